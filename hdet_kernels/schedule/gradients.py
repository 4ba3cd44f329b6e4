"""Read the gradients before a step: whether all replicas have the same ones, and the hypergradient's slopes.

Both run in a hook of the optimizer just before its step, when the gradients are certainly there; with a closure, when
it has made them. An optimizer that steps in the backward pass shows its gradients a part at a time. The results stay on
their device until the next sync.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from hdet_kernels.checks import check_callable
from hdet_kernels.controller.protocol import MeasuredSlopes, Run
from hdet_kernels.ensemble import Ensemble
from hdet_kernels.optim.base import Pairs
from hdet_kernels.tensors import checksum, local, one_replica, wide_dtype

#: The first gradients of a cycle that are multiplied with the displacement of the cycle before.
SLOPE_STEPS = 8


def look_at_gradients(
    look: Callable[[], None], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Call ``look`` when the gradients of an optimizer step are there: now, or once its closure has made them.

    ``args`` and ``kwargs`` are those of ``optimizer.step``, the optimizer first, as a pre-hook of it gets them. Returns
    them with another closure, for the optimizer to go on with; None where there is no closure.
    """
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if closure is None:
        look()
        return None
    check_callable("closure", closure, "closure()", takes=0, remedy="it evaluates the model and returns the loss")
    looked = False

    def looked_after() -> Any:
        nonlocal looked
        loss = closure()
        if not looked:  # some optimizers call it again after they have moved the parameters
            looked = True
            look()
        return loss

    if len(args) > 1:
        return (args[0], looked_after, *args[2:]), kwargs
    return args, {**kwargs, "closure": looked_after}


class Fingerprint:
    """A number that is equal on two replicas if, and almost surely only if, their gradients are bit-equal.

    All-reduced gradients are equal; local ones are not. It adds checksums, because norms alone would be equal after
    clipping tensor by tensor.
    """

    def __init__(self) -> None:
        self._numbers: dict[int, Tensor] = {}

    def look(self, pairs: Pairs) -> None:
        """Take the gradients of some parameters in."""
        for param, gradient in pairs:
            if gradient is not None and (part := local(gradient)).numel():
                self._numbers[id(param)] = checksum(part)

    def value(self, groups: Sequence[dict[str, Any]]) -> Tensor | None:
        """Return the number; None if there was no gradient."""
        params = [id(p) for group in groups for p in group["params"] if id(p) in self._numbers]
        if not params:
            return None
        device = self._numbers[params[0]].device
        return torch.stack([self._numbers[param].to(device) for param in params]).sum()


def fingerprint(groups: Sequence[dict[str, Any]]) -> Tensor | None:
    """Return the :class:`Fingerprint` of the gradients that are there now; None if there is no gradient."""
    found = Fingerprint()
    found.look(pairs_of(groups))
    return found.value(groups)


def pairs_of(groups: Sequence[dict[str, Any]]) -> Pairs:
    """Return all parameters with the gradients that they have now."""
    return ((param, param.grad) for group in groups for param in group["params"])


class Displacement:
    """The hypergradient's slopes b_j = ⟨ḡ, θ̄(kT) − θ̄((k−1)T)⟩, one for each learning rate.

    ḡ is the mean of the first gradients of the next cycle. Each of them sees other examples, so their scatter tells the
    error of the mean. :meth:`turn` is called at every sync, with the averaged parameters in place. :meth:`measure` is
    called before every optimizer step and does something in the first ``steps`` of a cycle only.

    Args:
        optimizer: its parameters are measured.
        apart: whether replicas may start apart (warm noisy initialisation). Then none knows θ̄(0), and the first
            displacement is that of the second cycle.
        steps: the most gradients of a cycle that are taken.
        tied: the parameter groups of each learning rate. None: every group has one of its own.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        apart: bool = False,
        steps: int = 1,
        tied: Sequence[Sequence[int]] | None = None,
    ) -> None:
        self.optimizer, self.apart, self.steps = optimizer, apart, steps
        self._starts_apart = apart
        self.tied = [(index,) for index in range(len(optimizer.param_groups))] if tied is None else list(tied)
        self.last = self._copy()
        self.moved = None
        self.slopes: list[Tensor] = []  # [learning rates] of each gradient so far
        self._dots: dict[int, Tensor] = {}  # by parameter, of the step that is being looked at

    @staticmethod
    def of(
        optimizer: Optimizer, run: Run, ensemble: Ensemble, *, tied: Sequence[Sequence[int]] | None = None
    ) -> Displacement | None:
        """Return one for a run as its controller prepared it; None if that does not ask for slopes."""
        if not run.slopes:
            return None
        return Displacement(optimizer, apart=ensemble.size > 1, steps=SLOPE_STEPS, tied=tied)

    @property
    def moved(self) -> list[list[Tensor]] | None:
        """The displacement of the last cycle, by group; None if gradients are not to be multiplied with it."""
        return self._moved

    @moved.setter
    def moved(self, value: list[list[Tensor]] | None) -> None:
        self._moved, self._moved_of = value, dict[int, Tensor]()

    def begin(self) -> None:
        self.last = self._copy()

    def begin_anew(self) -> None:
        """Forget all cycles, because the replicas are where they started, and measure again if that had ended."""
        self.last, self.moved, self.slopes, self.apart = self._copy(), None, [], self._starts_apart

    def end(self) -> None:
        """Free the memory: nothing is measured any more."""
        self.last, self.moved, self.slopes = [[] for _ in self.last], None, []

    @property
    def ended(self) -> bool:
        return not any(self.last)

    def _parameters(self) -> list[list[Tensor]]:
        # The first row of a stack stands for all: they are equal after a sync.
        return [[local(one_replica(p)) for p in group["params"]] for group in self.optimizer.param_groups]

    @property
    def shapes(self) -> list[list[tuple[int, ...]]]:
        return [[tuple(param.shape) for param in group] for group in self._parameters()]

    def _copy(self) -> list[list[Tensor]]:
        return [[p.clone() for p in group] for group in self._parameters()]

    def _device(self) -> torch.device:
        return next(param.device for group in self.optimizer.param_groups for param in group["params"])

    def turn(self, rows: Tensor | None = None) -> MeasuredSlopes | None:
        """End a cycle: return the slopes that were measured in it, if any, and note its displacement.

        Args:
            rows: where several processes hold one replica, what :meth:`row` returned on each of them, [parts, columns].
        """
        measured = self._measured() if rows is None else self._measured_by_all(rows)
        slopes = _mean_and_error(measured) if measured else None
        self.slopes = []
        if self.ended:
            return slopes
        now = self._parameters()
        moved = [[p - q for p, q in zip(new, old, strict=True)] for new, old in zip(now, self.last, strict=True)]
        self.moved, self.apart = None if self.apart else moved, False
        self.last = self._copy()
        return slopes

    def _measured(self) -> list[list[float]]:
        found: list[list[float]] = torch.stack(self.slopes).tolist() if self.slopes else []
        return found

    def row(self) -> Tensor:
        """Return what was measured in this cycle with this process's part of the gradient, for :meth:`turn`."""
        count, rates, device = len(self.slopes), len(self.tied), self._device()
        row = torch.zeros(1 + self.steps * rates, dtype=wide_dtype(device), device=device)
        row[0] = count
        if count:
            row[1 : 1 + count * rates] = torch.cat(self.slopes)
        return row

    def _measured_by_all(self, rows: Tensor) -> list[list[float]]:
        """Return the sums over the parts of a replica; nothing if one of them did not measure as often as others."""
        count, rates = len(self.slopes), len(self.tied)
        counts, products = rows.split([1, self.steps * rates], dim=1)
        if not bool((counts == count).all()):
            return []
        found: list[list[float]] = products.sum(dim=0)[: count * rates].view(count, rates).tolist()
        return found

    def measure(self) -> None:
        """Take the product of the gradients with the last displacement, in the first steps of a cycle."""
        self.begin_step()
        self.look(pairs_of(self.optimizer.param_groups))
        self.looked()

    def begin_step(self) -> None:
        """Forget the gradients of the step before, or of one that failed: this one may have fewer."""
        self._dots = {}

    def look(self, pairs: Pairs) -> None:
        """Multiply some of a step's gradients with the last displacement."""
        if self.moved is None:
            return
        wide = wide_dtype(self._device())
        if not self._moved_of:
            every = zip(self.optimizer.param_groups, self.moved, strict=True)
            self._moved_of = {id(p): d for group, ds in every for p, d in zip(group["params"], ds, strict=True)}
        for param, gradient in pairs:
            if gradient is not None and id(param) in self._moved_of:
                product = local(one_replica(param, gradient)) * self._moved_of[id(param)]
                self._dots[id(param)] = product.sum(dtype=wide)

    def looked(self) -> None:
        """Add up the products of a step, all of whose gradients were looked at."""
        if self.moved is None:
            return
        device, products = self._device(), []
        for tied in self.tied:
            members = (id(p) for index in tied for p in self.optimizer.param_groups[index]["params"])
            dots = [self._dots[param].to(device) for param in members if param in self._dots]
            zero = torch.zeros((), dtype=wide_dtype(device), device=device)
            products.append(torch.stack(dots).sum() if dots else zero)
        slopes = torch.stack(products)
        if (scale := getattr(self.optimizer, "grad_scale", None)) is not None:
            slopes = slopes / scale.to(device)  # GradScaler leaves unscaling to a fused optimizer
        self.slopes.append(slopes)
        if len(self.slopes) >= self.steps:
            self.moved = None

    def state_dict(self) -> dict[str, Any]:
        return {"last": self.last, "moved": self.moved, "slopes": self._measured(), "apart": self.apart}

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Load a saved state. None: the saved run measured no slopes, so that the last average is not known."""
        if state is None:
            self.last, self.moved, self.slopes, self.apart = self._copy(), None, [], True
            return
        device, like = self._device(), self._parameters()
        self.apart = state["apart"]
        if any(state["last"]):
            self.last = [_placed(saved, here) for saved, here in zip(state["last"], like, strict=True)]
        else:
            self.end()
        moved = state["moved"]
        self.moved = moved and [_placed(saved, here) for saved, here in zip(moved, like, strict=True)]
        wide = wide_dtype(device)
        self.slopes = [torch.tensor(slopes, dtype=wide, device=device) for slopes in state["slopes"]]


def _mean_and_error(measured: list[list[float]]) -> MeasuredSlopes:
    """Return the mean of the slopes of several gradients, and its standard error: NaN for one gradient."""
    n, values, errors = len(measured), [], []
    for slopes in zip(*measured, strict=True):
        total = squares = 0.0
        for slope in slopes:
            total, squares = total + slope, squares + slope * slope
        mean = total / n
        variance = max(squares / n - mean * mean, 0.0) / (n - 1) if n > 1 else math.nan
        values.append(mean)
        errors.append(math.sqrt(variance))
    return MeasuredSlopes(values, errors)


def _placed(saved: Sequence[Tensor], like: Sequence[Tensor]) -> list[Tensor]:
    return [s.to(here.device, here.dtype, copy=True) for s, here in zip(saved, like, strict=True)]
