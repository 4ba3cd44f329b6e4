"""A row of the table of malformed calls, and the values that are malformed in the place of a number."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

Errors = type[BaseException] | tuple[type[BaseException], ...]


@dataclass(frozen=True)
class Row:
    """One malformed call.

    Args:
        name: the call in words, unique in the table.
        call: makes the call on a fresh world.
        error: the exception that it raises.
        message: a regular expression that the message matches.
        world: ``"run"`` or ``"stack"``: the world that the call is made on.
    """

    name: str
    call: Callable[[Any], object]
    error: Errors
    message: str
    world: str = "run"


#: What is no number: the value, and how a message shows it.
NOT_NUMBERS: dict[str, tuple[Any, str]] = {
    "None": (None, "None"),
    "text": ("0.5", r"'0\.5'"),
    "a flag": (True, "True"),
    "a dict": ({}, r"\{\}"),
    "complex": (1j, "1j"),
    "a tensor of two": (torch.ones(2), r"a tensor of shape \(2,\)"),
    "a meta tensor": (torch.ones((), device="meta"), r"a tensor of shape \(\)"),
    "a generator": ((number for number in [0.5]), "a generator"),
}

NAN, INF = math.nan, math.inf

#: Values that are no factor within which a learning rate is right.
NO_TRUST: tuple[Any, ...] = (0.5, 0, -3.0, NAN, INF, "3", True, [3.0])


def wrong_kinds(
    argument: str, call: Callable[..., object], expected: str, *, leave_out: Iterable[str] = (), world: str = "run"
) -> list[Row]:
    """Return rows that pass what is no number as ``argument``; each raises TypeError.

    Args:
        argument: the name of the argument, as messages have it.
        call: called with the world and the value.
        expected: a regular expression of the expectation in the message.
        leave_out: kinds that the argument accepts, or refuses otherwise.
        world: the world that the calls are made on.
    """
    return [
        Row(
            f"{argument} is {kind}",
            _with(call, value),
            TypeError,
            rf"{argument}.* must be {expected}.* got {spelled}",
            world,
        )
        for kind, (value, spelled) in NOT_NUMBERS.items()
        if kind not in tuple(leave_out)
    ]


def out_of_range(
    argument: str, call: Callable[..., object], expected: str, *values: Any, world: str = "run"
) -> list[Row]:
    """Return rows that pass ``values`` as ``argument``; each raises ValueError with the expectation and the value."""
    return [
        Row(
            f"{argument}={value!r}",
            _with(call, value),
            ValueError,
            rf"{argument}.* must (be|lie) {expected}.* got {re.escape(str(value)[:40])}",
            world,
        )
        for value in values
    ]


def _with(call: Callable[..., object], value: object) -> Callable[[Any], object]:
    return lambda world: call(world, value)


def each(
    call: Callable[..., object], error: Any, message: str, *values: Any, world: str = "run", what: str = ""
) -> list[Row]:
    """Return a row for each value that ``call`` is made with."""
    return [
        Row(f"{what}{value!r}"[:50] + f" ({index})", lambda w, value=value: call(w, value), error, message, world)
        for index, value in enumerate(values)
    ]


def named(prefix: str, rows: Iterable[Row]) -> list[Row]:
    """Return the rows with ``prefix`` before their names."""
    return [Row(f"{prefix}: {row.name}", row.call, row.error, row.message, row.world) for row in rows]
