"""Compare the replicas at the end of a scouting round, by their losses. All processes decide alike."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hdet_kernels.converge.attendance import Gathers
from hdet_kernels.ensemble import Ensemble
from hdet_kernels.fanout.explore import Hyperparameter
from hdet_kernels.schedule.arguments import Probe
from hdet_kernels.schedule.history import SyncRecord
from hdet_kernels.schedule.losses import Loss, LossWindow, checked_divisor, checked_loss, run_probe
from hdet_kernels.schedule.scout.rounds import Comparison
from hdet_kernels.tensors import wide_dtype

#: The sums that are kept.
_SUMS = ("first", "tail", "squares")


class RoundLosses:
    """Sums of the losses of a round. Recording never waits for the device.

    Args:
        rows: replicas that this process holds.

    Attributes:
        first: those of the first step, which is made from the parameters that the run begins with.
        tail: those of the last steps, which are compared.
        squares: the squares of these, which tell their noise.
        ever: whether a loss was ever recorded.
    """

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.first, self.tail, self.squares = (LossWindow(rows) for _ in _SUMS)
        self.ever = False

    def record(self, loss: Loss, step: int, tail_from: int, divided_by: float = 1) -> None:
        """Add a loss of a round.

        Args:
            loss: of this replica, or one for each of several.
            step: steps of the round that are finished.
            tail_from: number of the step with which the last steps begin.
            divided_by: what the loss was divided by before.
        """
        value = checked_loss(loss, "the loss", self.rows)
        if (divisor := checked_divisor(divided_by)) != 1:
            value = (value.to(wide_dtype(value.device)) if isinstance(value, Tensor) else value) * divisor
        self.ever = True
        if step == 0:
            self.first.record(value)
        if step >= tail_from:
            wide = value.to(wide_dtype(value.device)) if isinstance(value, Tensor) else value
            self.tail.record(wide)
            self.squares.record(wide * wide)

    def clear(self) -> None:
        """Forget the losses, but not that there ever was one."""
        for window in self._windows():
            window.clear()

    def mark(self) -> tuple[Any, ...]:
        """Return a copy of the sums, to which :meth:`reset` goes back."""
        return self.ever, *(window.mark() for window in self._windows())

    def reset(self, mark: tuple[Any, ...]) -> None:
        """Go back to the sums that :meth:`mark` returned."""
        self.ever = mark[0]
        for window, sums in zip(self._windows(), mark[1:], strict=True):
            window.reset(sums)

    def state_dict(self) -> dict[str, Any]:
        return {"ever": self.ever, **{name: getattr(self, name).state_dict() for name in _SUMS}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.ever = state["ever"]
        for name in _SUMS:
            getattr(self, name).load_state_dict(state[name])

    def _windows(self) -> tuple[LossWindow, ...]:
        return self.first, self.tail, self.squares


Array = NDArray[np.float64]


def compare(
    ensemble: Gathers,
    rates: Sequence[float],
    losses: RoundLosses,
    probe: Probe | None,
    *,
    step: int,
    level: float | Tensor,
) -> tuple[Comparison, Array | None]:
    """Gather the losses of all replicas: on the probe if there is one, else the training losses. Collective.

    Args:
        ensemble: the replicas.
        rates: peak learning rate of every replica, ascending.
        losses: training losses of the replicas held here.
        probe: the user's probe.
        step: finished steps of the phase.
        level: loss on the probe before the first step.

    Returns:
        The comparison; and, with a probe, the mean training losses at the end of the round.

    Raises:
        RuntimeError: the same one on every process.
    """
    probed, failure = (math.nan, None) if probe is None else run_probe(probe, ensemble.rows)
    found = gather_numbers(
        ensemble,
        {
            "step": float(step),
            "failed": float(failure is not None),
            "probe": probed,
            "level": level,
            "first": losses.first.sum,
            "firsts": float(losses.first.count),
            "tail": losses.tail.sum,
            "squares": losses.squares.sum,
            "count": float(losses.tail.count),
        },
    )
    if (found["step"] != found["step"][0]).any():
        steps = found["step"].astype(int).tolist()
        raise RuntimeError(f"the replicas have made {steps} steps: step all of them equally often")
    raise_failed_probe(found["failed"], failure)
    count = found["count"]
    if probe is None and not (count > 0).all():
        raise RuntimeError(
            f"replicas {np.flatnonzero(count == 0).tolist()} recorded no loss in the last steps of a scouting round: "
            "call scheduler.step(loss) at every step, or pass probe="
        )
    with np.errstate(all="ignore"):  # losses may be infinite, or none
        mean, first = found["tail"] / count, found["first"] / found["firsts"]
        variance = _variance(found["squares"] / count - mean**2, count, first)
    if probe is None:
        return Comparison(np.array(rates), mean, np.sqrt(variance / count), _mean(first)), None
    return Comparison(np.array(rates), found["probe"], np.zeros_like(mean), _mean(found["level"])), mean


def scout_record(
    hyperparameters: Sequence[Hyperparameter],
    peaks: Sequence[float],
    seen: Comparison,
    training: Array | None,
    ensemble: Ensemble,
    *,
    step: int,
    number: int,
    gradients: Literal["local", "teams"] = "local",
) -> SyncRecord:
    """Return the record of a round: every replica's peak learning rates, and its losses.

    Args:
        hyperparameters: those of the run, learning rates first.
        peaks: peak learning rate of every parameter group in the middle of the candidates.
        seen, training: what :func:`compare` returned.
        ensemble: the replicas.
        step: finished steps of the phase.
        number: number of the round.
        gradients: whose gradients the replicas trained on.
    """
    names = [hyper.name for hyper in hyperparameters]
    factors = seen.rates / math.exp(float(np.log(seen.rates[[0, -1]]).mean()))
    base = [peaks[hyper.groups[0]] if hyper.base is None else hyper.base for hyper in hyperparameters]
    moved = [factors if hyper.base is None else np.ones_like(factors) for hyper in hyperparameters]
    values = [(value * each).tolist() for value, each in zip(base, moved, strict=True)]
    return SyncRecord(
        step=step,
        cycle=number,
        kind="scout",
        losses=(seen.losses if training is None else training).tolist(),
        probes=None if training is None else seen.losses.tolist(),
        base=dict(zip(names, base, strict=True)),
        values=dict(zip(names, values, strict=True)),
        excluded=np.flatnonzero(~np.isfinite(seen.losses)).tolist(),
        gradients=gradients,
        bytes=0,
        collectives=int(ensemble.talks),
        seconds=0.0,
        landed=step,
    )


def gather_numbers(ensemble: Gathers, columns: Mapping[str, float | Tensor | None]) -> dict[str, Array]:
    """Return [N] for each of the numbers, or [rows] tensors, of every process; the mean over parts. Collective.

    None counts as NaN.
    """
    rows = [
        value.detach().double().cpu().expand(ensemble.rows)
        if isinstance(value, Tensor)
        else torch.full((ensemble.rows,), math.nan if value is None else value, dtype=torch.float64, device="cpu")
        for value in columns.values()
    ]
    found = ensemble.gather(torch.stack(rows, dim=1)).double().mean(dim=1).numpy()
    return {name: found[:, index] for index, name in enumerate(columns)}


def raise_failed_probe(failed: Array, failure: Exception | None) -> None:
    """Raise RuntimeError on every process if the probe raised on one; ``failure`` is that of this process."""
    if failed.any():
        replicas = np.flatnonzero(failed).tolist()
        raise RuntimeError(f"probe() raised on replicas {replicas}: correct it, or leave probe= out") from failure


def _variance(within: Array, count: Array, first: Array) -> Array:
    """Return the variance of a single loss of each replica, from one batch to another.

    A few steps say little about it, so that it is at least what the median replica has. Of a single step it is that of
    the replicas' first losses, which are of the same parameters.
    """
    own = np.where(count > 1, np.maximum(within, 0.0) * count / np.maximum(count - 1, 1), np.nan)
    finite = own[np.isfinite(own)]
    firsts = first[np.isfinite(first)]
    if len(finite):
        return np.fmax(own, np.median(finite))
    return np.full_like(own, firsts.var(ddof=1) if len(firsts) > 1 else 0.0)


def _mean(levels: Array) -> float:
    """Return the mean of those that are finite; NaN without any."""
    finite = levels[np.isfinite(levels)]
    return float(finite.mean()) if len(finite) else math.nan
