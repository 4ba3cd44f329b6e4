"""Buffers that are not finite by design: attention masks, running minima that start at infinity, values not known yet.

Parameters and optimizer state must be finite. Of buffers, an element that is not finite counts as damage only if it
differs between replicas. Elements that are not finite on all replicas alike are left as they are, and so are the
elements of a buffer that began with infinities or NaN, as long as one replica has them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from hdet_kernels.converge.summary import integer_hash
from hdet_kernels.tensors import local

_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def begins_nonfinite(buffer: Tensor) -> bool:
    """Return whether a floating-point buffer has elements that are not finite. Waits for the device."""
    buffer = local(buffer)
    return (buffer.is_floating_point() or buffer.is_complex()) and not bool(buffer.isfinite().all())


def fingerprints(buffers: Iterable[Tensor]) -> list[int]:
    """Return a number for each buffer that changes with its values. Waits for the device, once."""
    sums = []
    for buffer in map(local, buffers):
        real = torch.view_as_real(buffer) if buffer.is_complex() else buffer
        bits = real.view(_BITS[real.element_size()]) if real.is_floating_point() else real
        sums.append(bits.sum(dtype=torch.int64))
    found: list[int] = torch.stack([each.to(sums[0].device) for each in sums]).tolist() if sums else []
    return found


def pattern(buffers: Sequence[Tensor], rows: int, device: torch.device) -> Tensor:
    """Return a hash of where every row is NaN, +∞ and −∞, [rows], on ``device``; 0 where all is finite."""
    kinds = [buffer.isnan().to(torch.int8) + 2 * buffer.isposinf() + 3 * buffer.isneginf() for buffer in buffers]
    clean = integer_hash([torch.zeros_like(kind) for kind in kinds], rows, device)
    found = integer_hash(kinds, rows, device)
    return torch.where(found == clean, 0, found.clamp(min=1))


def finite_part(buffer: Tensor) -> Tensor:
    """Return a copy in which elements that are not finite are zero."""
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
