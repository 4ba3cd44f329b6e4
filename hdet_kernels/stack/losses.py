"""Compute the losses of all replicas of a stack, and their gradients.

The replicas are computed together: one forward pass under ``torch.func.vmap``, then one ordinary backward pass outside
of it. Where vmap cannot follow the module or the loss function, they are computed one after another.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from hdet_kernels.stack.batch import Batch
from hdet_kernels.stack.finite import are_finite, check_first_gradients
from hdet_kernels.stack.gradients import GradientCollector, hand_over
from hdet_kernels.stack.hyper import StackHyper
from hdet_kernels.stack.rollback import Rollback
from hdet_kernels.stack.side_effects import AttributeGuard, BufferAssignments, refuse_template_gradients
from hdet_kernels.stack.vmap import StackMode, refuse_checkpointing

log = logging.getLogger("hdet_kernels")

LossFunction = Callable[..., Tensor]


class ReplicaLosses:
    """Computes losses and gradients of the replicas, together where possible.

    Args:
        module: the template, which is called with the tensors of a replica in the place of its own.
        parameters: the stacked parameters [R, *shape], by the names that they have in ``module`` (several if tied).
        buffers: the stacked buffers, likewise.
        hyper: the hyperparameters that the loss function may read.
    """

    def __init__(
        self,
        module: nn.Module,
        parameters: Mapping[tuple[str, ...], Tensor],
        buffers: Mapping[tuple[str, ...], Tensor],
        hyper: StackHyper,
    ) -> None:
        self.module, self.hyper = module, hyper
        self._caller = _Caller(module)
        self._parameters, self._buffers = list(parameters.values()), list(buffers.values())
        self._parameter_names = [[f"module.{name}" for name in names] for names in parameters]
        self._buffer_names = [[f"module.{name}" for name in names] for names in buffers]
        self._assignments = BufferAssignments(module, [names[0] for names in buffers])
        self._guard = AttributeGuard(module)
        self._replicas = len(self._parameters[0])
        self._device = self._parameters[0].device
        # By loss function, with or without gradients, and mode of the module: the buffers that it changes, ...
        self._changed_buffers: dict[object, list[int]] = {}
        # ... and whether vmap has failed on it.
        self._one_by_one: set[object] = set()
        self._warned: set[object] = set()

    def compute(
        self, loss_fn: LossFunction, batch: Batch, chunk_size: int | None, gradients: GradientCollector | None
    ) -> Tensor:
        """Return the losses [R], detached.

        If the losses cannot be computed together, restore buffers and random numbers and compute them one by one.

        Args:
            loss_fn: called as ``loss_fn(module, *batch)``.
            batch: the batch of all replicas.
            chunk_size: how many replicas are computed at a time; None for all.
            gradients: collects the gradients, and is not committed; None for losses only.

        Raises:
            RuntimeError: in the first pass by ``loss_fn``, gradients are not finite where the losses are.
        """
        code = _code_of(loss_fn)
        kind = (code, gradients is not None, self.module.training)
        step = self._replicas if chunk_size is None else chunk_size
        rollback = Rollback(self._buffers, self._changed_buffers.get(kind), self._device)
        reason = None
        if step > 1 and self._replicas > 1 and kind not in self._one_by_one:
            # A loss function may write to its batch; a second attempt needs the batch unwritten.
            unwritten = batch if kind in self._changed_buffers else batch.copy()
            try:
                losses = self._compute(loss_fn, batch, step, gradients)
            except torch.OutOfMemoryError as error:
                rollback.restore()
                error.add_note(f"chunk_size=k computes k of the {self._replicas} replicas at a time")
                raise
            except Exception as error:
                reason = (str(error).strip().splitlines() or [repr(error)])[0]
            else:
                self._end_first(kind, loss_fn, unwritten, step, gradients, losses, rollback)
                return losses
            rollback.restore()
            batch = unwritten
        try:
            losses = self._compute(loss_fn, batch, 1, gradients)
        except Exception:
            rollback.restore()
            raise
        self._end_first(kind, loss_fn, batch, 1, gradients, losses, rollback)
        if reason is not None:
            self._one_by_one.add(kind)
            self._warn(code, loss_fn, reason)
        return losses

    def _end_first(
        self,
        kind: object,
        loss_fn: LossFunction,
        batch: Batch,
        step: int,
        gradients: GradientCollector | None,
        losses: Tensor,
        rollback: Rollback,
    ) -> None:
        """After the first pass of a ``kind``: check its gradients, and note the buffers that it changes."""
        if kind in self._changed_buffers:
            return
        if gradients is not None and not are_finite(losses, gradients.collected):
            after = Rollback(self._buffers, None, self._device)
            names = [names[0].removeprefix("module.") for names in self._parameter_names]
            compute = functools.partial(self._compute, loss_fn)
            try:
                check_first_gradients(compute, batch, step, names, self._device.type)
            except Exception:
                rollback.restore()
                raise
            after.restore()
        self._changed_buffers[kind] = rollback.changed()

    def is_vectorized(self, loss_fn: LossFunction) -> bool:
        """Return whether losses and gradients by ``loss_fn`` have been computed together before."""
        kind = (_code_of(loss_fn), True, self.module.training)
        return kind in self._changed_buffers and kind not in self._one_by_one

    def compute_vectorized(
        self, loss_fn: LossFunction, batch: Batch, chunk_size: int | None, gradients: GradientCollector
    ) -> Tensor:
        """Return the losses [R] of a loss function that :meth:`is_vectorized`, without a second attempt on failure."""
        return self._compute(loss_fn, batch, chunk_size or self._replicas, gradients)

    def recording_key(self) -> tuple[Any, ...]:
        """Return what a recorded pass depends on beside its batch: addresses of tensors and modes of modules."""
        tensors = (*self._parameters, *self._buffers, *self.hyper.values())
        return tuple(map(Tensor.data_ptr, tensors)), tuple(module.training for module in self.module.modules())

    def _compute(self, loss_fn: LossFunction, batch: Batch, step: int, gradients: GradientCollector | None) -> Tensor:
        """Return the losses [R], computing ``step`` replicas at a time."""
        starts = range(0, self._replicas, step)
        if gradients is not None:
            gradients.begin(len(starts))
        losses = []
        with torch.set_grad_enabled(gradients is not None), refuse_template_gradients(self.module):
            for start in starts:
                rows = slice(start, min(start + step, self._replicas))
                compute = self._compute_one if rows.stop - rows.start == 1 else self._compute_several
                losses.append(compute(loss_fn, rows, batch, gradients))
        return torch.cat(losses)

    def _compute_several(
        self, loss_fn: LossFunction, rows: slice, batch: Batch, gradients: GradientCollector | None
    ) -> Tensor:
        """Return the losses [k] of the replicas ``rows`` by one forward and one backward pass."""
        assigned: list[int] = []

        def one(parameters: list[Tensor], buffers: list[Tensor], hyper: list[Tensor], slices: list[Tensor]) -> Any:
            def losses(module: nn.Module) -> Any:
                loss = _checked_loss(loss_fn(module, *batch.with_slices(slices)))
                found = self._assignments.find(buffers)
                assigned.extend(found)
                return loss, list(found.values())

            with self.hyper.reading(hyper), StackMode(self._device, parameters[0]):
                return self._call_with(parameters, buffers, losses)

        leaves = self._leaves(rows, gradients)
        buffers = [buffer.detach()[rows] for buffer in self._buffers]
        with self._guard, refuse_checkpointing():
            inputs = leaves, buffers, self.hyper.slices(rows), batch.slices(rows)
            loss, changed = vmap(one, randomness="different")(*inputs)
        if gradients is not None:
            self._backward(loss.sum())
        self._write_buffers(assigned, rows, changed)
        detached: Tensor = loss.detach()
        return detached

    def _compute_one(
        self, loss_fn: LossFunction, rows: slice, batch: Batch, gradients: GradientCollector | None
    ) -> Tensor:
        """Return the loss [1] of the single replica in ``rows``, without vmap.

        The backward pass runs while the replica's tensors are in the module, since activation checkpointing computes
        forward again in it.
        """
        row = rows.start
        buffers = [buffer.detach()[row] for buffer in self._buffers]
        assigned: dict[int, Tensor] = {}

        def loss_of(module: nn.Module) -> Tensor:
            loss = _checked_loss(loss_fn(module, *batch.with_slices(batch.slices(row))))
            if gradients is not None:
                self._backward(loss)
            assigned.update(self._assignments.find(buffers))
            return loss.detach()

        leaves = self._leaves(rows, gradients, single=True)
        hyper = [values[0] for values in self.hyper.slices(rows)]
        with self._guard, self.hyper.reading(hyper):
            loss = self._call_with(leaves, buffers, loss_of)
        self._write_buffers(list(assigned), rows, [tensor[None] for tensor in assigned.values()])
        return loss.reshape(1)

    def _call_with(
        self, parameters: Sequence[Tensor], buffers: Sequence[Tensor], function: Callable[[nn.Module], Any]
    ) -> Any:
        """Return ``function(module)`` with these tensors in the places of the module's own."""
        tensors = {
            name: tensor
            for names, tensor in (
                *zip(self._parameter_names, parameters, strict=True),
                *zip(self._buffer_names, buffers, strict=True),
            )
            for name in names
        }
        return functional_call(self._caller, tensors, (function,), tie_weights=False)

    def _leaves(self, rows: slice, gradients: GradientCollector | None, single: bool = False) -> list[Tensor]:
        """Return ``rows`` of all parameters, [k, *shape] or of a ``single`` replica [*shape], as leaves of autograd."""
        leaves = [parameter.detach()[rows.start if single else rows] for parameter in self._parameters]
        if gradients is None:
            return leaves
        return [
            hand_over(leaf, gradients, index, rows, single) if parameter.requires_grad else leaf
            for index, (leaf, parameter) in enumerate(zip(leaves, self._parameters, strict=True))
        ]

    def _backward(self, loss: Tensor) -> None:
        # As for a backward pass outside of torch.autocast: each operation uses the precision of its forward pass.
        with contextlib.ExitStack() as stack:
            if torch.is_autocast_enabled(self._device.type):
                stack.enter_context(torch.autocast(self._device.type, enabled=False))
            loss.backward()

    @torch.no_grad()
    def _write_buffers(self, indices: Sequence[int], rows: slice, values: Sequence[Tensor]) -> None:
        for index, value in zip(indices, values, strict=True):
            self._buffers[index][rows].copy_(value)

    def _warn(self, code: object, loss_fn: LossFunction, reason: str) -> None:
        if code in self._warned:
            return
        self._warned.add(code)
        log.warning(
            "the replicas' losses by %s are computed one after the other, because torch.func.vmap cannot compute them "
            "together (%s): %d forward passes and backward passes instead of one, with about %d times the launches",
            getattr(loss_fn, "__qualname__", type(loss_fn).__name__),
            reason,
            self._replicas,
            self._replicas,
        )


class _Caller(nn.Module):
    """Calls a function with the module: ``functional_call`` swaps tensors only while a module is called."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, function: Callable[[nn.Module], Any]) -> Any:
        return function(self.module)


def _checked_loss(loss: Any) -> Tensor:
    """Return the loss of one replica as a tensor without dimensions; raise if it is not one real number."""
    if not isinstance(loss, Tensor):
        raise TypeError(f"loss_fn must return the loss, a tensor, got a {type(loss).__name__}")
    if loss.numel() != 1 or loss.is_complex():
        raise ValueError(
            f"loss_fn must return one real number for each replica, got shape {tuple(loss.shape)} of {loss.dtype}: "
            "reduce it, as by .mean()"
        )
    return loss.reshape(())


def _code_of(loss_fn: Any) -> object:
    """Return what identifies a loss function: its code.

    The function object itself will not do: a lambda, a partial or a bound method is a new object each time it is
    evaluated.
    """
    while isinstance(loss_fn, functools.partial):
        loss_fn = loss_fn.func
    loss_fn = getattr(loss_fn, "__func__", loss_fn)
    return getattr(loss_fn, "__code__", None) or type(loss_fn)
