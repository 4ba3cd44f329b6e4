"""The scouting phase: miniatures at the learning rates of each replica, and back to the start."""

from __future__ import annotations

import io
import math
import os
import re
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import hdet_kernels as hk
from tests.ranks import Cases, run_ranks
from tests.schedule.scout_runs import PHASE, QUICK, REPLICAS, ROUNDS, RUN, STEPS, RankRun, StackRun
from tests.training import batch, loss_of, network, same

SGD = partial(hk.FusedSGD, momentum=0.9)
COUPLED = partial(hk.FusedAdam, weight_decay=0.01)  # every replica has its own moments
CLIPPED = partial(hk.FusedAdamW, max_grad_norm=0.05, in_backward=hk.InBackward(clip="previous"))


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="adamw"),
        pytest.param({"make_optimizer": SGD, "gradients": "local"}, id="sgd-local", marks=pytest.mark.full),
        pytest.param({"make_optimizer": COUPLED}, id="adam-coupled", marks=pytest.mark.full),
        pytest.param({"make_optimizer": SGD}, id="sgd", marks=pytest.mark.full),
        pytest.param({"gradients": "local"}, id="adamw-local", marks=pytest.mark.full),
        pytest.param({"dtype": torch.bfloat16}, id="bf16-masters"),
        pytest.param({"make_optimizer": CLIPPED}, id="clipped-by-norm-before", marks=pytest.mark.full),
        pytest.param({"spread": 0.0, "auto_lr": False, "cycle_momentum": False}, id="plain", marks=pytest.mark.full),
        pytest.param({"device": "cuda"}, id="gpu", marks=pytest.mark.gpu),
        pytest.param({"device": "cuda", "cuda_graphs": True}, id="gpu-graphs", marks=pytest.mark.gpu),
        pytest.param({"device": "cuda", "dtype": torch.bfloat16}, id="gpu-bf16", marks=pytest.mark.gpu),
        pytest.param({"replicas": 2}, id="two", marks=pytest.mark.full),
        pytest.param({"outer": hk.Outer()}, id="outer", marks=pytest.mark.full),
        pytest.param({"explore": [hk.Explore("weight_decay")]}, id="explore", marks=pytest.mark.full),
    ],
)
def test_after_the_phase_the_run_is_the_one_with_that_learning_rate(options: dict[str, Any]) -> None:
    """Parameters, buffers, moments, counters, learning rates and momenta are those of a run that begins there."""
    scouted = StackRun(**options)
    start = scouted.tensors()
    scouted.train(PHASE)
    assert same(scouted.tensors(), start)
    found = scouted.scheduler.scouted
    assert found is not None
    plain = StackRun([found, found / 4], RUN, first=PHASE, **options)
    assert same(scouted.train(RUN), plain.train(RUN))
    assert same(scouted.tensors(), plain.tensors())
    assert scouted.scheduler.get_last_lr() == plain.scheduler.get_last_lr()
    records = [record for record in scouted.scheduler.history if record.kind != "scout"]
    assert [record.step - PHASE for record in records] == [record.step for record in plain.scheduler.history]
    assert [record.losses for record in records] == [record.losses for record in plain.scheduler.history]
    with pytest.raises(ValueError, match=f"step {STEPS + 1} is past the end: total_steps is {STEPS}"):
        scouted.train(1)


def test_the_norm_by_which_gradients_were_clipped_before_returns() -> None:
    run = StackRun(make_optimizer=CLIPPED)
    state = run.optimizer.state_dict()
    state["param_groups"][0]["previous_grad_norm"] = torch.tensor(0.3, dtype=torch.float64)
    run.optimizer.load_state_dict(state)
    norms = []
    for steps in (1, ROUNDS[0] - 1, PHASE - ROUNDS[0]):
        run.train(steps)
        norms.append(run.optimizer.state_dict()["param_groups"][0]["previous_grad_norm"])
    assert norms[0].shape == (REPLICAS,)
    assert [float(norm) for norm in norms[1:]] == [0.3, 0.3]


def test_replicas_train_miniatures_of_the_schedule_on_their_own_gradients() -> None:
    run = StackRun()
    rates = run.train(PHASE)
    first, second = (record for record in run.scheduler.history if record.kind == "scout")
    for record, begin, length in ((first, 0, ROUNDS[0]), (second, ROUNDS[0], ROUNDS[1])):
        assert (record.step, record.gradients) == (begin + length, "local")
        for group, name in enumerate(record.values):
            for replica, peak in enumerate(record.values[name]):
                optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
                alone = torch.optim.lr_scheduler.OneCycleLR(optimizer, peak, length, cycle_momentum=False)
                for step in range(length):
                    own = rates[begin + step][group][1][replica]
                    assert own == pytest.approx(alone.get_last_lr()[0], rel=1e-9)
                    optimizer.step()
                    alone.step()
    name = next(iter(first.values))
    assert first.values[name] == pytest.approx([10 ** (-5 + (1 + index)) for index in range(REPLICAS)], rel=1e-6)
    names = list(first.values)
    assert second.values[names[1]] == pytest.approx([value / 4 for value in second.values[names[0]]])
    assert second.values[name][-1] / second.values[name][0] < first.values[name][-1] / first.values[name][0]
    assert len(set(second.losses)) == REPLICAS


def test_gradients_are_shared_again_after_the_phase() -> None:
    run = StackRun()
    params = list(run.stack.parameters())
    assert not params[0].shares_gradient
    assert not run.optimizer.shares_state
    run.train(PHASE)
    assert params[0].shares_gradient
    assert run.optimizer.shares_state
    run.stack.backward(loss_of, *batch(0, 0, size=8 * REPLICAS))
    assert params[0].grad is not None
    assert params[0].grad.stride(0) == 0


@pytest.mark.parametrize(
    "at", [13, PHASE + 7, *(pytest.param(at, marks=pytest.mark.full) for at in (0, 3, ROUNDS[0], PHASE))]
)
@pytest.mark.parametrize(
    "options", [pytest.param({}, id="adamw"), pytest.param({"make_optimizer": SGD}, id="sgd", marks=pytest.mark.full)]
)
def test_a_run_resumes_anywhere_bit_for_bit(at: int, options: dict[str, Any]) -> None:
    whole = StackRun(**options)
    whole.train(at)
    saved = whole.saved()
    whole.train(STEPS - at)
    resumed = StackRun(**options)
    resumed.train(0 if at == PHASE + 7 else 2 if at == 13 else STEPS)  # where it is does not matter
    resumed.load(saved)
    resumed.train(STEPS - at)
    assert same(resumed.tensors(), whole.tensors())
    assert resumed.scheduler.scouted == whole.scheduler.scouted
    assert [r.to_dict() for r in resumed.scheduler.history][:2] == [r.to_dict() for r in whole.scheduler.history][:2]


@pytest.mark.full
@pytest.mark.parametrize("make_optimizer", [hk.FusedAdamW, SGD, COUPLED], ids=["adamw", "sgd", "coupled"])
def test_a_state_that_the_optimizer_had_before_returns(make_optimizer: Any) -> None:
    run = StackRun(0.01, 10, make_optimizer=make_optimizer)
    run.train(10)
    before = run.tensors()
    run.scheduler = hk.HDETOneCycleLR(run.optimizer, None, STEPS, ensemble=run.stack.ensemble, scout=QUICK)
    run.train(PHASE)
    assert same(run.tensors(), before)


@pytest.mark.full
@pytest.mark.parametrize("at", [3, 13])
def test_the_scheduler_may_be_built_after_the_optimizer_was_loaded(at: int) -> None:
    whole = StackRun()
    whole.train(at)
    saved = whole.saved()
    whole.train(STEPS - at)
    resumed = StackRun(0.01, 10)  # its scheduler is of no use
    hk.release(resumed.optimizer)
    resumed.stack.load_state_dict(saved["model"])
    resumed.optimizer.load_state_dict(saved["optimizer"])
    resumed.scheduler = hk.HDETOneCycleLR(resumed.optimizer, None, STEPS, ensemble=resumed.stack.ensemble, scout=QUICK)
    resumed.scheduler.load_state_dict(saved["scheduler"])
    resumed.step = at
    resumed.train(STEPS - at)
    assert same(resumed.tensors(), whole.tensors())


def test_a_diverged_candidate_is_worst_and_leaves_no_trace() -> None:
    wild = replace(QUICK, lowest=1e-4, highest=1e12)
    run = StackRun(make_optimizer=SGD, scout=wild)
    start = run.tensors()
    run.train(PHASE)
    records = [record for record in run.scheduler.history if record.kind == "scout"]
    assert records[0].excluded
    assert run.scheduler.scouted is not None
    assert run.scheduler.scouted < 10
    assert same(run.tensors(), start)


def test_losses_of_a_probe_decide_where_there_is_one() -> None:
    run: StackRun

    def probe() -> Any:
        return (run.stack.losses(loss_of, *batch(99, 0, size=16), same_batch=True), calls.append(run.step))[0]

    calls: list[int] = []
    run = StackRun(probe=probe)
    run.train(PHASE)
    assert calls == [0, ROUNDS[0] - 1, PHASE - 1]
    for record in run.scheduler.history[:2]:
        assert record.probes is not None
        assert record.probes != record.losses
        assert len(record.losses) == REPLICAS


def test_a_probe_that_raises_is_reported() -> None:
    def probe() -> Any:
        raise KeyError("no data")

    with pytest.raises(RuntimeError, match=r"probe\(\) raised on replicas \[0, 1, 2, 3\]"):
        StackRun(probe=probe).train(1)


def test_a_round_that_says_nothing_is_said(caplog: pytest.LogCaptureFixture) -> None:
    tiny = replace(QUICK, lowest=1e-12, highest=1e-9)
    run = StackRun(scout=tiny)
    run.train(ROUNDS[0])
    assert "scouting round 1 says little" in caplog.text


def test_methods_of_a_scheduler_in_the_phase(tmp_path: Any) -> None:
    run = StackRun(history_file=tmp_path / "history.jsonl")
    scheduler = run.scheduler
    middle = math.sqrt(1e-5)
    assert scheduler.get_base_lr() == pytest.approx([middle / 25, middle / 100])
    start = run.tensors()["model"]
    run.train(3)
    assert scheduler.scouted is None
    assert scheduler.sync_every == StackRun(0.01, RUN).scheduler.sync_every
    with pytest.raises(RuntimeError, match=f"converge\\(\\) at step 3: until step {PHASE} every replica"):
        scheduler.converge()
    before = run.tensors()
    with scheduler.consensus():
        assert same(run.tensors()["model"], start)
        with pytest.raises(RuntimeError, match=r"inside scheduler.consensus\(\)"):
            scheduler.step(torch.ones(REPLICAS))
        unfinished = scheduler.state_dict()
        assert scheduler.in_sync
    with pytest.raises(ValueError, match=rf"consensus\(\) at step 3.*checkpoint of step {PHASE} or later"):
        scheduler.load_state_dict(unfinished)
    assert not scheduler.in_sync
    assert same(run.tensors(), before)
    run.train(STEPS - 3)
    assert len((tmp_path / "history.jsonl").read_text().splitlines()) == len(scheduler.history)


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_steps_that_a_grad_scaler_leaves_out_do_no_harm() -> None:
    """The first call of the scheduler may come without a step of the optimizer."""
    run = StackRun()
    start = run.tensors()
    run.stack.backward(loss_of, *batch(0, 0, size=8 * REPLICAS))
    run.scheduler.step(torch.ones(REPLICAS))
    run.optimizer.zero_grad()
    run.train(PHASE - 1)
    assert same(run.tensors(), start)


def test_parameters_that_change_unseen_are_refused() -> None:
    run = StackRun()
    with torch.no_grad():
        next(run.stack.parameters()).add_(1.0)
    with pytest.raises(RuntimeError, match="parameters changed without a call"):
        run.scheduler.step(torch.ones(REPLICAS))


def test_weights_that_are_loaded_after_the_scheduler_was_built_are_the_start() -> None:
    run = StackRun()
    loaded = {name: tensor + 1 for name, tensor in run.stack.state_dict().items()}
    run.stack.load_state_dict(loaded)
    run.train(PHASE)
    assert same(run.tensors()["model"], loaded)


def test_without_losses_it_says_so() -> None:
    run = StackRun()
    run.stack.backward(loss_of, *batch(0, 0, size=8 * REPLICAS))
    run.optimizer.step()
    with pytest.raises(RuntimeError, match=r"compares losses, and none was recorded.* HDET\(\).* HDETCallback\(\)"):
        run.scheduler.step()


@pytest.mark.parametrize("again", [True, False], ids=["a second scheduler", "released"])
def test_whoever_follows_the_phase_finds_the_stack_as_it_was(again: bool) -> None:
    run = StackRun()
    run.train(3)
    if again:
        hk.HDETOneCycleLR(run.optimizer, 0.01, 100, ensemble=run.stack.ensemble)
        with pytest.raises(RuntimeError, match="the optimizer has another HDET scheduler now"):
            run.train(1)
    else:
        hk.release(run.optimizer)
        assert all("per_replica" not in group for group in run.optimizer.param_groups)
    assert next(run.stack.parameters()).shares_gradient
    assert run.optimizer.shares_state


@pytest.mark.parametrize(
    ("steps", "noise", "make_optimizer", "excess"),
    [
        # Miniatures of 23 and 46 steps see less than those of a real run.
        pytest.param(300, 0.0, SGD, 0.1, id="short"),
        pytest.param(2000, 1.0, partial(hk.FusedAdamW, weight_decay=0.0), 0.005, id="long", marks=pytest.mark.full),
    ],
)
def test_the_found_learning_rate_is_as_good_as_the_best_of_a_grid(
    steps: int, noise: float, make_optimizer: Any, excess: float
) -> None:
    """Plain runs over a grid an octave apart, and a run without a learning rate, on classes of a linear rule."""
    grid, size = [2.0**exponent for exponent in range(-10, 4)], 256

    def data(step: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(size, 20, generator=generator) * torch.linspace(0.3, 3.0, 20)
        target = x[:, :2] @ torch.tensor([1.0, -2.0]) + noise * torch.randn(size, generator=generator)
        return x, torch.sin(target)

    def loss_fn(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.mse_loss(model(x)[:, 0], y)

    def stacked(replicas: int, gradients: Any) -> tuple[hk.ReplicaStack, Any]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(20, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
        stack = hk.ReplicaStack(model, replicas, gradients=gradients)
        return stack, make_optimizer(stack.parameters(), lr=1.0)

    stack, optimizer = stacked(8, "shared")
    scout = hk.ScoutSettings(lowest=1e-5, highest=1.0)
    scheduler = hk.HDETOneCycleLR(optimizer, None, steps, ensemble=stack.ensemble, scout=scout)
    phase = scheduler.cycle.before
    for step in range(phase):
        losses = stack.backward(loss_fn, *data(step))
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step(losses)
    found = scheduler.scouted
    assert found is not None

    grid.append(found)
    plain, optimizer = stacked(len(grid), "local")  # all runs at once, on the whole batches
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1.0, steps - phase)
    for step in range(phase, steps):
        optimizer.param_groups[0]["per_replica"] = {"lr": tuple(schedule.get_last_lr()[0] * rate for rate in grid)}
        plain.backward(loss_fn, *data(step), same_batch=True)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    unseen = [torch.cat(part) for part in zip(*(data(10**6 + index) for index in range(16)), strict=True)]
    finals = plain.losses(loss_fn, *unseen, same_batch=True)
    *others, chosen = finals.nan_to_num(nan=math.inf).tolist()
    assert chosen <= (1 + excess) * min(others), dict(zip(grid, finals.tolist(), strict=True))


# Several processes


def _load_others(run: RankRun) -> None:
    run.model.load_state_dict({name: tensor * 2 for name, tensor in run.model.state_dict().items()})
    (norm,) = (module for module in run.model.modules() if isinstance(module, torch.nn.BatchNorm1d))
    norm.load_state_dict({name: tensor + 1 for name, tensor in norm.state_dict().items()})


def _as_if_begun_there(rank: int, options: dict[str, Any]) -> list[Any]:
    """A run without a learning rate, and one that begins with what it found; and one that is resumed.

    Weights are loaded after the scheduler was built: all, and then those of a part of the model.
    """
    run = RankRun(rank, **options)
    _load_others(run)
    start = run.tensors()
    run.train(8)
    saved, before = run.saved(), run.tensors()
    with run.scheduler.consensus():
        assert same(run.tensors()["model"], start["model"])
    assert same(run.tensors(), before)
    run.train(PHASE - 8)
    back = same(run.tensors()["model"], start["model"])
    found = run.scheduler.scouted
    assert found is not None
    run.train(RUN)
    plain = RankRun(rank, found, RUN, first=PHASE, **options)
    _load_others(plain)
    plain.train(RUN)
    resumed = RankRun(rank, **options)
    resumed.load(saved)
    resumed.train(STEPS - 8)
    synced = getattr(run.model, "require_backward_grad_sync", None)
    return [back, same(run.tensors(), plain.tensors()), same(run.tensors(), resumed.tensors()), synced, found]


def _stacks(rank: int) -> list[Any]:
    """Two stacks of two replicas, one in each process, against one stack of four."""
    torch.manual_seed(0)
    run = StackRun(replicas=2, first=1000 * rank)
    start = run.tensors()
    run.train(PHASE)
    return [same(run.tensors(), start), run.scheduler.scouted, next(run.stack.parameters()).shares_gradient]


@pytest.mark.full
def test_stacks_in_several_processes() -> None:
    results = run_ranks(2, _stacks)
    assert [result[0] for result in results] == [True, True]
    assert results[0][1] == results[1][1] is not None
    assert results[0][2]


_RANKS = Cases(
    2,
    _as_if_begun_there,
    {"ddp": ({},)},
    full={
        "torch-local": ({"ddp": False, "make_optimizer": torch.optim.AdamW},),
        "torch-ddp": ({"make_optimizer": torch.optim.SGD},),
        "local": ({"ddp": False, "make_optimizer": SGD},),
    },
)


@pytest.mark.parametrize("case", _RANKS.params())
def test_ranks_find_one_learning_rate_and_begin_with_it(case: str) -> None:
    results = _RANKS[case]
    for back, as_begun, resumed, synced, _ in results:
        assert (back, as_begun, resumed) == (True, True, True)
        assert synced is not False
    assert len({found for *_, found in results}) == 1


def _refused(rank: int) -> dict[str, Any]:
    texts: dict[str, Any] = {}
    for name, options in {
        "no model": {"tells": False},
        "shared": {"tells": False, "gradients": "shared"},
        "other settings": {"scout": replace(QUICK, shift=float(rank))},
    }.items():
        try:
            RankRun(rank, **options).train(1)  # type: ignore[arg-type]
        except (RuntimeError, ValueError) as error:
            texts[name] = str(error)
    return {**texts, "inside": _inside()}


def _inside() -> list[bool]:
    """Return whether a wrapper inside the model averages gradients: in the phase, and after the release."""
    wrapper = DistributedDataParallel(network())
    outside = torch.nn.Sequential(wrapper)
    optimizer = hk.FusedAdamW(outside.parameters(), lr=0.01)
    scheduler = hk.HDETOneCycleLR(optimizer, None, STEPS, model=outside, scout=QUICK)
    during = bool(wrapper.require_backward_grad_sync)
    hk.release(optimizer)
    return [scheduler.scouted is not None, during, bool(wrapper.require_backward_grad_sync)]


def test_ranks_that_cannot_differ_are_told_what_to_do() -> None:
    for texts in run_ranks(2, _refused):
        assert "all replicas have the same one: pass the DistributedDataParallel model as model=" in texts["no model"]
        assert "got gradients='shared' and no DistributedDataParallel in model=" in texts["shared"]
        assert "the replicas disagree on the settings" in texts["other settings"]
        assert texts["inside"] == [False, False, True]


#: The timeout of the group, in seconds, that the ranks wait for in vain.
SHORT = 2.0


def _lost(rank: int, at: int, dies: bool) -> str:
    """Rank 1 does not come to the end of step ``at``, because it has died or is slow."""
    group = dist.new_group(timeout=timedelta(seconds=SHORT))
    run = RankRun(rank, ddp=False, ensemble=hk.ProcessEnsemble(group))
    run.train(at - 1)
    dist.barrier()
    message = ""
    try:
        if rank == 1 and dies:
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 1:
            time.sleep(2 * SHORT)
        run.train(1)
    except RuntimeError as error:
        message = str(error)
    if not dies:
        dist.barrier()
    return message


@pytest.mark.parametrize(
    ("at", "dies"), [(1, True), (ROUNDS[0], False), pytest.param(PHASE, True, marks=pytest.mark.full)]
)
def test_a_rank_that_is_lost_in_the_phase_is_named_with_the_step(at: int, dies: bool) -> None:
    results = run_ranks(3, _lost, at, dies, expect_dead=int(dies))
    last = "it was never seen at an average" if at == 1 else "it was last seen at scouting at step 1"
    for message in (results[0], results[2]):
        what = "has ended" if dies else r"did not come within \d+\.\d s"  # SHORT, or a little more
        assert re.match(rf"scouting at step {at} failed: rank 1 {what} \(", message), message
        assert re.findall(r"rank (\d)", message) == ["1"], "no rank that lives is accused"
        assert last in message or at == PHASE


def _sharded(rank: int) -> tuple[str, bool, float | None]:
    """Two replicas of two shards: averaged by FSDP they are refused, on gradients of their own they are compared."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    averaged = network()
    fully_shard(averaged, mesh=mesh)
    optimizer = torch.optim.AdamW(averaged.parameters(), lr=0.01)
    refused = ""
    try:
        hk.HDETOneCycleLR(optimizer, None, STEPS, scout=QUICK)
    except ValueError as error:
        refused = str(error)
    model = network()
    fully_shard(model, mesh=mesh["shard"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    ensemble = hk.ProcessEnsemble(mesh)
    scheduler = hk.HDETOneCycleLR(optimizer, None, STEPS, ensemble=ensemble, scout=QUICK)
    start = [param.to_local().clone() for param in model.parameters()]  # type: ignore[attr-defined]
    for step in range(PHASE):
        loss = loss_of(model, *batch(rank, step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step(loss)
    now = [param.to_local() for param in model.parameters()]  # type: ignore[attr-defined]
    return refused, all(map(torch.equal, now, start)), scheduler.scouted


@pytest.mark.full
def test_sharded_replicas_differ_unless_fsdp_averages_them() -> None:
    results = run_ranks(4, _sharded)
    assert all("fully_shard over a mesh (replicate, shard) averages them" in refused for refused, _, _ in results)
    assert all(back for _, back, _ in results)
    assert len({found for *_, found in results}) == 1
    assert results[0][2] is not None


def test_the_schedule_is_that_of_the_run_which_begins_after_the_phase() -> None:
    run = StackRun()
    seen = [(run.scheduler.last_epoch, run.scheduler.total_steps)]
    for _ in range(STEPS):
        run.train(1)
        seen.append((run.scheduler.last_epoch, run.scheduler.total_steps))
    assert seen == [*[(0, RUN)] * PHASE, *((step, RUN) for step in range(RUN + 1))]


def test_learning_rates_that_are_tensors_stay_the_same_objects() -> None:
    rate = torch.tensor(0.01)
    run = StackRun(make_optimizer=lambda groups, lr: hk.FusedAdamW(groups, lr=rate))
    run.train(PHASE + 1)
    assert run.optimizer.param_groups[0]["lr"] is rate
    assert run.scheduler.scouted is not None


def test_epochs_count_for_the_length_of_a_run() -> None:
    stack = hk.ReplicaStack(torch.nn.Linear(2, 1), REPLICAS)
    optimizer = hk.FusedAdamW(stack.parameters())
    scheduler = hk.HDETOneCycleLR(optimizer, None, epochs=5, steps_per_epoch=10, ensemble=stack.ensemble, scout=QUICK)
    assert scheduler.cycle.run.total_steps == RUN
    assert scheduler.cycle.before == PHASE


@pytest.mark.parametrize(
    ("here", "there"),
    [
        pytest.param(3, PHASE + 2, id="phase to run", marks=pytest.mark.full),
        pytest.param(3, 8, id="phase to phase"),
        pytest.param(PHASE + 2, 3, id="run to phase", marks=pytest.mark.full),
        pytest.param(PHASE + 2, PHASE + 5, id="run to run", marks=pytest.mark.full),
    ],
)
def test_a_refused_setter_leaves_the_scheduler_as_it_was(here: int, there: int) -> None:
    """Loading raises in the middle, in a setter of the user: everything is as before, and goes on."""
    refuses = False

    def setter(values: object) -> None:
        if refuses:
            raise OSError("no")

    def made(steps: int) -> StackRun:
        explore = [hk.Explore("dropout", spread=0.1, base=0.1, apply=setter)]
        run = StackRun(gradients="local", explore=explore)
        run.train(steps)
        return run

    state = made(there).saved()["scheduler"]
    run, whole = made(here), made(here)
    refuses = True
    with pytest.raises(OSError, match="no"):
        run.scheduler.load_state_dict(state)
    refuses = False
    assert same(run.saved(), whole.saved())
    run.train(STEPS - here)
    whole.train(STEPS - here)
    assert same(run.tensors(), whole.tensors())
    assert run.scheduler.scouted == whole.scheduler.scouted


def test_a_checkpoint_is_plain_values_and_tensors() -> None:
    run = StackRun()
    run.train(3)
    file = io.BytesIO()
    torch.save(run.scheduler.state_dict(), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert loaded["scout"][0].keys() == {"config", "ratios", "found", "phase"}
    other = StackRun()
    other.scheduler.load_state_dict(loaded)
    assert same(other.scheduler.state_dict()["scout"], run.scheduler.state_dict()["scout"])


def change(*path: str | int, value: Any) -> Callable[[dict[str, Any]], None]:
    def changed(state: Any) -> None:
        for name in path[:-1]:
            state = state[name]
        state[path[-1]] = value

    return changed


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (change("scout", value=None), "made with a learning rate, this scheduler has max_lr=None"),
        (change("scout", 0, "config", "total_steps", value=51), "made with total_steps=51, this scheduler has 50"),
        (change("scout", 0, "config", value=None), "made with scout=None"),
        (change("scout", 0, "found", value=0.1), "scout.found and scout.phase exclude each other"),
        (change("scout", 0, "ratios", value=[1.0]), "scout.ratios"),
        (change("scout", 0, "phase", "round", value=2), "scout.phase.round"),
        (change("scout", 0, "phase", "step", value=5), "scout.phase.step"),
        (change("scout", 0, "phase", "bracket", value=[0.0]), "scout.phase.bracket"),
        (change("scout", 0, "phase", "start", value=None), "scout.phase.start"),
        (change("scout", 0, "phase", "start", "params", value=[torch.zeros(3)]), "resume with the model"),
        (
            change("scout", 0, "phase", "start", "state", value={"0/step": torch.zeros(3)}),
            "start.state.0/step has shape",
        ),
        (change("scout", 0, "phase", "losses", "tail", "count", value=-1), "scout.phase.losses.tail.count"),
        (change("scout", 0, "phase", "replicas", value=[2, 0, 2, 0]), "load on every process its own file"),
        (change("scout", 0, "phase", "more", value=1), "scout.phase.more"),
        (change("last_epoch", value=2), "scheduler.last_epoch"),
        (change("total_steps", value=50), "scheduler.total_steps"),
    ],
)
def test_a_damaged_checkpoint_is_refused_and_changes_nothing(damage: Any, text: str) -> None:
    run = StackRun()
    run.train(3)
    state = run.saved()["scheduler"]
    damage(state)
    other = StackRun()
    other.train(1)
    before = other.saved()
    with pytest.raises(ValueError, match=text.replace("[", r"\[")):
        other.scheduler.load_state_dict(state)
    assert same(other.saved(), before)


@pytest.mark.parametrize("replicas", [2, 8])
def test_another_number_of_replicas_resumes_after_the_search_and_not_in_it(replicas: int) -> None:
    run = StackRun()
    for step in (2, ROUNDS[0]):  # within a round, and between two
        run.train(step - run.step)
        with pytest.raises(ValueError, match=rf"{REPLICAS}, .* this one has replicas {replicas}.*as many replicas"):
            StackRun(replicas=replicas).scheduler.load_state_dict(run.saved()["scheduler"])
    run.train(PHASE - run.step)
    other = StackRun(replicas=replicas)
    other.scheduler.load_state_dict(run.saved()["scheduler"])
    assert other.scheduler.scouted == run.scheduler.scouted is not None


def test_runs_with_and_without_a_learning_rate_do_not_load_each_other() -> None:
    found, given = StackRun(), StackRun(0.01)
    found.train(PHASE)
    with pytest.raises(ValueError, match="made with max_lr=None, this scheduler has max_lr=one"):
        given.scheduler.load_state_dict(found.scheduler.state_dict())
    other = StackRun(scout=replace(QUICK, highest=10.0))
    with pytest.raises(ValueError, match=r"made with scout\.highest=1.0, this scheduler has 10.0"):
        other.scheduler.load_state_dict(found.scheduler.state_dict())
