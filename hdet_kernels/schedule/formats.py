"""Formats of the checkpoints of earlier versions, and their conversion."""

from __future__ import annotations

from typing import Any

from hdet_kernels.schedule import state_schema
from hdet_kernels.schedule.cycle import Cycle, plain_fields
from hdet_kernels.schedule.history import History, SyncRecord
from hdet_kernels.version import __version__

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


def current(cycle: Cycle, state: dict[str, Any]) -> dict[str, Any]:
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
    state["undo"] = cycle.undoing and {"returns": 0, "kept": None}
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
