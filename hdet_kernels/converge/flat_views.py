"""Flat views of tensors of any shape, which collectives and kernels work on."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hdet_kernels.tensors import flat_view, has_overlap, is_dense, local

#: For tensors with gaps in memory, a contiguous copy and the tensor that it is written back to.
Gapped = list[tuple[Tensor, Tensor]]


class FlatViews:
    """The flat views of the same tensors, sync after sync: 1-D, or [rows, n] where each tensor holds several replicas.

    Those of CPU tensors are kept, because to make one takes as long as to average a hundred elements. On a GPU they
    would keep memory from being freed when a model is moved away.

    Args:
        rows: the number of replicas that each tensor holds.
    """

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self._kept: list[Tensor] | None = None

    def forget(self) -> None:
        """Keep no views, because the tensors or their layouts have changed."""
        self._kept = None

    def of(self, tensors: Sequence[Tensor], gapped: Gapped) -> list[Tensor]:
        """Return the elements of all tensors as flat views; of distributed tensors those of this process.

        Unless :meth:`forget` was called, the tensors must be those of the last call, with the layouts they had then.
        Of a tensor with gaps it is a copy, which is appended to ``gapped``.

        Raises:
            ValueError: if elements of a tensor overlap in memory, or its first dimension is not the rows.
        """
        if self._kept is not None:
            return list(self._kept)
        copies = len(gapped)
        views = [flattened(local(tensor), self.rows, gapped) for tensor in tensors]
        # A complex tensor may become its conjugate without a change of its layout, and a view that was made in
        # inference mode cannot be written outside of it.
        lasting = len(gapped) == copies and not torch.is_inference_mode_enabled()
        if lasting and all(tensor.device.type == "cpu" and not tensor.is_complex() for tensor in tensors):
            self._kept = list(views)
        return views


def flattened(tensor: Tensor, rows: int, gapped: Gapped) -> Tensor:
    """Return the elements as a flat view; of a tensor with gaps a copy, which is appended to ``gapped``."""
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    if rows > 1:
        if tensor.dim() == 0 or tensor.shape[0] != rows:
            raise ValueError(f"{rows} replicas are the rows of tensors [{rows}, …], got shape {tuple(tensor.shape)}")
        if real.is_contiguous():
            return real.view(rows, -1)
        copied = real.reshape(rows, -1).contiguous()
        gapped.append((copied, real))
        return copied
    if is_dense(tensor) or has_overlap(tensor):
        return flat_view(tensor)  # raises for overlaps
    copied = real.contiguous().view(-1)
    gapped.append((copied, real))
    return copied
