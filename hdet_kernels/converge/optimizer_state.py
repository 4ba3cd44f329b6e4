"""Find the state of any optimizer that is averaged: moments and the like, and the step counts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from hdet_kernels.tensors import unique


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
        """Replace the counts, in the order of :meth:`read`."""
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
