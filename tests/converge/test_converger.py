"""Converge over real gloo groups: the mean, its cost, and what happens when a replica is bad or disagrees."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import hdet_kernels as hk
from hdet_kernels import Buckets, Converger, Outer, ProcessEnsemble
from hdet_kernels.converge import Report
from hdet_kernels.converge.handshake import COLUMNS
from hdet_kernels.ensemble import RowEnsemble, SingleReplica
from hdet_kernels.optim import FusedAdamW
from tests.ranks import Cases, run_ranks
from tests.training import Trainer, same

OPTIMIZERS: dict[str, Any] = {"torch": torch.optim.AdamW, "ours": FusedAdamW}


def _many(rank: int, count: int, homed: bool, bucket_bytes: int) -> tuple[int, int, bool]:
    params = [nn.Parameter(torch.full((3, 5), float(rank * count + i))) for i in range(count)]
    n = dist.get_world_size()
    source = Buckets(params) if homed else params
    outcome = Converger(source, ProcessEnsemble(), bucket_bytes=bucket_bytes).converge(Report(step=1))
    right = all(torch.equal(p, torch.full((3, 5), (n - 1) / 2 * count + i)) for i, p in enumerate(params))
    return outcome.collectives, outcome.bytes, right


@pytest.mark.parametrize("n", [3, pytest.param(2, marks=pytest.mark.full), pytest.param(4, marks=pytest.mark.full)])
def test_400_tensors_take_one_handshake_and_one_bucket_collective(n: int) -> None:
    cases = Cases(n, _many, [(400, homed, 2**29) for homed in (False, True)])
    for case in cases.cases:
        assert [(collectives, right) for collectives, _, right in cases[case]] == [(2, True)] * n


BUCKETS = Cases(2, _many, [(7, homed, size) for homed in (False, True) for size in (1, 16, 100, 4096)])


@pytest.mark.parametrize("homed", [False, True], ids=["loose", "homed"])
@pytest.mark.parametrize("bucket_bytes", [1, 16, 100, 4096])
def test_collectives_are_bytes_over_bucket_bytes(bucket_bytes: int, homed: bool) -> None:
    payload = 7 * (32 if homed else 15) * 4  # homed tensors start at multiples of 128 bytes
    (collectives, sent, right), *_ = BUCKETS[7, homed, bucket_bytes]
    assert right
    assert collectives == 1 + math.ceil(payload / max(bucket_bytes // 4 * 4, 4))
    assert sent == payload + 8 * len(COLUMNS), "a handshake row, then every byte once"


def _dtypes(rank: int) -> dict[str, Any]:
    torch.manual_seed(rank)
    params = {
        "fp64": nn.Parameter(torch.randn(5, dtype=torch.float64)),
        "fp32": nn.Parameter(torch.randn(3, 4)),
        "bf16": nn.Parameter(torch.randn(33, dtype=torch.bfloat16)),
        "fp16": nn.Parameter(torch.full((4,), 40000.0, dtype=torch.float16)),
        "complex": nn.Parameter(torch.randn(3, dtype=torch.complex64)),
        "channels_last": nn.Parameter(torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)),
        "transposed": nn.Parameter(torch.randn(4, 6).t()),
        "empty": nn.Parameter(torch.empty(0, 3)),
        "scalar": nn.Parameter(torch.randn(())),
    }
    before = {name: p.detach().clone() for name, p in params.items()}
    strides = {name: p.stride() for name, p in params.items()}
    outcome = Converger(params.values(), ProcessEnsemble()).converge(Report(step=0))
    assert strides == {name: p.stride() for name, p in params.items()}
    return {"before": before, "after": {k: p.detach() for k, p in params.items()}, "collectives": outcome.collectives}


def test_every_dtype_and_layout_is_averaged_in_at_least_fp32() -> None:
    results = run_ranks(3, _dtypes)
    assert [r["collectives"] for r in results] == [3] * 3, "handshake, fp32 (half precision and complex with it), fp64"
    for name in results[0]["before"]:
        stacked = torch.stack([r["before"][name] for r in results])
        wide = stacked.to(torch.complex128 if stacked.is_complex() else torch.float64)
        # The mean of numbers held in fp32, rounded once to the dtype: 40000 · 3 would overflow fp16.
        expected = (wide.mean(dim=0) if stacked.numel() else wide[0]).to(stacked.dtype)
        for r in results:
            torch.testing.assert_close(r["after"][name], expected, rtol=None, atol=None)
            assert torch.equal(r["after"][name], results[0]["after"][name])


def _sick(rank: int, what: str, ddp: bool, kind: str) -> dict[str, Any]:
    """Ranks 1 and 3 turn bad at the first sync."""
    trainer = Trainer(rank, ddp=ddp, make_optimizer=OPTIMIZERS[kind], auto_lr=False)
    trainer.train(3)

    def break_it(trainer: Trainer) -> None:
        if rank not in (1, 3):
            return
        if what == "parameter":
            trainer.module.inner.weight.data[1, 1] = math.inf
        else:
            trainer.optimizer.state[trainer.module.inner.weight]["exp_avg"][0, 0] = math.nan

    before: list[Tensor] = []
    trainer.train(1, before_step=lambda t: (break_it(t), before.append(t.parameters()))[0])
    after, moments = trainer.parameters(), trainer.moments()
    trainer.train(8)
    records = [(r.excluded, r.step) for r in trainer.scheduler.history]
    return {"before": before[0], "after": after, "moments": moments, "end": trainer.parameters(), "records": records}


SICK = Cases(4, _sick, [("parameter", True, "ours"), ("moment", True, "torch"), ("moment", False, "ours")])


@pytest.mark.parametrize(("what", "ddp", "kind"), SICK.params())
def test_a_replica_that_is_not_finite_is_left_out_and_healed(what: str, ddp: bool, kind: str) -> None:
    results = SICK[what, ddp, kind]
    mean = (results[0]["before"].double() + results[2]["before"].double()) / 2
    for r in results:
        torch.testing.assert_close(r["after"], mean.float(), rtol=2e-7, atol=2e-8)
        assert torch.isfinite(r["moments"]).all()
        assert torch.equal(r["moments"], results[0]["moments"])
        assert torch.isfinite(r["end"]).all()
        assert torch.equal(r["end"], results[0]["end"])
        assert r["records"] == [([1, 3], 4), ([], 8), ([], 12)]


def _exploding_loss_with_auto_lr(rank: int) -> tuple[list[float], list[int]]:
    trainer = Trainer(rank, ddp=False, total_steps=100, sync_every=5, max_lr=1e-3)
    trainer.train(10, before_step=lambda t: t.scheduler.record_loss(math.inf) if rank == 2 and t.step == 7 else None)
    return trainer.scheduler.cycle.spread.controller_state["mu"], trainer.scheduler.history[1].excluded


def test_an_exploding_replica_does_not_reach_the_controller_as_a_number() -> None:
    results = run_ranks(3, _exploding_loss_with_auto_lr)
    assert all(excluded == [2] for _, excluded in results)
    assert all(math.isfinite(mu) for mus, _ in results for mu in mus)


def _disagree(rank: int, how: str) -> tuple[str, bool]:
    options: dict[str, Any] = {"seed": rank} if how == "settings" else {}
    trainer = Trainer(rank, ddp=False, auto_lr=how == "loss", groups=how == "groups" and rank == 1, **options)
    if how == "layout" and rank == 1:
        trainer.optimizer = torch.optim.AdamW(list(trainer.module.parameters())[1:], lr=0.01)
        trainer.scheduler = hk.HDETOneCycleLR(trainer.optimizer, 0.01, 12, sync_every=4, auto_lr=False)
    if how == "schedule":
        trainer.scheduler = hk.HDETOneCycleLR(trainer.optimizer, 0.01 * (1 + rank % 2), 12, sync_every=4, auto_lr=False)
    if how == "step" and rank == 1:
        trainer.scheduler.cycle.step = 8
    if how == "loss":  # the controller acts at the sync, and one rank stops recording after the first step
        trainer.scheduler = hk.HDETOneCycleLR(
            trainer.optimizer, 0.01, 40, sync_every=4, auto_lr=hk.RegressionController(start_at=0.0)
        )
        trainer.scheduler.record_loss(1.0)
        trainer.scheduler.cycle.window.clear()
    before = trainer.parameters()
    loss = None if how == "loss" and rank == 1 else 1.0
    for _ in range(3):
        trainer.scheduler.step(loss)
    with pytest.raises(RuntimeError) as error:
        trainer.scheduler.step(loss)
    return str(error.value), torch.equal(before, trainer.parameters())


DISAGREEMENTS = {
    "step": r"disagree on the step \(ranks 0, 2: step 4; rank 1: step 12\)",
    "layout": r"disagree on the layout of parameters and buffers \(ranks 0, 2: tensors 4, elements 129, "
    r"tensor 0 parameter 0: float32 \(16, 6\) with strides \(6, 1\); "
    r"rank 1: tensors 3, elements 33, tensor 0 parameter 0: float32 \(16,\)",
    "groups": r"disagree on the settings \(ranks 0, 2: .*; rank 1: ",
    "schedule": r"disagree on the base values \(ranks 0, 2: lr/0 9.94\d+e-03; rank 1: lr/0 1.98\d+e-02\)",
    "settings": r"disagree on the settings \(rank 0: seed 0; rank 1: seed 1; rank 2: seed 2\)",
    "loss": r"no loss was recorded since the last sync on rank 1: call scheduler\.step\(loss\)",
}


DISAGREEING = Cases(3, _disagree, {how: (how,) for how in DISAGREEMENTS})


@pytest.mark.filterwarnings("ignore:Detected call of")
@pytest.mark.parametrize("how", DISAGREEMENTS)
def test_replicas_that_disagree_all_get_an_error_that_names_them(how: str) -> None:
    for message, unchanged in DISAGREEING[how]:
        assert re.search(DISAGREEMENTS[how], message), message
        assert unchanged


def _uneven_state(rank: int) -> tuple[str, bool]:
    """Rank 0 has stepped no parameter yet, rank 1 all of them, rank 2 one."""
    trainer = Trainer(rank, ddp=False, auto_lr=False, sync_every=1, gradients="local")
    for index, param in enumerate(trainer.module.parameters()):
        param.grad = torch.ones_like(param) if rank == 1 or (rank == 2 and index == 0) else None
    trainer.optimizer.step()
    before = trainer.parameters()
    with pytest.raises(RuntimeError) as error:
        trainer.scheduler.step()
    return str(error.value), torch.equal(before, trainer.parameters())


def test_optimizer_state_on_some_ranks_only_is_an_error_on_all() -> None:
    for message, unchanged in run_ranks(3, _uneven_state):
        assert "disagree on the optimizer state (rank 0: " in message
        assert "pass averaging=hk.Averaging(state=False)" in message
        assert unchanged


def _same_shapes(rank: int, ours: bool) -> Any:
    """Two parameters of one shape; every rank has a gradient for another one."""
    params = [nn.Parameter(torch.ones(2, 2)) for _ in range(2)]
    optimizer = (FusedAdamW if ours else torch.optim.AdamW)(params, lr=0.01)
    scheduler = hk.HDETOneCycleLR(optimizer, 0.01, 4, sync_every=2, gradients="local", auto_lr=False)
    for _ in range(2):
        params[rank].grad = torch.full((2, 2), 1.0 if rank == 0 else -100.0)
        optimizer.step()
        try:
            scheduler.step()
        except RuntimeError as error:
            return str(error)
    return [float(optimizer.state[p]["exp_avg"][0, 0]) if p in optimizer.state else None for p in params]


def test_moments_of_different_parameters_are_never_mixed() -> None:
    found = Cases(2, _same_shapes, [(False,), (True,)])
    assert all("disagree on the optimizer state" in message for message in found[(False,)])
    (a0, _), (_, b1) = found[(True,)]
    assert a0 > 0 > b1, "with state for all parameters the mean is that of one parameter"


class _Replacing(nn.Module):
    """A module that replaces its buffer at every call, as many moving averages do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 1)
        self.register_buffer("mean", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        self.mean = 0.9 * self.mean + 0.1 * y.detach().mean()
        return y


def _replaced_buffer(rank: int) -> tuple[float, float, float]:
    torch.manual_seed(0)
    model = _Replacing()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = hk.HDETOneCycleLR(
        optimizer, 0.1, 8, sync_every=4, gradients="local", auto_lr=False, cycle_momentum=False, model=model
    )
    for step in range(6):
        optimizer.zero_grad()
        model(torch.full((2, 6), float(rank + step))).sum().backward()
        optimizer.step()
        scheduler.step()
        if step == 3:
            synced = float(model.mean)
    own = float(model.mean)
    with scheduler.consensus():
        inside = float(model.mean)
    assert float(model.mean) == own
    return synced, own, inside


def test_buffers_are_those_that_the_model_has_at_the_sync() -> None:
    (synced, own, inside), (synced1, own1, inside1) = run_ranks(2, _replaced_buffer)
    assert synced == synced1
    assert own != own1
    assert inside == inside1


def _factored(rank: int) -> list[list[int]]:
    trainer = Trainer(rank, ddp=False, auto_lr=False, make_optimizer=torch.optim.Adafactor, cycle_momentum=False)

    def poison(t: Trainer) -> None:
        if rank == 1 and t.step == 1:
            for state in t.optimizer.state.values():
                for value in state.values():
                    if isinstance(value, Tensor) and value.dim():
                        value.fill_(math.nan)

    trainer.train(12, before_step=poison)
    return [record.excluded for record in trainer.scheduler.history]


def test_state_of_another_shape_than_its_parameter_is_healed_too() -> None:
    assert run_ranks(2, _factored) == [[[1], [], []]] * 2


def _failing_probe(rank: int, how: str) -> tuple[str, str, int]:
    def probe() -> Any:
        if rank != 1:
            return torch.tensor(1.0)
        if how == "raises":
            raise ZeroDivisionError("in the probe")
        return {"none": None, "vector": torch.ones(3), "text": "1.0"}[how]

    without_early_syncs = hk.RegressionController(start_at=0.01)
    trainer = Trainer(rank, ddp=False, total_steps=40, auto_lr=without_early_syncs, probe=probe)
    trainer.train(3)
    with pytest.raises(RuntimeError) as error:
        trainer.train(1)
    return str(error.value), repr(error.value.__cause__), trainer.step


CAUSES = {"raises": "ZeroDivisionError", "none": "got None", "vector": r"shape \(3,\)", "text": "got '1.0'"}
FAILING_PROBES = Cases(3, _failing_probe, {how: (how,) for how in CAUSES})


@pytest.mark.parametrize(("how", "cause"), CAUSES.items())
def test_a_probe_that_fails_on_one_rank_is_an_error_on_all_at_once(how: str, cause: str) -> None:
    results = FAILING_PROBES[how]
    assert [message for message, _, _ in results] == ["probe() raised on rank 1. Nothing was averaged."] * 3
    assert re.search(cause, results[1][1]), results[1][1]
    assert [step for _, _, step in results] == [3] * 3


def _nan_probe(rank: int) -> list[Any]:
    def probe() -> float:
        return math.nan if rank == 1 else 1.0 + rank

    trainer = Trainer(rank, ddp=False, total_steps=40, auto_lr=hk.RegressionController(start_at=0.0), probe=probe)
    trainer.train(4)
    record = trainer.scheduler.history[0]
    return [record.excluded, record.probes, trainer.scheduler.cycle.spread.controller_state["mu"]]


def test_a_probe_that_is_not_finite_counts_as_a_bad_replica() -> None:
    results = run_ranks(3, _nan_probe)
    assert all(r[0] == [1] and r[1][1] == math.inf and math.isfinite(r[2][0]) for r in results)


def test_integer_parameters_are_left_alone() -> None:
    quantised = nn.Parameter(torch.zeros(4, dtype=torch.uint8), requires_grad=False)
    converger = Converger([nn.Parameter(torch.ones(2)), quantised], hk.ensemble.SingleReplica())
    assert len(converger.tensors.params) == 1
    converger.converge(Report(step=0))


def test_the_size_of_buckets_is_that_of_the_buckets() -> None:
    buckets = Buckets([nn.Parameter(torch.ones(64))], bucket_bytes=64)
    assert Converger(buckets, hk.ensemble.SingleReplica()).bucket_bytes == 64
    assert Converger(buckets, hk.ensemble.SingleReplica(), bucket_bytes=128).bucket_bytes == 128


def _moved(rank: int) -> bool:
    """A parameter that left its bucket is averaged where it is now."""
    param = nn.Parameter(torch.full((4,), float(rank)))
    converger = Converger(Buckets([param]), ProcessEnsemble())
    param.data = torch.full((4,), 10.0 + rank)
    converger.converge(Report(step=0))
    return torch.equal(param, torch.full((4,), 10.5))


def test_a_parameter_that_moved_away_is_averaged_with_its_current_values() -> None:
    assert run_ranks(2, _moved) == [True, True]


def test_what_cannot_be_averaged_is_refused() -> None:
    with pytest.raises(ValueError, match="at most 64 replicas of one process are averaged, got 65: stack fewer"):
        Converger([torch.ones(65, 1)], RowEnsemble(65))


def _with_masters(rank: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model = torch.nn.Linear(7, 3).to(torch.bfloat16)
    optimizer = FusedAdamW(model.parameters(), lr=1e-3)
    scheduler = hk.HDETScheduler(
        torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0), total_steps=10, sync_every=5, auto_lr=False, spread=0.5
    )
    for step in range(2):
        generator = torch.Generator().manual_seed(10 * step + rank)
        for param in model.parameters():
            param.grad = torch.randn(param.shape, generator=generator).to(torch.bfloat16)
        optimizer.step()
        scheduler.step(1.0)
    (master,) = optimizer.buckets.masters
    assert master is not None
    before = master.clone(), optimizer.buckets.flats[0].clone()
    with scheduler.consensus():
        inside = master.clone(), optimizer.buckets.flats[0].clone()
    after = master.clone(), optimizer.buckets.flats[0].clone()
    with torch.no_grad():
        model.bias.fill_(rank + 1.0)
    scheduler.converge()
    return {"before": before, "inside": inside, "after": after, "bias": model.bias.detach().clone()}


def test_masters_are_averaged_in_full_and_parameters_are_their_roundings() -> None:
    first, second = run_ranks(2, _with_masters)
    mean = (first["before"][0] + second["before"][0]) / 2
    rounded = mean.to(torch.bfloat16)
    assert not torch.equal(first["before"][0], second["before"][0])
    for result in (first, second):
        torch.testing.assert_close(result["inside"][0], mean, rtol=1e-6, atol=0)
        assert torch.equal(result["inside"][0], first["inside"][0])
        assert torch.equal(result["inside"][1], result["inside"][0].to(torch.bfloat16))
        assert torch.equal(result["after"][0], result["before"][0]), "every digit of this replica comes back"
        assert torch.equal(result["after"][1], result["before"][1])
        assert torch.equal(result["bias"], torch.full((3,), 1.5, dtype=torch.bfloat16)), "what was written counts"
    assert (rounded != ((first["before"][1] + second["before"][1]) / 2)).any(), "a mean of roundings would be another"


def _aliases(rank: int, overlapped: bool, bucket_bytes: int) -> list[float]:
    """A parameter, another one on the same memory, and a buffer that is the first seen otherwise."""
    param = nn.Parameter(torch.full((4, 16), float(rank)))
    tied = nn.Parameter(param.detach())
    buffer, own = param.detach().view(-1), torch.full((3,), 10.0 * rank)
    converger = Converger(
        [param, tied], ProcessEnsemble(), buffers=lambda: [buffer, own, own.view(3)], bucket_bytes=bucket_bytes
    )
    if overlapped:
        converger.land(converger.start(Report(step=0)))
    else:
        converger.converge(Report(step=0))
    return sorted({*param.flatten().tolist(), *own.tolist()})


ALIASES = Cases(2, _aliases, [(overlapped, size) for overlapped in (False, True) for size in (64, 2**20)])


@pytest.mark.parametrize("bucket_bytes", [64, 2**20])
@pytest.mark.parametrize("overlapped", [False, True], ids=["at once", "overlapped"])
def test_memory_that_is_seen_twice_is_averaged_once(overlapped: bool, bucket_bytes: int) -> None:
    assert ALIASES[overlapped, bucket_bytes] == [[0.5, 5.0]] * 2


def _mirrored(rank: int) -> Tensor:
    weight = nn.Parameter(torch.zeros(4))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scheduler = hk.HDETOneCycleLR(optimizer, 0.1, 4, sync_every=1, spread=0, gradients="local", cycle_momentum=False)
    weight.grad = torch.full((4,), 1.0 - 2 * rank)
    optimizer.step()
    scheduler.step()
    return weight.detach()


def test_replicas_of_equal_norm_are_not_taken_for_equal_with_local_gradients() -> None:
    assert all(torch.equal(weight, torch.zeros(4)) for weight in run_ranks(2, _mirrored))


def _masks(rank: int) -> list[list[int]]:
    masks = [torch.tensor([[1, 0, 0, 1, 0], [0, 1, 1, 0, 0]][rank], dtype=dtype) for dtype in (torch.bool, torch.uint8)]
    Converger([nn.Parameter(torch.ones(2))], ProcessEnsemble(), buffers=lambda: masks).converge(Report(step=0))
    return [mask.int().tolist() for mask in masks]


def test_changes_of_integers_that_add_up_to_nothing_are_seen() -> None:
    assert run_ranks(2, _masks) == [[[1, 0, 0, 1, 0]] * 2] * 2


def converger(size: int = 3, outer: Outer | None = None) -> Converger:
    return Converger([nn.Parameter(torch.ones(size))], SingleReplica(), outer=outer)


def test_a_plain_average_leaves_nothing_to_remember() -> None:
    plain = converger()
    plain.converge(Report(step=1))
    assert plain.memories() == []
    assert plain.state_dict() is None
    assert plain.outer_state_dict() is None
    plain.check_state_dict(None)
    plain.load_state_dict(None, own=True)
    plain.load_outer_state_dict(None)


def test_the_outer_optimizer_goes_on_from_what_was_saved() -> None:
    first, second = converger(outer=Outer()), converger(outer=Outer())
    with torch.no_grad():
        first.tensors.params[0].add_(1.0)
    first.converge(Report(step=1))
    saved = first.outer_state_dict()
    assert not same(second.outer_state_dict(), saved)
    second.load_outer_state_dict(saved)
    assert same(second.outer_state_dict(), saved)
    assert len(second.memories()) == 1
    with pytest.raises(ValueError, match="flat tensors of 3 float32, this one of 4 float32"):
        converger(4, outer=Outer()).check_outer_state_dict(saved)
