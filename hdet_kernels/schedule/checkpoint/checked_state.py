"""Check the state of a checkpoint as a whole, before any of it is applied.

``state_schema.py`` says how every entry must look. Here it is compared with the scheduler that loads it, and entries
that depend on each other are compared with each other. Nothing is modified.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from hdet_kernels.controller.protocol import Run
from hdet_kernels.schedule.checkpoint import state_schema
from hdet_kernels.schedule.checkpoint.formats import current
from hdet_kernels.schedule.checkpoint.packed import unpacked
from hdet_kernels.schedule.checkpoint.schema import (
    RATE,
    Fields,
    Items,
    Like,
    Schema,
    UnknownFields,
    Whole,
    equal,
    refuse,
)
from hdet_kernels.schedule.cycle import Cycle
from hdet_kernels.schedule.history import WINDOW
from hdet_kernels.version import __version__

#: Entries of torch's schedulers that follow from the arguments of their constructors.
_FIXED = (
    *("total_steps", "_schedule_phases", "_anneal_func_type", "cycle_momentum", "use_beta1", "_milestones"),
    *("T_max", "T_0", "T_mult", "eta_min", "total_iters", "start_factor", "end_factor", "factor", "gamma"),
    *("step_size", "milestones", "power"),
)


def checked(cycle: Cycle, state_dict: object) -> dict[str, Any]:
    """Return the cycle's part of a scheduler's state, in the current format, that :func:`.checkpoint.restore` can take.

    Raises:
        ValueError: naming the entry that is missing, unknown, damaged or of another run; nothing is modified.
    """
    own = unpacked(state_dict.get("hdet")) if isinstance(state_dict, dict) else None
    if not isinstance(own, dict) or "config" not in own:
        raise ValueError("this is not a checkpoint of an HDET scheduler: it has no 'hdet' entry")
    state = current(cycle, own)
    _check_config(cycle, state["config"])
    state_schema.head(cycle).check({name: state[name] for name in state_schema.HEAD if name in state}, "hdet")
    size, rows, step = state["size"], state["rows"], state["step"]
    _check_replicas(cycle, state)
    with _versions_named(state):
        schema = state_schema.body(cycle, size=size, rows=rows, step=step, own_part=holds_part(cycle, state))
        schema.check(state, "hdet")
    if isinstance(state["window"]["sum"], list) is not (rows > 1) and state["window"]["count"]:
        raise refuse("hdet.window.sum", f"{rows} numbers" if rows > 1 else "a number", state["window"]["sum"])
    _check_history(state)
    if state["pending"] is not None:
        _check_pending(cycle, state["pending"]["correction"])
    if holds_part(cycle, state):
        cycle.converger.check_state_dict(state["compression"])
    cycle.converger.check_outer_state_dict(state["outer"])
    if cycle.undoing is not None and state["undo"] is not None:
        cycle.undoing.last_sound.check_state_dict(state["undo"]["kept"])
    _check_controller(cycle, state)
    return state


def checked_schedule(
    here: dict[str, Any], saved: object, step: int, path: str, *, of_torch: bool = True
) -> dict[str, Any]:
    """Return the entries of a torch scheduler's saved state that it has here too, without those of other versions.

    Args:
        here: the state of the scheduler now.
        saved: the saved one.
        step: the step of the checkpoint, which the schedule must have too.
        path: how messages name ``saved``.
        of_torch: whether torch has the scheduler's class, so that its constants are known by name.
    """
    if not isinstance(saved, dict):
        raise refuse(path, "a dict", saved)
    rates = Items(RATE, (len(here["_last_lr"]),) if "_last_lr" in here else ())
    steps = {"last_epoch": Whole(-1, step), "_step_count": Whole(0, 2**63 - 1)}
    named: dict[str, Schema] = {**steps, "base_lrs": rates, "_last_lr": rates}
    like = Like(here, named, _FIXED) if of_torch else Like(here)
    fields = {name: like.of(name) for name in here}
    if isinstance(here.get("last_epoch"), int):
        fields["last_epoch"] = Whole(step, step)
    known = {name: value for name, value in saved.items() if name in fields}
    private = frozenset(name for name in fields if name.startswith("_") and name != "_schedulers")
    Fields(fields, optional=private).check(known, path)
    return known


def holds_part(cycle: Cycle, state: dict[str, Any]) -> bool:
    """Return whether this process holds the part of its replica that the process which saved the state held."""
    return list(state["part"]) == [cycle.ensemble.part, cycle.ensemble.parts]


def run_of(cycle: Cycle, state: dict[str, Any]) -> Run:
    """Return the run as the controller prepared it in the saved run.

    A schedule that is built on an optimizer that was loaded before begins somewhere else and may look otherwise.
    """
    facts = {**state["run"], "peaks": tuple(state["run"]["peaks"])}
    if all(getattr(cycle.run, name) == value for name, value in facts.items()) or cycle.spread.controller is None:
        return cycle.run
    prepared = cycle.spread.controller.prepare(replace(cycle.run, **facts, early=(), in_pairs=False, departs=()))
    return replace(prepared, slopes=cycle.run.slopes)  # whether they are measured is settled where the cycle is built


def _check_config(cycle: Cycle, saved: object) -> None:
    if not isinstance(saved, dict):
        raise refuse("hdet.config", "a dict", saved)
    for name, there, here in _differences(saved, cycle.config):
        raise ValueError(
            f"the checkpoint was made with {name}={there!r:.200}, this scheduler has {here!r:.200}: build it with the "
            "arguments of the saved run"
        )


def _check_replicas(cycle: Cycle, state: dict[str, Any]) -> None:
    """Raise ValueError if a state of another number of replicas cannot be divided among those here."""
    saved, here = (state["size"], state["rows"]), (cycle.ensemble.size, cycle.ensemble.rows)
    if saved[0] % saved[1] or state["replica"] % saved[1]:
        raise refuse("hdet.rows", f"a divisor of size={saved[0]} and of replica={state['replica']}", saved[1])
    if state.get("pending") is not None and not holds_part(cycle, state):
        raise ValueError(
            f"the checkpoint has part {state['part'][0]} of {state['part'][1]} of a replica and an overlapped average "
            f"under way, this process holds part {cycle.ensemble.part} of {cycle.ensemble.parts}: load the file of a "
            "process that held the same part, or call scheduler.converge() before saving, which applies the average"
        )
    if saved == here:
        return
    into_cycle = state["step"] % cycle.run.sync_every
    several = max(saved[1], here[1]) > 1
    of_saved, of_here = (f", {rows} in a process," if several else "" for _, rows in (saved, here))
    counts = f"the checkpoint has {saved[0]} replicas{of_saved}", f"this run has {here[0]}{of_here.rstrip(',')}"
    if into_cycle and state["step"] != cycle.run.total_steps and not state["averaged"]:
        raise ValueError(
            f"{counts[0]} and was saved {into_cycle} steps into a cycle, {counts[1]}: another number of replicas"
            f"{' in a process' if saved[0] == here[0] else ''} can resume only where all are equal, at a multiple "
            f"of sync_every={cycle.run.sync_every}; save there, or inside scheduler.consensus()"
        )
    if state.get("pending") is not None and saved[1] != here[1]:
        raise ValueError(
            f"{counts[0]} and an overlapped average under way, {counts[1]}: its corrections are those of the saved "
            "replicas; call scheduler.converge() before saving, which applies it"
        )


def _check_history(state: dict[str, Any]) -> None:
    """Raise ValueError unless there are as many records and points as belong to the number of syncs."""
    syncs, every = state["summary"]["syncs"], state["summary"]["every"]
    for name, found, expected in (
        ("history", len(state["history"]), min(syncs, WINDOW)),
        ("summary.points", len(state["summary"]["points"]), -(-syncs // every)),
    ):
        if found != expected:
            raise ValueError(
                f"the checkpoint's hdet.{name} has {found} entries, {expected} belong to {syncs} syncs: load an "
                "undamaged checkpoint"
            )


def _check_pending(cycle: Cycle, correction: dict[str, Any]) -> None:
    """Raise ValueError unless the corrections of the optimizer's state fit each other and the state that exists."""
    shapes = [{name: t.shape for name, t in correction[key].items()} for key in ("state", "state_before")]
    at_once = cycle.converger.bucket_bytes
    payload = cycle.converger.tensors.payload(include_state=True, reads=True, bucket_bytes=at_once)
    here = {name: t.shape for name, t in payload.state.items()}
    for name in shapes[0].keys() | shapes[1].keys():
        found = [each.get(name) for each in shapes]
        if found[0] != found[1] or here.get(name, found[0]) != found[0]:
            raise ValueError(
                f"the checkpoint's hdet.pending.correction.state.{name} and state_before.{name} have shapes {found[0]} "
                f"and {found[1]}, the optimizer's state {here.get(name, 'none yet')}: load an undamaged checkpoint of "
                "this model"
            )


def _check_controller(cycle: Cycle, state: dict[str, Any]) -> None:
    """Raise ValueError unless the controller's state gives every hyperparameter a base value."""
    controller, saved = cycle.spread.controller, state["spread"]
    if controller is None:
        return
    own = copy.deepcopy(saved["controller"])
    for index, hyper in enumerate(cycle.spread.hyperparameters):
        scheduled = saved["scheduled"][hyper.groups[0]] if hyper.base is None else hyper.base
        try:
            value = controller.base(own, index, scheduled)
            fine = math.isfinite(value) and float(value) >= 0
        except Exception as error:  # a controller may raise anything
            raise refuse("hdet.spread.controller", f"one that gives {hyper.name} a value ({error!r})", own) from error
        if not fine:
            raise refuse("hdet.spread.controller", f"one that gives {hyper.name} a value, not {value}", own)
    try:
        run_of(cycle, state)
    except Exception as error:
        raise refuse("hdet.run", f"one that {type(controller).__name__} can work in ({error})", state["run"]) from error


@contextlib.contextmanager
def _versions_named(state: dict[str, Any]) -> Iterator[None]:
    try:
        yield
    except UnknownFields as unknown:
        raise ValueError(
            f"the checkpoint has entries that hdet_kernels {__version__} does not know: {', '.join(unknown.args)}; it "
            f"was saved by version {state.get('version')!r:.40}: load it with that version"
        ) from None


def _differences(saved: Any, here: Any, name: str = "") -> list[tuple[str, Any, Any]]:
    """Return (name, saved value, value here) of every entry in which two nested dicts differ."""
    if not (isinstance(saved, dict) and isinstance(here, dict)):
        return [] if equal(saved, here) else [(name, saved, here)]
    keys = list(dict.fromkeys((*here, *saved)))
    found = []
    for key in keys:
        there = saved.get(key, _NOTHING)
        found += _differences(there, here.get(key, _NOTHING), f"{name}.{key}" if name else str(key))
    return found


class _Nothing:
    """Stands for an entry that is not there."""

    def __repr__(self) -> str:
        return "nothing"


_NOTHING = _Nothing()
