"""The gradients of a stack, from where autograd leaves them to ``grad`` of the stacked parameters.

They are collected first and added to ``grad`` at the end, when nothing can fail any more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from hdet_kernels.buckets import BUCKET_BYTES
from hdet_kernels.converge.transport import Transport
from hdet_kernels.ensemble import Ensemble
from hdet_kernels.stack.parameter import StackedParameter
from hdet_kernels.tensors import flat_view, travel_dtype


class Collector(Protocol):
    """Takes gradients of some rows of the parameters at a time, one parameter after the other.

    keeps: whether it keeps what it takes, which then must be nobody else's.
    collected: what it has, for each parameter.
    """

    keeps: bool
    collected: list[Tensor | None]

    def begin(self, passes: int) -> None:
        """Forget what was collected; ``passes`` times will there be gradients of some of the rows."""

    def take(self, index: int, rows: slice, gradient: Tensor) -> None:
        """[k, *shape], of these rows of parameter ``index``."""

    def commit(self) -> None:
        """Add what was collected to ``grad`` of the parameters; what had no gradient is left alone."""

    def let_go(self, collected: Sequence[Tensor | None]) -> None:
        """Copy the ``grad`` of parameters that is in the memory of ``collected``, which is about to be written."""


class LocalGradients:
    """Every replica has its own: ``grad`` is [R, *shape]."""

    keeps = True

    def __init__(self, params: Sequence[StackedParameter]) -> None:
        self._params = params
        self._strides = [row_strides(param[0]) for param in params]
        self.collected: list[Tensor | None] = []

    def begin(self, passes: int) -> None:
        self.collected = [None] * len(self._params)

    def take(self, index: int, rows: slice, gradient: Tensor) -> None:
        param, kept = self._params[index], self.collected[index]
        if len(gradient) == len(param) and gradient.stride()[1:] == self._strides[index]:
            self.collected[index] = gradient
            return
        if kept is None:
            kept = self.collected[index] = empty_rows(param[0], len(param)).zero_()
        kept[rows].copy_(gradient)

    def commit(self) -> None:
        for param, kept in zip(self._params, self.collected, strict=True):
            if kept is not None:
                param.grad = kept if param.grad is None else param.grad.add_(kept)
        self.collected = []

    def let_go(self, collected: Sequence[Tensor | None]) -> None:
        for param, kept in zip(self._params, collected, strict=True):
            if param.grad is not None and kept is not None and param.grad.data_ptr() == kept.data_ptr():
                param.grad = param.grad.clone()


class SharedGradients:
    """One for all replicas of all processes, their mean: ``grad`` is an expanded view [R, *shape] of it.

    A parameter that has a gradient in one process has one in all. As long as ``syncs`` is False, gradients stay those
    of this process; they are averaged with the next ones.
    """

    keeps = False
    syncs = True

    def __init__(self, params: Sequence[StackedParameter], among: Ensemble) -> None:
        self._params, self._among = params, among
        self._strides = [row_strides(param[0]) for param in params]
        self._transport = Transport(among, BUCKET_BYTES, None) if among.processes > 1 else None
        self._flags: dict[tuple[bool, ...], Tensor] = {}
        #: Whether ``grad`` has something that was not averaged over the processes.
        self._owes = False
        self.collected: list[Tensor | None] = []

    def begin(self, passes: int) -> None:
        self.collected = [None] * len(self._params)
        self._passes = passes

    def take(self, index: int, rows: slice, gradient: Tensor) -> None:
        param, kept = self._params[index], self.collected[index]
        # A sum of several parts would be rounded at each of them.
        dtype = param.dtype if self._passes == 1 else travel_dtype(param.dtype)
        mean, share = _mean(gradient, dtype), len(gradient) / len(param)
        if kept is None:
            self.collected[index] = torch.mul(mean, share, out=self._empty(index, dtype))
        else:
            kept.add_(mean, alpha=share)

    def commit(self) -> None:
        means = [
            None if kept is None else kept.to(param.dtype)
            for kept, param in zip(self.collected, self._params, strict=True)
        ]
        self.collected = []
        if self._transport is not None and self.syncs:
            owed = [param.grad[0] if self._owes and param.grad is not None else None for param in self._params]
            means = [_sum(mean, more) for mean, more in zip(means, owed, strict=True)]
            means = self._over_processes(self._transport, means)
            for param, more in zip(self._params, owed, strict=True):
                if more is not None:  # not before all have arrived: it is part of their mean now
                    param.grad = None
        self._owes = not self.syncs
        for param, mean in zip(self._params, means, strict=True):
            if mean is None:
                continue
            if param.grad is None:
                param.grad = mean.expand_as(param)
            elif param.grad.stride(0) == 0:
                param.grad[0].add_(mean)
            else:  # someone gave the rows gradients of their own
                param.grad.add_(mean)

    def let_go(self, collected: Sequence[Tensor | None]) -> None:
        for param, kept in zip(self._params, collected, strict=True):
            if param.grad is not None and kept is not None and param.grad.data_ptr() == kept.data_ptr():
                param.grad = param.grad[0].clone().expand_as(param)

    def _empty(self, index: int, dtype: torch.dtype) -> Tensor:
        param = self._params[index]
        return torch.empty_strided(param.shape[1:], self._strides[index], dtype=dtype, device=param.device)

    def _over_processes(self, transport: Transport, means: list[Tensor | None]) -> list[Tensor | None]:
        """All parameters travel, so that the processes agree on what does, and a flag for each that has a gradient. A
        process reads the flags only if it lacks some: that waits for the device."""
        present = tuple(mean is not None for mean in means)
        if present not in self._flags:
            self._flags[present] = torch.tensor(present, dtype=torch.float32, device=self._params[0].device)
        flags = self._flags[present].clone()
        whole = [
            self._empty(index, self._params[index].dtype).zero_() if mean is None else mean
            for index, mean in enumerate(means)
        ]
        transport.average([[*map(flat_view, whole), flags]], np.ones(self._among.size, dtype=bool))
        if all(present):
            return list(whole)
        return [mean if flag > 0 else None for mean, flag in zip(whole, flags.tolist(), strict=True)]


def _sum(mean: Tensor | None, more: Tensor | None) -> Tensor | None:
    """In the memory of ``mean``, or in new one."""
    if mean is None:
        return None if more is None else more.clone()
    return mean if more is None else mean.add_(more)


def _mean(gradient: Tensor, dtype: torch.dtype) -> Tensor:
    """The mean over dimension 0, in the order of memory of the gradient: those of matrices are transposed, and to
    reduce them into another order took 7 times as long (8 rows of 512 × 128 on a CPU)."""
    order = sorted(range(1, gradient.dim()), key=gradient.stride, reverse=True)
    mean = gradient.permute(0, *order).mean(0, dtype=dtype)
    return mean.permute([order.index(dim) for dim in range(1, gradient.dim())])


def row_strides(row: Tensor) -> tuple[int, ...]:
    """How ``row`` would lie in memory without gaps, in its order of dimensions."""
    return torch.empty_like(row, device="meta").stride()


def empty_rows(row: Tensor, count: int) -> Tensor:
    """[count, *shape] for rows like ``row``, each of them without gaps in its order of dimensions."""
    strides = (max(row.numel(), 1), *row_strides(row))
    return torch.empty_strided((count, *row.shape), strides, dtype=row.dtype, device=row.device)
