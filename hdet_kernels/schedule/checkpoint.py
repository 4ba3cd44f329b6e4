"""Save and restore a cycle. ``docs/checkpoint-format.md`` lists the keys."""

from __future__ import annotations

import logging
from typing import Any

from hdet_kernels.schedule.cycle import Cycle, plain_fields
from hdet_kernels.schedule.history import SyncRecord
from hdet_kernels.schedule.overlapping import Overlapping

log = logging.getLogger("hdet_kernels")

#: Raised when a key changes its name or its meaning. Format 1 is that of version 0.1.
FORMAT = 2

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


def state_of(cycle: Cycle) -> dict[str, Any]:
    """Return the state of a cycle in this process, as plain values and tensors that ``weights_only=True`` loads."""
    overlapping = cycle.overlapping
    return {
        "format": FORMAT,
        "config": cycle.config,
        "size": cycle.ensemble.size,
        "replica": cycle.ensemble.replica,
        "rows": cycle.ensemble.rows,
        "step": cycle.step,
        "shared": cycle.shared,
        "spread": cycle.spread.state_dict(),
        "window": cycle.window.state_dict(),
        "displacement": cycle.displacement.state_dict() if cycle.displacement else None,
        "pending": overlapping and overlapping.state_dict(in_consensus=cycle.in_consensus),
        "compression": cycle.converger.state_dict(),
        "outer": cycle.converger.outer_state_dict(),
        "begun": cycle.started,
        "history": [record.to_dict() for record in cycle.history],
    }


def check_state(cycle: Cycle, state: dict[str, Any]) -> None:
    """Raise ValueError unless :func:`restore` can take ``state``; nothing is modified."""
    state = _current(cycle, state)
    differences = _differences(state["config"], cycle.config)
    if differences:
        name, saved, here = differences[0]
        raise ValueError(
            f"the checkpoint was made with {name}={saved!r}, this scheduler has {here!r}: build it with the arguments "
            "of the saved run"
        )
    cycle.converger.check_outer_state_dict(state["outer"])
    into_cycle = state["step"] % cycle.run.sync_every
    saved, here = (state["size"], state["rows"]), (cycle.ensemble.size, cycle.ensemble.rows)
    if saved != here and into_cycle and state["step"] != cycle.run.total_steps:
        several = max(saved[1], here[1]) > 1
        of_saved, of_here = (f", {rows} in a process," if several else "" for _, rows in (saved, here))
        raise ValueError(
            f"the checkpoint has {saved[0]} replicas{of_saved} and was saved {into_cycle} steps into a cycle, this "
            f"run has {here[0]}{of_here.rstrip(',')}: another number of replicas"
            f"{' in a process' if saved[0] == here[0] else ''} can resume only where all are equal, at a multiple "
            f"of sync_every={cycle.run.sync_every}; save there"
        )


def restore(cycle: Cycle, state: dict[str, Any]) -> None:
    """Bring ``cycle`` to a saved state, at this replica's own place in the spread, whichever replica saved it."""
    check_state(cycle, state)
    state = _current(cycle, state)
    if state["replica"] != cycle.ensemble.replica and state["step"] % cycle.run.sync_every:
        log.info(
            "resuming from replica %d's checkpoint, %d steps into a cycle: the parameters of the other replicas at "
            "that moment are not in it",
            state["replica"],
            state["step"] % cycle.run.sync_every,
        )
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
    cycle.history[:] = [SyncRecord(**record) for record in state["history"]]
    cycle.fan_out()
    cycle.write()


def _differences(saved: Any, here: Any, name: str = "") -> list[tuple[str, Any, Any]]:
    """Return (name, saved value, value here) of every entry in which two nested dicts differ."""
    if not (isinstance(saved, dict) and isinstance(here, dict)):
        return [] if saved == here else [(name, saved, here)]
    keys = list(dict.fromkeys((*here, *saved)))
    found = []
    for key in keys:
        found += _differences(saved.get(key), here.get(key), f"{name}.{key}" if name else key)
    return found


def _current(cycle: Cycle, state: dict[str, Any]) -> dict[str, Any]:
    """Return ``state`` in the current format.

    Version 0.1 saved no settings: the constants of its controllers are those of :mod:`..controller.settings` today.
    """
    saved = state.get("format", 1)
    if saved == FORMAT:
        return state
    if saved != 1:
        raise ValueError(
            f"the checkpoint has format {saved}, this version of hdet_kernels reads {FORMAT} and 1: load it with the "
            "version that saved it"
        )
    config, spread = dict(state["config"]), dict(state["spread"])
    settings = getattr(cycle.spread.controller, "settings", None)
    if settings is not None and config["controller_constants"]:
        constants = {**config["controller_constants"], "settings": plain_fields(type(settings)())}
        config["controller_constants"] = constants
    spread["controller"] = _renamed(spread["controller"], _RENAMED)
    if spread["controller"].get("stability") is not None:
        spread["controller"]["stability"] = _renamed(spread["controller"]["stability"], _RENAMED_STABILITY)
    return {**state, "format": FORMAT, "config": config, "spread": spread}


def _renamed(entries: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    now = {old: new for new, old in names.items()}
    return {now.get(key, key): value for key, value in entries.items()}
