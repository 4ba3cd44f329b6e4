"""Team rounds of the scouting phase: two learning rates at a time, on gradients that half of the replicas share."""

from __future__ import annotations

import pickle
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

import hdet_kernels as hk
from tests.ranks import run_ranks
from tests.schedule.scout_runs import PHASE, REPLICAS, RUN, STEPS, TEAM_ROUNDS, TEAMS, RankRun, StackRun
from tests.training import batch, loss_of, network, same

SGD = partial(hk.FusedSGD, momentum=0.9)

#: Steps before the first team round, and within each of them.
APART = TEAM_ROUNDS[0]
WITHIN = (APART + 3, APART + TEAM_ROUNDS[1] + 3)


def test_a_stack_shares_gradients_within_a_team() -> None:
    run = StackRun(scout=TEAMS)
    run.train(APART)
    own = hk.ReplicaStack(network(batch_norm=True), REPLICAS, gradients="local")
    x, y = batch(0, run.step, size=8 * REPLICAS)
    own.load_state_dict(run.stack.state_dict())
    own.backward(loss_of, x, y)
    for _ in range(2):  # gradients of several passes are added
        run.stack.backward(loss_of, x, y)
    for mean, apart in zip(run.stack.parameters(), own.parameters(), strict=True):
        assert mean.grad is not None
        assert apart.grad is not None
        for team in (slice(2), slice(2, 4)):
            expected = 2 * apart.grad[team].mean(0, keepdim=True).expand(2, *apart.shape[1:])
            torch.testing.assert_close(mean.grad[team], expected)
            assert torch.equal(mean.grad[team][0], mean.grad[team][1])
        assert not torch.equal(mean.grad[1], mean.grad[2])


def test_a_team_has_one_learning_rate_and_stays_together() -> None:
    run = StackRun(scout=TEAMS)
    run.train(APART)
    for length in TEAM_ROUNDS[1:]:
        rates = run.train(length - 1)
        first, *others = (rows for _, rows in rates[0])
        assert first[0] == first[1] < first[2] == first[3]
        assert all(rows[0] == rows[1] < rows[2] == rows[3] for rows in others)
        params = [param.detach() for param in run.stack.parameters()]
        assert all(torch.equal(param[0], param[1]) and torch.equal(param[2], param[3]) for param in params)
        assert not any(torch.equal(param[1], param[2]) for param in params)
        run.train(1)
    rounds = [record for record in run.scheduler.history if record.kind == "scout"]
    assert [record.gradients for record in rounds] == ["local", "teams", "teams"]
    assert run.scheduler.scouted is not None


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="adamw"),
        pytest.param({"make_optimizer": SGD}, id="sgd", marks=pytest.mark.full),
        pytest.param({"dtype": torch.bfloat16}, id="bf16-masters", marks=pytest.mark.full),
        pytest.param({"replicas": 3}, id="three", marks=pytest.mark.full),
        pytest.param({"replicas": 2}, id="two", marks=pytest.mark.full),
        pytest.param({"device": "cuda"}, id="gpu", marks=pytest.mark.gpu),
        pytest.param({"device": "cuda", "cuda_graphs": True}, id="gpu-graphs", marks=pytest.mark.gpu),
    ],
)
def test_after_team_rounds_the_run_is_the_one_with_that_learning_rate(options: dict[str, Any]) -> None:
    scouted = StackRun(scout=TEAMS, **options)
    start = scouted.tensors()
    scouted.train(PHASE)
    assert same(scouted.tensors(), start)
    found = scouted.scheduler.scouted
    assert found is not None
    plain = StackRun([found, found / 4], RUN, first=PHASE, **options)
    assert same(scouted.train(RUN), plain.train(RUN))
    assert same(scouted.tensors(), plain.tensors())
    assert next(scouted.stack.parameters()).shares_gradient


@pytest.mark.parametrize(
    ("at", "trained"),
    [
        (WITHIN[1], 2),
        *(
            pytest.param(at, trained, marks=pytest.mark.full)
            for at in (APART, *WITHIN)
            for trained in (WITHIN[0], PHASE + 2)
        ),
    ],
)
def test_a_run_resumes_within_team_rounds_bit_for_bit(at: int, trained: int) -> None:
    whole = StackRun(scout=TEAMS)
    whole.train(at)
    saved = whole.saved()
    whole.train(STEPS - at)
    resumed = StackRun(scout=TEAMS)
    resumed.train(trained)  # where it is does not matter
    resumed.load(saved)
    resumed.train(STEPS - at)
    assert same(resumed.tensors(), whole.tensors())
    assert resumed.scheduler.scouted == whole.scheduler.scouted


@pytest.mark.full
def test_a_round_apart_is_loaded_within_a_team_round() -> None:
    whole, resumed = StackRun(scout=TEAMS), StackRun(scout=TEAMS)
    whole.train(3)
    resumed.train(WITHIN[0])
    resumed.load(whole.saved())
    for run in (whole, resumed):
        run.train(PHASE - 3)
    assert resumed.scheduler.scouted == whole.scheduler.scouted


@pytest.mark.parametrize(
    ("here", "there"),
    [
        pytest.param(3, WITHIN[0], id="apart to teams"),
        pytest.param(WITHIN[0], 3, id="teams to apart", marks=pytest.mark.full),
        pytest.param(WITHIN[1], PHASE + 2, id="teams to run", marks=pytest.mark.full),
        pytest.param(PHASE + 2, WITHIN[1], id="run to teams", marks=pytest.mark.full),
    ],
)
def test_a_refused_setter_leaves_gradients_as_they_were(here: int, there: int) -> None:
    """Loading raises in the middle, in a setter of the user: everything goes on as it was."""
    refuses = False

    def setter(values: object) -> None:
        if refuses:
            raise OSError("no")

    def made(steps: int) -> StackRun:
        run = StackRun(scout=TEAMS, explore=[hk.Explore("dropout", spread=0.1, base=0.1, apply=setter)])
        run.train(steps)
        return run

    state = made(there).saved()["scheduler"]
    run, whole = made(here), made(here)
    refuses = True
    with pytest.raises(OSError, match="no"):
        run.scheduler.load_state_dict(state)
    refuses = False
    for each in (run, whole):
        each.train(PHASE + 5 - here)
    assert same(run.tensors(), whole.tensors())
    assert run.scheduler.scouted == whole.scheduler.scouted


def test_whoever_follows_a_team_round_finds_the_stack_as_it_was() -> None:
    run = StackRun(scout=TEAMS)
    run.train(WITHIN[0])
    hk.release(run.optimizer)
    assert next(run.stack.parameters()).shares_gradient
    assert run.optimizer.shares_state
    run.stack.backward(loss_of, *batch(0, 0, size=8 * REPLICAS))
    assert all(param.grad is not None and param.grad.stride(0) == 0 for param in run.stack.parameters())


def test_a_damaged_outcome_is_refused() -> None:
    run = StackRun(scout=TEAMS)
    run.train(WITHIN[1])
    state = run.saved()["scheduler"]
    state["scout"][0]["phase"]["near"].pop()
    with pytest.raises(ValueError, match=r"scout\.phase\.near"):
        StackRun(scout=TEAMS).scheduler.load_state_dict(state)


def test_a_team_that_diverges_is_worst_and_leaves_the_other_alone() -> None:
    wild = hk.ScoutSettings(share=2 / 3, apart=0.2, fewest=4, lowest=1e-4, highest=10.0, distance=1e30)
    run = StackRun(make_optimizer=SGD, scout=wild)
    start = run.tensors()
    run.train(APART + TEAM_ROUNDS[1])
    record = run.scheduler.history[-1]
    assert record.excluded == [2, 3]
    run.train(TEAM_ROUNDS[2])
    assert run.scheduler.scouted is not None
    assert run.scheduler.scouted < next(iter(record.values.values()))[-1]
    assert same(run.tensors(), start)


def test_replicas_that_share_no_gradient_in_the_run_share_none_in_the_search() -> None:
    run = StackRun(scout=TEAMS, gradients="local")
    run.train(PHASE)
    assert {record.gradients for record in run.scheduler.history} == {"local"}


# Several processes


def _gradients(run: RankRun) -> list[torch.Tensor]:
    """Return the gradients of the next batch, which is not stepped with."""
    run.optimizer.zero_grad()
    loss_of(run.model, *batch(run.rank, run.step)).backward()
    found = [param.grad.clone() for param in run.model.parameters() if param.grad is not None]
    run.optimizer.zero_grad()
    return found


def _under_ddp(rank: int) -> dict[str, Any]:
    """A run with teams, one that begins with what it found, and one that is resumed within a team round."""
    run = RankRun(rank, scout=TEAMS)
    run.train(APART)
    gradients = _gradients(run)
    with run.model.no_sync():
        own = _gradients(run)
    run = RankRun(rank, scout=TEAMS)
    start = run.tensors()
    run.train(WITHIN[1])
    saved = run.saved()
    run.train(PHASE - WITHIN[1])
    back, found = same(run.tensors(), start), run.scheduler.scouted
    assert found is not None
    run.train(RUN)
    plain = RankRun(rank, found, RUN, first=PHASE)
    plain.model.eval()  # so that BatchNorm sees no more batches than in the other run
    _gradients(plain)  # DDP arranges its buckets anew after the first average, and sums of four depend on it
    plain.model.train()
    plain.train(RUN)
    resumed = RankRun(rank, scout=TEAMS)
    resumed.load(saved)
    resumed.train(STEPS - WITHIN[1])
    return {
        "gradients": gradients,
        "own": own,
        "same": [back, same(run.tensors(), plain.tensors()), same(run.tensors(), resumed.tensors())],
        "found": found,
        "rounds": [(record.gradients, record.losses) for record in run.scheduler.history if record.kind == "scout"],
        "switches": (run.model.require_backward_grad_sync, run.model.broadcast_buffers),
        "pickled": same(pickle.loads(pickle.dumps(run.model)).state_dict(), run.model.state_dict()),
    }


@pytest.mark.full
def test_teams_of_processes_under_ddp() -> None:
    results = run_ranks(4, _under_ddp)
    for first, second in ((0, 1), (2, 3)):
        a, b = results[first], results[second]
        assert same(a["gradients"], b["gradients"])
        for mean, one, other in zip(a["gradients"], a["own"], b["own"], strict=True):
            torch.testing.assert_close(mean, (one + other) / 2)
    assert not same(results[1]["gradients"], results[2]["gradients"])
    for result in results:
        assert result["same"] == [True, True, True]
        assert result["switches"] == (True, True)
        assert result["pickled"]
        assert result["rounds"] == results[0]["rounds"]
        assert result["found"] == results[0]["found"]
    assert [gradients for gradients, _ in results[0]["rounds"]] == ["local", "teams", "teams"]

    # A stack that sees the same batches.
    stack = hk.ReplicaStack(network(batch_norm=True), 4)
    optimizer = hk.FusedAdamW(stack.parameters(), lr=0.01)
    scheduler = hk.HDETOneCycleLR(optimizer, None, STEPS, ensemble=stack.ensemble, scout=TEAMS)
    for step in range(PHASE):
        x, y = (torch.cat(parts) for parts in zip(*(batch(rank, step) for rank in range(4)), strict=True))
        losses = stack.backward(loss_of, x, y)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step(losses)
    for record, (_, expected) in zip(scheduler.history, results[0]["rounds"], strict=True):
        assert record.losses == pytest.approx(expected, rel=1e-4)
    assert scheduler.scouted == pytest.approx(results[0]["found"], rel=1e-3)


def _stacks(rank: int) -> list[Any]:
    """Two replicas in each process: a process is a team."""
    run = StackRun(replicas=2, first=1000 * rank, scout=TEAMS)
    start = run.tensors()
    run.train(WITHIN[0])
    saved = run.saved()
    together = [torch.equal(*param.detach()) for param in run.stack.parameters()]
    run.train(PHASE - WITHIN[0])
    resumed = StackRun(replicas=2, scout=TEAMS)
    resumed.load(saved)
    resumed.train(PHASE - WITHIN[0])
    back = same(run.tensors(), start)
    run.train(2)
    return [all(together), back, run.scheduler.scouted, resumed.scheduler.scouted]


@pytest.mark.full
@pytest.mark.parametrize("ranks", [2, 3])
def test_stacks_in_several_processes(ranks: int) -> None:
    """Of three processes two are one team."""
    results = run_ranks(ranks, _stacks)
    for together, back, found, resumed in results:
        assert together
        assert back
        assert found == resumed == results[0][2] is not None


def _of_some(rank: int) -> list[Any]:
    """The replicas are processes 1 to 3 of four, and process 1 trains with a hook of the user."""
    group = dist.new_group([1, 2, 3])
    if rank == 0:
        return []
    found = []
    for hooked in (False, True):
        model = DistributedDataParallel(network(), process_group=group)
        if hooked:
            model.register_comm_hook(group, allreduce_hook)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        ensemble = hk.ProcessEnsemble(group)
        scheduler = hk.HDETOneCycleLR(optimizer, None, STEPS, model=model, ensemble=ensemble, scout=TEAMS)
        for step in range(PHASE):
            loss = loss_of(model, *batch(rank, step))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step(loss)
        found.append([scheduler.scouted, *(record.gradients for record in scheduler.history)])
    return found


@pytest.mark.full
def test_processes_of_a_group_and_a_hook_of_the_user() -> None:
    _, *results = run_ranks(4, _of_some)
    for teams, hooked in results:
        assert teams == results[0][0]
        assert teams[1:] == ["local", "teams", "teams"]
        assert hooked == results[0][1]
        assert set(hooked[1:]) == {"local"}
