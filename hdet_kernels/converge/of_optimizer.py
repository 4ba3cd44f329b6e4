"""Build the converger of an optimizer: for its parameters, its state and its step counts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from hdet_kernels.buckets import Buckets
from hdet_kernels.converge.converger import Converger
from hdet_kernels.converge.labels import all_names
from hdet_kernels.converge.optimizer_state import StepCounts, averaged_state, why_not_averaged
from hdet_kernels.ensemble import Ensemble


def converger_of(
    optimizer: Optimizer,
    ensemble: Ensemble,
    *,
    needs_state: bool = True,
    model: Any = None,
    buffers: Callable[[], Sequence[Tensor]] = tuple,
    **options: Any,
) -> Converger:
    """Return the converger of all parameters, state and step counts of an optimizer.

    Args:
        optimizer: any torch optimizer. Those of this package are averaged in place, in their flat buffers.
        ensemble: the replicas.
        needs_state: whether state will be averaged: unless gradients are shared. State without a mean (integer codes)
            then raises TypeError at the first average.
        model: a module whose names of parameters and buffers messages use.
        buffers: returns the buffers that are averaged.
        options: the other keywords of :class:`Converger`, such as ``compress`` and ``outer``.
    """

    def state() -> dict[str, Tensor]:
        if (why_not := why_not_averaged(optimizer)) is None:
            return averaged_state(optimizer)
        if not needs_state:
            return {}
        raise TypeError(why_not)

    def names() -> Iterator[tuple[str, Tensor]]:
        for group in optimizer.param_groups:
            yield from zip(group.get("param_names", ()), group["params"], strict=False)
        if model is not None:
            yield from all_names(model)

    buckets = getattr(optimizer, "buckets", None)
    return Converger(
        buckets if isinstance(buckets, Buckets) else [p for group in optimizer.param_groups for p in group["params"]],
        ensemble,
        state=state,
        write_state=getattr(optimizer, "write_state_flats", None),
        counts=StepCounts(optimizer),
        buffers=buffers,
        names=names,
        **options,
    )
