"""Malformed states: each is a good ``state_dict`` in which one value was replaced, or something else altogether."""

from __future__ import annotations

import copy
from typing import Any

import torch

from tests.bad_input.rows import BEYOND, BOTH, HUGE, INF, NAN, Entry, Row, refused

MISSING = object()


def replaced(state: dict[str, Any], keys: tuple[Any, ...], value: Any) -> dict[str, Any]:
    """Return a copy of a state with the value under ``keys`` replaced, or removed (MISSING)."""
    whole = target = copy.deepcopy(state)
    for key in keys[:-1]:
        target = target[key]
    target[keys[-1]] = value
    if value is MISSING:
        del target[keys[-1]]
    return whole


def of(part: str, *keys: Any, values: tuple[Any, ...], argument: str = "") -> list[Row]:
    """Return a row for each value that replaces the one under ``keys`` in the state of a part of the world."""

    def load(world: Any, **edit: Any) -> object:
        owner = getattr(world, part)
        return owner.load_state_dict(replaced(owner.state_dict(), keys, *edit.values()))

    return refused(load, ".".join(map(str, keys)), BOTH, *values, argument=argument or str(keys[-1]))


def loading(part: str) -> Entry:
    return lambda world, state: getattr(world, part).load_state_dict(state)


HDET = ("scheduler", "hdet", 0)
#: Values for the keys of a scheduler's own state.
SCHEDULER_VALUES: dict[tuple[str, ...], tuple[Any, ...]] = {
    ("format",): ("x", -1, 99, 1.5, None, 10**9),
    ("config",): (None, []),
    ("step",): (-1, 7.5, "x", NAN, None, True, 10**9, *BEYOND, MISSING, [3], HUGE),
    ("size",): (0, -1, "x", None, 1.5, MISSING, NAN),
    ("rows",): (0, "x", None, MISSING, -1),
    ("replica",): (-1, "x", None, 5, MISSING, 0.5),
    ("shared",): ("x", 3, [], MISSING),
    ("spread",): (None, [], {}, MISSING),
    ("spread", "scheduled"): (None, [], [1.0], ["a", "b"], [NAN, 1.0], [10**400] * 2, HUGE, MISSING),
    ("window",): (None, [], {}, MISSING),
    ("window", "count"): (-1, "x", 1e30, *BEYOND, None, MISSING, True),
    ("window", "sum"): ("x", None, *BEYOND, [[1.0]], MISSING),
    ("begun",): ("x", None, 3, MISSING),
    ("history",): (None, 3, "x", {}, [3], [{}], MISSING, range(10**9)),
    ("compression",): (3, "x", [1]),
    ("outer",): (3, "x", {"consensus": HUGE}),
}

SCHEDULER: list[Row] = [
    *refused(loading("scheduler"), "state", BOTH, None, 3, [], "x", {}, argument="checkpoint"),
    *of("scheduler", "hdet", values=(None, 3, [], {}, MISSING), argument="checkpoint"),
    *of(*HDET, "config", values=(MISSING, {}), argument="checkpoint"),
    *of("scheduler", "last_epoch", values=(*BEYOND, "x", None, -7, 2.5, NAN)),
    *(row for keys, values in SCHEDULER_VALUES.items() for row in of(*HDET, *keys, values=values)),
]

SHAPE = (4, 3)
OPTIMIZER: list[Row] = [
    *refused(loading("optimizer"), "state", BOTH, None, 3, [], "x", {}),
    *of("optimizer", "state", values=(None, 3, [], MISSING)),
    *of("optimizer", "state", 0, values=(3, "x", [1]), argument="state"),
    *of("optimizer", "state", 0, "exp_avg", values=(MISSING, None, 3, "x", torch.ones(7), HUGE)),
    *of("optimizer", "state", 0, "exp_avg", values=(torch.ones(SHAPE, device="meta"), torch.ones(SHAPE).to_sparse())),
    *of("optimizer", "state", 0, "exp_avg_sq", values=(MISSING, None, torch.ones(3, 4))),
    *of("optimizer", "state", 0, "step", values=(*BEYOND, -1, "x", NAN, None, torch.ones(3), HUGE)),
    *of("optimizer", "state", 0, "momentum_buffer", values=(torch.ones(SHAPE),)),
    *of("optimizer", "param_groups", values=(None, [], 3, MISSING), argument="group"),
    *of("optimizer", "param_groups", 0, values=(None, 3, {}), argument="group"),
    *of("optimizer", "param_groups", 0, "lr", values=(-1.0, *BEYOND, NAN, "x", None)),
    *of("optimizer", "param_groups", 0, "betas", values=((0.9,), (0.9, 1.5), None, "x")),
    *of("optimizer", "param_groups", 0, "eps", values=(-1.0, INF, "x")),
    *of("optimizer", "param_groups", 0, "params", values=([0], None, list(range(7))), argument="param"),
    *of("optimizer", "param_groups", 0, "params", values=([0, 0, 1, 2], [0, 1, 2, 7]), argument="params"),
]

AREAS = {"scheduler states": SCHEDULER, "optimizer states": OPTIMIZER}
