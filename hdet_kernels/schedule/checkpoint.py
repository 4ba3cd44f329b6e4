"""Save and restore a cycle. ``docs/checkpoint-format.md`` lists the keys.

Loading has two parts. :func:`checked` brings a state to the current format and checks all of it by
``state_schema.py``; it modifies nothing. :func:`restore` then applies it. If that fails after all, because a setter of
the user raises, :func:`undone_on_error` brings everything back.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from hdet_kernels.controller.protocol import Run
from hdet_kernels.schedule import state_schema
from hdet_kernels.schedule.build import untouched_on_error
from hdet_kernels.schedule.cycle import Cycle, plain_fields
from hdet_kernels.schedule.history import WINDOW, History, SyncRecord
from hdet_kernels.schedule.overlapping import Overlapping
from hdet_kernels.schedule.schema import (
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
from hdet_kernels.version import __version__

log = logging.getLogger("hdet_kernels")

#: Raised when a key changes its name or its meaning. Format 1 is that of version 0.1.
FORMAT = 3

#: Keys of the controllers' states and what they were called in format 1.
_RENAMED = {
    "observations": "looks",
    "caps": "ceilings",
    "log_likelihood": "belief",
    "path_length": "way",
    "slow": "opposed",
    "stability": "terrain",
}
_RENAMED_STABILITY = {"initial_level": "first", "edge": "near", "diverged_at": "broke", "lowest_before": "lowest"}

#: Entries of torch's schedulers that follow from the arguments of their constructors.
_FIXED = (
    *("total_steps", "_schedule_phases", "_anneal_func_type", "cycle_momentum", "use_beta1", "_milestones"),
    *("T_max", "T_0", "T_mult", "eta_min", "total_iters", "start_factor", "end_factor", "factor", "gamma"),
    *("step_size", "milestones", "power"),
)


def state_of(cycle: Cycle) -> dict[str, Any]:
    """Return the state of a cycle in this process, as plain values and tensors that ``weights_only=True`` loads."""
    overlapping, run = cycle.overlapping, cycle.run
    return {
        "format": FORMAT,
        "version": __version__,
        "config": cycle.config,
        "size": cycle.ensemble.size,
        "replica": cycle.ensemble.replica,
        "rows": cycle.ensemble.rows,
        "step": cycle.step,
        "run": {"peak": run.peak, "peaks": list(run.peaks), "end": run.end},
        "shared": cycle.shared,
        "spread": cycle.spread.state_dict(),
        "window": cycle.window.state_dict(),
        "displacement": cycle.displacement.state_dict() if cycle.displacement else None,
        "pending": overlapping and overlapping.state_dict(in_consensus=cycle.in_consensus),
        "compression": cycle.converger.state_dict(),
        "outer": cycle.converger.outer_state_dict(),
        "begun": cycle.started,
        "history": [record.to_dict() for record in cycle.history.records],
        "summary": cycle.history.summary.to_dict(),
    }


def checked(cycle: Cycle, state_dict: object) -> dict[str, Any]:
    """Return the cycle's part of a scheduler's state, in the current format, that :func:`restore` can take.

    Raises:
        ValueError: naming the entry that is missing, unknown, damaged or of another run; nothing is modified.
    """
    own = state_dict.get("hdet") if isinstance(state_dict, dict) else None
    if not isinstance(own, dict) or "config" not in own:
        raise ValueError("this is not a checkpoint of an HDET scheduler: it has no 'hdet' entry")
    state = _current(cycle, own)
    _check_config(cycle, state["config"])
    state_schema.head(cycle).check({name: state[name] for name in state_schema.HEAD if name in state}, "hdet")
    size, rows, step = state["size"], state["rows"], state["step"]
    _check_replicas(cycle, state)
    with _versions_named(state):
        state_schema.body(cycle, size=size, rows=rows, step=step).check(state, "hdet")
    if isinstance(state["window"]["sum"], list) is not (rows > 1) and state["window"]["count"]:
        raise refuse("hdet.window.sum", f"{rows} numbers" if rows > 1 else "a number", state["window"]["sum"])
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
    cycle.converger.check_state_dict(state["compression"])
    cycle.converger.check_outer_state_dict(state["outer"])
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


def restore(cycle: Cycle, state: dict[str, Any]) -> None:
    """Bring ``cycle`` to a state that was :func:`checked`, at this replica's own place in the spread."""
    if state["replica"] != cycle.ensemble.replica and state["step"] % cycle.run.sync_every:
        log.info(
            "resuming from replica %d's checkpoint, %d steps into a cycle: the parameters of the other replicas at "
            "that moment are not in it",
            state["replica"],
            state["step"] % cycle.run.sync_every,
        )
    cycle.run = _run_of(cycle, state)
    cycle.step = state["step"]
    cycle.shared = state["shared"]
    cycle.spread.load_state_dict(state["spread"], cycle.optimizer.param_groups)
    cycle.window.load_state_dict(state["window"])
    if cycle.displacement is not None:
        cycle.displacement.load_state_dict(state["displacement"])
    if cycle.overlapping is not None:
        _ = cycle.overlapping.average.failed  # waits for it, so that it cannot write to what is loaded now
    cycle.overlapping = None if state["pending"] is None else Overlapping.of(state["pending"])
    own = (state["replica"], state["size"]) == (cycle.ensemble.replica, cycle.ensemble.size)
    cycle.converger.load_state_dict(state["compression"], own=own)
    cycle.converger.load_outer_state_dict(state["outer"])
    cycle.started = state["begun"]
    cycle.history = History.of(state["history"], state["summary"])
    if cycle.history_file is not None:
        cycle.history_file.reopen()
    cycle.fan_out()
    cycle.write()
    cycle.publish()


@contextlib.contextmanager
def undone_on_error(cycle: Cycle, *others: object) -> Iterator[None]:
    """Bring the cycle, the optimizer's groups and ``others`` back to what they were if the block raises."""
    parts = [cycle, cycle.spread, cycle.window, cycle.displacement, *cycle.converger.memories(), *others]
    before = [(part, dict(vars(part))) for part in parts if part is not None]
    with untouched_on_error(cycle.optimizer):
        try:
            yield
        except BaseException:
            for part, entries in before:
                vars(part).clear()
                vars(part).update(entries)
            with contextlib.suppress(Exception):  # a setter that raised may raise again
                cycle.write()
            raise


@contextlib.contextmanager
def schedule_loaded(scheduler: LRScheduler, state: dict[str, Any]) -> Iterator[None]:
    """Load a wrapped scheduler; if it raises, or the block does, it is as before."""
    before = copy.deepcopy(scheduler.state_dict())
    try:
        try:
            scheduler.load_state_dict(copy.deepcopy(state))
        except Exception as error:  # a scheduler of the user may raise anything
            raise ValueError(
                f"{type(scheduler).__name__} refuses the checkpoint's base_scheduler ({error!r}): load an undamaged "
                "checkpoint"
            ) from error
        yield
    except BaseException:
        scheduler.load_state_dict(before)
        raise


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
    if saved == here:
        return
    into_cycle = state["step"] % cycle.run.sync_every
    several = max(saved[1], here[1]) > 1
    of_saved, of_here = (f", {rows} in a process," if several else "" for _, rows in (saved, here))
    counts = f"the checkpoint has {saved[0]} replicas{of_saved}", f"this run has {here[0]}{of_here.rstrip(',')}"
    if into_cycle and state["step"] != cycle.run.total_steps:
        raise ValueError(
            f"{counts[0]} and was saved {into_cycle} steps into a cycle, {counts[1]}: another number of replicas"
            f"{' in a process' if saved[0] == here[0] else ''} can resume only where all are equal, at a multiple "
            f"of sync_every={cycle.run.sync_every}; save there"
        )
    if state.get("pending") is not None:
        raise ValueError(
            f"{counts[0]} and an overlapped average under way, {counts[1]}: its corrections are those of the saved "
            "replicas; call scheduler.converge() before saving, which applies it"
        )


def _check_controller(cycle: Cycle, state: dict[str, Any]) -> None:
    """Raise ValueError unless the controller's state gives every hyperparameter a base value."""
    controller, saved = cycle.spread.controller, state["spread"]
    if controller is None:
        return
    own = copy.deepcopy(saved["controller"])
    for index, hyper in enumerate(cycle.spread.hyperparameters):
        scheduled = saved["scheduled"][index] if hyper.base is None else hyper.base
        try:
            value = controller.base(own, index, scheduled)
            fine = math.isfinite(value) and float(value) >= 0
        except Exception as error:  # a controller may raise anything
            raise refuse("hdet.spread.controller", f"one that gives {hyper.name} a value ({error!r})", own) from error
        if not fine:
            raise refuse("hdet.spread.controller", f"one that gives {hyper.name} a value, not {value}", own)
    try:
        _run_of(cycle, state)
    except Exception as error:
        raise refuse("hdet.run", f"one that {type(controller).__name__} can work in ({error})", state["run"]) from error


def _run_of(cycle: Cycle, state: dict[str, Any]) -> Run:
    """Return the run as the controller prepared it in the saved run.

    A schedule that is built on an optimizer that was loaded before begins somewhere else and may look otherwise.
    """
    facts = {**state["run"], "peaks": tuple(state["run"]["peaks"])}
    if all(getattr(cycle.run, name) == value for name, value in facts.items()) or cycle.spread.controller is None:
        return cycle.run
    return cycle.spread.controller.prepare(replace(cycle.run, **facts, early=(), in_pairs=False, departs=()))


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


def _current(cycle: Cycle, state: dict[str, Any]) -> dict[str, Any]:
    """Return ``state`` in the current format; entries that cannot be converted stay, for the schema to refuse.

    Version 0.1 saved no settings: the constants of its controllers are those of :mod:`..controller.settings` today.
    """
    saved = state.get("format", 1)
    if "format" not in state and "version" in state:
        raise ValueError("the checkpoint has no hdet.format: load an undamaged checkpoint")
    if isinstance(saved, bool) or not isinstance(saved, int) or saved not in (1, 2, FORMAT):
        known = state_schema.names(cycle)
        unknown = ", ".join(f"hdet.{name}" for name in state if name not in known)
        raise ValueError(
            f"the checkpoint has format {saved!r:.40} of hdet_kernels {state.get('version', '0.1 or 0.2')!r:.40}, this "
            f"is version {__version__}, which reads 1 to {FORMAT}{f' and does not know {unknown}' if unknown else ''}: "
            "load it with the version that saved it"
        )
    if saved == FORMAT:
        return state
    state = {**state, "format": FORMAT, "version": "0.1 or 0.2"}
    run = cycle.run
    state["run"] = {"peak": run.peak, "peaks": list(run.peaks), "end": run.end}
    if isinstance(state.get("history"), list):
        state_schema.HISTORY.check(state["history"], "hdet.history")
        whole = History(SyncRecord(**record) for record in state["history"])
        state["history"] = [record.to_dict() for record in whole.records]
        state["summary"] = whole.summary.to_dict()
    return _from_version_0_1(cycle, state) if saved == 1 else state


def _from_version_0_1(cycle: Cycle, state: dict[str, Any]) -> dict[str, Any]:
    config, spread = state["config"], state.get("spread")
    settings = getattr(cycle.spread.controller, "settings", None)
    if isinstance(config, dict) and settings is not None and isinstance(config.get("controller_constants"), dict):
        constants = {**config["controller_constants"], "settings": plain_fields(type(settings)())}
        config = {**config, "controller_constants": constants if config["controller_constants"] else {}}
    if isinstance(spread, dict) and isinstance(spread.get("controller"), dict):
        controller = _renamed(spread["controller"], _RENAMED)
        if isinstance(controller.get("stability"), dict):
            controller["stability"] = _renamed(controller["stability"], _RENAMED_STABILITY)
        spread = {**spread, "controller": controller}
    return {**state, "config": config, "spread": spread}


def _renamed(entries: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    now = {old: new for new, old in names.items()}
    return {now.get(key, key): value for key, value in entries.items()}
