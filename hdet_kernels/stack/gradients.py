"""Move gradients from autograd to ``grad`` of the stacked parameters.

:func:`hand_over` passes the gradient of a row to a collector as soon as autograd has it. The collector adds all of
them to ``grad`` at the end, when nothing can fail any more; or each at once, if an optimizer steps in the backward
pass (``in_backward``) and losses by this function were computed before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hdet_kernels.buckets import BUCKET_BYTES
from hdet_kernels.converge.transport import Transport
from hdet_kernels.ensemble import Ensemble
from hdet_kernels.stack.template import StackedParameter, empty_rows, row_strides
from hdet_kernels.tensors import flat_view, travel_dtype


class Collector:
    """Collects the gradients of one loss.

    Attributes:
        keeps_tensors: whether it keeps the tensors it is given, which then must not share memory with others.
        collected: the gradients so far, one entry per parameter; None without a gradient.
        syncs: whether gradients that all processes share are averaged over them; False accumulates those of this one.
    """

    keeps_tensors = False
    syncs = True

    def __init__(self, params: Sequence[StackedParameter]) -> None:
        self._params = params
        self._strides = [row_strides(param[0]) for param in params]
        self.collected: list[Tensor | None] = []

    def begin(self, passes: int, *, known: bool = False) -> None:
        """Forget what was collected; gradients will come in ``passes`` passes, each for some of the rows.

        ``known``: the losses were computed in this way before.
        """
        self.collected, self._passes = [None] * len(self._params), passes
        self._at_once = known and passes == 1 and any(param.has_hooks for param in self._params)

    def take(self, index: int, rows: slice, gradient: Tensor) -> None:
        """Take the gradient [k, *shape] of ``rows`` of parameter ``index``."""
        raise NotImplementedError

    def commit(self) -> None:
        """Add what was collected to ``grad`` of the parameters; leave parameters without a gradient alone."""
        for index in range(len(self.collected)):
            self._commit_one(index)
        self.collected = []

    def _commit_one(self, index: int) -> None:
        """Add what was collected for a parameter to its ``grad``, and call its hooks."""
        raise NotImplementedError

    def unalias(self, collected: Sequence[Tensor | None]) -> None:
        """Copy each ``grad`` that lies in the memory of ``collected``, which is about to be overwritten."""
        for param, found in zip(self._params, collected, strict=True):
            if param.grad is not None and found is not None and param.grad.data_ptr() == found.data_ptr():
                is_shared = param.grad.stride(0) == 0
                param.grad = param.grad[0].clone().expand_as(param) if is_shared else param.grad.clone()


class LocalGradients(Collector):
    """One gradient for each replica: ``grad`` is [R, *shape]."""

    keeps_tensors = True

    def take(self, index: int, rows: slice, gradient: Tensor) -> None:
        param, found = self._params[index], self.collected[index]
        if len(gradient) == len(param) and gradient.stride()[1:] == self._strides[index]:
            self.collected[index] = gradient
        else:
            if found is None:
                found = self.collected[index] = empty_rows(param[0], len(param)).zero_()
            found[rows].copy_(gradient)
        if self._at_once:
            self._commit_one(index)

    def _commit_one(self, index: int) -> None:
        param, found = self._params[index], self.collected[index]
        self.collected[index] = None
        if found is not None:
            param.grad = found if param.grad is None else param.grad.add_(found)
            param.gradient_complete()


class TeamGradients(LocalGradients):
    """One gradient for each of two teams, the mean over its replicas: ``grad`` is [R, *shape], equal within a team.

    ``first`` replicas are in the first team, the rest in the second.
    """

    def __init__(self, params: Sequence[StackedParameter], first: int) -> None:
        super().__init__(params)
        self._teams = slice(first), slice(first, None)

    def _commit_one(self, index: int) -> None:
        if (found := self.collected[index]) is not None:
            for team in self._teams:
                found[team].copy_(_mean(found[team], found.dtype))
        super()._commit_one(index)


class SharedGradients(Collector):
    """One gradient for all replicas of all processes, their mean: ``grad`` is an expanded view [R, *shape] of it.

    A parameter that has a gradient in one process gets one in all. The first commit after some without ``syncs``
    averages what they accumulated together with its own.
    """

    def __init__(self, params: Sequence[StackedParameter], among: Ensemble) -> None:
        super().__init__(params)
        self._among = among
        self._transport = Transport(among, BUCKET_BYTES, None) if among.processes > 1 else None
        self._flags: dict[tuple[bool, ...], Tensor] = {}
        # Whether ``grad`` holds gradients that have not been averaged over the processes.
        self._unsynced = False

    def take(self, index: int, rows: slice, gradient: Tensor) -> None:
        param, found = self._params[index], self.collected[index]
        # In the parameter's own half precision, a sum over several passes would be rounded after each of them.
        dtype = param.dtype if self._passes == 1 else travel_dtype(param.dtype)
        mean, share = _mean(gradient, dtype), len(gradient) / len(param)
        if found is None:
            self.collected[index] = torch.mul(mean, share, out=self._empty(index, dtype))
        else:
            found.add_(mean, alpha=share)
        if self._at_once and self._transport is None and self.syncs:
            self._commit_one(index)

    def commit(self) -> None:
        if self._transport is not None and self.syncs:
            means = [
                None if found is None else found.to(param.dtype)
                for found, param in zip(self.collected, self._params, strict=True)
            ]
            unsynced = [param.grad[0] if self._unsynced and param.grad is not None else None for param in self._params]
            means = [_sum(mean, more) for mean, more in zip(means, unsynced, strict=True)]
            self.collected = self._over_processes(self._transport, means)
            for param, more in zip(self._params, unsynced, strict=True):
                if more is not None:  # it is part of the mean now; kept until the all-reduce has succeeded
                    param.grad = None
        self._unsynced = not self.syncs
        super().commit()

    def _commit_one(self, index: int) -> None:
        param, found = self._params[index], self.collected[index]
        self.collected[index] = None
        if found is None:
            return
        mean = found.to(param.dtype)
        if param.grad is None:
            param.grad = mean.expand_as(param)
        elif param.grad.stride(0) == 0:
            param.grad[0].add_(mean)
        else:  # the user gave the rows gradients of their own
            param.grad.add_(mean)
        if self.syncs:
            param.gradient_complete()

    def _empty(self, index: int, dtype: torch.dtype) -> Tensor:
        param = self._params[index]
        return torch.empty_strided(param.shape[1:], self._strides[index], dtype=dtype, device=param.device)

    def _over_processes(self, transport: Transport, means: list[Tensor | None]) -> list[Tensor | None]:
        """Average the gradients over the processes.

        All parameters take part, so that the processes agree on what is reduced, with one flag per parameter for those
        that have a gradient. A process reads the flags only if it lacks gradients: reading waits for the device.
        """
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


class FiniteRows(Collector):
    """Collects whether the gradients of each replica are finite, and keeps none of them."""

    def begin(self, passes: int, *, known: bool = False) -> None:
        self._good = torch.ones(len(self._params), len(self._params[0]), dtype=torch.bool)

    def take(self, index: int, rows: slice, gradient: Tensor) -> None:
        self._good[index, rows] = gradient.reshape(len(gradient), -1).isfinite().all(1).cpu()

    def find_bad(self, losses: Tensor) -> tuple[list[int], list[int]]:
        """Return the replicas with a finite loss whose gradients are not, and the parameters of these gradients."""
        bad = ~self._good & losses.isfinite().cpu()
        return bad.any(0).nonzero().flatten().tolist(), bad.any(1).nonzero().flatten().tolist()


def _sum(mean: Tensor | None, more: Tensor | None) -> Tensor | None:
    """Return the sum of what is not None, in the memory of ``mean`` or in new memory."""
    if mean is None:
        return None if more is None else more.clone()
    return mean if more is None else mean.add_(more)


def _mean(gradient: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the mean over dimension 0, in the gradient's own memory order.

    Gradients of matrices come transposed. Reducing them into another order took 7 times as long (8 rows of 512 × 128
    on a CPU).
    """
    order = sorted(range(1, gradient.dim()), key=gradient.stride, reverse=True)
    mean = gradient.permute(0, *order).mean(0, dtype=dtype)
    return mean.permute([order.index(dim) for dim in range(1, gradient.dim())])


def hand_over(leaf: Tensor, collector: Collector, index: int, rows: slice, single: bool) -> Tensor:
    """Return a tensor for the forward pass whose gradient goes to ``collector`` as soon as autograd has it.

    The gradients of all parameters then never exist at the same time, unless the collector keeps them. ``leaf`` has the
    ``rows`` of parameter ``index``, [k, *shape], or the row of a ``single`` replica, [*shape].
    """

    def take(gradient: Tensor) -> None:
        dense = gradient.to_dense() if gradient.is_sparse else gradient
        collector.take(index, rows, dense[None] if single else dense)

    def take_grad(leaf: Tensor) -> None:
        gradient, leaf.grad = leaf.grad, None
        if gradient is not None:
            take(gradient)

    leaf = leaf.requires_grad_()
    if collector.keeps_tensors:
        leaf.register_post_accumulate_grad_hook(take_grad)
        return leaf
    handed_over: Tensor = _HandOver.apply(leaf, take)
    return handed_over


class _HandOver(torch.autograd.Function):
    """An identity whose gradient goes to ``take`` only.

    Autograd would copy the gradient to give it the layout of the leaf: under vmap, gradients of matrices come
    transposed.
    """

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, take: Callable[[Tensor], None]) -> Tensor:
        ctx.take = take
        ctx.set_materialize_grads(False)
        return leaf.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[None, None]:
        if gradient is not None:
            ctx.take(gradient)
        return None, None
