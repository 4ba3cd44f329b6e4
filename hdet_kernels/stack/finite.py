"""Check the first gradients of a loss function: they must be finite where the loss is.

A gradient that is not finite although its loss is comes from the backward pass of an operation. Either the model itself
has such a point, or ``torch.func.vmap`` computes the operation wrongly. So the first pass by each loss function is
checked, at the cost of waiting for the device once.

fp16 is an exception: in the first steps of a run, gradients of a scaled loss overflow until the scale is adapted. There
the check logs a warning only. Whether a model computes in fp16 is found out by watching its operations, since autocast
may be used inside of the loss function.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from hdet_kernels.stack.batch import Batch
from hdet_kernels.stack.gradients import GradientCollector
from hdet_kernels.torch_internals import tree_flatten

log = logging.getLogger("hdet_kernels")

# Computes the losses [R] of a batch, some replicas at a time, and hands their gradients to a collector.
ComputeLosses = Callable[[Batch, int, GradientCollector], Tensor]

# The largest number of parameters that a message names.
MOST_NAMES = 5


def are_finite(losses: Tensor, gradients: Sequence[Tensor | None]) -> bool:
    """Return whether all gradients are finite, or no loss is. Waits for the device."""
    flags = [gradient.isfinite().all() for gradient in gradients if gradient is not None]
    return not flags or bool(torch.stack(flags).all() | ~losses.isfinite().any())


def check_first_gradients(compute: ComputeLosses, batch: Batch, step: int, names: Sequence[str], device: str) -> None:
    """Raise if gradients are not finite where the losses are; called when :func:`are_finite` has found some.

    The pass is computed again, together and then one replica after another, to find the replicas and the culprit. Their
    effects on buffers and random numbers are left to the caller.

    Args:
        compute: computes the losses.
        batch: the batch of the pass.
        step: how many replicas are computed at a time.
        names: the names of the parameters.
        device: the type of the replicas' device.

    Raises:
        RuntimeError: gradients of a replica with a finite loss are not finite, and no operation is in fp16.
    """
    together = _FiniteRows(len(names))
    replicas, parameters = together.find_bad(compute(batch.detached(), step, together))
    if not replicas:
        return
    separate, watch = _FiniteRows(len(names)), _WatchHalf(device)
    with watch:
        losses = compute(batch.detached(), 1, separate)
    is_ours = step > 1 and not separate.find_bad(losses)[0]
    named = ", ".join(names[index] for index in parameters[:MOST_NAMES])
    named += f" and {len(parameters) - MOST_NAMES} more" * (len(parameters) > MOST_NAMES)
    text = (
        f"the losses are finite, but in their first backward pass the gradients of {named} are not, in "
        f"replica{'s' * (len(replicas) > 1)} {', '.join(map(str, replicas))}. {_OURS if is_ours else _MODEL}"
    )
    if not watch.seen:
        raise RuntimeError(text)
    log.warning("%s. The model computes in fp16, where a scaled loss overflows in the first steps: continuing", text)


_OURS = (
    "One replica after another they are finite: torch.func.vmap computes an operation of the model wrongly. Try "
    "chunk_size=1 (one replica after another), fp32 instead of autocast, attention under "
    "torch.nn.attention.sdpa_kernel(SDPBackend.MATH) or written out as matrix products; and report the operation"
)
_MODEL = (
    "Separate modules have them too: look for a root or a norm at 0, a division by 0, or attention with all keys "
    "masked. torch.autograd.set_detect_anomaly(True) and chunk_size=1 name the operation; try fp32 if it is an overflow"
)


class _FiniteRows:
    """Collects whether the gradients of each replica are finite, and keeps none of them."""

    keeps_tensors = False

    def __init__(self, count: int) -> None:
        self.collected: list[Tensor | None] = []
        self._finite: list[list[tuple[slice, Tensor]]] = [[] for _ in range(count)]

    def begin(self, passes: int) -> None:
        pass

    def take(self, index: int, rows: slice, gradient: Tensor) -> None:
        self._finite[index].append((rows, gradient.reshape(len(gradient), -1).isfinite().all(1)))

    def commit(self) -> None:
        raise NotImplementedError("gradients are looked at, and not kept")

    def unalias(self, collected: Sequence[Tensor | None]) -> None:
        pass

    def find_bad(self, losses: Tensor) -> tuple[list[int], list[int]]:
        """Return the replicas with a finite loss whose gradients are not, and the parameters of these gradients."""
        good = torch.ones(len(self._finite), len(losses), dtype=torch.bool)
        for index, found in enumerate(self._finite):
            for rows, finite in found:
                good[index, rows] = finite.cpu()
        bad = ~good & losses.isfinite().cpu()
        replicas: list[int] = bad.any(0).nonzero().flatten().tolist()
        parameters: list[int] = bad.any(1).nonzero().flatten().tolist()
        return replicas, parameters


class _WatchHalf(TorchFunctionMode):
    """Notices whether an operation is computed in fp16."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self._device, self.seen = device, False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        autocast = torch.is_autocast_enabled(self._device) and torch.get_autocast_dtype(self._device) == torch.float16
        tensors = tree_flatten((args, kwargs))[0]
        self.seen |= autocast or any(isinstance(each, Tensor) and each.dtype == torch.float16 for each in tensors)
        return func(*args, **(kwargs or {}))
