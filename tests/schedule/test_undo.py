"""Returns to the start: bit for bit, counted, recorded and resumable, and the run that begins then."""

from __future__ import annotations

import copy
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import hdet_kernels as hk
from tests.ranks import Cases, run_ranks
from tests.schedule.undo_runs import OPTIMIZERS, SYNC, TOTAL, Kind, Scripted, Trying, Undoable
from tests.training import Trainer, batch, loss_of, same

KINDS: tuple[Kind, ...] = ("stack shared", "stack local", "ranks shared", "ranks local")
#: Training breaks at the second sync.
BROKEN = Scripted((2 * SYNC,))


def _returned(rank: int, kind: Kind, optimizer: str, options: dict[str, Any]) -> dict[str, Any]:
    """Train to a sync at which training broke, and on to the end; return the states at the start, before and after
    the return, and the ends of this run and of those that were interrupted before the return and after it."""
    options = {"auto_lr": BROKEN, **options}
    run = Undoable(kind, optimizer, rank, warm=True, **options).train(2 * SYNC - 1)
    saved, before = run.saved(), run.everything()
    returned = run.train(1).everything()
    history, saved_after = run.history(), run.saved()
    resumed = [
        Undoable(kind, optimizer, rank, **options).load(file, scheduler_first=first).train(TOTAL - made)
        for file, made, first in ((saved, 7, False), (saved, 7, True), (saved_after, 8, False))
    ]
    run.train(TOTAL - 2 * SYNC)
    ends = [{**each.everything(), "history": each.history()} for each in (run, *resumed)]
    steps = [each.scheduler.last_epoch for each in (run, *resumed)]
    return {"start": run.start, "before": before, "returned": returned, "history": history, "ends": ends, "made": steps}


def check_return(found: dict[str, Any]) -> None:
    assert not same(found["start"], found["before"])
    assert same(found["start"], found["returned"])
    for resumed in found["ends"][1:]:
        assert same(found["ends"][0], resumed)
    assert found["made"] == [TOTAL] * 4
    assert [record["undone"] for record in found["history"]] == [None, 0]


STACKS = [("stack shared", "FusedAdamW"), ("stack shared", "FusedAdam"), ("stack local", "FusedSGD")]
QUICK_RANKS = [("ranks shared", "torch AdamW"), ("ranks local", "FusedAdamW")]
_ALL_RANKS = list(itertools.product(KINDS[2:], OPTIMIZERS)) + STACKS  # stacks in ranks

RANKS = Cases(
    2,
    _returned,
    {case: (*case, {}) for case in QUICK_RANKS},
    full={case: (*case, {}) for case in _ALL_RANKS if case not in QUICK_RANKS},
)


@pytest.mark.parametrize(
    ("kind", "optimizer"),
    [
        pytest.param(kind, optimizer, marks=() if (kind, optimizer) in STACKS else pytest.mark.full)
        for kind, optimizer in itertools.product(KINDS[:2], list(OPTIMIZERS)[:4])
    ],
)
def test_a_stack_returns_bit_for_bit_and_resumes_before_and_after(kind: Kind, optimizer: str) -> None:
    check_return(_returned(0, kind, optimizer, {}))


@pytest.mark.parametrize(("kind", "optimizer"), RANKS.params())
def test_ranks_return_bit_for_bit_and_resume_before_and_after(kind: Kind, optimizer: str) -> None:
    results = RANKS[kind, optimizer]
    for found in results:
        check_return(found)
    assert same(results[0]["ends"][0]["params"], results[1]["ends"][0]["params"])


#: Ways of averaging that remember something from one sync to the next, and another place of the copy.
MODES: dict[str, dict[str, Any]] = {
    "outer": {"outer": hk.Outer(lr=0.7, momentum=0.9)},
    "int8": {"compress": "int8"},
    "int8 outer": {"compress": "int8", "outer": hk.Outer()},
    "best": {"merge": "best"},
    "cpu": {"auto_lr": Scripted((2 * SYNC,), undo_on="cpu")},
}
_MODES = Cases(2, _returned, {}, full={name: ("ranks local", "FusedAdamW", options) for name, options in MODES.items()})


@pytest.mark.parametrize("mode", [pytest.param(name, marks=pytest.mark.full) for name in MODES])
def test_what_averages_remember_is_brought_back_too(mode: str) -> None:
    for found in _MODES[mode]:
        check_return(found)


def stack(optimizer: str = "FusedAdamW", **options: Any) -> Undoable:
    return Undoable("stack local", optimizer, **options)


def kept_step(run: Undoable) -> int | None:
    undoing = run.scheduler.cycle.undoing
    return None if undoing is None else undoing.start.step


# The start


def test_replicas_that_begin_apart_return_to_their_own_start() -> None:
    run = stack(auto_lr=Scripted((SYNC,)))
    hk.warm_noisy_init_(run.params(), nu=0.1, seed=3, ensemble=run.stack.ensemble)
    before = run.everything()["params"]
    assert not torch.equal(before[0][0], before[0][1])
    assert same(run.train(SYNC).everything()["params"], before)


@pytest.mark.parametrize("warm", [True, False])
def test_masters_and_parameters_return_together(warm: bool) -> None:
    run = stack(dtype=torch.bfloat16, auto_lr=BROKEN, warm=warm).train(2 * SYNC)
    found = run.everything()
    assert "master" in found["state"][0]
    assert same(found if warm else found["params"], run.start if warm else run.start["params"])
    moments = [entry[name] for entry in found["state"].values() for name in ("exp_avg", "exp_avg_sq")]
    assert any(bool(each.any()) for each in moments) is warm


def test_every_return_goes_to_the_start_and_is_recorded_and_logged(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """Training breaks four times, with two returns: then it goes on, with one warning."""
    broken = Scripted((4, 12, 16, 20), undo=2, last=24)
    run = stack(auto_lr=broken, total_steps=24, history_file=tmp_path / "history", warm=True).train(SYNC)
    assert same(run.everything(), run.start)
    states = [run.train(SYNC).scheduler.cycle.spread.controller_state for _ in range(2)]
    assert same(run.everything(), run.start)
    assert kept_step(run) is None, "the copy is of no use any more"
    assert (run.scheduler.cycle.origin, run.scheduler.cycle.run.total_steps) == (12, 12)
    states += [run.train(SYNC).scheduler.cycle.spread.controller_state for _ in range(3)]
    assert not same(run.everything(), run.start)
    assert [state["moved"] for state in states] == [1, 1, 2, 3, 4]
    assert states[1]["factors"] == [0.9 / 4]
    undone = [0, None, 4, None, None, None]
    assert [record["undone"] for record in run.history()] == undone
    summary = run.scheduler.history_summary
    assert (summary.undone, summary.lost) == (2, 4 + 8)
    assert hk.report.summary(run.scheduler.history)["undone"] == 2
    lines = [json.loads(line) for line in (tmp_path / "history").read_text().splitlines()]
    assert [(line["step"], line["undone"]) for line in lines] == list(zip(range(4, 25, 4), undone, strict=True))
    assert run.scheduler.last_epoch == 24
    with pytest.raises(ValueError, match="step 25 is past the end"):
        run.train(1)
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert said[:2] == [run.history()[index]["why"] for index in (0, 2)]
    assert "all replicas return to the start, and the run begins anew over the 20 steps that remain" in said[0]
    assert "1 of 2 returns left" in said[0]
    assert "the 12 steps that remain" in said[1]
    assert "0 of 2 returns left" in said[1]
    assert "is not undone" in said[2]
    assert len(said) == 3, "without returns left it is said once"


@pytest.mark.parametrize("controller", [Scripted((4,), undo=0), True, False], ids=["undo=0", "default", "off"])
def test_without_undo_nothing_is_kept(controller: Any) -> None:
    run = stack(auto_lr=controller).train(2 * SYNC)
    undoing = run.scheduler.cycle.undoing
    assert undoing is None or controller is True
    assert controller is True or run.scheduler.state_dict()["hdet"][0]["undo"] is None
    assert run.scheduler.history_summary.undone == 0


def test_the_start_is_kept_until_the_last_sync_at_which_the_controller_acts() -> None:
    run = stack(auto_lr=Scripted(last=8)).train(SYNC)
    assert kept_step(run) == 0
    assert kept_step(run.train(SYNC)) is None
    idle = stack(auto_lr=Scripted(last=-1)).train(1)
    assert kept_step(idle) is None, "it never acts"


def test_with_one_step_left_nothing_is_undone() -> None:
    """A schedule needs two: its first and its last."""
    run = stack(auto_lr=Scripted((8,)), total_steps=9).train(9)
    assert [record["undone"] for record in run.history()] == [None, None, None]
    shortest = stack(auto_lr=Scripted((8,)), total_steps=10).train(10)
    assert [record["undone"] for record in shortest.history()] == [None, 0, None]


# No finite replica


def poison(run: Undoable) -> None:
    if run.scheduler.last_epoch >= SYNC:
        run.poison()


def test_a_stack_without_a_finite_replica_returns_instead_of_raising(caplog: pytest.LogCaptureFixture) -> None:
    run = stack(auto_lr=Scripted(undo=1), warm=True).train(SYNC)
    assert same(run.train(SYNC, poison).everything(), run.start)
    record = run.history()[-1]
    assert (record["undone"], record["excluded"], record["step"]) == (0, [0, 1], 8)
    assert caplog.text.count("no replica is sound; not finite: ") == 1
    assert record["why"] in caplog.text
    assert record["why"].startswith("step 8: no replica is sound; not finite: parameter")
    assert "left out of the mean" not in caplog.text
    with pytest.raises(RuntimeError, match="no replica is sound at step 4"):
        run.train(SYNC, poison)


def _nonfinite(rank: int, overlap_steps: int) -> dict[str, Any]:
    options = {"auto_lr": Scripted(undo=1), "overlap_steps": overlap_steps}
    run = Undoable("ranks local", "torch AdamW", rank, warm=True, **options).train(SYNC + overlap_steps)
    lost = run.train(SYNC, lambda run: poison(run)).everything()
    run.train(2 * SYNC - overlap_steps)
    return {"start": run.start, "lost": lost, "history": run.history(), "end": run.everything()["params"]}


def _disagree(rank: int) -> str:
    """One rank has lost its copy: then nobody returns, and the error is as without any."""
    run = Undoable("ranks local", "torch AdamW", rank, auto_lr=Scripted()).train(SYNC)
    if rank == 1:
        run.scheduler.cycle.undoing.start.drop()
    try:
        run.train(SYNC, poison)
    except RuntimeError as error:
        return str(error)
    return ""


LOST = Cases(2, _nonfinite, [(0,)], full=[(1,), (2,)])


@pytest.mark.parametrize("overlap_steps", LOST.params())
def test_ranks_without_a_finite_replica_return_instead_of_raising(overlap_steps: int) -> None:
    found = LOST[(overlap_steps,)]
    for each in found:
        assert same(each["lost"], each["start"])
        undone = [record["undone"] for record in each["history"]]
        assert undone[:2] == [None, 0]
        assert undone[2:] == [None] * len(undone[2:])
        assert each["history"][1]["landed"] == 8 + overlap_steps
        assert each["history"][-1]["step"] == TOTAL
    assert not same(found[0]["start"], found[1]["start"])
    assert same(found[0]["end"], found[1]["end"])


@pytest.mark.full
def test_ranks_that_do_not_all_keep_the_start_do_not_return() -> None:
    for message in run_ranks(2, _disagree):
        assert message.startswith("no replica is sound at step 8")


# Averages that overlap with training


def _inf_between(rank: int, at: int, overlap_steps: int) -> tuple[list[int | None], float, float]:
    """Train by the default controller with a batch of inf in the step after ``at``.

    Returns:
        The records' ``undone``, and the mean of the last losses of this run and of one without a controller and such a
        batch, at the lowered peak over the steps that remain.
    """
    steps = 80

    def trained(peak: float, first: int, bad: int | None, **options: Any) -> tuple[Any, float]:
        options |= {"total_steps": steps - first, "max_lr": peak, "cycle_momentum": False}
        trainer, losses = Trainer(rank, ddp=True, **options), []
        for step in range(first, steps):
            x, y = batch(rank, step)
            trainer.optimizer.zero_grad()
            loss = loss_of(trainer.model, x * torch.inf if step == bad else x, y)
            loss.backward()
            trainer.optimizer.step()
            trainer.scheduler.step(loss.detach())
            losses.append(float(loss.detach()))
        return trainer.scheduler, sum(losses[-10:]) / 10

    scheduler, end = trained(0.01, 0, at, overlap_steps=overlap_steps)
    (returned,) = [record for record in scheduler.history if record.undone is not None]
    peak = 0.01 / hk.controller.RegressionSettings().cut
    _, plain = trained(peak, returned.landed, None, auto_lr=False)
    return [record.undone for record in scheduler.history], end, plain


_BETWEEN = list(itertools.product((4, 5, 9, 12, 13, 14), (2, 3)))
INF_BETWEEN = Cases(2, _inf_between, [], full=_BETWEEN)


@pytest.mark.parametrize(("at", "overlap_steps"), INF_BETWEEN.params())
def test_a_batch_of_inf_while_an_average_is_under_way_is_undone(at: int, overlap_steps: int) -> None:
    """What is not finite when the average is applied is never kept."""
    for undone, end, plain in INF_BETWEEN[at, overlap_steps]:
        assert [step for step in undone if step is not None] == [0]
        assert end < 1.1 * plain


def _overlapped(rank: int, kind: Kind, by_hand: bool) -> dict[str, Any]:
    """Have training break at a sync whose average is applied two steps later, or one later by ``converge()``."""
    options = {"auto_lr": BROKEN, "overlap_steps": 2}
    run = Undoable(kind, "FusedAdamW", rank, warm=True, **options).train(2 * SYNC + 1)
    saved = run.saved()  # the average of step 8 is under way
    resumed = Undoable(kind, "FusedAdamW", rank, **options).load(saved)
    found = []
    for each in (run, resumed):
        if by_hand:
            each.scheduler.converge()
        else:
            each.train(1)
        began = each.everything(), each.scheduler.cycle.origin, each.scheduler.get_base_lr()
        each.train(TOTAL - each.scheduler.last_epoch)
        found.append({**each.everything(), "began": began, "history": each.history()})
    return {"start": run.start, "ends": found}


_APPLIED = list(itertools.product(("ranks local", "stack local"), (False, True)))
OVERLAPPED = Cases(2, _overlapped, _APPLIED[:2], full=_APPLIED[2:])


@pytest.mark.parametrize(("kind", "by_hand"), OVERLAPPED.params())
def test_a_return_where_an_overlapped_average_is_applied(kind: Kind, by_hand: bool) -> None:
    landed = 9 if by_hand else 10
    for found in OVERLAPPED[kind, by_hand]:
        end = found["ends"][0]
        everything, origin, base = end["began"]
        assert same(found["start"], everything)
        assert origin == landed
        assert same(*found["ends"])
        records = [(record["step"], record["landed"], record["undone"]) for record in end["history"]]
        assert records[:2] == [(4, 6, None), (8, landed, 0)]
        assert [step for step, _, _ in records[2:]] == [landed + SYNC, TOTAL]
        # The first learning rate of OneCycleLR, after a move at step 4 and a return.
        assert base == pytest.approx([0.05 / 25 * 0.9 / 2])


# Checkpoints


def _from_rank_0(rank: int) -> bool:
    """Whether a run that all ranks resume from rank 0's file at a sync is the uninterrupted one."""
    options = {"auto_lr": Scripted((12,))}
    whole = Undoable("ranks local", "FusedAdamW", rank, **options).train(2 * SYNC)
    files = [whole.saved()]
    torch.distributed.broadcast_object_list(files, src=0)
    resumed = Undoable("ranks local", "FusedAdamW", rank, **options).load(files[0])
    return same(*(run.train(2 * SYNC).everything() for run in (whole, resumed)))


@pytest.mark.full
def test_rank_0s_file_at_a_sync_restores_the_copy_of_all_ranks() -> None:
    assert run_ranks(2, _from_rank_0) == [True, True]


def test_the_number_of_returns_and_the_new_beginning_are_saved() -> None:
    options: dict[str, Any] = {"auto_lr": Scripted((4, 8), undo=1)}
    run = stack(**options).train(SYNC + 1)
    resumed = stack(**options).load(run.saved())
    cycle = resumed.scheduler.cycle
    assert (cycle.undoing.returns, cycle.origin, cycle.step, cycle.made) == (1, 4, 1, 5)
    assert cycle.run == run.scheduler.cycle.run
    assert [record["undone"] for record in resumed.train(SYNC).history()] == [0, None], "no return is left"


def test_the_place_of_the_copy_is_no_part_of_a_checkpoint() -> None:
    run = stack(auto_lr=Scripted((8,)), warm=True).train(SYNC)
    other = stack(auto_lr=Scripted((8,), undo_on="cpu")).load(run.saved()).train(SYNC)
    assert same(other.everything(), run.start)


@pytest.mark.parametrize("trial", [False, True])
def test_another_number_of_replicas_resumes_without_the_copy_and_is_told_so(
    trial: bool, caplog: pytest.LogCaptureFixture
) -> None:
    run = stack(auto_lr=Trying() if trial else BROKEN).train(SYNC)
    state = run.scheduler.state_dict()
    for replicas, told in ((2, 0), (3, 1)):
        caplog.clear()
        other = stack(replicas=replicas, auto_lr=Trying() if trial else BROKEN)
        other.scheduler.load_state_dict(state)
        assert (kept_step(other) is None) is bool(told)
        said = [record.getMessage() for record in caplog.records if "left out" in record.getMessage()]
        assert [record.levelname for record in caplog.records if record.getMessage() in said] == ["WARNING"] * told
    assert "is of 2 replicas, and this process holds 3 replicas" in said[0]
    assert "training that breaks is not undone" in said[0]
    assert "Resume with as many replicas in a process" in said[0]
    assert other.train(SYNC).history()[-1]["undone"] is None


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda hdet: hdet["undo"]["kept"]["params"].pop(), r"hdet\.undo\.kept\.params have shapes"),
        (lambda hdet: hdet["undo"]["kept"]["params"].append(torch.ones(3)), r"hdet\.undo\.kept\.params have shapes"),
        (lambda hdet: hdet["undo"]["kept"].pop("state"), r"no hdet\.undo\.kept\.state"),
        (lambda hdet: hdet["undo"]["kept"].update(step=99), r"hdet\.undo\.kept\.step must be at most 4"),
        (lambda hdet: hdet["undo"]["kept"]["state"].update(x=3), r"hdet\.undo\.kept\.state\.x must be a tensor"),
        (lambda hdet: hdet["undo"]["kept"]["buffers"].append(torch.ones(3)), r"hdet\.undo\.kept\.buffers have shapes"),
        (
            lambda hdet: hdet["undo"]["kept"]["buffers"].insert(0, hdet["undo"]["kept"]["buffers"].pop()),
            r"hdet\.undo\.kept\.buffers have shapes",
        ),
        (lambda hdet: hdet.update(origin=13), r"hdet\.step must be at most 16, after hdet\.origin=13, got 17"),
        (lambda hdet: hdet.update(origin=-1), r"hdet\.origin must be"),
        (lambda hdet: hdet.update(first=5), r"hdet\.first must be at most 4"),
    ],
    ids=["fewer", "more", "missing", "later", "kind", "more buffers", "other buffers", "too late", "origin", "first"],
)
def test_a_damaged_copy_or_beginning_is_refused_with_nothing_changed(damage: Any, message: str) -> None:
    run = stack(auto_lr=BROKEN, warm=True).train(SYNC)
    state = copy.deepcopy(run.scheduler.state_dict())
    damage(state["hdet"][0])
    before = run.everything()
    with pytest.raises(ValueError, match=message):
        run.scheduler.load_state_dict(state)
    assert kept_step(run) == 0
    assert same(run.everything(), before)
    assert same(run.train(SYNC).everything(), run.start)


def test_a_checkpoint_that_cannot_be_applied_leaves_the_copy() -> None:
    """A setter of the user raises in the middle of loading."""
    allowed = [True]

    def apply(value: float) -> None:
        if not allowed[0]:
            raise ArithmeticError("no")

    options = {"auto_lr": BROKEN, "explore": [hk.Explore("x", base=1.0, apply=apply)], "warm": True}
    run = Undoable("stack local", "FusedAdamW", **options).train(SYNC)
    state = copy.deepcopy(run.scheduler.state_dict())
    state["hdet"][0]["undo"] = {"returns": 2, "kept": None}
    allowed[0] = False
    with pytest.raises(ArithmeticError):
        run.scheduler.load_state_dict(state)
    allowed[0] = True
    assert same(run.train(SYNC).everything(), run.start)
    assert run.scheduler.cycle.undoing.returns == 1
