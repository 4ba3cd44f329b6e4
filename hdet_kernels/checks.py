"""Checks of arguments, the same for all public entry points. Each raises before anything is modified.

Every message has the argument's name, what was expected, the value, and where it helps a remedy. An argument of the
wrong kind (text, None, a bool or a list in the place of a number) raises TypeError. A number out of range, a fraction
in the place of a whole number and an unknown choice raise ValueError, as in torch.

``name`` is how the message names the argument, ``expected`` what it should be, in words that follow "must be", and
``remedy`` what to do instead.

Numbers of numpy count as numbers, and so do tensors and arrays without dimensions. The checks return them as plain
Python numbers, which ``torch.load(weights_only=True)`` reads from a checkpoint.
"""

from __future__ import annotations

import difflib
import inspect
import math
import operator
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any, TypeGuard, TypeVar

import numpy as np
import torch
from torch import Tensor

Kind = TypeVar("Kind")

#: Most steps of a run or a cycle: up to here floats tell all whole numbers apart.
MOST_STEPS = 2**53


def check_number(
    name: str,
    value: object,
    *,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
    remedy: str = "",
) -> float:
    """Return ``value`` as a float; raise unless it is a finite number within the bounds.

    ``at_least`` and ``at_most`` are the lowest and the highest value; it must be greater than ``above`` and less than
    ``below``.
    """
    expected = f"a finite number{_bounds(at_least, above, at_most, below)}"
    number = _float(name, value, expected, remedy)
    if not (math.isfinite(number) and _within(number, at_least, above, at_most, below)):
        raise ValueError(_message(name, value, expected, remedy))
    return number


def check_whole(
    name: str, value: object, *, at_least: int | None = None, at_most: int | None = None, remedy: str = ""
) -> int:
    """Return ``value`` as an int; raise unless it is a whole number (no bool, no float) within the bounds."""
    expected = f"a whole number{_bounds(at_least, None, at_most, None)}"
    given = _real(name, value, expected, remedy)
    if not isinstance(given, Integral) or not _within(given, at_least, None, at_most, None):
        raise ValueError(_message(name, value, expected, remedy))
    return int(given)


def check_steps(name: str, value: object, *, remedy: str = "") -> int:
    """Return ``value`` as an int; raise unless it is a number of steps: whole, of at least 1."""
    number = check_whole(name, value, at_least=1, remedy=remedy)
    if number > MOST_STEPS:
        raise ValueError(_message(name, value, f"a whole number of at least 1 and at most {MOST_STEPS}", remedy))
    return number


def check_share(name: str, value: object, *, below_one: bool = False, remedy: str = "") -> float:
    """Return ``value`` as a float; raise unless it is a number between 0 and 1, or below 1 with ``below_one``."""
    expected = f"a number between 0 and 1{' (excluded)' if below_one else ''}"
    number = _float(name, value, expected, remedy)
    if not (0 <= number < 1 or (number == 1 and not below_one)):
        raise ValueError(_message(name, value, expected.removeprefix("a number "), remedy, verb="lie"))
    return number


def check_positive(name: str, value: object, *, remedy: str = "") -> float:
    """Return ``value`` as a float; raise unless it is a positive finite number."""
    number = _float(name, value, "a positive number", remedy)
    if not 0 < number < math.inf:
        raise ValueError(_message(name, value, "a positive number", remedy))
    return number


def check_choice(name: str, value: object, choices: Sequence[object], *, remedy: str = "") -> None:
    """Raise ValueError unless ``value`` is one of ``choices``: strings by value, everything else by identity."""
    if not any(
        value is choice or (isinstance(choice, str) and isinstance(value, str) and value == choice)
        for choice in choices
    ):
        raise ValueError(_message(name, value, f"one of {', '.join(map(repr, choices))}", remedy))


def check_flag(name: str, value: object, *, remedy: str = "") -> bool:
    """Return ``value`` as a bool; raise ValueError unless it is True or False. Numbers are not taken for flags."""
    if not isinstance(value, bool | np.bool_):
        raise ValueError(_message(name, value, "True or False", remedy))
    return bool(value)


def check_callable(name: str, value: object, call: str, *, takes: int | None = None, remedy: str = "") -> None:
    """Raise TypeError unless ``value`` can be called; ``call`` tells how it will be, as in ``"loss_fn(model)"``.

    With ``takes`` it must take that many positional arguments, as far as its signature is known.
    """
    if not callable(value):
        raise TypeError(_message(name, value, f"callable as {call}", remedy))
    if takes is not None and not accepts(value, *[None] * takes):
        own = f"{spell(value)} that takes {inspect.signature(value)}"
        raise TypeError(f"{name} must be callable as {call}, got {own}{': ' if remedy else ''}{remedy}")


def accepts(function: Callable[..., object], *arguments: object, **keywords: object) -> bool:
    """Return whether a function can be called with these arguments, or may be: some written in C do not tell."""
    try:
        inspect.signature(function).bind(*arguments, **keywords)
    except ValueError:
        return not keywords
    except TypeError:
        return False
    return True


def unexpected_keyword(where: str, name: str, known: Iterable[str], hint: str = "") -> TypeError:
    """Return the error for a keyword that ``where`` does not have; by default it has the most similar one it has."""
    known = list(known)
    close = difflib.get_close_matches(name, known, 1)
    default = f"did you mean {close[0]!r}?" if close else f"it takes {', '.join(known)}"
    return TypeError(f"{where}() got an unexpected keyword argument {name!r}; {hint or default}")


def check_kind(name: str, value: Kind, kind: type[Any], expected: str, *, remedy: str = "") -> Kind:
    """Return ``value``; raise TypeError unless it is an instance of ``kind``, in words ``expected``."""
    if isinstance(value, type) and issubclass(value, kind):
        raise TypeError(f"{name} must be {expected}, got the class {value.__name__} itself: pass an instance of it")
    if not isinstance(value, kind):
        raise TypeError(_message(name, value, expected, remedy))
    return value


def check_sequence(
    name: str, value: object, expected: str, *, length: int | None = None, remedy: str = ""
) -> list[Any]:
    """Return ``value`` as a list; raise unless it is a list, a tuple, an array or a tensor [n], of a given ``length``.

    Text and mappings are no sequences, and neither are generators, which can be read once.
    """
    if isinstance(value, np.ndarray) or (isinstance(value, Tensor) and is_readable(value)):
        value = value.tolist() if value.ndim == 1 else value
    if not is_several(value):
        raise TypeError(_message(name, value, expected, remedy))
    if length is not None and len(value) != length:
        raise ValueError(_message(name, value, expected, remedy))
    return list(value)


def each(check: Callable[..., Kind], name: str, value: object, count: int, of: str, **bounds: Any) -> list[Kind]:
    """Return one checked number for each of ``count`` things: of one number for all, or of a list of as many.

    ``check`` checks one of them, within ``bounds``; ``of`` says what there are so many of.
    """
    if not is_several(value):
        return [check(name, value, **bounds)] * count
    expected = f"one number, or a list of {count}: one for each of the {of}"
    values = check_sequence(name, value, expected, length=count)
    return [check(f"{name}[{index}]", entry, **bounds) for index, entry in enumerate(values)]


def check_iterable(name: str, value: object, expected: str, *, remedy: str = "") -> None:
    """Raise TypeError unless ``value`` can be iterated, at least once. Text and mappings count as single things."""
    single = isinstance(value, str | bytes | bytearray | Mapping)
    single = single or (isinstance(value, Tensor) and value.is_nested)
    if single or not isinstance(value, Iterable) or (isinstance(value, np.ndarray | Tensor) and value.ndim == 0):
        raise TypeError(_message(name, value, expected, remedy))


def is_several(value: object) -> TypeGuard[Sequence[Any]]:
    """Return whether ``value`` is a sequence or an array [n]. Text is not."""
    if isinstance(value, np.ndarray):
        return value.ndim == 1
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray)


def keep_plain(instance: object, **values: object) -> None:
    """Set fields of a frozen dataclass, in its ``__post_init__``, to the plain values that the checks returned."""
    for name, value in values.items():
        object.__setattr__(instance, name, value)


def is_readable(tensor: Tensor) -> bool:
    """Return whether a tensor is a dense one with values: not sparse, nested, quantized or on the meta device."""
    return tensor.layout is torch.strided and not (tensor.is_nested or tensor.is_quantized or tensor.is_meta)


def is_real(tensor: Tensor) -> bool:
    """Return whether a tensor has real numbers that can be read: :func:`is_readable`, no complex ones and no flags."""
    return is_readable(tensor) and not tensor.is_complex() and tensor.dtype is not torch.bool


def spell(value: object) -> str:
    """Return ``value`` as messages show it: short, and without waiting for a device."""
    if isinstance(value, Tensor):
        if not value.is_nested and value.dim() == 0 and value.device.type == "cpu" and is_readable(value):
            return f"tensor({value.item()})"
        kind = "nested" if value.is_nested else "quantized" if value.is_quantized else ""
        kind = kind or str(value.layout).removeprefix("torch.").removesuffix("strided").removesuffix("_coo")
        shape = "" if value.is_nested else f" of shape {tuple(value.shape)}"
        return f"a {kind}{' ' * bool(kind)}tensor{shape}, {value.dtype}, on {value.device}"
    if isinstance(value, np.generic):
        return repr(value.item())
    if isinstance(value, np.ndarray):
        return f"an array of shape {value.shape}"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    text = _SHORT.repr(value)
    # Texts of modules take many lines, and addresses tell nothing.
    if "\n" in text or text.startswith("<"):
        kind = type(value).__name__
        return f"{'an' if kind[0] in 'AEIOUaeiou' else 'a'} {kind}"
    return text


def _real(name: str, value: object, expected: str, remedy: str) -> Any:
    """Return a real number as it is, or that of a tensor without dimensions; raise TypeError for anything else."""
    if isinstance(value, Tensor):
        if not is_real(value) or value.dim():
            raise TypeError(_message(name, value, expected, remedy))
        return value.item()
    if type(value) is np.ndarray and value.ndim == 0:
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(_message(name, value, expected, remedy))
    return value


def _float(name: str, value: object, expected: str, remedy: str) -> float:
    """Return a real number as a float, infinite if it is beyond their range; raise TypeError for anything else."""
    given = _real(name, value, expected, remedy)
    try:
        return float(given)
    except OverflowError:
        return math.inf if given > 0 else -math.inf


def _message(name: str, value: object, expected: str, remedy: str, verb: str = "be") -> str:
    return f"{name} must {verb} {expected}, got {spell(value)}{': ' if remedy else ''}{remedy}"


# A ``repr`` whose texts are short, whatever the value; one that raises is named by its class.
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 120
_SHORT.maxlist = _SHORT.maxtuple = _SHORT.maxset = _SHORT.maxdict = 4


# The limits of a number in their order, at_least, above, at_most and below: in words, and what they ask.
_LIMITS = (("of at least", operator.ge), ("above", operator.gt), ("of at most", operator.le), ("below", operator.lt))


def _bounds(*limits: float | None) -> str:
    """Return the limits in words, to follow "a number"."""
    at_least, _, at_most, _ = limits
    if at_least is not None and at_most is not None:
        return f" from {at_least} to {at_most}"
    found = [f"{words} {limit}" for (words, _), limit in zip(_LIMITS, limits, strict=True) if limit is not None]
    return f" {' and '.join(found)}" if found else ""


def _within(number: Any, *limits: float | None) -> bool:
    return all(limit is None or holds(number, limit) for (_, holds), limit in zip(_LIMITS, limits, strict=True))
