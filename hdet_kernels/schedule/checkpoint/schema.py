"""Describe how saved values must look, and find the first that does not.

A schema is a tree of the small classes below, with one for every value. ``check(value, path)`` raises ValueError and
names the path, what is there and what was expected. ``state_schema.py`` has the schema of a scheduler's checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from torch import Tensor


class Schema(Protocol):
    """Anything that can check a value."""

    def check(self, value: Any, path: str) -> None:
        """Raise ValueError, naming ``path``, unless ``value`` is as expected."""


class UnknownFields(ValueError):
    """A dict has entries that nobody knows: their paths are ``args``."""


def refuse(path: str, expected: str, value: object) -> ValueError:
    """Return the error for a value that is not as expected."""
    if isinstance(value, Tensor):
        shown = f"a {str(value.dtype).removeprefix('torch.')} tensor of shape {tuple(value.shape)} on {value.device}"
    elif isinstance(value, list | tuple | dict):
        shown = f"a {type(value).__name__} of {len(value)} entries"
    else:
        shown = repr(value)[:80]
    return ValueError(f"the checkpoint's {path} must be {expected}, got {shown}: load an undamaged checkpoint")


def equal(saved: object, here: object) -> bool:
    """Return whether two plain values are equal; a bool equals no number."""
    try:
        return isinstance(saved, bool) is isinstance(here, bool) and bool(saved == here)
    except Exception:  # values of other kinds, such as tensors, may not have a truth value
        return False


@dataclass(frozen=True)
class Whole:
    """A whole number in a range."""

    lowest: int = 0
    highest: int | None = None

    def check(self, value: Any, path: str) -> None:
        whole = isinstance(value, int) and not isinstance(value, bool)
        if not whole or value < self.lowest or (self.highest is not None and value > self.highest):
            bound = f"of at least {self.lowest}" if self.highest is None else f"from {self.lowest} to {self.highest}"
            raise refuse(path, f"a whole number {bound}", value)


@dataclass(frozen=True)
class Number:
    """A number in a range; ``finite=False`` admits NaN and infinities, whatever the range."""

    lowest: float = -math.inf
    highest: float = math.inf
    finite: bool = True

    def check(self, value: Any, path: str) -> None:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if number and not self.finite and not math.isfinite(value):
            return
        if not number or not math.isfinite(value) or not self.lowest <= value <= self.highest:
            ends = math.isfinite(self.lowest), math.isfinite(self.highest)
            bound = f" from {self.lowest:g} to {self.highest:g}" if all(ends) else ""
            bound = f" of at least {self.lowest:g}" if ends == (True, False) else bound
            raise refuse(path, f"a {'finite ' if self.finite else ''}number{bound}", value)


@dataclass(frozen=True)
class Flag:
    """True or False."""

    def check(self, value: Any, path: str) -> None:
        if not isinstance(value, bool):
            raise refuse(path, "True or False", value)


@dataclass(frozen=True)
class Text:
    """A string; with ``choices`` one of them."""

    choices: tuple[str, ...] = ()

    def check(self, value: Any, path: str) -> None:
        if not isinstance(value, str) or (self.choices and value not in self.choices):
            raise refuse(path, f"one of {', '.join(map(repr, self.choices))}" if self.choices else "a string", value)


@dataclass(frozen=True)
class Missing:
    """None and nothing else; ``why`` says what would have to be different."""

    why: str

    def check(self, value: Any, path: str) -> None:
        if value is not None:
            raise refuse(path, f"None ({self.why})", value)


@dataclass(frozen=True)
class Maybe:
    """None, or as ``inner`` says."""

    inner: Schema

    def check(self, value: Any, path: str) -> None:
        if value is not None:
            self.inner.check(value, path)


@dataclass(frozen=True)
class EmptyOr:
    """An empty dict, or as ``inner`` says."""

    inner: Schema

    def check(self, value: Any, path: str) -> None:
        if value != {}:
            self.inner.check(value, path)


@dataclass(frozen=True)
class Items:
    """A list of values that are all alike, of one of the given lengths, or of any length."""

    inner: Schema
    lengths: tuple[int, ...] = ()
    longest: int | None = None

    def check(self, value: Any, path: str) -> None:
        if not isinstance(value, list | tuple):
            raise refuse(path, "a list", value)
        too_long = self.longest is not None and len(value) > self.longest
        if too_long or (self.lengths and len(value) not in self.lengths):
            lengths = " or ".join(map(str, self.lengths)) or f"at most {self.longest}"
            raise refuse(path, f"a list of {lengths} entries", value)
        for number, entry in enumerate(value):
            self.inner.check(entry, f"{path}[{number}]")


@dataclass(frozen=True)
class InOrder:
    """A list with one entry for each schema."""

    inner: tuple[Schema, ...]

    def check(self, value: Any, path: str) -> None:
        if not isinstance(value, list | tuple) or len(value) != len(self.inner):
            raise refuse(path, f"a list of {len(self.inner)} entries", value)
        for number, (schema, entry) in enumerate(zip(self.inner, value, strict=True)):
            schema.check(entry, f"{path}[{number}]")


@dataclass(frozen=True)
class ByName:
    """A dict of values that are all alike, with any names, or with exactly the given ones."""

    inner: Schema
    names: tuple[str, ...] | None = None

    def check(self, value: Any, path: str) -> None:
        if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
            raise refuse(path, "a dict with names as keys", value)
        if self.names is not None and set(value) != set(self.names):
            raise refuse(path, f"a dict of {', '.join(self.names)}", ", ".join(value))
        for name, entry in value.items():
            self.inner.check(entry, f"{path}.{name}")


@dataclass(frozen=True)
class Fields:
    """A dict with one schema for each entry, and no others."""

    fields: Mapping[str, Schema]
    optional: frozenset[str] = frozenset()

    def check(self, value: Any, path: str) -> None:
        if not isinstance(value, dict):
            raise refuse(path, "a dict", value)
        if missing := [f"{path}.{name}" for name in self.fields if name not in value and name not in self.optional]:
            raise ValueError(f"the checkpoint has no {', '.join(missing)}: load an undamaged checkpoint")
        if unknown := [f"{path}.{name}" for name in value if name not in self.fields]:
            raise UnknownFields(*unknown)
        for name, schema in self.fields.items():
            if name in value:
                schema.check(value[name], f"{path}.{name}")


@dataclass(frozen=True)
class TensorOf:
    """A tensor with values: floating-point unless ``integers``; ``shape`` None is any, and -1 in it any length."""

    shape: tuple[int, ...] | None = None
    finite: bool = True
    integers: bool = False

    def check(self, value: Any, path: str) -> None:
        if not isinstance(value, Tensor) or value.is_meta or (value.is_floating_point() is self.integers):
            raise refuse(path, f"a{'n integer' if self.integers else ' floating-point'} tensor", value)
        if self.shape is not None:
            fits = len(self.shape) == value.dim()
            if not fits or any(want not in (-1, n) for want, n in zip(self.shape, value.shape, strict=True)):
                raise refuse(path, f"a tensor of shape {tuple(self.shape)}", value)
        if self.finite and not self.integers and not bool(value.isfinite().all()):
            raise ValueError(f"the checkpoint's {path} has values that are not finite: load an undamaged checkpoint")


@dataclass(frozen=True)
class AnyTensor:
    """A tensor with values, of any kind and shape."""

    def check(self, value: Any, path: str) -> None:
        if not isinstance(value, Tensor) or value.is_meta:
            raise refuse(path, "a tensor", value)


@dataclass(frozen=True)
class FlatTensors:
    """A list of 1-D tensors that together have ``numel`` elements, however they are cut; None: any number."""

    numel: int | None = None

    def check(self, value: Any, path: str) -> None:
        # The size comes first: a tensor of one element can claim to be as large as memory allows.
        Items(TensorOf((-1,), finite=False)).check(value, path)
        found = sum(tensor.numel() for tensor in value)
        if self.numel is not None and found != self.numel:
            raise ValueError(
                f"the checkpoint's {path} has {found} elements, this model has {self.numel}: resume with the model "
                "that it was saved with"
            )
        Items(TensorOf((-1,))).check(value, path)


@dataclass(frozen=True)
class OneOf:
    """As the first schema says, or as the second does."""

    first: Schema
    second: Schema

    def check(self, value: Any, path: str) -> None:
        try:
            self.first.check(value, path)
        except ValueError:
            self.second.check(value, path)


#: A learning rate: a number, or a tensor of one.
RATE = OneOf(OneOf(TensorOf(()), TensorOf((1,))), Number(0))


@dataclass(frozen=True)
class EqualTo:
    """The value that this scheduler has: it follows from the arguments of its constructor."""

    own: Any

    def check(self, value: Any, path: str) -> None:
        if not equal(value, self.own):
            raise ValueError(
                f"the checkpoint was made with {path}={value!r:.80}, this scheduler has {self.own!r:.80}: build it "
                "with the arguments of the saved run"
            )


@dataclass(frozen=True)
class Like:
    """A value of the same structure as an example: for the state of objects whose code is not ours.

    Numbers are finite where the example's are. Where the example is None or empty, anything is accepted.

    Args:
        example: the example.
        named: schemas of entries that are known by their name, wherever they are.
        fixed: names of entries that must be equal to the example's.
    """

    example: Any
    named: Mapping[str, Schema] = field(default_factory=dict)
    fixed: tuple[str, ...] = ()

    def of(self, name: Any) -> Schema:
        """Return the schema of an entry of the example."""
        if name in self.fixed:
            return EqualTo(self.example[name])
        return self.named.get(name) or replace(self, example=self.example[name])

    def check(self, value: Any, path: str) -> None:
        example = self.example
        if isinstance(example, dict) and example:
            if not isinstance(value, dict):
                raise refuse(path, "a dict", value)
            # Names with an underscore are details that differ between versions of torch.
            if missing := [f"{path}.{name}" for name in example if name not in value and str(name)[:1] != "_"]:
                raise ValueError(f"the checkpoint has no {', '.join(missing)}: load an undamaged checkpoint")
            for name in example.keys() & value.keys():
                self.of(name).check(value[name], f"{path}.{name}")
        elif isinstance(example, list | tuple) and example:
            InOrder(tuple(replace(self, example=entry) for entry in example)).check(value, path)
        elif isinstance(example, bool):
            Flag().check(value, path)
        elif isinstance(example, str):
            Text().check(value, path)
        elif isinstance(example, int | float) or (isinstance(example, Tensor) and example.numel() == 1):
            if isinstance(value, Tensor):
                TensorOf(tuple(example.shape) if isinstance(example, Tensor) else ()).check(value, path)
            else:
                Number(finite=math.isfinite(example)).check(value, path)
        elif isinstance(example, Tensor):
            TensorOf(tuple(example.shape), finite=False, integers=not example.is_floating_point()).check(value, path)
