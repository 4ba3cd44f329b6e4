"""Summarise the tensors of a replica for the handshake: hashes of their layout, checksums, and what is not finite."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hdet_kernels import ops
from hdet_kernels.ops.chunks import ChunkTable, StackedTable
from hdet_kernels.tensors import Slot, local, wide_dtype


@dataclass(frozen=True)
class TensorSummary:
    """The numbers that a process sends about the tensors of its replicas. Tensors are [rows]."""

    layout: int  # hash of names, shapes, strides, dtypes and ties of parameters and buffers
    state: int  # the same of the optimizer state; 0 if there is none
    moments: Tensor  # checksums of the optimizer state
    coded: Tensor  # hashes of optimizer state of which a part has no mean; 0 if there is none
    counts: int  # hash of the optimizer's step counts
    integers: Tensor  # hashes of the values of integer buffers
    checksum: Tensor  # checksums of the parameters
    rest: Tensor  # checksums of the optimizer state and the finite part of the buffers
    nonfinite: Tensor  # hashes of where buffers are not finite; 0 where they are
    masks: bool  # whether a buffer has changed that was not finite at the start
    consensus: Tensor | float  # of the last consensus, which compressed differences refer to; NaN without one
    outer: Tensor | float  # of the place that the outer step starts from; NaN without one
    #: Returns a readable description of ``"layout"`` or ``"state"``, by tensor, or the names of tensors that are not
    #: ``"finite"``, by row, for error messages.
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


# The most tables of norms that are cached: one sync needs a few.
MOST_TABLES = 256


class Checksum:
    """The fp64 norm of all given tensors, in one kernel launch whatever their number.

    It is finite exactly if all elements are. It differs, except for chance collisions, where the elements do. Where the
    squares of fp64 elements overflow, their largest magnitude takes the place of the norm.
    """

    def __init__(self, rows: int, backend: str | None) -> None:
        self.rows, self.backend = rows, backend
        self._tables: dict[object, ChunkTable] = {}

    def __call__(self, tensors: Iterable[Tensor], device: torch.device) -> Tensor:
        """Return the checksum of every row, [rows], on ``device``."""
        alike: dict[tuple[torch.device, bool], list[Tensor]] = {}
        for tensor in tensors:
            if tensor.numel():
                alike.setdefault((tensor.device, tensor.dtype == torch.float64), []).append(tensor)
        groups = [alike[kind] for kind in sorted(alike, key=str)] if len(alike) > 1 else list(alike.values())
        if not groups:
            return torch.zeros(self.rows, dtype=wide_dtype(device), device=device)
        total = self._norm(groups[0]).to(device)
        for weight, group in enumerate(groups[1:], start=2):
            total = total + weight * self._norm(group).to(device)
        return total

    def _norm(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the norm of tensors of one device, all of them fp64 or none."""
        table = self._table(tensors)
        norm = ops.grad_norm(table, table.match(tensors), rows=self.rows, backend=self.backend)
        if table.dtype != torch.float64:
            return norm
        largest = torch.stack([tensor.reshape(self.rows, -1).abs().amax(dim=1) for tensor in tensors]).amax(dim=0)
        # Divided, so that the weighted sum of several norms stays finite.
        return torch.where(norm.isinf(), largest / 2**8, norm)

    def _table(self, tensors: Sequence[Tensor]) -> ChunkTable:
        sizes = tuple(tensor.numel() // self.rows for tensor in tensors)
        device, dtype = tensors[0].device, torch.float64 if tensors[0].dtype == torch.float64 else torch.float32
        key = (device, dtype, sizes)
        if key not in self._tables:
            if len(self._tables) == MOST_TABLES:
                self._tables.clear()
            *starts, end = itertools.accumulate(sizes, initial=0)
            slots = [Slot(0, start, size, (size,), (1,)) for start, size in zip(starts, sizes, strict=True)]
            table_rows = [0] * len(slots)  # a norm reads no hyperparameters
            self._tables[key] = (
                ChunkTable(slots, table_rows, device, dtype)
                if self.rows == 1
                else StackedTable(
                    *(slots, table_rows, device, dtype),
                    replicas=self.rows,
                    row_stride=end,
                    table_rows_per_replica=0,
                    shares_state=False,
                )
            )
        return self._tables[key]


# Large odd numbers without a pattern, within 64 bits.
_ODD = (0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9, 0x14D049BB133111EB)

# Elements that are hashed at once: the copies take 8 bytes each, and state in 8 bits can fill a device.
_SLICE = 2**22


def integer_hash(tensors: Sequence[Tensor], rows: int, device: torch.device) -> Tensor:
    """Return a 48-bit hash of the values of every row, [rows], on ``device``."""
    total = torch.zeros(rows, dtype=torch.int64, device=device)
    for number, tensor in enumerate(tensors):
        whole = tensor.reshape(rows, -1)
        for start in range(0, whole.shape[1], _SLICE):
            values = whole[:, start : start + _SLICE].to(torch.int64)
            # Value and place are mixed before they are added. Otherwise changes at several places could cancel out.
            places = torch.arange(number + start, number + start + values.shape[1], device=values.device)
            mixed = (values + places * _ODD[0]) * _ODD[1]
            mixed = (mixed ^ (mixed >> 31)) * _ODD[2]
            total += (mixed ^ (mixed >> 29)).sum(dim=1).to(device)
    return total % 2**48


def bit_hash(tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    """Return a 48-bit hash, above 0, of the bits of tensors of any dtype, on ``device``; 0 if there are none."""
    integers = [_bits(tensor) for tensor in tensors]
    if not integers:
        return torch.zeros((), dtype=torch.int64, device=device)
    return integer_hash(integers, 1, device)[0].clamp(min=1)


# Buffers that are not finite by design: attention masks, running minima that start at infinity, values not known yet.
#
# Parameters and optimizer state must be finite. Of buffers, an element that is not finite counts as damage only if it
# differs between replicas. Elements that are not finite on all replicas alike are left as they are, and so are the
# elements of a buffer that began with infinities or NaN, as long as one replica has them.

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _bits(tensor: Tensor) -> Tensor:
    """Return integers with the bits of a tensor."""
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return real.view(_BITS[real.element_size()]) if real.is_floating_point() else real


def begins_nonfinite(buffer: Tensor) -> bool:
    """Return whether a floating-point buffer has elements that are not finite. Waits for the device."""
    buffer = local(buffer)
    return (buffer.is_floating_point() or buffer.is_complex()) and not bool(buffer.isfinite().all())


def fingerprints(buffers: Iterable[Tensor]) -> list[int]:
    """Return a number for each buffer that changes with its values. Waits for the device, once."""
    sums = [_bits(buffer).sum(dtype=torch.int64) for buffer in map(local, buffers)]
    found: list[int] = torch.stack([each.to(sums[0].device) for each in sums]).tolist() if sums else []
    return found


def pattern(buffers: Sequence[Tensor], rows: int, device: torch.device) -> Tensor:
    """Return a hash of where every row is NaN, +∞ and −∞, [rows], on ``device``; 0 where all is finite."""
    kinds = [buffer.isnan().to(torch.int8) + 2 * buffer.isposinf() + 3 * buffer.isneginf() for buffer in buffers]
    clean = integer_hash([torch.zeros_like(kind) for kind in kinds], rows, device)
    found = integer_hash(kinds, rows, device)
    return torch.where(found == clean, 0, found.clamp(min=1))


def finite_part(buffer: Tensor) -> Tensor:
    return buffer.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)


def keep_own(averaged: Tensor, own: Tensor, healthy: Sequence[bool]) -> None:
    """Give the elements whose mean is not finite back to the replicas, the rows, that were healthy.

    The others take the mean, which has the infinities that the healthy replicas share.
    """
    kept = ~averaged.isfinite()
    if not all(healthy):
        kept.view(len(healthy), -1)[[not fine for fine in healthy]] = False
    averaged.copy_(torch.where(kept, own, averaged))


def names_of_nonfinite(labelled: Iterable[tuple[str, Tensor]], rows: int) -> dict[str, list[str]]:
    """Return the labels of the tensors that are not finite, by row. For error messages: it waits for every tensor."""
    found: dict[str, list[str]] = {str(row): [] for row in range(rows)}
    for label, tensor in labelled:
        if not (tensor.numel() and (tensor.is_floating_point() or tensor.is_complex())):
            continue
        for row, fine in enumerate(tensor.reshape(rows, -1).isfinite().all(dim=1).tolist()):
            if not fine:
                found[str(row)].append(label)
    return found
