"""Compute the losses of all replicas of a stack, and their gradients.

The replicas are computed together: one forward pass under ``torch.func.vmap``, then one ordinary backward pass outside
of it. Where vmap cannot follow the module or the loss function, they are computed one after another.

A pass can be recorded as a CUDA graph (:class:`GraphedLosses`). Under vmap it costs the host two to three times what a
plain one does, so that with a small model the GPU waits for the host. A recorded pass costs it only the copy of the
batch.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.overrides import TorchFunctionMode

from hdet_kernels.stack.gradients import Collector, FiniteRows, hand_over
from hdet_kernels.stack.inputs import Batch, StackHyper
from hdet_kernels.stack.template import StackedParameter, Template
from hdet_kernels.stack.vmap import StackMode, refuse_checkpointing
from hdet_kernels.torch_internals import tree_flatten

log = logging.getLogger("hdet_kernels")

LossFunction = Callable[..., Tensor]

#: The code of a loss function, whether gradients are computed, and the mode of the module.
Kind = tuple[object, bool, bool]


class ReplicaLosses:
    """Computes losses and gradients of the replicas, together where possible.

    ``module`` is called with the tensors of a replica in the place of its own. Stacked tensors [R, *shape]
    are given by the names that they have in it, several if tied.
    """

    def __init__(
        self,
        module: nn.Module,
        parameters: Mapping[tuple[str, ...], StackedParameter],
        buffers: Mapping[tuple[str, ...], Tensor],
        hyper: StackHyper,
    ) -> None:
        self.module, self.hyper = module, hyper
        self._template = Template(module, parameters, buffers)
        self._parameters, self._buffers = list(parameters.values()), list(buffers.values())
        self._names = [names[0] for names in parameters]
        self._replicas, self._device = len(self._parameters[0]), self._parameters[0].device
        # The buffers that each kind of pass changes, ...
        self._changed_buffers: dict[Kind, list[int]] = {}
        # ... and the kinds on which vmap has failed.
        self._one_by_one: set[Kind] = set()

    def compute(
        self, loss_fn: LossFunction, batch: Batch, chunk_size: int | None, gradients: Collector | None
    ) -> Tensor:
        """Return the losses [R], detached, with ``chunk_size`` replicas at a time; None for all.

        If the losses cannot be computed together, restore buffers and random numbers and compute them one by one. The
        collector of the gradients is not committed.
        """
        kind = self._kind(loss_fn, gradients is not None)
        step = 1 if kind in self._one_by_one else min(chunk_size or self._replicas, self._replicas)
        rollback = Rollback(self._buffers, self._changed_buffers.get(kind), self._device)
        # A loss function may write to its batch; a second attempt needs the batch unwritten.
        unwritten = batch.copy() if step > 1 and kind not in self._changed_buffers else batch
        reason = None
        try:
            losses = self.compute_once(loss_fn, batch, step, gradients, known=kind in self._changed_buffers)
        except Exception as error:
            rollback.restore()
            if step > 1 and isinstance(error, torch.OutOfMemoryError):
                error.add_note(f"chunk_size=k computes k of the {self._replicas} replicas at a time")
                raise
            if step == 1:
                raise
            reason, step = (str(error).strip().splitlines() or [repr(error)])[0], 1
        if reason is not None:
            try:
                losses = self.compute_once(loss_fn, unwritten, 1, gradients)
            except Exception as error:
                rollback.restore()
                error.add_note(f"the replicas are computed one after another, because together they raised: {reason}")
                raise
        if kind not in self._changed_buffers:
            with rollback.on_error():
                self._check_first(loss_fn, unwritten, step, gradients, losses)
            self._changed_buffers[kind] = rollback.changed()
        if reason is not None:
            if not any(code == kind[0] for code, _, _ in self._one_by_one):  # warn once for a loss function
                log.warning(
                    "the replicas' losses by %s are computed one after the other, because torch.func.vmap cannot "
                    "compute them together (%s): %d forward passes and backward passes instead of one, with about %d "
                    "times the launches",
                    getattr(loss_fn, "__qualname__", type(loss_fn).__name__),
                    reason,
                    self._replicas,
                    self._replicas,
                )
            self._one_by_one.add(kind)
        return losses

    def is_vectorized(self, loss_fn: LossFunction) -> bool:
        """Return whether losses and gradients by ``loss_fn`` have been computed together before."""
        kind = self._kind(loss_fn, True)
        return kind in self._changed_buffers and kind not in self._one_by_one

    def recording_key(self) -> tuple[Any, ...]:
        """Return what a recorded pass depends on beside its batch: addresses of tensors and modes of modules."""
        tensors = (*self._parameters, *self._buffers, *self.hyper.values())
        return tuple(map(Tensor.data_ptr, tensors)), tuple(module.training for module in self.module.modules())

    def _kind(self, loss_fn: LossFunction, has_gradients: bool) -> Kind:
        return _code_of(loss_fn), has_gradients, self.module.training

    def compute_once(
        self,
        loss_fn: LossFunction,
        batch: Batch,
        step: int | None,
        gradients: Collector | None,
        *,
        known: bool = False,
    ) -> Tensor:
        """Return the losses [R], computing ``step`` replicas at a time (default: all), without a second attempt.

        ``known``: they were computed in this way before, so that no second attempt is to be expected.
        """
        step = step or self._replicas
        starts = range(0, self._replicas, step)
        if gradients is not None:
            gradients.begin(len(starts), known=known)
        losses = []
        with torch.set_grad_enabled(gradients is not None), self._template.refuse_gradients():
            for start in starts:
                rows = slice(start, min(start + step, self._replicas))
                compute = self._compute_one if rows.stop - rows.start == 1 else self._compute_several
                losses.append(compute(loss_fn, rows, batch, gradients))
        return torch.cat(losses)

    def _compute_several(self, loss_fn: LossFunction, rows: slice, batch: Batch, gradients: Collector | None) -> Tensor:
        """Return the losses [k] of the replicas ``rows`` by one forward and one backward pass."""
        indices: list[int] = []

        def one(parameters: list[Tensor], buffers: list[Tensor], hyper: list[Tensor], slices: list[Tensor]) -> Any:
            def loss_of(module: nn.Module) -> Tensor:
                return _checked_loss(loss_fn(module, *batch.with_slices(slices)))

            with self.hyper.reading(hyper), StackMode(self._device, parameters[0]):
                loss, assigned = self._template.call(parameters, buffers, loss_of)
            indices.extend(assigned)
            return loss, list(assigned.values())

        leaves = self._leaves(rows, gradients)
        buffers = [buffer.detach()[rows] for buffer in self._buffers]
        with refuse_checkpointing():
            inputs = leaves, buffers, self.hyper.slices(rows), batch.slices(rows)
            loss, changed = vmap(one, randomness="different")(*inputs)
        if gradients is not None:
            self._backward(loss.sum())
        self._write_buffers(rows, dict(zip(indices, changed, strict=True)))
        detached: Tensor = loss.detach()
        return detached

    def _compute_one(self, loss_fn: LossFunction, rows: slice, batch: Batch, gradients: Collector | None) -> Tensor:
        """Return the loss [1] of the single replica in ``rows``, without vmap.

        The backward pass runs while the replica's tensors are in the module, since activation checkpointing computes
        forward again in it.
        """
        row = rows.start

        def loss_of(module: nn.Module) -> Tensor:
            loss = _checked_loss(loss_fn(module, *batch.with_slices(batch.slices(row))))
            if gradients is not None:
                self._backward(loss)
            return loss.detach()

        leaves = self._leaves(rows, gradients, single=True)
        buffers = [buffer.detach()[row] for buffer in self._buffers]
        with self.hyper.reading([values[0] for values in self.hyper.slices(rows)]):
            loss, assigned = self._template.call(leaves, buffers, loss_of)
        self._write_buffers(rows, {index: tensor[None] for index, tensor in assigned.items()})
        losses: Tensor = loss.reshape(1)
        return losses

    def _leaves(self, rows: slice, gradients: Collector | None, single: bool = False) -> list[Tensor]:
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
        kind = self._device.type
        with torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else contextlib.nullcontext():
            loss.backward()

    @torch.no_grad()
    def _write_buffers(self, rows: slice, values: Mapping[int, Tensor]) -> None:
        for index, value in values.items():
            self._buffers[index][rows].copy_(value)

    def _check_first(
        self, loss_fn: LossFunction, batch: Batch, step: int, gradients: Collector | None, losses: Tensor
    ) -> None:
        """Raise if gradients of the first pass by a loss function are not finite where the losses are.

        A gradient that is not finite although its loss is comes from the backward pass of an operation. Either the
        model itself has such a point, or vmap computes the operation wrongly. To find out, the pass is computed again,
        together and one replica after another, and what that does to buffers and random numbers is undone.

        fp16 is an exception: in the first steps of a run, gradients of a scaled loss overflow until the scale is
        adapted. There a warning is logged.
        """
        if gradients is None or _are_finite(losses, gradients.collected):
            return
        after = Rollback(self._buffers, None, self._device)
        together, separate, watch = FiniteRows(self._parameters), FiniteRows(self._parameters), _WatchHalf(self._device)
        replicas, parameters = together.find_bad(self.compute_once(loss_fn, batch.copy(detach=True), step, together))
        if not replicas:
            after.restore()
            return
        with watch:
            losses = self.compute_once(loss_fn, batch.copy(detach=True), 1, separate)
        is_ours = step > 1 and not separate.find_bad(losses)[0]
        named = ", ".join(self._names[index] for index in parameters[:MOST_NAMES])
        named += f" and {len(parameters) - MOST_NAMES} more" * (len(parameters) > MOST_NAMES)
        text = (
            f"the losses are finite, but in their first backward pass the gradients of {named} are not, in "
            f"replica{'s' * (len(replicas) > 1)} {', '.join(map(str, replicas))}. {_OURS if is_ours else _MODEL}"
        )
        if not watch.seen:
            raise RuntimeError(text)
        after.restore()
        log.warning(
            "%s. The model computes in fp16, where a scaled loss overflows in the first steps: continuing", text
        )


# The largest number of parameters that a message names.
MOST_NAMES = 5

_OURS = (
    "One replica after another they are finite: torch.func.vmap computes an operation of the model wrongly. Try "
    "chunk_size=1 (one replica after another), fp32 instead of autocast, attention under "
    "torch.nn.attention.sdpa_kernel(SDPBackend.MATH) or written out as matrix products; and report the operation"
)
_MODEL = (
    "Separate modules have them too: look for a root or a norm at 0, a division by 0, or attention with all keys "
    "masked. torch.autograd.set_detect_anomaly(True) and chunk_size=1 name the operation; try fp32 if it is an overflow"
)


def _are_finite(losses: Tensor, gradients: Sequence[Tensor | None]) -> bool:
    """Return whether all gradients are finite, or no loss is. Waits for the device."""
    flags = [gradient.isfinite().all() for gradient in gradients if gradient is not None]
    return not flags or bool(torch.stack(flags).all() | ~losses.isfinite().any())


class _WatchHalf(TorchFunctionMode):
    """Notices whether an operation is computed in fp16, since autocast may be used inside of a loss function."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device, self.seen = device.type, False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        autocast = torch.is_autocast_enabled(self._device) and torch.get_autocast_dtype(self._device) == torch.float16
        self.seen |= autocast or any(
            tensor.dtype == torch.float16 for tensor in _tensors(tree_flatten((args, kwargs))[0])
        )
        return func(*args, **(kwargs or {}))


class Rollback:
    """A copy of the state that computing a loss may change: buffers and, at its first use, random numbers.

    ``changing`` are the indices of the buffers that the loss is known to change; None if it is used for the first time
    and may change any.
    """

    def __init__(self, buffers: Sequence[Tensor], changing: Sequence[int] | None, device: torch.device) -> None:
        self._buffers, self._device = buffers, device
        indices = range(len(buffers)) if changing is None else changing
        self._copies = {index: buffers[index].clone() for index in indices}
        self._generators: tuple[Tensor, Tensor | None] | None = None
        if changing is None:
            cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
            self._generators = torch.get_rng_state(), cuda

    def changed(self) -> list[int]:
        """Return the indices of the buffers that have changed.

        Values are compared: the version counters of tensors do not count what vmap writes.
        """
        return [index for index, copied in self._copies.items() if not torch.equal(copied, self._buffers[index])]

    @torch.no_grad()
    def restore(self) -> None:
        """Write the copies back."""
        for index, copied in self._copies.items():
            self._buffers[index].copy_(copied)
        if self._generators is not None:
            cpu, cuda = self._generators
            torch.set_rng_state(cpu)
            if cuda is not None:
                torch.cuda.set_rng_state(cuda, self._device)

    @contextlib.contextmanager
    def on_error(self) -> Iterator[None]:
        """Restore if the block raises."""
        try:
            yield
        except Exception:
            self.restore()
            raise


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


# Calls with the same loss function and shapes before one is recorded: libraries initialise themselves in them.
EAGER_CALLS = 2

# The largest number of recorded passes. Each keeps the memory of its activations.
MAX_GRAPHS = 8


@dataclass(frozen=True)
class _RecordedPass:
    """A graph, the tensors it reads its batch from, and the tensors it writes losses and gradients to."""

    graph: torch.cuda.CUDAGraph
    batch: list[Tensor]
    losses: Tensor
    gradients: list[Tensor | None]


class GraphedLosses:
    """Computes losses and gradients as ``losses`` does, by recording passes and replaying them.

    A recorded pass is replayed for the same loss function, the same shapes of the batch, modes of the modules, autocast
    setting, and addresses of parameters and buffers. If one of them differs, it is another pass, which ``losses``
    computes until it is recorded.
    """

    def __init__(self, losses: ReplicaLosses, gradients: Collector, device: torch.device) -> None:
        self._losses, self._gradients, self._device = losses, gradients, device
        self._recorded: dict[Hashable, _RecordedPass] = {}
        self._calls: dict[Hashable, int] = {}
        self._pool: Any = None
        self._warned = False

    def compute(self, loss_fn: LossFunction, batch: Batch, same_batch: bool, chunk_size: int | None) -> Tensor:
        """Return the losses [R]; the gradients are collected and not committed."""
        key = self._key(loss_fn, batch, same_batch, chunk_size)
        if key not in self._recorded:
            if key is None or not self._is_due(loss_fn, key):
                return self._losses.compute(loss_fn, batch, chunk_size, self._gradients)
            self._recorded[key] = self._record(loss_fn, batch.copy(), chunk_size)
        recorded = self._recorded[key]
        self._gradients.unalias(recorded.gradients)
        for own, given in zip(recorded.batch, _tensors(batch.leaves), strict=True):
            own.copy_(given)
        recorded.graph.replay()
        self._gradients.collected = list(recorded.gradients)
        return recorded.losses.clone()

    def _key(self, loss_fn: LossFunction, batch: Batch, same_batch: bool, chunk_size: int | None) -> Hashable:
        """Return the key of a pass; None if it cannot be recorded (unhashable arguments, or another device)."""
        if any(tensor.device != self._device or tensor.requires_grad for tensor in _tensors(batch.leaves)):
            return None
        kind = self._device.type
        key = (
            loss_fn,
            str(batch.structure),
            tuple((tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else leaf for leaf in batch.leaves),
            (same_batch, chunk_size),
            (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)),
            self._losses.recording_key(),
        )
        try:
            hash(key)
        except TypeError:
            return None
        return key

    def _is_due(self, loss_fn: LossFunction, key: Hashable) -> bool:
        """Count a call of pass ``key``, and return whether it is to be recorded now."""
        if len(self._calls) > 100 * MAX_GRAPHS:
            self._calls.clear()
        self._calls[key] = self._calls.get(key, 0) + 1
        if self._calls[key] <= EAGER_CALLS or not self._losses.is_vectorized(loss_fn):
            return False
        if len(self._recorded) == MAX_GRAPHS:
            if not self._warned:
                self._warned = True
                log.warning(
                    "cuda_graphs=True: %d different passes are recorded, and no more will be: pad batches to a few "
                    "shapes, and pass the same loss function object every time",
                    MAX_GRAPHS,
                )
            return False
        return True

    def _record(self, loss_fn: LossFunction, batch: Batch, chunk_size: int | None) -> _RecordedPass:
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        caches = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)  # else every replay would read a cast made before the recording
        try:
            # thread_local: another thread may be averaging parameters on the device.
            with (
                torch.cuda.device(self._device),
                _without_garbage_collection(),
                torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"),
            ):
                losses = self._losses.compute_once(loss_fn, batch, chunk_size, self._gradients)
        except Exception as error:
            self._end_failed_recording()
            raise RuntimeError(
                "cuda_graphs=True, but the loss could not be recorded as a CUDA graph: it waits for the device, or "
                "uses another one. Build the stack without cuda_graphs"
            ) from error
        finally:
            torch.set_autocast_cache_enabled(caches)
        return _RecordedPass(graph, _tensors(batch.leaves), losses, list(self._gradients.collected))

    def _end_failed_recording(self) -> None:
        """Record nothing: torch's random generator believes that a recording that failed goes on until one ends."""
        with torch.cuda.device(self._device), warnings.catch_warnings(), contextlib.suppress(RuntimeError):
            warnings.simplefilter("ignore")  # torch warns of a graph without any work
            with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
                pass


@contextlib.contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Collect garbage now and none in this block: freeing a graph while another is recorded ends the recording."""
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _tensors(leaves: Sequence[Any]) -> list[Tensor]:
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]
