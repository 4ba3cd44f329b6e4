"""A row of the table of malformed calls, and the values that are malformed in the place of a number."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

import torch

Errors = type[BaseException] | tuple[type[BaseException], ...]
#: Makes a call on a world with the keywords that it is given.
Entry = Callable[..., object]

NAN, INF = math.nan, math.inf
#: Whole numbers beyond the range of floats.
BEYOND = (10**400, -(10**400))
BOTH = (TypeError, ValueError)

#: 10⁹ elements that take the memory of one.
HUGE = torch.zeros(1).expand(10**9)

#: What is no number.
NOT_NUMBERS: dict[str, Any] = {
    "None": None,
    "text": "0.5",
    "a flag": True,
    "a dict": {},
    "complex": 1j,
    "a tensor of two": torch.ones(2),
    "a meta tensor": torch.ones((), device="meta"),
    "a sparse tensor": torch.tensor(0.5).to_sparse(),
    "a nested tensor": torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged),
    "a generator": (number for number in [0.5]),
}


@dataclass(frozen=True)
class Row:
    """One malformed call.

    Args:
        name: the call in words, unique in its area.
        call: makes the call on a fresh world.
        error: the exception that it raises.
        argument: the name that its message has: of the argument, or of what to call or to pass instead.
        world: ``"run"`` or ``"stack"``: the world that the call is made on.
    """

    name: str
    call: Callable[[Any], object]
    error: Errors
    argument: str
    world: str = "run"


def refused(
    entry: Entry, keyword: str, error: Errors, *values: Any, argument: str = "", world: str = "run", **others: Any
) -> list[Row]:
    """Return a row for each value that is passed as ``keyword``.

    Args:
        argument: the name that the message has, if it is not the keyword.
        others: keywords that are passed beside it.
    """
    return [
        Row(
            f"{keyword}={value!r}"[:50] + f" ({index}{argument}{' '.join(others)})",
            lambda world, value=value: entry(world, **{**others, keyword: value}),
            error,
            argument or keyword,
            world,
        )
        for index, value in enumerate(values)
    ]


def number(entry: Entry, keyword: str, *values: Any, accepts: Iterable[str] = (), argument: str = "") -> list[Row]:
    """Return rows for an argument that is a number: TypeError for what is none, ValueError for ``values``.

    Args:
        accepts: the kinds of :data:`NOT_NUMBERS` that the argument takes.
    """
    kinds = [value for kind, value in NOT_NUMBERS.items() if kind not in tuple(accepts)]
    return [
        *refused(entry, keyword, TypeError, *kinds, argument=argument),
        *refused(entry, keyword, ValueError, *values, argument=argument),
    ]


def optional(entry: Entry, keyword: str, *values: Any, argument: str = "") -> list[Row]:
    """Return the rows of :func:`number` for an argument that may be None."""
    return number(entry, keyword, *values, accepts=["None"], argument=argument)


def flags(entry: Entry, *keywords: str) -> list[Row]:
    """Return rows for arguments that are True or False."""
    return [row for keyword in keywords for row in refused(entry, keyword, ValueError, "no", 1, None)]


def built(function: Callable[..., object], **given: Any) -> Entry:
    """Return an entry that calls a function with the keywords of a good call and one other."""
    return lambda world, **keywords: function(**{**given, **keywords})


def method(path: str) -> Entry:
    """Return an entry that calls a method of a world, such as ``scheduler.step``, with a value."""
    return lambda world, **keyword: attrgetter(path)(world)(*keyword.values())


def named(prefix: str, rows: Iterable[Row], world: str = "run") -> list[Row]:
    """Return the rows with ``prefix`` before their names."""
    return [replace(row, name=f"{prefix}: {row.name}", world=world) for row in rows]
