"""Formats of the checkpoints of earlier versions, and their conversion."""

from __future__ import annotations

import math
from typing import Any

from hdet_kernels.controller import RegressionController
from hdet_kernels.schedule.checkpoint import state_schema
from hdet_kernels.schedule.cycle import Cycle
from hdet_kernels.schedule.history import History, SyncRecord
from hdet_kernels.schedule.sync import plain_fields
from hdet_kernels.version import __version__

#: Raised when a key changes its name or its meaning. Format 1 is that of version 0.1.
FORMAT = 4

#: Keys of the controllers' states and what they were called in format 1.
_RENAMED = {"observations": "looks", "caps": "ceilings"}


def current(cycle: Cycle, state: dict[str, Any]) -> dict[str, Any]:
    """Return ``state`` in the current format; entries that cannot be converted stay, for the schema to refuse."""
    saved = state.get("format", 1)
    if "format" not in state and "version" in state:
        raise ValueError("the checkpoint has no hdet.format: load an undamaged checkpoint")
    if isinstance(saved, bool) or not isinstance(saved, int) or saved not in range(1, FORMAT + 1):
        known = state_schema.names(cycle)
        unknown = ", ".join(f"hdet.{name}" for name in state if name not in known)
        raise ValueError(
            f"the checkpoint has format {saved!r:.40} of hdet_kernels {state.get('version', '0.1 or 0.2')!r:.40}, this "
            f"is version {__version__}, which reads 1 to {FORMAT}{f' and does not know {unknown}' if unknown else ''}: "
            "load it with the version that saved it"
        )
    if saved == FORMAT:
        return state
    return _of_format_3(cycle, state if saved == 3 else _of_format_1_or_2(cycle, state))


def _of_format_3(cycle: Cycle, state: dict[str, Any]) -> dict[str, Any]:
    """Return a state of format 3 in format 4, which tells more about the process that saved it."""
    step, run = state.get("step"), cycle.run
    at_a_sync = isinstance(step, int) and (step % run.sync_every == 0 or step == run.total_steps)
    if isinstance(moved := state.get("displacement"), dict) and "slopes" not in moved:
        state = {**state, "displacement": _with_slopes(moved)}
    return {
        **state,
        "format": FORMAT,
        "part": [cycle.ensemble.part, cycle.ensemble.parts],
        "averaged": at_a_sync and state.get("pending") is None,
        "optimizer_state": False,  # not known
    }


def _of_format_1_or_2(cycle: Cycle, state: dict[str, Any]) -> dict[str, Any]:
    state = {**state, "format": 3, "version": "0.1 or 0.2"}
    run = cycle.run
    state["undo"] = cycle.undoing and {"returns": 0, "kept": None}
    if isinstance(pending := state.get("pending"), dict) and isinstance(pending.get("outcome"), dict):
        state["pending"] = {**pending, "outcome": {"kept": None, **pending["outcome"]}}
    state["run"] = {"peak": run.peak, "peaks": list(run.peaks), "end": run.end}
    if isinstance(state.get("history"), list):
        state_schema.HISTORY.check(state["history"], "hdet.history")
        whole = History(SyncRecord(**record) for record in state["history"])
        state["history"] = [record.to_dict() for record in whole.records]
        state["summary"] = whole.summary.to_dict()
    if isinstance(moved := state.get("displacement"), dict) and isinstance(moved.get("measured"), list | None):
        others = {key: value for key, value in moved.items() if key != "measured"}
        state["displacement"] = {**others, "slopes": [] if moved.get("measured") is None else [moved["measured"]]}
    return _with_controller_of_today(cycle, state)


def _with_slopes(displacement: dict[str, Any]) -> dict[str, Any]:
    """Return the state of a displacement that had sums of slopes and of their squares, by group.

    The slopes of each gradient are not known any more. Others with the same mean and the same error stand for them.
    """
    others = {key: value for key, value in displacement.items() if key not in ("sums", "count")}
    sums: Any = displacement.get("sums")
    count: Any = displacement.get("count")
    if sums is None and count == 0:
        return {**others, "slopes": []}
    try:
        by_group = [_spread_out(total, squares, int(count)) for total, squares in zip(*sums, strict=True)]
        return {**others, "slopes": [list(slopes) for slopes in zip(*by_group, strict=True)]}
    except (TypeError, ValueError, ZeroDivisionError):
        return displacement  # damaged, which the schema names


def _spread_out(total: float, squares: float, count: int) -> list[float]:
    """Return ``count`` numbers with this sum and this sum of squares."""
    mean = total / count
    apart = math.sqrt(max(squares - total * mean, 0.0) / (count // 2 * 2)) if count > 1 else 0.0
    return [mean] * (count % 2) + [mean - apart, mean + apart] * (count // 2)


def _with_controller_of_today(cycle: Cycle, state: dict[str, Any]) -> dict[str, Any]:
    """Return ``state`` for the controllers of today: factors of the base values and slopes go on, evidence begins anew.

    Version 0.1 saved no settings, and those of the regression controller were others: today's hold from here on.
    """
    config, spread, controller = state["config"], state.get("spread"), cycle.spread.controller
    if controller is None or not isinstance(config, dict) or not isinstance(spread, dict):
        return state
    constants = config.get("controller_constants")
    if isinstance(constants, dict) and constants and config.get("controller") == type(controller).__name__:
        kept = {key: value for key, value in constants.items() if key != "settings"}
        config = {**config, "controller_constants": {**plain_fields(controller), **kept}}
    saved = spread.get("controller")
    if isinstance(saved, dict):
        saved = _renamed(saved, _RENAMED)
        if isinstance(controller, RegressionController):
            fresh = controller.start(len(cycle.spread.hyperparameters), cycle.run)
            begins_anew = ("log_likelihood", "path_length")
            saved = {key: value if key in begins_anew else saved.get(key, value) for key, value in fresh.items()}
        spread = {**spread, "controller": saved}
    return {**state, "config": config, "spread": spread}


def _renamed(entries: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    now = {old: new for new, old in names.items()}
    return {now.get(key, key): value for key, value in entries.items()}
