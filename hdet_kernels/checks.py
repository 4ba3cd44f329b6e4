"""Checks of arguments that several parts share. Each raises before anything is modified."""

from __future__ import annotations

import math


def check_share(name: str, value: float, *, below_one: bool = False) -> None:
    """Raise ValueError unless ``value`` lies between 0 and 1.

    Args:
        name: the argument's name, for the message.
        value: what was given.
        below_one: whether 1 itself is refused.
    """
    if not (0 <= value < 1 or (value == 1 and not below_one)):
        raise ValueError(f"{name} must lie between 0 and 1{' (excluded)' if below_one else ''}, got {value}")


def check_positive(name: str, value: float) -> None:
    """Raise ValueError unless ``value`` is a positive finite number."""
    if not 0 < value < math.inf:
        raise ValueError(f"{name} must be a positive number, got {value}")


def check_whole(name: str, value: object, *, at_least: int | None = None) -> None:
    """Raise ValueError unless ``value`` is an int (not a bool) of at least ``at_least``."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not whole or (at_least is not None and isinstance(value, int) and value < at_least):
        bound = "" if at_least is None else f" of at least {at_least}"
        raise ValueError(f"{name} must be a whole number{bound}, got {value!r}")


def check_choice(name: str, value: object, choices: tuple[object, ...]) -> None:
    """Raise ValueError unless ``value`` is one of ``choices``: strings by value, everything else by identity."""
    if not any(value is choice or (isinstance(choice, str) and value == choice) for choice in choices):
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")
