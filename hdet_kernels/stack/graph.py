"""Record the passes of a stack as CUDA graphs, and replay each at the cost of one launch.

A pass is one computation of all losses and gradients. Under vmap it costs the host two to three times what a plain one
does, so that with a small model the GPU waits for the host. A recorded pass costs the host only the copy of the batch.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hdet_kernels.stack.batch import Batch
from hdet_kernels.stack.gradients import GradientCollector
from hdet_kernels.stack.losses import LossFunction, ReplicaLosses
from hdet_kernels.torch_internals import tree_flatten, tree_unflatten

log = logging.getLogger("hdet_kernels")

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
    setting, and addresses of parameters and buffers. If one of them differs, it is another pass.

    Args:
        losses: computes passes that are not recorded yet.
        gradients: collects the gradients.
        device: the CUDA device of the stack.
    """

    def __init__(self, losses: ReplicaLosses, gradients: GradientCollector, device: torch.device) -> None:
        self._losses, self._gradients, self._device = losses, gradients, device
        self._recorded: dict[Hashable, _RecordedPass] = {}
        self._calls: dict[Hashable, int] = {}
        self._pool: Any = None
        self._warned = False

    def compute(
        self, loss_fn: LossFunction, batch: tuple[Any, ...], replicas: int, same_batch: bool, chunk_size: int | None
    ) -> Tensor:
        """Return the losses [R]; the gradients are collected and not committed."""
        leaves, spec = tree_flatten(batch)
        key = self._key(loss_fn, leaves, spec, same_batch, chunk_size)
        if key not in self._recorded:
            # Built before anything else, since it checks the batch.
            whole = Batch(batch, replicas, same_batch)
            if key is None or not self._is_due(loss_fn, key):
                return self._losses.compute(loss_fn, whole, chunk_size, self._gradients)
            static = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            whole = Batch(tree_unflatten(static, spec), replicas, same_batch)
            self._recorded[key] = self._record(loss_fn, whole, chunk_size, _tensors(static))
        recorded = self._recorded[key]
        self._gradients.unalias(recorded.gradients)
        for own, given in zip(recorded.batch, _tensors(leaves), strict=True):
            own.copy_(given)
        recorded.graph.replay()
        self._gradients.collected = list(recorded.gradients)
        return recorded.losses.clone()

    def _key(
        self, loss_fn: LossFunction, leaves: Sequence[Any], spec: Any, same_batch: bool, chunk_size: int | None
    ) -> Hashable:
        """Return the key of a pass; None if it cannot be recorded (unhashable arguments, or another device)."""
        tensors = _tensors(leaves)
        if any(tensor.device != self._device or tensor.requires_grad for tensor in tensors):
            return None
        kind = self._device.type
        key = (
            loss_fn,
            str(spec),
            tuple((tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else leaf for leaf in leaves),
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

    def _record(
        self, loss_fn: LossFunction, batch: Batch, chunk_size: int | None, inputs: list[Tensor]
    ) -> _RecordedPass:
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
                losses = self._losses.compute_vectorized(loss_fn, batch, chunk_size, self._gradients)
        except Exception as error:
            raise RuntimeError(
                "cuda_graphs=True, but the loss could not be recorded as a CUDA graph: it waits for the device, or "
                "uses another one. Build the stack without cuda_graphs"
            ) from error
        finally:
            torch.set_autocast_cache_enabled(caches)
        return _RecordedPass(graph, inputs, losses, list(self._gradients.collected))


@contextmanager
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
