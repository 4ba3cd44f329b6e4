"""Read the gradients before a step: whether all replicas have the same ones, and the hypergradient's slopes.

Both run in a hook of the optimizer just before its step, when the gradients are certainly there. The results stay on
their device until the next sync.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from hdet_kernels.controller.protocol import MeasuredSlopes, Run
from hdet_kernels.ensemble import Ensemble
from hdet_kernels.tensors import local, one_replica, wide_dtype

#: The first gradients of a cycle that are multiplied with the displacement of the cycle before.
SLOPE_STEPS = 8


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

    ḡ is the mean of the first gradients of the next cycle. Each of them sees other examples, so their scatter tells the
    error of the mean. :meth:`turn` is called at every sync, with the averaged parameters in place. :meth:`measure` is
    called before every optimizer step and does something in the first ``steps`` of a cycle only.

    Args:
        optimizer: its parameters are measured.
        apart: whether replicas may start apart (warm noisy initialisation). Then none knows θ̄(0), and the first
            displacement is that of the second cycle.
        steps: the most gradients of a cycle that are taken.
    """

    def __init__(self, optimizer: Optimizer, *, apart: bool = False, steps: int = 1) -> None:
        self.optimizer, self.apart, self.steps = optimizer, apart, steps
        self.last = self._copy()
        self.moved: list[list[Tensor]] | None = None
        self.sums: Tensor | None = None  # [2, groups]: of the products and of their squares
        self.count = 0

    @staticmethod
    def of(optimizer: Optimizer, run: Run, ensemble: Ensemble) -> Displacement | None:
        """Return one for a run; None if its controller does not ask for slopes."""
        return Displacement(optimizer, apart=ensemble.size > 1, steps=SLOPE_STEPS) if run.slopes else None

    def begin(self) -> None:
        """Start from the current parameters."""
        self.last = self._copy()

    def begin_anew(self) -> None:
        """Forget the last cycle, because the parameters were replaced, unless nothing is measured any more."""
        if not self.ended:
            self.last, self.moved, self.sums, self.count = self._copy(), None, None, 0

    def end(self) -> None:
        """Free the memory: nothing is measured any more."""
        self.last, self.moved, self.sums, self.count = [[] for _ in self.last], None, None, 0

    @property
    def ended(self) -> bool:
        """Whether :meth:`end` was called."""
        return not any(self.last)

    def _parameters(self) -> list[list[Tensor]]:
        # The first row of a stack stands for all: they are equal after a sync.
        return [[local(one_replica(p)) for p in group["params"]] for group in self.optimizer.param_groups]

    @property
    def shapes(self) -> list[list[tuple[int, ...]]]:
        """The shapes of the parameters of one replica, by group."""
        return [[tuple(param.shape) for param in group] for group in self._parameters()]

    def _copy(self) -> list[list[Tensor]]:
        return [[p.clone() for p in group] for group in self._parameters()]

    def _device(self) -> torch.device:
        return next(param.device for group in self._parameters() for param in group)

    def turn(self) -> MeasuredSlopes | None:
        """End a cycle: return the slopes that were measured in it, if any, and note its displacement."""
        slopes = None if self.sums is None else self._slopes(self.sums.tolist())
        self.sums, self.count = None, 0
        if self.ended:
            return slopes
        now = self._parameters()
        moved = [list(torch._foreach_sub(new, old)) if new else [] for new, old in zip(now, self.last, strict=True)]
        self.moved, self.apart = None if self.apart else moved, False
        self.last = self._copy()
        return slopes

    def _slopes(self, sums: list[list[float]]) -> MeasuredSlopes:
        n, values, errors = self.count, [], []
        for total, squares in zip(*sums, strict=True):
            mean = total / n
            variance = max(squares / n - mean * mean, 0.0) / (n - 1) if n > 1 else math.nan
            values.append(mean)
            errors.append(math.sqrt(variance))
        return MeasuredSlopes(values, errors)

    def measure(self) -> None:
        """Take the product of the gradients with the last displacement, in the first steps of a cycle."""
        if self.moved is None:
            return
        device = self._device()
        wide = wide_dtype(device)
        products = []
        for group, moved in zip(self.optimizer.param_groups, self.moved, strict=True):
            pairs = zip(group["params"], moved, strict=True)
            dots = [
                (local(one_replica(p, p.grad)) * d).sum(dtype=wide).to(device) for p, d in pairs if p.grad is not None
            ]
            products.append(torch.stack(dots).sum() if dots else torch.zeros((), dtype=wide, device=device))
        slopes = torch.stack(products)
        if (scale := getattr(self.optimizer, "grad_scale", None)) is not None:
            slopes = slopes / scale.to(device)  # GradScaler leaves unscaling to a fused optimizer
        sums = torch.stack([slopes, slopes.square()])
        self.sums = sums if self.sums is None else self.sums + sums
        self.count += 1
        if self.count == self.steps:
            self.moved = None

    def state_dict(self) -> dict[str, Any]:
        """Return the state, with the tensors in use."""
        sums = None if self.sums is None else self.sums.tolist()
        return {"last": self.last, "moved": self.moved, "sums": sums, "count": self.count, "apart": self.apart}

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Load a saved state. None: the saved run measured no slopes, so that the last average is not known."""
        if state is None:
            self.last, self.moved, self.sums, self.count, self.apart = self._copy(), None, None, 0, True
            return
        device, like = self._device(), self._parameters()
        self.apart = state["apart"]
        if any(state["last"]):
            self.last = [_placed(saved, here) for saved, here in zip(state["last"], like, strict=True)]
        else:
            self.end()
        moved = state["moved"]
        self.moved = moved and [_placed(saved, here) for saved, here in zip(moved, like, strict=True)]
        sums = state["sums"]
        self.sums = None if sums is None else torch.tensor(sums, dtype=wide_dtype(device), device=device)
        self.count = state["count"]


def _placed(saved: Sequence[Tensor], like: Sequence[Tensor]) -> list[Tensor]:
    return [s.to(here.device, here.dtype, copy=True) for s, here in zip(saved, like, strict=True)]
