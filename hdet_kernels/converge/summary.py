"""Summarise the tensors of a replica for the handshake: hashes of their layout and checksums of their values."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hdet_kernels import ops
from hdet_kernels.ops.chunks import ChunkTable, MatchedGradients, StackedTable
from hdet_kernels.ops.live_layouts import LiveLayouts
from hdet_kernels.tensors import Slot, wide_dtype


@dataclass(frozen=True)
class TensorSummary:
    """The numbers that a process sends about the tensors of its replicas.

    Attributes:
        layout: hash of names, shapes, strides, dtypes and ties of parameters and buffers.
        state: the same of the optimizer state; 0 if there is none.
        counts: hash of the optimizer's step counts.
        integers: [rows] hashes of the values of integer buffers.
        checksum: [rows] checksums of the parameters.
        rest: [rows] checksums of the optimizer state and the finite part of the buffers.
        nonfinite: [rows] hashes of where buffers are not finite; 0 where they are.
        masks: whether a buffer has changed that was not finite at the start.
        consensus: checksum of the last consensus, which compressed differences refer to; NaN if none is remembered.
        outer: checksum of the place that the outer step starts from; NaN without one.
        describe: returns a readable description of ``"layout"`` or ``"state"``, by tensor, or the names of tensors
            that are not ``"finite"``, by row, for error messages.
    """

    layout: int
    state: int
    counts: int
    integers: Tensor
    checksum: Tensor
    rest: Tensor
    nonfinite: Tensor
    masks: bool
    consensus: Tensor | float
    outer: Tensor | float
    describe: Callable[[str], Mapping[str, Any]]


def describe_layout(
    tensors: Iterable[Tensor], names: Iterable[str] | None = None, labels: Iterable[str] | None = None
) -> dict[str, Any]:
    """Return dtype, shape and strides of every tensor by name, after the number of tensors and of elements.

    Without ``names`` the keys are places in the order. ``labels`` are put in front of the descriptions.
    """
    tensors = list(tensors)
    names = [f"tensor {number}" for number in range(len(tensors))] if names is None else list(names)
    prefixes = [""] * len(tensors) if labels is None else [f"{label}: " for label in labels]
    return {
        "tensors": len(tensors),
        "elements": sum(tensor.numel() for tensor in tensors),
        **{
            name: f"{prefix}{str(t.dtype).removeprefix('torch.')} {tuple(t.shape)} with strides {t.stride()}"
            for name, prefix, t in zip(names, prefixes, tensors, strict=True)
        },
    }


# The fewest tensors of which it is kept where they lie, and the most lists of tensors for which that is kept.
MANY, MOST_KNOWN = 64, 8


@dataclass(frozen=True)
class _Alike:
    """Tensors of one device, all of them fp64 or none, by their numbers; the table of their norm, and its entries."""

    numbers: Sequence[int]
    table: ChunkTable
    matched: MatchedGradients

    def of(self, tensors: Sequence[Tensor]) -> _Alike:
        """Return the same of ``tensors``, all those that the numbers count, with the same layouts; of none if empty."""
        own = [tensors[number] for number in self.numbers] if tensors else []
        return replace(self, matched=replace(self.matched, tensors=own))


class Checksum:
    """The fp64 norm of all given tensors, in one kernel launch whatever their number.

    It is finite exactly if all elements are. It differs, except for chance collisions, where the elements do. Where the
    squares of fp64 elements overflow, their largest magnitude takes the place of the norm.
    """

    def __init__(self, rows: int, backend: str | None) -> None:
        self.rows, self.backend = rows, backend
        self._tables: dict[object, ChunkTable] = {}
        self._known: dict[tuple[int, int], tuple[LiveLayouts, list[_Alike]]] = {}

    def __call__(self, tensors: Iterable[Tensor], device: torch.device) -> Tensor:
        """Return the checksum of every row, [rows], on ``device``."""
        total = torch.zeros(self.rows, dtype=wide_dtype(device), device=device)
        for weight, alike in enumerate(self._groups(list(tensors)), start=1):
            total += weight * self._norm(alike).to(device)
        return total

    def _groups(self, tensors: Sequence[Tensor]) -> list[_Alike]:
        """Return the groups of tensors. Those of many CPU tensors are kept, while these have the same layouts."""
        if len(tensors) < MANY or not tensors[0].is_cpu:
            return self._found(tensors)
        key = (len(tensors), id(tensors[0]))
        if (known := self._known.get(key)) is not None and known[0].match(tensors):
            return [alike.of(tensors) for alike in known[1]]
        groups = self._found(tensors)
        if not any(alike.matched.copied for alike in groups):
            if len(self._known) == MOST_KNOWN:
                self._known.clear()
            layouts = LiveLayouts()
            layouts.remember(tensors)
            self._known[key] = layouts, [alike.of(()) for alike in groups]
        return groups

    def _found(self, tensors: Sequence[Tensor]) -> list[_Alike]:
        kinds: dict[tuple[torch.device, bool], list[int]] = {}
        for number, tensor in enumerate(tensors):
            if tensor.numel():
                kinds.setdefault((tensor.device, tensor.dtype == torch.float64), []).append(number)
        ordered = sorted(kinds.items(), key=lambda item: str(item[0]))
        return [self._alike(numbers, [tensors[number] for number in numbers]) for _, numbers in ordered]

    def _alike(self, numbers: Sequence[int], tensors: Sequence[Tensor]) -> _Alike:
        sizes = tuple(tensor.numel() // self.rows for tensor in tensors)
        device, wide_elements = tensors[0].device, tensors[0].dtype == torch.float64
        key = (device, wide_elements, sizes)
        if key not in self._tables:
            *starts, end = itertools.accumulate(sizes, initial=0)
            slots = [Slot(0, start, size, (size,), (1,)) for start, size in zip(starts, sizes, strict=True)]
            dtype = torch.float64 if wide_elements else torch.float32
            table_rows = [0] * len(slots)  # a norm reads no hyperparameters
            self._tables[key] = (
                ChunkTable(slots, table_rows, device, dtype)
                if self.rows == 1
                else StackedTable(
                    slots,
                    table_rows,
                    device,
                    dtype,
                    replicas=self.rows,
                    row_stride=end,
                    table_rows_per_replica=0,
                    shares_state=False,
                )
            )
        table = self._tables[key]
        return _Alike(numbers, table, table.match(tensors))

    def _norm(self, alike: _Alike) -> Tensor:
        norm = ops.grad_norm(alike.table, alike.matched, rows=self.rows, backend=self.backend)
        if alike.table.dtype != torch.float64:
            return norm
        present = [tensor for tensor in alike.matched.tensors if tensor is not None]
        largest = torch.stack([tensor.reshape(self.rows, -1).abs().amax(dim=1) for tensor in present]).amax(dim=0)
        # Divided, so that the weighted sum of several norms stays finite.
        return torch.where(norm.isinf(), largest / 2**8, norm)


# Large odd numbers without a pattern, within 64 bits.
_ODD = (0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9, 0x14D049BB133111EB)


def integer_hash(tensors: Sequence[Tensor], rows: int, device: torch.device) -> Tensor:
    """Return a 48-bit hash of the values of every row, [rows], on ``device``."""
    total = torch.zeros(rows, dtype=torch.int64, device=device)
    for number, tensor in enumerate(tensors):
        values = tensor.reshape(rows, -1).to(torch.int64)
        # Value and place are mixed before they are added. Otherwise changes at several places could cancel out.
        places = torch.arange(number, number + values.shape[1], device=values.device)
        mixed = (values + places * _ODD[0]) * _ODD[1]
        mixed = (mixed ^ (mixed >> 31)) * _ODD[2]
        total += (mixed ^ (mixed >> 29)).sum(dim=1).to(device)
    return total % 2**48
