"""Returns to the last sound average: bit for bit, counted, recorded and resumable."""

from __future__ import annotations

import copy
import itertools
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

import hdet_kernels as hk
from tests.ranks import Cases, run_ranks
from tests.schedule.undo_runs import OPTIMIZERS, SOUND_THEN_BROKEN, SYNC, TOTAL, Kind, Scripted, Undoable, script
from tests.training import same

KINDS: tuple[Kind, ...] = ("stack shared", "stack local", "ranks shared", "ranks local")


def _returned(rank: int, kind: Kind, optimizer: str, options: dict[str, Any]) -> dict[str, Any]:
    """Train to a sound sync and on to a broken one; return both states, and the runs after it, of this one and of two
    that were interrupted between them."""
    options = {"auto_lr": Scripted(SOUND_THEN_BROKEN), **options}
    run = Undoable(kind, optimizer, rank, **options).train(SYNC)
    sound = run.everything()
    saved = run.train(SYNC - 1).saved()
    before, base = run.everything(), run.scheduler.get_base_lr()
    broken = run.train(1).everything()
    history = run.history()
    resumed = [
        Undoable(kind, optimizer, rank, **options).load(saved, scheduler_first=first).train(TOTAL - 2 * SYNC + 1)
        for first in (False, True)
    ]
    run.train(TOTAL - 2 * SYNC)
    ends = [{**each.everything(), "history": each.history()} for each in (run, *resumed)]
    base = [base, run.scheduler.get_base_lr()]
    return {"sound": sound, "before": before, "broken": broken, "history": history, "ends": ends, "base": base}


def check_return(found: dict[str, Any]) -> None:
    assert not same(found["sound"], found["before"])
    assert same(found["sound"], found["broken"])
    for resumed in found["ends"][1:]:
        assert same(found["ends"][0], resumed)
    assert [record["undone"] for record in found["history"]] == [None, 4]


STACKS = [("stack shared", "FusedAdamW"), ("stack shared", "FusedAdam"), ("stack local", "FusedSGD")]
QUICK_RANKS = [("ranks shared", "torch AdamW"), ("ranks local", "FusedAdamW")]
#: Not those with a penalty in the gradient: their moments differ between ranks also where gradients are shared.
_ALL_RANKS = list(itertools.product(KINDS[2:], ("FusedAdamW", "FusedSGD", "torch AdamW")))
_ALL_RANKS += [case for case in STACKS if case[1] != "FusedAdam"]  # stacks in ranks

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
def test_a_stack_returns_bit_for_bit_and_resumes_between(kind: Kind, optimizer: str) -> None:
    check_return(_returned(0, kind, optimizer, {}))


@pytest.mark.parametrize(("kind", "optimizer"), RANKS.params())
def test_ranks_return_bit_for_bit_and_resume_between(kind: Kind, optimizer: str) -> None:
    results = RANKS[kind, optimizer]
    for found in results:
        check_return(found)
    assert same(results[0]["broken"], results[1]["broken"])


#: Ways of averaging that remember something from one sync to the next.
MODES: dict[str, dict[str, Any]] = {
    "outer": {"outer": hk.Outer(lr=0.7, momentum=0.9)},
    "int8": {"compress": "int8"},
    "int8 outer": {"compress": "int8", "outer": hk.Outer()},
    "best": {"merge": "best"},
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
    return None if undoing is None else undoing.last_sound.step


@pytest.mark.parametrize("optimizer", ["FusedAdamW", pytest.param("FusedSGD", marks=pytest.mark.full)])
@pytest.mark.parametrize("kind", ["stack local", pytest.param("stack shared", marks=pytest.mark.full)])
def test_the_start_is_the_first_sound_average(kind: Kind, optimizer: str) -> None:
    """After a return to the start, the run is one that begins there, with another learning rate.

    The buffers are those of the first forward pass, which is over before the first step.
    """
    run = Undoable(kind, optimizer, auto_lr=Scripted(script(s4="broken")))
    params = [param.detach().clone() for param in run.params()]
    run.train(SYNC)
    assert same([param.detach() for param in run.params()], params)
    assert not any(value.any() for entry in run.everything()["state"].values() for value in entry.values())
    assert run.history()[0]["undone"] == 0
    fresh = Undoable(kind, optimizer, auto_lr=Scripted())
    for step in range(SYNC, SYNC + 3):
        rates = run.optimizer.param_groups[0]["lr"], run.optimizer.param_groups[0]["per_replica"]
        run.train(1)
        group = fresh.optimizer.param_groups[0]
        group["lr"], group["per_replica"], group["per_replica_base"] = *rates, {}
        fresh.gradients(step)
        fresh.optimizer.step()
        found = [{**each.everything(), "buffers": None} for each in (run, fresh)]
        assert same(*found)


def test_replicas_that_begin_apart_return_to_their_own_start() -> None:
    run = stack(auto_lr=Scripted(script(s4="broken")))
    hk.warm_noisy_init_(run.params(), nu=0.1, seed=3, ensemble=run.stack.ensemble)
    before = run.everything()["params"]
    assert not torch.equal(before[0][0], before[0][1])
    assert same(run.train(SYNC).everything()["params"], before)


def test_masters_and_parameters_return_together() -> None:
    run = stack(dtype=torch.bfloat16, auto_lr=Scripted(SOUND_THEN_BROKEN)).train(SYNC)
    sound = run.everything()
    assert "master" in sound["state"][0]
    assert same(run.train(SYNC).everything(), sound)


def test_returns_are_bounded_recorded_and_logged(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    """Sound, broken, broken, broken with two returns: the third is a move, with a warning."""
    judged = script(s4="sound", s8="broken", s12="broken", s16="broken", s20="broken")
    options = {"auto_lr": Scripted(judged, undo=2, last=24), "total_steps": 24, "history_file": tmp_path / "history"}
    run = stack(**options).train(SYNC)
    sound, rates = run.everything(), []
    for _ in range(4):
        run.train(SYNC)
        rates.append(run.scheduler.cycle.spread.controller_state)
    assert [record["undone"] for record in run.history()] == [None, 4, 4, None, None]
    assert [rate["moved"] for rate in rates] == [1, 1, 2, 3]
    assert rates[1]["factors"] == [0.9 / 4]
    assert not same(run.everything(), sound)
    assert run.scheduler.history_summary.undone == 2
    assert hk.report.summary(run.scheduler.history)["undone"] == 2
    lines = [json.loads(line) for line in (tmp_path / "history").read_text().splitlines()]
    assert [line["undone"] for line in lines] == [None, 4, 4, None, None]
    assert kept_step(run) is None, "the copy is of no use any more"
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert said[:2] == [record["why"] for record in run.history()[1:3]]
    assert "return to the average of step 4" in said[0]
    assert "1 of 2 returns left" in said[0]
    assert "0 of 2 returns left" in said[1]
    assert "is not undone" in said[2]
    assert len(said) == 3, "without returns left it is said once"


@pytest.mark.parametrize(
    "controller", [Scripted(SOUND_THEN_BROKEN, undo=0), True, False], ids=["undo=0", "default", "off"]
)
def test_without_undo_nothing_is_kept(controller: Any) -> None:
    run = stack(auto_lr=controller).train(2 * SYNC)
    undoing = run.scheduler.cycle.undoing
    assert undoing is None or controller is True
    assert controller is True or run.scheduler.state_dict()["hdet"][0]["undo"] is None
    assert run.scheduler.history_summary.undone == 0


def test_the_copy_is_dropped_after_the_last_sync_at_which_the_controller_acts() -> None:
    run = stack(auto_lr=Scripted(script(s4="sound", s8="sound"), last=8)).train(SYNC)
    assert kept_step(run) == 4
    assert kept_step(run.train(SYNC)) is None
    idle = stack(auto_lr=Scripted(last=-1)).train(1)
    assert kept_step(idle) is None, "it never acts"


def test_an_unclear_sync_keeps_the_copy_of_the_one_before() -> None:
    run = stack(auto_lr=Scripted(script(s4="sound"))).train(2 * SYNC)
    assert kept_step(run) == 4


def poison(run: Undoable) -> None:
    if run.scheduler.last_epoch >= SYNC:
        run.poison()


def test_a_stack_without_a_finite_replica_returns_instead_of_raising(caplog: pytest.LogCaptureFixture) -> None:
    run = stack(auto_lr=Scripted(script(s4="sound"), undo=1)).train(SYNC)
    sound = run.everything()
    assert same(run.train(SYNC, poison).everything()["params"], sound["params"])
    assert same(run.everything(), sound)
    record = run.history()[-1]
    assert (record["undone"], record["excluded"], record["step"]) == (4, [0, 1], 8)
    assert caplog.text.count("no replica is sound; not finite: ") == 1
    assert record["why"] in caplog.text
    assert record["why"].startswith("step 8: no replica is sound; not finite: parameter")
    assert "left out of the mean" not in caplog.text
    with pytest.raises(RuntimeError, match="no replica is sound at step 12"):
        run.train(SYNC, poison)


def _nonfinite(rank: int, overlap_steps: int) -> dict[str, Any]:
    options = {"auto_lr": Scripted(script(s4="sound"), undo=1), "overlap_steps": overlap_steps}
    run = Undoable("ranks local", "torch AdamW", rank, **options).train(SYNC + overlap_steps)
    sound = run.everything()
    lost = run.train(SYNC, lambda run: poison(run)).everything()
    run.train(2 * SYNC - overlap_steps)
    return {"sound": sound, "lost": lost, "history": run.history(), "end": run.everything()["params"]}


def _disagree(rank: int) -> str:
    """One rank has lost its copy: then nobody returns, and the error is as without any."""
    run = Undoable("ranks local", "torch AdamW", rank, auto_lr=Scripted(script(s4="sound"))).train(SYNC)
    if rank == 1:
        run.scheduler.cycle.undoing.last_sound.drop()
    try:
        run.train(SYNC, poison)
    except RuntimeError as error:
        return str(error)
    return ""


LOST = Cases(2, _nonfinite, [(0,)], full=[(1,), (2,)])


@pytest.mark.parametrize("overlap_steps", LOST.params())
def test_ranks_without_a_finite_replica_return_instead_of_raising(overlap_steps: int) -> None:
    """With an overlapped average every replica returns to what it had when the sound average was applied."""
    found = LOST[(overlap_steps,)]
    for each in found:
        assert same(each["lost"], each["sound"])
        assert [record["undone"] for record in each["history"]] == [None, 4, None, None]
        assert each["history"][1]["landed"] == 8 + overlap_steps
    assert same(found[0]["sound"], found[1]["sound"]) is (overlap_steps == 0)
    assert same(found[0]["end"], found[1]["end"])


@pytest.mark.full
def test_ranks_that_keep_different_averages_do_not_return() -> None:
    for message in run_ranks(2, _disagree):
        assert message.startswith("no replica is sound at step 8")


@pytest.mark.full
@pytest.mark.parametrize("kind", ["ranks local", "stack local"])
def test_overlapped_averages_return_too(kind: Kind) -> None:
    for found in run_ranks(2, _overlapped, kind):
        assert same(found["sound"], found["broken"])
        assert same(*found["ends"])


def _overlapped(rank: int, kind: Kind) -> dict[str, Any]:
    options = {"auto_lr": Scripted(SOUND_THEN_BROKEN), "overlap_steps": 2}
    run = Undoable(kind, "FusedAdamW", rank, **options).train(SYNC + 2)
    sound = run.everything()
    saved = run.train(SYNC - 1).saved()  # the average of step 8 is under way
    broken = run.train(1).everything()
    resumed = Undoable(kind, "FusedAdamW", rank, **options).load(saved).train(TOTAL - 2 * SYNC - 1)
    run.train(TOTAL - 2 * SYNC - 2)
    ends = [{**each.everything(), "history": each.history()} for each in (run, resumed)]
    return {"sound": sound, "broken": broken, "ends": ends}


def _from_rank_0(rank: int) -> bool:
    """Whether a run that all ranks resume from rank 0's file at a sync is the uninterrupted one."""
    options = {"auto_lr": Scripted(script(s4="sound", s12="broken"))}
    whole = Undoable("ranks local", "FusedAdamW", rank, **options).train(2 * SYNC)
    files = [whole.saved()]
    torch.distributed.broadcast_object_list(files, src=0)
    resumed = Undoable("ranks local", "FusedAdamW", rank, **options).load(files[0])
    return same(whole.train(2 * SYNC).everything(), resumed.train(2 * SYNC).everything())


@pytest.mark.full
def test_rank_0s_file_at_a_sync_restores_the_copy_of_all_ranks() -> None:
    assert run_ranks(2, _from_rank_0) == [True, True]


def test_another_number_of_replicas_resumes_without_the_copy(caplog: pytest.LogCaptureFixture) -> None:
    run = stack(auto_lr=Scripted(SOUND_THEN_BROKEN)).train(SYNC)
    state = run.scheduler.state_dict()
    other = Undoable("stack local", "FusedAdamW", replicas=3, auto_lr=Scripted(SOUND_THEN_BROKEN))
    with caplog.at_level(logging.INFO):
        other.scheduler.load_state_dict(state)
    assert kept_step(other) is None
    assert "copy of step 4 is of part [0, 1] of a replica and of 2 replicas" in caplog.text
    assert other.train(SYNC).history()[-1]["undone"] is None


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda kept: kept["params"].pop(), r"hdet\.undo\.kept\.params have shapes"),
        (lambda kept: kept["params"].append(torch.ones(3)), r"hdet\.undo\.kept\.params have shapes"),
        (lambda kept: kept.pop("state"), r"no hdet\.undo\.kept\.state"),
        (lambda kept: kept.update(step=99), r"hdet\.undo\.kept\.step must be at most 4"),
        (lambda kept: kept["state"].update(x=3), r"hdet\.undo\.kept\.state\.x must be a tensor"),
        (lambda kept: kept["buffers"].append(torch.ones(3)), r"hdet\.undo\.kept\.buffers have shapes"),
        (lambda kept: kept["buffers"].insert(0, kept["buffers"].pop()), r"hdet\.undo\.kept\.buffers have shapes"),
    ],
    ids=["fewer", "more", "missing", "later", "kind", "more buffers", "other buffers"],
)
def test_a_damaged_copy_is_refused_with_nothing_changed(damage: Any, message: str) -> None:
    run = stack(auto_lr=Scripted(SOUND_THEN_BROKEN)).train(SYNC)
    state = copy.deepcopy(run.scheduler.state_dict())
    damage(state["hdet"][0]["undo"]["kept"])
    before = run.everything()
    with pytest.raises(ValueError, match=message):
        run.scheduler.load_state_dict(state)
    assert kept_step(run) == 4
    assert same(run.everything(), before)
    assert same(run.train(SYNC).everything(), before)


def test_a_checkpoint_that_cannot_be_applied_leaves_the_copy() -> None:
    """A setter of the user raises in the middle of loading."""
    allowed = [True]

    def apply(value: float) -> None:
        if not allowed[0]:
            raise ArithmeticError("no")

    options = {"auto_lr": Scripted(SOUND_THEN_BROKEN), "explore": [hk.Explore("x", base=1.0, apply=apply)]}
    run = Undoable("stack local", "FusedAdamW", **options).train(SYNC)
    state = copy.deepcopy(run.scheduler.state_dict())
    state["hdet"][0]["undo"] = {"returns": 2, "kept": None}
    allowed[0] = False
    with pytest.raises(ArithmeticError):
        run.scheduler.load_state_dict(state)
    allowed[0] = True
    sound = run.everything()
    assert same(run.train(SYNC).everything(), sound)
    assert run.scheduler.cycle.undoing.returns == 1
