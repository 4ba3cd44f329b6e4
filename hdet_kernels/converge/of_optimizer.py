"""Build the converger of any optimizer: find its parameters, the state that is averaged, and its step counts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from hdet_kernels.buckets import Buckets
from hdet_kernels.converge.converger import Converger
from hdet_kernels.converge.payload import all_names
from hdet_kernels.ensemble import Ensemble
from hdet_kernels.tensors import unique


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


def averaged_state(optimizer: Optimizer) -> dict[str, Tensor]:
    """Return the floating-point state of all parameters (moments, not step counts), by parameter and name."""
    flats = getattr(optimizer, "state_flats", None)
    if callable(flats):
        return dict(flats())
    return {
        f"{index}/{key}": value
        for index, state in enumerate(_states(optimizer))
        for key, value in sorted(state.items())
        if key != "step" and isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())
    }


def why_not_averaged(optimizer: Optimizer) -> str | None:
    """Return why this optimizer's state has no mean (integer codes, lists of tensors); None if it has one."""
    if callable(getattr(optimizer, "state_flats", None)):
        return None
    for index, state in enumerate(_states(optimizer)):
        for key, value in state.items():
            coded = isinstance(value, Tensor) and not (value.is_floating_point() or value.is_complex())
            listed = isinstance(value, list | tuple | dict) and any(isinstance(v, Tensor) for v in value)
            if key != "step" and (coded or listed):
                return (
                    f"the state {key!r} of parameter {index} ({type(optimizer).__name__}) is {type(value).__name__}"
                    f"{f' of {value.dtype}' if isinstance(value, Tensor) else ' of tensors'}, which has no mean: pass "
                    "gradients='shared' if gradients are averaged at every step (DDP), or "
                    "averaging=hk.Averaging(state=False)"
                )
    return None


class StepCounts:
    """Access to the step counts of all parameters that have one, as one tensor."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    def read(self) -> Tensor:
        """Return a copy, float32 on the CPU."""
        flats = getattr(self.optimizer, "step_flats", None)
        if callable(flats):
            found: list[Any] = flats()
        else:
            found = [state["step"] for state in _states(self.optimizer) if "step" in state]
        tensors = [
            (count if isinstance(count, Tensor) else torch.tensor(count, device="cpu")).detach().reshape(-1).float()
            for count in found
        ]
        # One transfer per device, not one per parameter.
        there = {device: [t for t in tensors if t.device == device] for device in {t.device for t in tensors}}
        here = {device: iter(torch.cat(group).cpu().split([len(t) for t in group])) for device, group in there.items()}
        return torch.cat([next(here[t.device]) for t in tensors]) if tensors else torch.zeros(0, device="cpu")

    def write(self, counts: Tensor) -> None:
        flats = getattr(self.optimizer, "step_flats", None)
        if callable(flats):
            targets = flats()
            for target, part in zip(targets, counts.split([len(target) for target in targets]), strict=True):
                target.copy_(part)
            return
        states = [state for state in _states(self.optimizer) if "step" in state]
        for state, count in zip(states, counts.tolist(), strict=True):
            if isinstance(state["step"], Tensor):
                state["step"].fill_(count)
            else:
                state["step"] = type(state["step"])(count)


def _states(optimizer: Optimizer) -> list[dict[str, Any]]:
    params = unique(param for group in optimizer.param_groups for param in group["params"])
    return [optimizer.state.get(param, {}) for param in params]
