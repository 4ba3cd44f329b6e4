"""The outer optimizer takes a step of torch.optim.SGD from the last consensus at every sync. Its gradient is what the
replicas moved. Tested on real gloo groups, stacks, and both."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import hdet_kernels as hk
from hdet_kernels import Converger
from hdet_kernels.converge import Report
from hdet_kernels.ensemble import RowEnsemble
from tests.converge.replicas import Replicas
from tests.converge.rounding import EPS
from tests.ranks import Cases, run_ranks
from tests.training import batch, loss_of, network, same, with_averaging

SYNC, SYNCS = 3, 4
SETTINGS: dict[str, Any] = {
    "max_lr": 0.05,
    "total_steps": SYNC * SYNCS,
    "sync_every": SYNC,
    "auto_lr": False,
    "bucket_bytes": 256,  # several buckets: what is remembered does not depend on them
}

OUTERS = {
    "nesterov": hk.Outer(),
    "heavy ball": hk.Outer(lr=0.5, momentum=0.8, nesterov=False),
    "no momentum": hk.Outer(lr=0.6, momentum=0.0),
    "long": hk.Outer(lr=1.3, momentum=0.5),
}
PLAIN = hk.Outer(lr=1.0, momentum=0.0)

#: Ranks, rows in each (0: no stack), dtype, optimizer, options.
KINDS: dict[str, tuple[int, int, torch.dtype, Callable[..., Any], dict[str, Any]]] = {
    "loose": (3, 0, torch.float64, torch.optim.AdamW, {}),
    "homed": (2, 0, torch.float64, hk.FusedAdamW, {}),
    "masters": (2, 0, torch.bfloat16, hk.FusedAdamW, {}),
    "stack": (1, 4, torch.float64, hk.FusedAdamW, {}),
    "stack of masters": (1, 3, torch.bfloat16, hk.FusedAdamW, {}),
    "2 ranks x 2 rows": (2, 2, torch.float64, hk.FusedAdamW, {}),
    "compressed": (3, 0, torch.float32, torch.optim.AdamW, {"compress": "bf16"}),
    "compressed rows": (2, 2, torch.float32, hk.FusedAdamW, {"compress": "bf16"}),
}


#: [rows, n] parameters before every sync, and after it and at the start.
Watched = dict[str, list[Tensor]]


def replicas_of(rank: int, kind: str, **options: Any) -> Replicas:
    _, rows, dtype, make, own = KINDS[kind]
    return Replicas(rank, rows, dtype, make, **{**SETTINGS, **own, **options})


def sgd_step(sgd: torch.optim.SGD, consensus: Tensor, mean: Tensor) -> Tensor:
    """Return ``consensus`` after a step of torch's optimizer, which keeps its momentum, with gradient θ_k − θ̄."""
    (param,) = sgd.param_groups[0]["params"]
    param.data = consensus.clone()
    param.grad = consensus - mean
    sgd.step()
    return param.detach().clone()


def make_sgd(outer: hk.Outer) -> torch.optim.SGD:
    nesterov = outer.nesterov and outer.momentum > 0  # torch refuses the one without the other
    return torch.optim.SGD([torch.zeros(1, dtype=torch.float64)], outer.lr, outer.momentum, nesterov=nesterov)


# Step by step as torch.optim.SGD


def _watched(rank: int, kind: str, outer: hk.Outer) -> Watched:
    """The parameters of the replicas here around every sync, and at the start."""
    replicas = replicas_of(rank, kind, outer=outer)
    found: Watched = {"before": [], "after": [replicas.numbers()], "consensus": []}
    for _ in range(SYNCS):
        replicas.train(SYNC - 1)
        loss = replicas.optimize()
        found["before"].append(replicas.numbers())
        replicas.scheduler.step(loss)
        found["after"].append(replicas.numbers())
        compression = replicas.scheduler.state_dict()["hdet"][0]["compression"]
        if compression is not None and not replicas.rows:
            found["consensus"].append(torch.cat(compression["consensus"]))
    return found


def shared_runs(function: Callable[..., Any], cases: list[tuple[Any, ...]]) -> Callable[..., list[Any]]:
    """Return a function from a case, which starts with a kind of replicas, to the results of all ranks.

    All given cases with the same number of ranks are run by one group of them, and any other by ranks of its own.
    """
    counts = {KINDS[case[0]][0] for case in cases}
    runs = {n: Cases(n, function, [case for case in cases if KINDS[case[0]][0] == n]) for n in counts if n > 1}

    def results(*case: Any) -> list[Any]:
        ranks = KINDS[case[0]][0]
        if ranks == 1:
            return [function(0, *case)]
        return runs[ranks][case] if case in cases else run_ranks(ranks, function, *case)

    return results


def check_steps(results: list[Watched], outer: hk.Outer, close: Callable[[Tensor, float], float]) -> None:
    """``close``: how far from torch's step it may end, of parameters ``[N, n]`` and their largest move so far."""
    sgd, moved = make_sgd(outer), 0.0
    for sync in range(SYNCS):
        before = torch.cat([result["before"][sync] for result in results])
        after = torch.cat([result["after"][sync + 1] for result in results])
        assert all(torch.equal(row, after[0]) for row in after), f"sync {sync}: all replicas go on from one place"
        consensus, mean = results[0]["after"][sync][0], before.mean(dim=0)
        moved = max(moved, float((before - consensus).abs().max()))
        expected = sgd_step(sgd, consensus, mean)
        limit = close(before, moved)
        assert float((after[0] - expected).abs().max()) <= limit, f"sync {sync}"
        assert float((mean - expected).abs().max()) > 4 * limit, "or this test shows nothing"


#: The kinds whose full step without momentum is compared with the plain mean.
FULL_STEP = ("loose", "homed", "masters", "stack of masters", "2 ranks x 2 rows")
CASES = [(kind, "nesterov") for kind in KINDS if "compressed" not in kind]
CASES += [(kind, outer) for kind in ("loose", "stack") for outer in OUTERS if outer != "nesterov"]
#: Stacks need no ranks: they have all outer optimizers. Those of ranks share theirs.
QUICK = [(kind, name) for kind, name in CASES if "stack" in kind or name == "nesterov"]
QUICK_STEP = ("masters", "stack of masters", "2 ranks x 2 rows")
run = shared_runs(
    _watched,
    [
        *((kind, OUTERS[name]) for kind, name in QUICK),
        *((kind, OUTERS["nesterov"]) for kind in KINDS if "compressed" in kind),
        *((kind, outer) for kind in QUICK_STEP for outer in (PLAIN, None)),
    ],
)


@pytest.mark.parametrize(
    ("kind", "name"),
    [pytest.param(*case, id=", ".join(case), marks=[] if case in QUICK else pytest.mark.full) for case in CASES],
)
def test_a_sync_ends_with_a_step_of_torchs_sgd(kind: str, name: str) -> None:
    def close(before: Tensor, moved: float) -> float:
        # Masters: a sync rounds the mean, Δ, three products and their sums, eight times at most, and v carries what
        # its roundings took to the syncs that follow.
        return 1e-12 if KINDS[kind][2] == torch.float64 else 8 * SYNCS * EPS * float(before.abs().max())

    check_steps(run(kind, OUTERS[name]), OUTERS[name], close)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "compressed" in kind])
def test_compressed_differences_refer_to_where_the_replicas_go_on_from(kind: str) -> None:
    outer = OUTERS["nesterov"]
    results = run(kind, outer)

    def close(before: Tensor, moved: float) -> float:
        # With error feedback the mean is off by what is owed before and after, of both roundings: four times half a
        # unit of bf16's last digit, of differences that have what was owed in them. Momentum adds those of all syncs.
        gain = outer.lr * (1 + outer.momentum * sum(outer.momentum**k for k in range(SYNCS)))
        return gain * 4 * 1.1 * 2.0**-8 * moved + 32 * EPS * float(before.abs().max())

    check_steps(results, outer, close)
    for result in results:
        for consensus, after in zip(result["consensus"], result["after"][1:], strict=bool(result["consensus"])):
            assert torch.equal(consensus.double(), after[0])


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind in QUICK_STEP else pytest.mark.full) for kind in FULL_STEP]
)
def test_a_full_step_without_momentum_is_the_plain_mean_bit_for_bit(kind: str) -> None:
    for stepped, plain in zip(run(kind, PLAIN), run(kind, None), strict=True):
        assert same(stepped["after"], plain["after"])


def test_halves_without_masters_step_from_what_they_were_rounded_to() -> None:
    """Parameters of bf16 lose digits in the mean and in the step; θ_k is what is left, and Δ of replicas at rest 0."""
    params = torch.stack([torch.linspace(-1, 1, 50), torch.linspace(-1, 1, 50)]).bfloat16()
    converger = Converger([params], RowEnsemble(2), outer=hk.Outer())
    params[1] += 0.125
    converger.converge(Report(step=1))
    rested = params.clone()
    assert torch.equal(params[0], params[1])
    for step in (2, 3):
        converger.converge(Report(step=step))
        assert not torch.equal(params, rested), "momentum goes on"
        state = converger.outer_state_dict()
        assert state is not None
        assert torch.equal(state["consensus"][0], params[0].float())
        rested = params.clone()


# Where it starts


@pytest.mark.parametrize("kind", ["loose", "stack"])
def test_it_starts_from_the_parameters_before_the_first_step(kind: str) -> None:
    """Not from those that there were when the scheduler was built: weights may be loaded after that."""
    replicas = replicas_of(0, kind, outer=hk.Outer())
    with torch.no_grad():
        for param in replicas.model.parameters():
            param.add_(1.0)
    start = replicas.numbers()
    replicas.train(SYNC - 1)
    loss = replicas.optimize()
    mean = replicas.numbers().mean(dim=0)
    replicas.scheduler.step(loss)
    expected = sgd_step(make_sgd(hk.Outer()), start[0], mean)
    torch.testing.assert_close(replicas.numbers()[0], expected, rtol=0, atol=1e-12)


def test_a_converger_begins_anew_where_it_is_told_to() -> None:
    params = torch.zeros(2, 3, dtype=torch.float64)
    converger = Converger([params], RowEnsemble(2), outer=hk.Outer())
    for start in (0.0, 5.0):
        params.fill_(start)
        converger.begin()
        sgd, consensus = make_sgd(hk.Outer()), params[0].clone()
        for step in range(2):
            params += torch.tensor([[1.0], [2.0]], dtype=torch.float64)
            consensus = sgd_step(sgd, consensus, params.mean(dim=0))
            converger.converge(Report(step=step))
            torch.testing.assert_close(params, consensus.expand(2, 3), rtol=0, atol=1e-12)


def _apart(rank: int, kind: str) -> list[tuple[Tensor, Tensor]]:
    replicas = replicas_of(rank, kind, outer=hk.Outer())
    hk.warm_noisy_init_(replicas.model.parameters(), nu=0.1, ensemble=replicas.scheduler.cycle.ensemble)
    found = []
    for _ in range(3):
        replicas.train(SYNC - 1)
        loss = replicas.optimize()
        before = replicas.numbers()
        replicas.scheduler.step(loss)
        found.append((before, replicas.numbers()))
    return found


@pytest.mark.parametrize("kind", ["homed", "stack"])
def test_replicas_that_start_apart_take_the_first_mean_for_their_start(kind: str) -> None:
    results = [_apart(0, kind)] if kind == "stack" else run_ranks(2, _apart, kind)
    sgd, consensus = make_sgd(hk.Outer()), None
    for sync in range(3):
        before, after = (torch.cat([r[sync][i] for r in results]) for i in range(2))
        mean = before.mean(dim=0)
        expected = mean if consensus is None else sgd_step(sgd, consensus, mean)
        consensus = after[0]
        torch.testing.assert_close(after, expected.expand_as(after), rtol=0, atol=1e-12)


def _equal(rank: int) -> tuple[Watched, list[int]]:
    """Without a spread, and with one gradient for all: nothing has to travel."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1, bias=False).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings = {**SETTINGS, "cycle_momentum": False, "spread": 0.0, "gradients": "shared"}
    scheduler = hk.HDETOneCycleLR(optimizer, **with_averaging({"outer": hk.Outer(), **settings}))
    found: Watched = {"before": [], "after": [model.weight.detach().clone()]}
    for step in range(SYNC * SYNCS):
        optimizer.zero_grad()
        (model(batch(0, step)[0][:, :4].double()) - 1).square().mean().backward()
        optimizer.step()
        due = (step + 1) % SYNC == 0
        found["before"] += [model.weight.detach().clone()] if due else []
        scheduler.step()
        found["after"] += [model.weight.detach().clone()] if due else []
    return found, [record.collectives for record in scheduler.history]


def test_it_steps_where_all_replicas_are_equal_and_with_one_alone() -> None:
    alone, pair = _equal(0)[0], run_ranks(2, _equal)
    check_steps([alone], hk.Outer(), lambda before, moved: 1e-12)
    assert all(same(found, alone) for found, _ in pair)
    assert pair[0][1] == [1] * SYNCS, "the handshake alone"


# By hand


@pytest.mark.parametrize("kind", ["loose", "stack"])
def test_an_average_by_hand_is_a_step_if_one_was_made(kind: str) -> None:
    replicas = replicas_of(0, kind, outer=hk.Outer())
    start = replicas.numbers()
    replicas.scheduler.converge()
    assert torch.equal(replicas.numbers(), start), "nothing was trained yet"
    replicas.train(1)
    mean, sgd = replicas.numbers().mean(dim=0), make_sgd(hk.Outer())
    replicas.scheduler.converge()
    consensus = replicas.numbers()
    torch.testing.assert_close(consensus[0], sgd_step(sgd, start[0], mean), rtol=0, atol=1e-12)
    replicas.scheduler.converge()
    torch.testing.assert_close(replicas.numbers(), consensus, rtol=0, atol=1e-15)
    replicas.train(SYNC - 2)
    loss = replicas.optimize()
    mean = replicas.numbers().mean(dim=0)
    replicas.scheduler.step(loss)
    torch.testing.assert_close(replicas.numbers()[0], sgd_step(sgd, consensus[0], mean), rtol=0, atol=1e-12)


# Faults


def _sick(rank: int, kind: str, sick: int) -> dict[str, Any]:
    replicas = replicas_of(rank, kind, outer=hk.Outer())
    rows = max(replicas.rows, 1)
    replicas.train(SYNC)
    consensus = replicas.numbers()
    replicas.train(SYNC - 1)
    loss = replicas.optimize()
    if sick // rows == rank:
        weight = next(replicas.model.parameters()).data
        (weight[sick % rows] if replicas.rows else weight).view(-1)[3] = math.nan
    before = replicas.numbers()
    replicas.scheduler.step(loss)
    excluded = replicas.scheduler.history[-1].excluded
    return {"consensus": consensus, "before": before, "after": replicas.numbers(), "excluded": excluded}


SICK = ("loose", "stack", "2 ranks x 2 rows")
run_sick = shared_runs(_sick, [(kind, 1) for kind in SICK])


@pytest.mark.parametrize("kind", SICK)
def test_the_mean_is_that_of_the_sound_replicas(kind: str) -> None:
    outer, ranks = hk.Outer(), KINDS[kind][0]
    first = run(kind, outer)  # the same run, up to the first sync: its gradient is the momentum
    results = run_sick(kind, 1)
    sgd = make_sgd(outer)
    sgd_step(sgd, first[0]["after"][0][0], torch.cat([r["before"][0] for r in first]).mean(dim=0))
    before, after = (torch.cat([r[name] for r in results]) for name in ("before", "after"))
    sound = before[[row for row in range(len(before)) if row != 1]].mean(dim=0)
    expected = sgd_step(sgd, results[0]["consensus"][0], sound)
    torch.testing.assert_close(after, expected.expand_as(after), rtol=0, atol=1e-12)
    assert [r["excluded"] for r in results] == [[1]] * ranks


# Shards


def _sharded(rank: int) -> Watched:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    module = network().double()
    fully_shard(module, mesh=mesh["shard"])
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    scheduler = hk.HDETOneCycleLR(
        optimizer, ensemble=hk.ProcessEnsemble(mesh), **with_averaging({**SETTINGS, "outer": hk.Outer()})
    )

    def numbers() -> Tensor:
        return torch.cat([p.to_local().detach().reshape(1, -1) for p in module.parameters()], dim=1).clone()

    found = {"before": [], "after": [numbers()]}
    for step in range(SYNC * SYNCS):
        optimizer.zero_grad()
        x, y = batch(rank, step)
        loss = loss_of(module, x.double(), y.double())
        loss.backward()
        optimizer.step()
        due = (step + 1) % SYNC == 0
        found["before"] += [numbers()] if due else []
        scheduler.step(loss.detach())
        found["after"] += [numbers()] if due else []
    state = scheduler.state_dict()
    state["hdet"][0]["outer"]["part"][0] ^= 1
    with pytest.raises(ValueError, match=r"of part . of 2 of a replica, this process holds part . of 2: load"):
        scheduler.load_state_dict(state)
    return found


@pytest.mark.full
def test_every_process_steps_its_own_shards() -> None:
    results = run_ranks(4, _sharded)
    for part in range(2):
        check_steps([results[part], results[2 + part]], hk.Outer(), lambda before, moved: 1e-12)


# Checkpoints


def _saved(rank: int, kind: str, steps: int) -> bytes:
    return replicas_of(rank, kind, outer=hk.Outer()).train(steps).save()


def _others(rank: int, kind: str, saved: bytes) -> Watched:
    replicas = replicas_of(rank, kind, outer=hk.Outer()).load(saved)
    found: Watched = {"before": [], "after": [replicas.numbers()]}
    for _ in range(SYNCS - 2):
        replicas.train(SYNC - 1)
        loss = replicas.optimize()
        found["before"].append(replicas.numbers())
        replicas.scheduler.step(loss)
        found["after"].append(replicas.numbers())
    return found


@pytest.mark.parametrize("ranks", [1, pytest.param(4, marks=pytest.mark.full)])
def test_another_number_of_replicas_goes_on_with_the_momentum_of_the_first(ranks: int) -> None:
    first = run_ranks(2, _saved, "homed", 2 * SYNC)[0]
    results = run_ranks(ranks, _others, "homed", first)
    outer = torch.load(io.BytesIO(first), weights_only=True)[2]["hdet"][0]["outer"]
    assert [velocity.shape for velocity in outer["velocity"]] == [consensus.shape for consensus in outer["consensus"]]
    # θ_{k+1} + lr·Δ·(1 + μ) + lr·μ²·v = θ_k; what the old momentum adds is as large as the run before made it.
    before, after = (torch.cat([r[name][i] for r in results]) for i, name in ((0, "before"), (1, "after")))
    consensus, mean = results[0]["after"][0][0], before.mean(dim=0)
    carried = consensus - after[0] - 0.7 * 1.9 * (consensus - mean)
    slots = replicas_of(0, "homed").optimizer.buckets
    velocity = torch.cat([view.reshape(-1) for view in slots.views(outer["velocity"])])
    torch.testing.assert_close(carried, 0.7 * 0.81 * velocity, rtol=0, atol=1e-12)


def test_a_checkpoint_with_and_one_without_do_not_fit_each_other() -> None:
    bare, outer = (replicas_of(0, "loose", outer=outer).train(SYNC) for outer in (None, hk.Outer()))
    with pytest.raises(ValueError, match=r"made with outer=None, this scheduler has \{'lr': 0.7, 'momentum': 0.9"):
        outer.scheduler.load_state_dict(bare.scheduler.state_dict())
    with pytest.raises(ValueError, match=r"made with outer=\{'lr': 0.7, .*\}, this scheduler has None"):
        bare.scheduler.load_state_dict(outer.scheduler.state_dict())
    with pytest.raises(ValueError, match=r"made with outer.momentum=0.9, this scheduler has 0.5"):
        replicas_of(0, "loose", outer=hk.Outer(momentum=0.5)).scheduler.load_state_dict(outer.scheduler.state_dict())
    homed = replicas_of(0, "homed", outer=hk.Outer())
    untouched = homed.scheduler.state_dict()
    with pytest.raises(ValueError, match=r"remembers flat tensors of 129 float64, this one of \d+ float64: resume"):
        homed.scheduler.load_state_dict(outer.scheduler.state_dict())
    assert same(homed.scheduler.state_dict(), untouched)


# What is refused


def _disagreeing(rank: int) -> str:
    replicas = replicas_of(rank, "loose", outer=hk.Outer(lr=0.5 + 0.1 * rank))
    before = replicas.train(SYNC - 1).numbers()
    loss = replicas.optimize()
    after = replicas.numbers()
    with pytest.raises(RuntimeError) as error:
        replicas.scheduler.step(loss)
    assert torch.equal(replicas.numbers(), after)
    assert not torch.equal(before, after)
    return str(error.value)


def test_replicas_with_other_constants_are_told() -> None:
    for message in run_ranks(2, _disagreeing):
        assert "disagree on the settings (rank 0: outer {'lr': 0.5" in message
        assert "rank 1: outer {'lr': 0.6" in message


def test_the_scheduler_around_another_takes_it_too() -> None:
    stack = hk.ReplicaStack(network().double(), 2, gradients="local")
    optimizer = hk.FusedSGD(stack.parameters(), lr=0.1)
    base = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6)
    scheduler = hk.HDETScheduler(
        base, ensemble=stack.ensemble, sync_every=2, auto_lr=False, **with_averaging({"outer": hk.Outer()})
    )
    assert not dist.is_initialized()
    assert scheduler.cycle.converger.settings()["outer"] == {"lr": 0.7, "momentum": 0.9, "nesterov": True}
