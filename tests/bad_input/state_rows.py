"""Malformed states: each is a good ``state_dict`` in which one value was replaced, or something else altogether."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch

from tests.bad_input.rows import INF, NAN, Row

BOTH = (TypeError, ValueError)
MISSING = object()


def edited(part: str, keys: tuple[Any, ...], value: Any) -> Callable[[Any], object]:
    """Return a call that loads the state of ``part`` of the world with one value replaced, or removed (MISSING)."""

    def call(world: Any) -> object:
        owner = getattr(world, part)
        state = copy.deepcopy(owner.state_dict())
        target = state
        for key in keys[:-1]:
            target = target[key]
        if value is MISSING:
            del target[keys[-1]]
        else:
            target[keys[-1]] = value
        return owner.load_state_dict(state)

    return call


def whole(part: str, value: Any) -> Callable[[Any], object]:
    return lambda world: getattr(world, part).load_state_dict(value)


def spelled(value: Any) -> str:
    return (
        "missing"
        if value is MISSING
        else f"a tensor {tuple(value.shape)}"
        if isinstance(value, torch.Tensor)
        else repr(value)[:30]
    )


def of(part: str, keys: tuple[Any, ...], *values: Any, message: str = "") -> list[Row]:
    """Return a row for each value that replaces the one under ``keys``."""
    name = ".".join(map(str, keys))
    return [
        Row(f"{name} = {spelled(value)} ({index})", edited(part, keys, value), BOTH, message or str(keys[-1]))
        for index, value in enumerate(values)
    ]


#: 10⁹ elements that take the memory of one.
HUGE = torch.zeros(1).expand(10**9)

SCHEDULER: list[Row] = [
    *(
        Row(f"loads {value!r}"[:40], whole("scheduler", value), BOTH, "checkpoint|state")
        for value in (None, 3, [], "x", {})
    ),
    *of("scheduler", ("hdet",), None, 3, [], {}, MISSING, message="hdet|checkpoint"),
    *of("scheduler", ("hdet", 0, "format"), "x", -1, 99, 1.5, None, 10**9),
    *of("scheduler", ("hdet", 0, "config"), None, [], MISSING, {}, message="config|checkpoint"),
    *of("scheduler", ("hdet", 0, "step"), -1, 7.5, "x", NAN, None, True, 10**9, MISSING, [3], HUGE),
    *of("scheduler", ("hdet", 0, "size"), 0, -1, "x", None, 1.5, MISSING, NAN),
    *of("scheduler", ("hdet", 0, "rows"), 0, "x", None, MISSING, -1),
    *of("scheduler", ("hdet", 0, "replica"), -1, "x", None, 5, MISSING, 0.5),
    *of("scheduler", ("hdet", 0, "shared"), "x", 3, [], MISSING),
    *of("scheduler", ("hdet", 0, "spread"), None, [], {}, MISSING),
    *of("scheduler", ("hdet", 0, "spread", "scheduled"), None, [], [1.0], ["a", "b"], [NAN, 1.0], HUGE, MISSING),
    *of("scheduler", ("hdet", 0, "window"), None, [], {}, MISSING),
    *of("scheduler", ("hdet", 0, "window", "count"), -1, "x", 1e30, None, MISSING, True),
    *of("scheduler", ("hdet", 0, "window", "sum"), "x", None, [[1.0]], MISSING),
    *of("scheduler", ("hdet", 0, "begun"), "x", None, 3, MISSING),
    *of("scheduler", ("hdet", 0, "history"), None, 3, "x", {}, [3], [{}], MISSING, range(10**9)),
    *of("scheduler", ("hdet", 0, "compression"), 3, "x", [1]),
    *of("scheduler", ("hdet", 0, "outer"), 3, "x", {"consensus": HUGE}),
    *of("scheduler", ("last_epoch",), "x", None, -7, 2.5, NAN),
]

OPTIMIZER: list[Row] = [
    *(
        Row(f"loads {value!r}"[:40], whole("optimizer", value), BOTH, "state_dict|state")
        for value in (None, 3, [], "x", {})
    ),
    *of("optimizer", ("state",), None, 3, [], MISSING),
    *of("optimizer", ("param_groups",), None, [], 3, MISSING, message="group"),
    *of("optimizer", ("param_groups", 0), None, 3, {}, message="group"),
    *of("optimizer", ("param_groups", 0, "lr"), -1.0, NAN, "x", None),
    *of("optimizer", ("param_groups", 0, "betas"), (0.9,), (0.9, 1.5), None, "x"),
    *of("optimizer", ("param_groups", 0, "params"), [0], None, [0, 1, 2, 3, 4, 5, 6], message="params|group|parameter"),
    *of("optimizer", ("param_groups", 0, "eps"), -1.0, INF, "x"),
    *of("optimizer", ("state", 0), 3, "x", [1], message="state"),
    *of(
        "optimizer",
        ("state", 0, "exp_avg"),
        MISSING,
        None,
        3,
        "x",
        torch.ones(7),
        torch.ones(4, 3, device="meta"),
        HUGE,
    ),
    *of("optimizer", ("state", 0, "exp_avg_sq"), MISSING, None, torch.ones(3, 4), torch.ones(4, 3).to_sparse()),
    *of("optimizer", ("state", 0, "step"), -1, "x", NAN, None, torch.ones(3), HUGE),
    *of("optimizer", ("state", 0, "momentum_buffer"), torch.ones(4, 3)),
]

AREAS = {"scheduler states": SCHEDULER, "optimizer states": OPTIMIZER}
