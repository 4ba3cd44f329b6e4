"""Save and check the part of a checkpoint that a run with ``max_lr=None`` has beside the others."""

from __future__ import annotations

from typing import Any

from hdet_kernels.schedule.checkpoint.packed import unpacked
from hdet_kernels.schedule.checkpoint.schema import (
    Fields,
    Flag,
    InOrder,
    Items,
    Like,
    Maybe,
    Number,
    OneOf,
    Schema,
    Whole,
)
from hdet_kernels.schedule.checkpoint.state_schema import kept_copy
from hdet_kernels.schedule.cycle import Cycle
from hdet_kernels.schedule.scout.phase import Scouted, Scouting
from hdet_kernels.schedule.undo.copies import state_pairs
from hdet_kernels.schedule.undo.undoing import LastSound

_ANY = Number(finite=False)  # a loss may be NaN
_COUNT = Whole(0, 2**63 - 1)


def scout_state(scouted: Scouted, phase: Scouting | None) -> dict[str, Any]:
    """Return the state of a run with ``max_lr=None``; ``phase`` is None once the learning rate is found."""
    return {
        "config": scouted.config,
        "ratios": scouted.ratios,
        "found": scouted.found,
        "phase": None if phase is None else phase.state_dict(),
    }


def checked_scout(scouted: Scouted | None, cycle: Cycle, state_dict: object) -> dict[str, Any] | None:
    """Return the ``"scout"`` entry of a scheduler's state after checking it; None if there is none to check.

    Args:
        scouted: that of the scheduler that loads it; None if it was given a learning rate.
        cycle: the cycle of that scheduler.
        state_dict: the whole state.

    Raises:
        ValueError: naming the entry that is missing, damaged or of another run.
    """
    if not isinstance(state_dict, dict) or "hdet" not in state_dict:
        return None  # checked_state.py refuses it
    saved: Any = unpacked(state_dict.get("scout"))
    if (saved is None) is not (scouted is None):
        there, here = ("a learning rate", "None") if saved is None else ("max_lr=None", "one")
        raise ValueError(
            f"the checkpoint was made with {there}, this scheduler has max_lr={here}: build it with the arguments of "
            "the saved run"
        )
    if saved is None or scouted is None:
        return None
    _check_config(scouted, saved)
    _schema(scouted, cycle, saved).check(saved, "scout")
    phase = saved["phase"]
    if (phase is None) is (saved["found"] is None):
        raise ValueError(
            "the checkpoint's scout.found and scout.phase exclude each other: load an undamaged checkpoint"
        )
    if phase is not None:
        _check_not_in_consensus(scouted, phase)
        _check_replicas(cycle, phase)
        _check_start(cycle, phase["start"])
    return dict(saved)


def _check_config(scouted: Scouted, saved: Any) -> None:
    there = saved.get("config") if isinstance(saved, dict) else None
    for name, here in scouted.config.items():
        found = there.get(name) if isinstance(there, dict) else None
        if found != here:
            raise ValueError(
                f"the checkpoint was made with {name}={found!r:.300}, this scheduler has {here!r:.300}: build it with "
                "the arguments of the saved run"
            )


def _check_not_in_consensus(scouted: Scouted, phase: dict[str, Any]) -> None:
    if phase.get("consensus"):
        raise ValueError(
            "the checkpoint was saved inside scheduler.consensus() at step "
            f"{scouted.plan.before(phase['round']) + phase['step']}, while a learning rate was looked for: its model "
            "is the one that the run begins with. Begin the run anew, or load a checkpoint of step "
            f"{scouted.plan.steps} or later"
        )


def _check_replicas(cycle: Cycle, phase: dict[str, Any]) -> None:
    ensemble = cycle.ensemble
    saved, here = list(phase["replicas"]), [ensemble.size, ensemble.replica, ensemble.rows, ensemble.part]
    if phase["step"] == 0:  # at the start of a round all replicas are equal
        saved[1] = here[1]
    if saved != here:
        names = ("replicas", "first replica", "replicas in a process", "shard")
        there, own = (", ".join(f"{n} {v}" for n, v in zip(names, values, strict=True)) for values in (saved, here))
        raise ValueError(
            f"the checkpoint was saved while a learning rate was looked for, by a process with {there}, and this one "
            f"has {own}: in that time replicas differ, so load on every process its own file, or one that was saved "
            "later"
        )


def _check_start(cycle: Cycle, start: dict[str, Any] | None) -> None:
    if start is None:
        return
    # Replicas of a stack may have a state of their own now and shared one before, or the other way round.
    LastSound(cycle.optimizer, cycle.converger, None, cycle.buffers).check_state_dict({**start, "state": None})
    rows = cycle.ensemble.rows
    for name, now, kept in state_pairs(cycle.optimizer, start["state"] or {}):
        if kept.numel() not in (now.numel(), now.numel() * rows, now.numel() // rows):
            raise ValueError(
                f"the checkpoint's scout.phase.start.state.{name} has {kept.numel()} elements, the optimizer's "
                f"{now.numel()}: resume with the model and the optimizer that it was saved with"
            )


def _schema(scouted: Scouted, cycle: Cycle, saved: dict[str, Any]) -> Fields:
    phase = saved.get("phase")
    rounds = scouted.plan.rounds
    number = phase.get("round") if isinstance(phase, dict) else None
    known = isinstance(number, int) and not isinstance(number, bool) and 0 <= number < len(rounds)
    length = rounds[number] if known and number is not None else max(rounds)
    rows = cycle.ensemble.rows
    by_row: Schema = _ANY if rows == 1 else OneOf(_ANY, Items(_ANY, (rows,)))
    window = Fields({"sum": by_row, "count": _COUNT, "ever": Flag()})
    begun = known and (number or 0) + (phase.get("step") or 0) != 0 if isinstance(phase, dict) else False
    start = kept_copy(rows, 0)
    fields: dict[str, Schema] = {
        "replicas": Items(_COUNT, (4,)),
        "round": Whole(0, len(rounds) - 1),
        "step": Whole(0, length - 1),
        "consensus": Flag(),
        "bracket": InOrder((Number(), Number())),
        "losses": Fields({"ever": Flag(), **dict.fromkeys(("first", "tail", "squares"), window)}),
        "probed": by_row,
        "certain": Flag(),
        "shared_state": Flag(),
        "fresh": Flag(),
        "start": start if begun else Maybe(start),
    }
    return Fields(
        {
            "config": Like({}),  # compared entry by entry
            "ratios": Items(Number(0), (len(cycle.optimizer.param_groups),)),
            "found": Maybe(Number(0)),
            "phase": Maybe(Fields(fields, optional=frozenset(("consensus",)))),  # format 3 had none
        }
    )
