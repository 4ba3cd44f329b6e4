"""The losses of all replicas of a stack, and their gradients.

Replicas are computed together, by one forward pass under ``torch.func.vmap`` and one backward pass of ordinary autograd
outside of it; or one by one, where vmap cannot follow the module or the loss.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import _functorch
from torch.func import functional_call, vmap

from hdet_kernels.stack.batch import Batch
from hdet_kernels.stack.corrections import Corrected, no_hooks
from hdet_kernels.stack.gradients import Collector
from hdet_kernels.stack.hyper import StackHyper
from hdet_kernels.stack.template import Places, Untouched, own_gradients

log = logging.getLogger("hdet_kernels")

LossFunction = Callable[..., Tensor]


class Losses:
    """parameters, buffers: names of the module's tensors → stacked tensors [R, *shape]; tied names → one tensor."""

    def __init__(
        self,
        module: nn.Module,
        parameters: Mapping[tuple[str, ...], Tensor],
        buffers: Mapping[tuple[str, ...], Tensor],
        hyper: StackHyper,
    ) -> None:
        self.module, self.hyper = module, hyper
        self._with_module = _WithModule(module)
        self._parameters, self._buffers = list(parameters.values()), list(buffers.values())
        self._parameter_names = [[f"module.{name}" for name in names] for names in parameters]
        self._buffer_names = [[f"module.{name}" for name in names] for names in buffers]
        self._places = Places(module, [names[0] for names in buffers])
        self._untouched = Untouched(module)
        self._replicas = len(self._parameters[0])
        self._device = self._parameters[0].device
        #: Losses that were computed, and the buffers that they change.
        self._changing: dict[object, list[int]] = {}
        self._one_by_one: set[object] = set()
        self._warned: set[object] = set()

    def __call__(
        self, loss_fn: LossFunction, batch: Batch, chunk_size: int | None, gradients: Collector | None
    ) -> Tensor:
        """[R], detached. ``gradients`` collects, and is not committed."""
        code = _code_of(loss_fn)
        kind = (code, gradients is not None, self.module.training)
        step = self._replicas if chunk_size is None else chunk_size
        undo = _Undo(self._buffers, self._changing.get(kind), self._device)
        reason = None
        if step > 1 and self._replicas > 1 and kind not in self._one_by_one:
            # A loss may write to its batch, and must not find it written if it is computed once more.
            again = batch if kind in self._changing else batch.copy()
            try:
                losses = self._computed(loss_fn, batch, step, gradients)
                self._changing.setdefault(kind, undo.changed())
                return losses
            except torch.OutOfMemoryError as error:
                undo()
                error.add_note(f"chunk_size=k computes k of the {self._replicas} replicas at a time")
                raise
            except Exception as error:
                reason = (str(error).strip().splitlines() or [repr(error)])[0]
            undo()
            batch = again
        try:
            losses = self._computed(loss_fn, batch, 1, gradients)
        except Exception:
            undo()
            raise
        self._changing.setdefault(kind, undo.changed())
        if reason is not None:
            self._one_by_one.add(kind)
            self._warn(code, loss_fn, reason)
        return losses

    def are_together(self, loss_fn: LossFunction) -> bool:
        """Whether the losses and gradients of all replicas have been computed together."""
        kind = (_code_of(loss_fn), True, self.module.training)
        return kind in self._changing and kind not in self._one_by_one

    def together(self, loss_fn: LossFunction, batch: Batch, chunk_size: int | None, gradients: Collector) -> Tensor:
        """As a call, of a loss that :meth:`are_together`; one that fails is not computed in another way."""
        return self._computed(loss_fn, batch, chunk_size or self._replicas, gradients)

    def fixed(self) -> tuple[Any, ...]:
        """What a recorded pass depends on beside its batch: where its tensors are, and the modes of the modules."""
        tensors = (*self._parameters, *self._buffers, *self.hyper.values())
        return tuple(map(Tensor.data_ptr, tensors)), tuple(module.training for module in self.module.modules())

    def _computed(self, loss_fn: LossFunction, batch: Batch, step: int, gradients: Collector | None) -> Tensor:
        starts = range(0, self._replicas, step)
        if gradients is not None:
            gradients.begin(len(starts))
        losses = []
        with torch.set_grad_enabled(gradients is not None), own_gradients(self.module):
            for start in starts:
                rows = slice(start, min(start + step, self._replicas))
                compute = self._of_one if rows.stop - rows.start == 1 else self._of_many
                losses.append(compute(loss_fn, rows, batch, gradients))
        return torch.cat(losses)

    def _of_many(self, loss_fn: LossFunction, rows: slice, batch: Batch, gradients: Collector | None) -> Tensor:
        """[k], of the replicas ``rows``, by one forward and one backward pass."""
        reassigned: list[int] = []

        def one(parameters: list[Tensor], buffers: list[Tensor], hyper: list[Tensor], slices: list[Tensor]) -> Any:
            def losses(module: nn.Module) -> Any:
                loss = _checked(loss_fn(module, *batch.with_slices(slices)))
                found = self._places.reassigned(buffers)
                reassigned.extend(found)
                return loss, list(found.values())

            with self.hyper.seen_as(hyper):
                return self._swapped(parameters, buffers, losses)

        leaves = self._leaves(rows, gradients)
        buffers = [buffer.detach()[rows] for buffer in self._buffers]
        escaped = _functorch.is_functorch_wrapped_tensor
        with self._untouched(escaped), no_hooks(), Corrected(self._device):
            loss, changed = vmap(one, randomness="different")(leaves, buffers, self.hyper.rows(rows), batch.rows(rows))
        if gradients is not None:
            self._backward(loss.sum())
        self._write(reassigned, rows, changed)
        detached: Tensor = loss.detach()
        return detached

    def _of_one(self, loss_fn: LossFunction, rows: slice, batch: Batch, gradients: Collector | None) -> Tensor:
        """[1], of the one replica in ``rows``, without vmap. The backward pass is run while the replica's tensors are
        in the module: activation checkpointing computes forward again in it."""
        row = rows.start
        buffers = [buffer.detach()[row] for buffer in self._buffers]
        reassigned: dict[int, Tensor] = {}

        def loss_of(module: nn.Module) -> Tensor:
            loss = _checked(loss_fn(module, *batch.with_slices(batch.rows(row))))
            if gradients is not None:
                self._backward(loss)
            reassigned.update(self._places.reassigned(buffers))
            return loss.detach()

        leaves = self._leaves(rows, gradients, single=True)
        hyper = [values[0] for values in self.hyper.rows(rows)]
        with self._untouched(lambda tensor: True), self.hyper.seen_as(hyper):
            loss = self._swapped(leaves, buffers, loss_of)
        self._write(list(reassigned), rows, [tensor[None] for tensor in reassigned.values()])
        return loss.reshape(1)

    def _swapped(
        self, parameters: Sequence[Tensor], buffers: Sequence[Tensor], work: Callable[[nn.Module], Any]
    ) -> Any:
        """``work(module)`` with these tensors in the places of the module's own."""
        tensors = {
            name: tensor
            for names, tensor in (
                *zip(self._parameter_names, parameters, strict=True),
                *zip(self._buffer_names, buffers, strict=True),
            )
            for name in names
        }
        return functional_call(self._with_module, tensors, (work,), tie_weights=False)

    def _leaves(self, rows: slice, gradients: Collector | None, single: bool = False) -> list[Tensor]:
        """Rows of all parameters, [k, *shape] or of a ``single`` replica [*shape], for this pass. They hand their
        gradients over as they come: those of all parameters do not exist together, unless they are wanted so."""
        leaves = [parameter.detach()[rows.start if single else rows] for parameter in self._parameters]
        if gradients is None:
            return leaves
        for number, parameter in enumerate(self._parameters):
            if parameter.requires_grad:
                take = functools.partial(_take, functools.partial(gradients.take, number, rows), single)
                leaf = leaves[number].requires_grad_()
                if gradients.keeps:
                    leaf.register_post_accumulate_grad_hook(functools.partial(_take_away, take))
                else:
                    leaves[number] = _HandedOver.apply(leaf, take)
        return leaves

    def _backward(self, loss: Tensor) -> None:
        # As outside of torch.autocast: every operation goes back in the precision in which it came.
        with contextlib.ExitStack() as stack:
            if torch.is_autocast_enabled(self._device.type):
                stack.enter_context(torch.autocast(self._device.type, enabled=False))
            loss.backward()

    @torch.no_grad()
    def _write(self, numbers: Sequence[int], rows: slice, values: Sequence[Tensor]) -> None:
        for number, value in zip(numbers, values, strict=True):
            self._buffers[number][rows].copy_(value)

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


class _WithModule(nn.Module):
    """Calls whatever it is given with the module: ``functional_call`` swaps tensors only while a module is called."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, work: Callable[[nn.Module], Any]) -> Any:
        return work(self.module)


class _Undo:
    """Brings buffers and, at the first use of a loss, random numbers back to where they were.

    changing: numbers of the buffers that the loss changes; None at its first use, when it may change any.
    """

    def __init__(self, buffers: Sequence[Tensor], changing: Sequence[int] | None, device: torch.device) -> None:
        self._buffers, self._device = buffers, device
        wanted = range(len(buffers)) if changing is None else changing
        self._copies = {number: buffers[number].clone() for number in wanted}
        self._states: tuple[Tensor, Tensor | None] | None = None
        if changing is None:
            self._states = torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    def changed(self) -> list[int]:
        """The numbers of the buffers that have changed. Their values tell: under vmap, versions do not."""
        return [number for number, copied in self._copies.items() if not torch.equal(copied, self._buffers[number])]

    @torch.no_grad()
    def __call__(self) -> None:
        for number, copied in self._copies.items():
            self._buffers[number].copy_(copied)
        if self._states is not None:
            cpu, cuda = self._states
            torch.set_rng_state(cpu)
            if cuda is not None:
                torch.cuda.set_rng_state(cuda, self._device)


class _HandedOver(torch.autograd.Function):
    """A leaf whose gradient goes to ``take`` and nowhere else. Autograd would copy it to give it the leaf's layout, and
    under vmap the gradients of matrices come transposed."""

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


def _take_away(take: Callable[[Tensor], None], leaf: Tensor) -> None:
    gradient, leaf.grad = leaf.grad, None
    if gradient is not None:
        take(gradient)


def _take(take: Callable[[Tensor], None], single: bool, gradient: Tensor) -> None:
    dense = gradient.to_dense() if gradient.is_sparse else gradient
    take(dense[None] if single else dense)


def _checked(loss: Any) -> Tensor:
    """The loss of one replica, without dimensions."""
    if not isinstance(loss, Tensor):
        raise TypeError(f"loss_fn must return the loss, a tensor, got a {type(loss).__name__}")
    if loss.numel() != 1 or loss.is_complex():
        raise ValueError(
            f"loss_fn must return one real number for each replica, got shape {tuple(loss.shape)} of {loss.dtype}: "
            "reduce it, as by .mean()"
        )
    return loss.reshape(())


def _code_of(loss_fn: Any) -> object:
    """By what loss functions are told apart: their code. A lambda, a partial or a bound method is a new object whenever
    it is written down."""
    while isinstance(loss_fn, functools.partial):
        loss_fn = loss_fn.func
    loss_fn = getattr(loss_fn, "__func__", loss_fn)
    return getattr(loss_fn, "__code__", None) or type(loss_fn)
