"""Replicas of several kinds: processes of any group, dimensions of a mesh, sharded models, and DDP with BatchNorm."""

from __future__ import annotations

import io
import math
import os
import re
import signal
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import hdet_kernels as hk
from hdet_kernels.optim import FusedAdamW
from tests.ranks import Cases, run_ranks
from tests.training import Trainer, batch, network, with_averaging

SETTINGS: dict[str, Any] = {"max_lr": 0.01, "total_steps": 12, "sync_every": 4, "auto_lr": False}
OPTIMIZERS: dict[str, Any] = {"torch": torch.optim.AdamW, "ours": FusedAdamW}


def mesh_2x2() -> Any:
    """Ranks 0 and 1 are replica 0, ranks 2 and 3 replica 1."""
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


def all_equal(tensors: list[Tensor]) -> bool:
    return all(torch.equal(tensors[0], other) for other in tensors[1:])


# Plain models


def _in_groups(rank: int, kind: str, how: str) -> dict[str, Any]:
    """Ranks 0 and 2, and ranks 1 and 3, are replicas of one another."""
    if how == "groups":
        groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        ensemble = hk.ProcessEnsemble(groups[rank % 2])
    else:
        ensemble = hk.ProcessEnsemble(mesh_2x2()["replicate"])
    trainer = Trainer(rank, ddp=False, auto_lr=False, make_optimizer=OPTIMIZERS[kind], ensemble=ensemble)
    before: list[Tensor] = []
    trainer.train(3)
    trainer.train(1, before_step=lambda t: before.append(t.parameters()))
    rates = trainer.rates[-1]
    record = trainer.scheduler.history[0]
    return {
        "size": ensemble.size, "replica": ensemble.replica, "before": before[0], "after": trainer.parameters(),
        "rates": rates, "values": record.values["lr/0"], "losses": record.losses,
    }  # fmt: skip


IN_GROUPS = Cases(4, _in_groups, [(kind, how) for kind in OPTIMIZERS for how in ("groups", "mesh dimension")])


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("how", ["groups", "mesh dimension"])
def test_replicas_average_within_their_group_only(how: str, kind: str) -> None:
    results = IN_GROUPS[kind, how]
    for members in ((0, 2), (1, 3)):
        first, second = (results[rank] for rank in members)
        mean = (first["before"].double() + second["before"].double()) / 2
        torch.testing.assert_close(first["after"], mean.float(), rtol=2e-7, atol=2e-8)
        assert torch.equal(first["after"], second["after"])
        assert [(r["size"], r["replica"]) for r in (first, second)] == [(2, 0), (2, 1)]
        assert first["losses"] == second["losses"]
        assert first["values"] == second["values"] == [first["rates"][0], second["rates"][0]]
    assert not torch.equal(results[0]["after"], results[1]["after"])
    assert results[0]["losses"] != results[1]["losses"]


# Sharded models


class Sharded:
    """One rank of a sharded model: ``"hsdp"`` shares gradients over all ranks, ``"fsdp"`` within its replica."""

    def __init__(self, rank: int, how: str, *, double: bool = False, kind: str = "ours", **options: Any) -> None:
        self.rank = rank
        mesh = mesh_2x2()
        self.module = network().double() if double else network()
        fully_shard(self.module, mesh=mesh if how == "hsdp" else mesh["shard"])
        self.optimizer = OPTIMIZERS[kind](self.module.parameters(), lr=0.01)
        self.ensemble = hk.ProcessEnsemble(mesh)
        self.scheduler = hk.HDETOneCycleLR(
            self.optimizer, ensemble=self.ensemble, **with_averaging({**SETTINGS, **options})
        )
        self.rates: list[float] = []
        self.losses: list[float] = []
        self.seen: list[Tensor] = []

    def optimize(self) -> Tensor:
        x, y = batch(self.rank, self.scheduler.last_epoch)
        dtype = next(self.module.parameters()).dtype
        self.rates.append(float(self.optimizer.param_groups[0]["lr"]))
        self.optimizer.zero_grad()
        loss = F.mse_loss(self.module(x.to(dtype)), y.to(dtype))
        loss.backward()
        self.optimizer.step()
        self.losses.append(float(loss.detach()))
        return loss.detach()

    def train(self, steps: int, watch: bool = False) -> Sharded:
        for _ in range(steps):
            loss = self.optimize()
            if watch:
                self.seen.append(self.parameters())
            self.scheduler.step(loss)
        return self

    def parameters(self) -> Tensor:
        """All parameters of this rank's replica, in full. Its ranks must all ask."""
        return torch.cat([whole(param).reshape(-1) for param in self.module.parameters()])

    def moments(self) -> Tensor:
        state = self.optimizer.state
        return torch.cat([whole(state[param]["exp_avg"]).reshape(-1) for param in self.module.parameters()])

    def shards(self) -> list[Tensor]:
        """This rank's own parts of parameters and state."""
        state = [value for entry in self.optimizer.state.values() for value in entry.values()]
        return [local(tensor).clone() for tensor in (*self.module.parameters(), *state)]


def local(tensor: Any) -> Tensor:
    found: Tensor = tensor.detach().to_local() if hasattr(tensor, "to_local") else tensor.detach()
    return found


def whole(tensor: Any) -> Tensor:
    found: Tensor = tensor.detach().full_tensor()
    return found.clone()


def _sharded(rank: int, how: str, options: dict[str, Any]) -> dict[str, Any]:
    sharded = Sharded(rank, how, **options)
    sharded.train(3)
    loss = sharded.optimize()
    before, moments = sharded.parameters(), sharded.moments()
    sharded.scheduler.step(loss)
    after, moments_after = sharded.parameters(), sharded.moments()
    sharded.train(8)
    return {
        "place": (sharded.ensemble.size, sharded.ensemble.replica), "rates": sharded.rates, "losses": sharded.losses,
        "before": before, "after": after, "moments": moments, "moments after": moments_after,
        "history": [record.to_dict() for record in sharded.scheduler.history], "end": sharded.parameters(),
    }  # fmt: skip


SHARDED = Cases(
    4,
    _sharded,
    {("hsdp", 64): ("hsdp", {"bucket_bytes": 64}), ("fsdp", None): ("fsdp", {"kind": "torch"})},
    full={("hsdp", None): ("hsdp", {"kind": "torch"}), ("fsdp", 64): ("fsdp", {"bucket_bytes": 64})},
)


@pytest.mark.parametrize(("how", "bucket_bytes"), SHARDED.params())
def test_sharded_replicas_are_averaged_shard_by_shard(how: str, bucket_bytes: int | None) -> None:
    results = SHARDED[how, bucket_bytes]
    assert [r["place"] for r in results] == [(2, 0), (2, 0), (2, 1), (2, 1)]
    for name in ("before", "after", "moments", "moments after", "end"):
        assert all_equal([results[0][name], results[1][name]]), f"{name}: the ranks of a replica see one model"
        assert all_equal([results[2][name], results[3][name]]), name
    first, second = results[0], results[2]
    assert not torch.equal(first["before"], second["before"])
    assert torch.equal(first["after"], second["after"])
    assert torch.equal(first["end"], second["end"])
    mean = (first["before"].double() + second["before"].double()) / 2
    torch.testing.assert_close(first["after"], mean.float(), rtol=2e-7, atol=2e-8)

    assert torch.equal(first["moments"], second["moments"]) is (how == "hsdp"), "HSDP shares the gradients"
    assert torch.equal(first["moments after"], second["moments after"])
    mean = (first["moments"].double() + second["moments"].double()) / 2
    torch.testing.assert_close(first["moments after"], mean.float(), rtol=2e-7, atol=2e-8)
    assert {record["gradients"] for r in results for record in r["history"]} == {"shared" if how == "hsdp" else "local"}

    losses = np.array([r["losses"] for r in results])  # [rank, step]
    for cycle in range(3):
        of_ranks = losses[:, 4 * cycle : 4 * cycle + 4].mean(axis=1)
        expected = [of_ranks[:2].mean(), of_ranks[2:].mean()]
        for r in results:
            np.testing.assert_allclose(r["history"][cycle]["losses"], expected, rtol=1e-6)

    rates = np.array([r["rates"] for r in results])
    assert (rates[0] == rates[1]).all()
    assert (rates[2] == rates[3]).all()
    ratio = np.sort(rates[[0, 2]] / rates[[0, 2]].mean(axis=0), axis=0)
    np.testing.assert_allclose(ratio, [[0.7] * 12, [1.3] * 12])


def _sick_shard(rank: int, how: str, what: str) -> dict[str, Any]:
    """Something of rank 3 turns bad: all of replica 1 is left out."""
    sharded = Sharded(rank, how)
    sharded.train(3)
    loss = sharded.optimize()
    weight = sharded.module.inner.weight
    before = sharded.parameters()
    if rank == 3 and what == "parameter":
        local(weight)[0, 0] = math.nan
    elif rank == 3 and what == "moment":
        local(sharded.optimizer.state[weight]["exp_avg_sq"])[0, 0] = math.inf
    elif rank == 3:
        loss = loss * math.nan
    sharded.scheduler.step(loss)
    after, moments = sharded.parameters(), sharded.moments()
    sharded.train(8)
    excluded = [record.excluded for record in sharded.scheduler.history]
    return {"before": before, "after": after, "moments": moments, "end": sharded.parameters(), "excluded": excluded}


SICK_SHARDS = Cases(
    4, _sick_shard, [("hsdp", "loss"), ("fsdp", "moment")], full=[("hsdp", "parameter"), ("fsdp", "parameter")]
)


@pytest.mark.parametrize(("how", "what"), SICK_SHARDS.params())
def test_a_bad_shard_leaves_its_replica_out_and_all_its_ranks_are_healed(how: str, what: str) -> None:
    results = SICK_SHARDS[how, what]
    assert not torch.equal(results[0]["before"], results[2]["before"])
    for result in results:
        assert torch.equal(result["after"], results[0]["before"]), "the one replica that is left is the mean"
        assert torch.equal(result["moments"], results[0]["moments"])
        assert torch.isfinite(result["moments"]).all()
        assert torch.isfinite(result["end"]).all()
        assert torch.equal(result["end"], results[0]["end"])
        assert result["excluded"] == [[1], [], []]


def _refused(sharded: Sharded, loss: Tensor) -> tuple[str, bool]:
    before = sharded.shards()
    step, rates = sharded.scheduler.last_epoch, sharded.scheduler.get_last_lr()
    with pytest.raises(RuntimeError) as error:
        sharded.scheduler.step(loss)
    same = all(torch.equal(a, b) for a, b in zip(before, sharded.shards(), strict=True))
    here = (sharded.scheduler.last_epoch, sharded.scheduler.get_last_lr(), len(sharded.scheduler.history))
    return str(error.value), same and here == (step, rates, 0)


def _torn(rank: int, how: str) -> tuple[str, bool]:
    """Rank 3 is four steps ahead of the rank that holds the rest of its replica."""
    sharded = Sharded(rank, how)
    sharded.train(3)
    loss = sharded.optimize()
    if rank == 3:
        sharded.scheduler.cycle.step = 7
    return _refused(sharded, loss)


TORN = Cases(4, _torn, [("fsdp",)], full=[("hsdp",)])


@pytest.mark.parametrize("how", TORN.params())
def test_ranks_of_one_replica_that_disagree_are_an_error_on_all(how: str) -> None:
    for message, unchanged in TORN[(how,)]:
        assert "disagree on the step" in message
        assert "step 4" in message
        assert re.search(r"rank (3|1\.1): step 8", message), "by its number, or by those of its replica and shard"
        assert unchanged


def _killed_shard(rank: int, after: int) -> tuple[str, bool]:
    sharded = Sharded(rank, "fsdp", bucket_bytes=64)
    sharded.train(3)
    loss = sharded.optimize()
    dist.barrier()
    if rank == 3:
        end_process_after(after)
    return _refused(sharded, loss)


def end_process_after(count: int) -> None:
    """Kill this process once it has finished ``count`` more all-reduces."""
    if not count:
        os.kill(os.getpid(), signal.SIGKILL)
    original, finished = dist.all_reduce, []

    def all_reduce(*args: Any, **keywords: Any) -> Any:
        work = original(*args, **keywords)
        finished.append(work)
        if len(finished) == count:
            work.wait()
            os.kill(os.getpid(), signal.SIGKILL)
        return work

    dist.all_reduce = all_reduce


@pytest.mark.parametrize(
    "after", [pytest.param(0, marks=pytest.mark.full, id="before"), pytest.param(2, id="after 2 buckets")]
)
def test_a_killed_shard_leaves_no_replica_averaged_in_part(after: int) -> None:
    """Rank 3 takes part in the averages of ranks 1 and 3 alone; ranks 0 and 2 must not keep theirs."""
    results = run_ranks(4, _killed_shard, after, expect_dead=1)
    assert results[3] is None
    assert [unchanged for _, unchanged in results[:3]] == [True] * 3


def _hsdp_runs(rank: int) -> list[dict[str, Any]]:
    """A run that saves after 6 and 8 steps, and the two that resume from there."""
    controller = hk.RegressionController(start_at=0.0, stop_at=1.0, trust=None)
    runs = [Sharded(rank, "hsdp", auto_lr=controller, total_steps=16) for _ in range(3)]
    for at, resumed in zip((6, 8), runs[1:], strict=True):
        file = io.BytesIO()
        runs[0].train(at - runs[0].scheduler.last_epoch)
        torch.save([part.state_dict() for part in (runs[0].module, runs[0].optimizer, runs[0].scheduler)], file)
        file.seek(0)
        states = torch.load(file, weights_only=True)
        for part, state in zip((resumed.module, resumed.optimizer, resumed.scheduler), states, strict=True):
            part.load_state_dict(state)
    found = []
    for run in runs:
        run.train(16 - run.scheduler.last_epoch)
        history = [{**record.to_dict(), "seconds": 0.0} for record in run.scheduler.history]
        found.append({"shards": run.shards(), "history": history, "base": run.scheduler.get_base_lr()})
    return found


def test_a_resumed_hsdp_run_is_the_uninterrupted_one() -> None:
    for a, *resumed in run_ranks(4, _hsdp_runs):
        for b in resumed:
            assert all(torch.equal(x, y) for x, y in zip(a["shards"], b["shards"], strict=True))
            assert a["history"] == b["history"]
            assert len(a["history"]) == 4
            assert a["base"] == b["base"]


AUTO_LR: dict[str, Any] = {
    "total_steps": 16,
    "spread": 0.3,
    "auto_lr": hk.RegressionController(start_at=0.0, stop_at=1.0, trust=None),
}


def _hsdp_trajectory(rank: int) -> dict[str, Any]:
    sharded = Sharded(rank, "hsdp", double=True, **AUTO_LR).train(16, watch=True)
    losses = [record.losses for record in sharded.scheduler.history]
    return {"seen": torch.stack(sharded.seen), "rates": sharded.rates, "losses": losses, "end": sharded.parameters()}


def _ddp_trajectory(rank: int) -> dict[str, Any]:
    """One rank of two, on the batches of both ranks of its sharded counterpart."""
    module = network().double()
    model = nn.parallel.DistributedDataParallel(module)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = hk.HDETOneCycleLR(optimizer, **{**SETTINGS, **AUTO_LR})
    rates, seen = [], []

    def parameters() -> Tensor:
        return torch.cat([param.detach().reshape(-1) for param in module.parameters()])

    for step in range(16):
        batches = [batch(2 * rank + shard, step) for shard in range(2)]
        x, y = (torch.cat(part).double() for part in zip(*batches, strict=True))
        rates.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        seen.append(parameters())
        scheduler.step(loss.detach())
    losses = [record.losses for record in scheduler.history]
    return {"seen": torch.stack(seen), "rates": rates, "losses": losses, "end": parameters()}


@pytest.mark.full
def test_hsdp_trains_as_plain_data_parallel_replicas_do() -> None:
    sharded, plain = run_ranks(4, _hsdp_trajectory), run_ranks(2, _ddp_trajectory)
    assert not torch.equal(plain[0]["seen"], plain[1]["seen"])
    for rank, result in enumerate(sharded):
        expected = plain[rank // 2]
        torch.testing.assert_close(result["seen"], expected["seen"], rtol=1e-7, atol=1e-9)
        torch.testing.assert_close(result["end"], expected["end"], rtol=1e-7, atol=1e-9)
        np.testing.assert_allclose(result["rates"], expected["rates"], rtol=1e-6)
        np.testing.assert_allclose(result["losses"], expected["losses"], rtol=1e-6)
    rates = np.array(plain[0]["rates"]) + np.array(plain[1]["rates"])
    plain_rates = np.array([2 * rate for rate in _one_cycle(16)])
    assert not np.allclose(rates[8:], plain_rates[8:], rtol=1e-3), "the controller has moved the base"


def _one_cycle(steps: int) -> list[float]:
    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(1))])
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, steps)
    rates = []
    for _ in range(steps):
        rates.append(float(scheduler.get_last_lr()[0]))
        optimizer.step()
        scheduler.step()
    return rates


# DDP with BatchNorm


def _batch_norm(rank: int, kind: str, extra: int | None, sick: int | None) -> dict[str, Any]:
    trainer = Trainer(rank, make_optimizer=OPTIMIZERS[kind], batch_norm=True, auto_lr=False, sync_every=100)
    trainer.scheduler = hk.HDETOneCycleLR(trainer.optimizer, **SETTINGS, model=trainer.model)
    before: dict[str, Tensor] = {}

    def buffers() -> dict[str, Tensor]:
        return {name: buffer.clone() for name, buffer in trainer.module.named_buffers()}

    def look(t: Trainer) -> None:
        if rank == extra:
            with torch.no_grad():
                t.module(batch(rank, 50)[0])
        if rank == sick:
            t.scheduler.record_loss(math.nan)
        before.update(buffers())

    trainer.train(3)
    trainer.train(1, before_step=look)
    return {"before": before, "after": buffers(), "excluded": trainer.scheduler.history[0].excluded}


#: The rank that has seen one more batch, the rank that is bad, and the count that all end with.
TRACKED = {"equal": (None, None, 4), "second ahead": (1, None, 4), "first ahead": (0, None, 5), "first bad": (1, 0, 5)}
BATCH_NORM = Cases(
    3, _batch_norm, {(name, kind): (kind, *case[:2]) for name, case in TRACKED.items() for kind in OPTIMIZERS}
)


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("name", TRACKED)
def test_batchnorm_statistics_are_averaged_and_counts_are_the_first_sound_replicas(name: str, kind: str) -> None:
    _, sick, tracked = TRACKED[name]
    results = BATCH_NORM[name, kind]
    sound = [result for rank, result in enumerate(results) if rank != sick]
    for name in ("norm.running_mean", "norm.running_var"):
        assert not all_equal([r["before"][name] for r in results]), "the statistics are local"
        mean = torch.stack([r["before"][name].double() for r in sound]).mean(dim=0)
        for r in results:
            torch.testing.assert_close(r["after"][name], mean.float(), rtol=3e-7, atol=1e-8)
            assert torch.equal(r["after"][name], results[0]["after"][name])
    assert [int(r["after"]["norm.num_batches_tracked"]) for r in results] == [tracked] * 3
    assert [r["excluded"] for r in results] == [[] if sick is None else [sick]] * 3


def _undeclared(rank: int) -> list[str]:
    """Messages about sharded parameters where the ensemble is missing, or takes shards for replicas."""
    said = []
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for shards, options in ((mesh["shard"], {}), (mesh, {"ensemble": hk.ProcessEnsemble()}), (mesh, {})):
        model = nn.Linear(6, 4)
        fully_shard(model, mesh=shards)
        with pytest.raises(TypeError, match=r"call it before fully_shard\(\)"):
            hk.warm_noisy_init_(model.parameters())
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        try:
            scheduler = hk.HDETOneCycleLR(optimizer, 0.01, 12, auto_lr=False, **options)
            said.append(repr(scheduler.cycle.ensemble))
        except ValueError as error:
            said.append(str(error))
    return said


def test_who_holds_which_shard_is_known_or_asked_for() -> None:
    for rank, (one, all_of_them, both) in enumerate(run_ranks(4, _undeclared)):
        assert "pass ensemble=hdet_kernels.ProcessEnsemble(mesh) with a 2-D mesh (replicate, shard)" in one
        assert "parameter 0 is sharded over ranks that the ensemble takes for replicas of each other" in all_of_them
        assert both.startswith(f"ProcessEnsemble(replica {rank // 2} of 2, shard of 2")
