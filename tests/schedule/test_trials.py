"""Trials of lower learning rates: a run goes back to where it was, bit for bit, or the trial is a return."""

from __future__ import annotations

import copy
import itertools
import logging
from typing import Any

import pytest

from tests.ranks import Cases
from tests.schedule.scout_runs import PHASE, STEPS, StackRun
from tests.schedule.undo_runs import OPTIMIZERS, SYNC, TOTAL, Kind, Scripted, Trying, Undoable
from tests.training import same

KINDS: tuple[Kind, ...] = ("stack shared", "stack local", "ranks shared", "ranks local")
#: A trial that begins at the first sync ends at the second one.
BACK, GOOD = Trying(no_better=(2 * SYNC,)), Trying(better=(2 * SYNC,))


def acts(run: Undoable) -> list[Any]:
    return [record.act if record.act != "move" else None for record in run.scheduler.history]


def ended(run: Undoable) -> dict[str, Any]:
    """Train to the end, and return everything with the history, the learning rates and the state of the controller."""
    rates = []
    while run.scheduler.last_epoch < TOTAL:
        rates.append(run.train(1).scheduler.get_last_lr())
    history = [{**record, "act": None, "why": None} for record in run.history()]
    return {**run.everything(), "rates": rates, "history": history, "base": run.scheduler.get_base_lr()}


def _tried(rank: int, kind: Kind, optimizer: str, options: dict[str, Any]) -> dict[str, Any]:
    """Train a run whose trial is no better, resumed in the trial and after it, and one whose trial is better."""

    def build(controller: Scripted, *, warm: bool = True) -> Undoable:
        return Undoable(kind, optimizer, rank, warm=warm, auto_lr=controller, **options)

    # With an average that overlaps, everything happens where it is applied, and the trial's sync is that much later.
    late = options.get("overlap_steps", 0)
    back = Trying(no_better=(2 * SYNC + late,), undo_on="cpu" if kind == "stack local" else "auto")
    first = SYNC + late
    reached = build(Scripted()).train(first).everything()
    run = build(back).train(first)
    found: dict[str, Any] = {"reached": reached, "start": run.start, "tried": run.everything()}
    saved = [(run.train(first - 2).saved(), 2 * first - 2)]
    found["apart"] = run.everything()
    assert run.scheduler.cycle.undoing.aside.copy.read() is not None
    found["back"] = run.train(2).everything()
    undoing, saved = run.scheduler.cycle.undoing, [*saved, (run.saved(), 2 * first)]
    found["freed"] = (undoing.attempt, undoing.aside.step, undoing.aside.copy.read()) == (None, None, None)
    resumed = [build(back, warm=False).load(each) for each, _ in saved]
    made = [each.scheduler.last_epoch for each in resumed]
    ends = [ended(each) for each in (run, *resumed)]
    for end, steps in zip(ends[1:], made, strict=True):  # the learning rates of the steps that both made
        end["rates"] = end["rates"][2 * first - steps :]
    found |= {"made": made == [steps for _, steps in saved], "ends": ends, "acts": acts(run)}
    found["better"] = [ended(build(each)) for each in (Trying(better=(2 * SYNC + late,)), Scripted((SYNC,)))]
    return found


def check_trial(found: dict[str, Any]) -> None:
    assert same(found["start"], found["tried"])
    assert not same(found["start"], found["reached"])
    assert not same(found["reached"], found["apart"])
    assert same(found["reached"], found["back"]), "bit for bit what the trial was compared with"
    assert found["freed"]
    assert found["made"]
    for end in found["ends"][1:]:
        assert same(found["ends"][0], end)
    assert found["acts"][:2] == ["trial", "back"]
    assert same(*found["better"]), "a trial that is better is a return"


QUICK = [("stack shared", "FusedAdamW"), ("stack local", "FusedSGD")]
QUICK_RANKS = [("ranks shared", "torch AdamW"), ("ranks local", "FusedAdamW")]
_ALL_RANKS = [case for case in itertools.product(KINDS[2:], OPTIMIZERS) if case not in QUICK_RANKS]
_OVERLAPPED = ("ranks local, overlapped", ("ranks local", "FusedAdamW", {"overlap_steps": 2}))

RANKS = Cases(
    2,
    _tried,
    {", ".join(case): (*case, {}) for case in QUICK_RANKS},
    full={**{", ".join(case): (*case, {}) for case in _ALL_RANKS}, **dict([_OVERLAPPED])},
)


@pytest.mark.parametrize(
    ("kind", "optimizer"),
    [
        pytest.param(*case, marks=() if case in QUICK else pytest.mark.full)
        for case in itertools.product(KINDS[:2], list(OPTIMIZERS)[:4])
    ],
)
def test_a_stack_goes_back_bit_for_bit_and_resumes(kind: Kind, optimizer: str) -> None:
    check_trial(_tried(0, kind, optimizer, {}))


@pytest.mark.parametrize("case", RANKS.params())
def test_ranks_go_back_bit_for_bit_and_resume(case: str) -> None:
    results = RANKS[case]
    for found in results:
        check_trial(found)
    assert same(results[0]["ends"][0]["params"], results[1]["ends"][0]["params"])


def stack(controller: Trying, **options: Any) -> Undoable:
    return Undoable("stack local", "FusedAdamW", auto_lr=controller, **options)


# What is counted and said


def test_a_trial_counts_as_a_return_and_going_back_does_not(caplog: pytest.LogCaptureFixture) -> None:
    run = stack(BACK).train(TOTAL)
    assert acts(run) == ["trial", "back", None, None]
    assert [record["undone"] for record in run.history()] == [0, 4, None, None]
    summary = run.scheduler.history_summary
    assert (summary.undone, summary.lost, summary.aside) == (1, 4, 0)
    whys = [record["why"] for record in run.history()[:2]]
    assert [event["why"] for event in summary.events] == whys
    assert [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING] == whys
    assert (
        "all replicas return to the start, and the run begins anew over the 12 steps that remain as a trial" in whys[0]
    )
    assert "step 8: by Trying: all replicas go back to where they were at step 4, " in whys[1]
    assert whys[1].endswith("; 2 of 3 returns left")
    assert run.scheduler.cycle.undoing.returns == 1


def test_one_trial_may_follow_another_and_goes_back_to_it() -> None:
    """The steps before the first one, and those of the second, are lost."""
    run = stack(Trying(doubted=(4, 8), better=(8,), no_better=(12,))).train(TOTAL)
    assert acts(run) == ["trial", "trial", "back", None]
    summary = run.scheduler.history_summary
    assert (summary.undone, summary.lost) == (2, 4 + 4)
    assert run.scheduler.cycle.spread.controller_state["factors"] == pytest.approx([0.9**2 / 2]), "of the first trial"
    assert "where they were at step 8" in run.history()[2]["why"]


def test_steps_are_told_from_the_first_step_of_all() -> None:
    run = StackRun(auto_lr=Trying(doubted=(10,), no_better=(20,)), sync_every=5)
    run.train(STEPS)
    records = [record for record in run.scheduler.history if record.act in ("trial", "back")]
    assert [(record.step, record.undone) for record in records] == [(PHASE + 10, PHASE), (PHASE + 20, PHASE + 10)]
    assert f"go back to where they were at step {PHASE + 10}, " in (records[1].why or "")


# Where nothing goes back


@pytest.mark.parametrize(("total_steps", "goes_back"), [(16, False), (17, False), (18, True)])
def test_a_run_goes_back_only_while_two_steps_remain(total_steps: int, goes_back: bool) -> None:
    """A schedule needs them: one step from where it is, and its last one."""
    run = stack(Trying(no_better=(16,), last=99), total_steps=total_steps).train(total_steps)
    assert acts(run)[:4] == ["trial", None, None, "back" if goes_back else None]
    assert run.scheduler.last_epoch == total_steps


@pytest.mark.parametrize(("total_steps", "tries"), [(9, False), (10, True)])
def test_a_trial_begins_only_if_two_steps_remain_after_it(total_steps: int, tries: bool) -> None:
    assert ("trial" in acts(stack(BACK, total_steps=total_steps).train(9))) is tries


def test_without_returns_nothing_is_tried() -> None:
    assert acts(stack(Trying(no_better=(8,), undo=0)).train(TOTAL)) == [None] * 4
    assert acts(stack(Trying(broken=(4,), doubted=(8,), undo=1)).train(TOTAL)) == ["return", None, None, None]


def test_a_break_in_a_trial_forgets_what_it_was_compared_with() -> None:
    run = stack(Trying(broken=(8,), no_better=(8, 12)), warm=True).train(2 * SYNC)
    undoing = run.scheduler.cycle.undoing
    assert same(run.everything(), run.start)
    assert (undoing.attempt, undoing.aside.step, undoing.aside.copy.read(), undoing.kept) == (None, None, None, 0)
    assert acts(run.train(2 * SYNC)) == ["trial", "return", None, None]
    summary = run.scheduler.history_summary
    assert (summary.undone, summary.lost) == (2, 8)


def test_no_finite_replica_in_a_trial_is_a_break() -> None:
    def poison(run: Undoable) -> None:
        if run.scheduler.last_epoch >= SYNC:
            run.poison()

    run = stack(BACK, warm=True).train(SYNC)
    assert same(run.train(SYNC, poison).everything(), run.start)
    assert acts(run) == ["trial", "return"]
    assert run.scheduler.cycle.undoing.attempt is None
    # A trial leaves a return for a break in it.
    assert acts(stack(Trying(undo=1, no_better=(8,))).train(TOTAL)) == [None] * 4


def test_a_trial_that_is_no_better_and_cannot_go_back_has_not_won() -> None:
    run = stack(Trying(no_better=(8,), better=(8,))).train(SYNC + 2)
    undoing = run.scheduler.cycle.undoing
    undoing.start.drop()
    undoing.aside.drop()
    run.train(TOTAL - SYNC - 2)
    assert acts(run) == ["trial", "lost", None, None]
    lost = run.scheduler.history[1]
    assert "step 8: by Trying: it cannot be undone, and the run goes on with it" in (lost.why or "")
    assert lost.event == lost.why
    assert lost.undone is None


def test_a_trial_that_the_controller_can_no_longer_end_keeps_nothing() -> None:
    run = stack(Trying()).train(2 * SYNC)
    assert run.scheduler.cycle.undoing.aside.step == SYNC
    assert stack(Trying(last=SYNC)).train(2 * SYNC).scheduler.cycle.undoing.aside.step is None


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda hdet: hdet["undo"]["attempt"].update(step=3), r"attempt\.step must be 4, when the trial began, got 3"),
        (lambda hdet: hdet["undo"]["attempt"].update(position=17.0), r"attempt\.position must be at most 16, got 17"),
        (lambda hdet: hdet["undo"]["attempt"]["state"].pop("factors"), r"no hdet\.undo\.attempt\.state\.factors"),
        (lambda hdet: hdet["undo"]["attempt"]["kept"]["params"].pop(), r"attempt\.kept\.params have shapes"),
        (lambda hdet: hdet["undo"]["attempt"]["kept"].update(step=7), r"attempt\.kept\.step must be at most 6, got 7"),
        (lambda hdet: hdet.update(anchor=[3, 0.0]), r"hdet\.anchor\[0\] must be at most 2, got 3"),
        (lambda hdet: hdet.update(anchor=[0, 17.0]), r"hdet\.anchor\[1\] must be at most 16, got 17"),
    ],
    ids=["step", "position", "state", "fewer", "later", "anchor", "beyond"],
)
def test_a_damaged_attempt_or_anchor_is_refused_with_nothing_changed(damage: Any, message: str) -> None:
    run = stack(BACK).train(SYNC + 2)
    state, before = copy.deepcopy(run.scheduler.state_dict()), run.everything()
    damage(state["hdet"][0])
    with pytest.raises(ValueError, match=message):
        run.scheduler.load_state_dict(state)
    assert same(run.everything(), before)
    assert acts(run.train(2)) == ["trial", "back"]


def _lost(rank: int, which: str) -> tuple[Any, ...]:
    """Train on after rank 1 lost a copy in a trial, which is no better, or breaks; it breaks again at step 12."""
    broken = (12,) if which == "aside" else (8,)
    controller = Trying(no_better=(8,), better=(8,), broken=broken)  # where it cannot go back, it goes on
    run = Undoable("ranks local", "FusedAdamW", rank, auto_lr=controller).train(SYNC + 2)
    if rank == 1:
        getattr(run.scheduler.cycle.undoing, which).drop()
    run.train(TOTAL - SYNC - 2)
    whys = " ".join(record.why or "" for record in run.scheduler.history)
    return acts(run), "go back" in whys, run.everything()["params"]


LOST = Cases(2, _lost, [], full=[("aside",), ("start",)])


@pytest.mark.parametrize("which", LOST.params())
def test_ranks_that_do_not_hold_the_same_copies_do_not_return_to_them(which: str) -> None:
    first, second = LOST[(which,)]
    later = "return" if which == "aside" else None
    assert first[0] == second[0] == ["trial", "lost", later, None]
    assert not first[1]
    assert not second[1]
    assert same(first[2], second[2])
