"""The passes of a stack as CUDA graphs: recorded once, and replayed at the price of one launch.

Under vmap a pass costs the host two to three times what a plain one does, and a small model leaves the GPU waiting for
it. A recorded pass costs the host nothing but the copy of the batch.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hdet_kernels.stack.batch import Batch
from hdet_kernels.stack.gradients import Collector
from hdet_kernels.stack.losses import Losses, LossFunction

log = logging.getLogger("hdet_kernels")

#: Calls with the same loss function and shapes before the one that is recorded: libraries set themselves up in them.
EAGER_CALLS = 2

#: Passes that are kept. Each has the memory of its activations for itself.
MOST_GRAPHS = 8


@dataclass(frozen=True)
class _Recorded:
    """A pass, the tensors it reads its batch from, and those it leaves losses and gradients in."""

    graph: torch.cuda.CUDAGraph
    batch: list[Tensor]
    losses: Tensor
    gradients: list[Tensor | None]


class Graphs:
    """Computes losses and gradients as ``losses`` does, by replaying what it has recorded.

    A pass belongs to a loss function, the shapes of its batch, the modes of the modules, autocast, and the addresses of
    parameters and buffers: where one of them is another, it is another pass.
    """

    def __init__(self, losses: Losses, gradients: Collector, device: torch.device) -> None:
        self._losses, self._gradients, self._device = losses, gradients, device
        self._recorded: dict[Hashable, _Recorded] = {}
        self._calls: dict[Hashable, int] = {}
        self._pool: Any = None
        self._warned = False

    def __call__(
        self, loss_fn: LossFunction, batch: tuple[Any, ...], replicas: int, same_batch: bool, chunk_size: int | None
    ) -> Tensor:
        """[R]; ``gradients`` collects, and is not committed."""
        leaves, spec = pytree.tree_flatten(batch)
        key = self._key(loss_fn, leaves, spec, same_batch, chunk_size)
        if key not in self._recorded:
            # Checks the batch, whatever comes of it.
            whole = Batch(batch, replicas, same_batch)
            if key is None or not self._is_due(loss_fn, key):
                return self._losses(loss_fn, whole, chunk_size, self._gradients)
            static = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            whole = Batch(pytree.tree_unflatten(static, spec), replicas, same_batch)
            self._recorded[key] = self._record(loss_fn, whole, chunk_size, _tensors(static))
        recorded = self._recorded[key]
        self._gradients.let_go(recorded.gradients)
        if recorded.batch:
            torch._foreach_copy_(recorded.batch, _tensors(leaves))
        recorded.graph.replay()
        self._gradients.collected = list(recorded.gradients)
        return recorded.losses.clone()

    def _key(
        self, loss_fn: LossFunction, leaves: Sequence[Any], spec: Any, same_batch: bool, chunk_size: int | None
    ) -> Hashable:
        """None for what cannot be told from another pass, or lies on another device."""
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
            self._losses.fixed(),
        )
        try:
            hash(key)
        except TypeError:
            return None
        return key

    def _is_due(self, loss_fn: LossFunction, key: Hashable) -> bool:
        if len(self._calls) > 100 * MOST_GRAPHS:
            self._calls.clear()
        self._calls[key] = self._calls.get(key, 0) + 1
        if self._calls[key] <= EAGER_CALLS or not self._losses.are_together(loss_fn):
            return False
        if len(self._recorded) == MOST_GRAPHS:
            if not self._warned:
                self._warned = True
                log.warning(
                    "cuda_graphs=True: %d different passes are recorded, and no more will be: pad batches to a few "
                    "shapes, and pass the same loss function object every time",
                    MOST_GRAPHS,
                )
            return False
        return True

    def _record(self, loss_fn: LossFunction, batch: Batch, chunk_size: int | None, inputs: list[Tensor]) -> _Recorded:
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        caches = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)  # a cast that was made before would be read by every replay
        try:
            # thread_local: an average may be on its way in another thread.
            with (
                torch.cuda.device(self._device),
                torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"),
            ):
                losses = self._losses.together(loss_fn, batch, chunk_size, self._gradients)
        except Exception as error:
            raise RuntimeError(
                "cuda_graphs=True, but the loss could not be recorded as a CUDA graph: it waits for the device, or "
                "works on another one. Build the stack without cuda_graphs"
            ) from error
        finally:
            torch.set_autocast_cache_enabled(caches)
        return _Recorded(graph, inputs, losses, list(self._gradients.collected))


def _tensors(leaves: Sequence[Any]) -> list[Tensor]:
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]
