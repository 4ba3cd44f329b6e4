"""Read the gradients before a step: whether all replicas have the same ones, and the hypergradient's slopes.

Both run in a hook of the optimizer just before its step, when the gradients are certainly there. The results stay on
their device until the next sync.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from hdet_kernels.tensors import local, one_replica, wide_dtype


def weakly(call: Callable[[], None]) -> Callable[..., None]:
    """Return a hook for an optimizer that calls the bound method ``call`` as long as its object lives."""
    method = weakref.WeakMethod(call)

    def hook(*_: Any) -> None:
        if (alive := method()) is not None:
            alive()

    return hook


def fingerprint(groups: Sequence[dict[str, Any]]) -> Tensor | None:
    """Return a number that is equal on two replicas if, and almost surely only if, their gradients are bit-equal.

    All-reduced gradients are equal; local ones are not. It adds norms and sums of elements in fp64: norms alone would
    be equal after clipping tensor by tensor. None if there is no gradient.
    """
    gradients = [local(p.grad) for group in groups for p in group["params"] if p.grad is not None]
    dense = [g.coalesce().values() if g.is_sparse else g for g in gradients]
    real = [torch.view_as_real(g) if g.is_complex() else g for g in dense if g.numel()]
    if not real:
        return None
    device = real[0].device
    wide = wide_dtype(device)
    parts = [(torch.linalg.vector_norm(g, dtype=wide) + 0.618 * g.sum(dtype=wide)).to(device) for g in real]
    return torch.stack(parts).sum()


class Displacement:
    """The hypergradient's slopes b_j = ⟨ḡ, θ̄(kT) − θ̄((k−1)T)⟩, one for each parameter group.

    :meth:`turn` is called at every sync, with the averaged parameters in place. :meth:`measure` is called before every
    optimizer step, and only the first one after a sync does anything.

    Args:
        optimizer: its parameters are measured.
        apart: whether replicas may start apart (warm noisy initialisation). Then none knows θ̄(0), and the first
            displacement is that of the second cycle.
    """

    def __init__(self, optimizer: Optimizer, *, apart: bool = False) -> None:
        self.optimizer, self.apart = optimizer, apart
        self.last = self._copy()
        self.moved: list[list[Tensor]] | None = None
        self.measured: Tensor | None = None

    def begin(self) -> None:
        """Start from the current parameters."""
        self.last = self._copy()

    def _parameters(self) -> list[list[Tensor]]:
        # The first row of a stack stands for all: they are equal after a sync.
        return [[local(one_replica(p)) for p in group["params"]] for group in self.optimizer.param_groups]

    def _copy(self) -> list[list[Tensor]]:
        return [[p.clone() for p in group] for group in self._parameters()]

    def _device(self) -> torch.device:
        return next(param.device for group in self.last for param in group)

    def turn(self) -> list[float] | None:
        """End a cycle: return the slopes that were measured in it, if any, and note its displacement."""
        slopes = None if self.measured is None else self.measured.tolist()
        now = self._parameters()
        moved = [list(torch._foreach_sub(new, old)) if new else [] for new, old in zip(now, self.last, strict=True)]
        self.moved, self.apart = None if self.apart else moved, False
        self.last = self._copy()
        self.measured = None
        return slopes

    def measure(self) -> None:
        """Take the product of the gradients with the last displacement, if that was not done in this cycle."""
        if self.moved is None:
            return
        device = self._device()
        wide = wide_dtype(device)
        slopes = []
        for group, moved in zip(self.optimizer.param_groups, self.moved, strict=True):
            pairs = zip(group["params"], moved, strict=True)
            dots = [
                (local(one_replica(p, p.grad)) * d).sum(dtype=wide).to(device) for p, d in pairs if p.grad is not None
            ]
            slopes.append(torch.stack(dots).sum() if dots else torch.zeros((), dtype=wide, device=device))
        self.measured = torch.stack(slopes)
        if (scale := getattr(self.optimizer, "grad_scale", None)) is not None:
            self.measured = self.measured / scale.to(device)  # GradScaler leaves unscaling to a fused optimizer
        self.moved = None

    def state_dict(self) -> dict[str, Any]:
        measured = None if self.measured is None else self.measured.tolist()
        return {"last": self.last, "moved": self.moved, "measured": measured, "apart": self.apart}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        device = self._device()
        self.apart = state["apart"]
        self.last = [_placed(saved, here) for saved, here in zip(state["last"], self.last, strict=True)]
        moved = state["moved"]
        self.moved = moved and [_placed(saved, here) for saved, here in zip(moved, self.last, strict=True)]
        measured = state["measured"]
        self.measured = None if measured is None else torch.tensor(measured, dtype=wide_dtype(device), device=device)


def _placed(saved: Sequence[Tensor], like: Sequence[Tensor]) -> list[Tensor]:
    return [s.to(here.device, here.dtype, copy=True) for s, here in zip(saved, like, strict=True)]
