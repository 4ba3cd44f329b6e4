"""Compare the candidates of a scouting round: narrow the range of learning rates, and choose one."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hdet_kernels.scout.plan import Bracket
from hdet_kernels.scout.settings import ScoutSettings

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Comparison:
    """The outcome of one round. Arrays have one entry for each replica, by ascending learning rate.

    Args:
        rates: learning rates.
        losses: losses at the end; not finite for a replica that diverged.
        errors: standard errors of the losses; 0 where they are not known.
        level: the loss before the first step; NaN if it is not known.
    """

    rates: Array
    losses: Array
    errors: Array
    level: float = math.nan

    def __post_init__(self) -> None:
        object.__setattr__(self, "losses", np.where(np.isfinite(self.losses), self.losses, np.inf))
        object.__setattr__(self, "errors", np.where(np.isfinite(self.errors), self.errors, 0.0))

    @property
    def best(self) -> int:
        """The candidate with the lowest loss.

        Raises:
            RuntimeError: none has a finite loss.
        """
        if not np.isfinite(self.losses).any():
            raise RuntimeError(
                f"no loss was finite at any of the learning rates {', '.join(f'{rate:.3g}' for rate in self.rates)}: "
                "look for an error in the model or the data, or pass max_lr"
            )
        return int(np.argmin(self.losses))

    def as_good(self, settings: ScoutSettings) -> list[int]:
        """Return the candidates whose loss cannot be told from the best one."""
        best = self.best
        noise = settings.deviations * np.hypot(self.errors, self.errors[best])
        allowed = np.maximum(noise, settings.flat * abs(self.losses[best]))
        return [int(index) for index in np.flatnonzero(self.losses - self.losses[best] <= allowed)]

    def learned(self, settings: ScoutSettings) -> bool:
        """Return whether the best loss is below that before the first step, by more than noise.

        The best of several that differ by noise alone is below the others, so that it has to be twice as far away.
        """
        best = self.best
        noise = max(2 * settings.deviations * self.errors[best], settings.flat * abs(self.losses[best]))
        return not self.level - self.losses[best] <= noise


@dataclass(frozen=True)
class Verdict:
    """A learning rate, and how it was found.

    Args:
        rate: the learning rate.
        how: the rule that chose it, for messages.
    """

    rate: float
    how: str


def narrow(seen: Comparison, bracket: Bracket, settings: ScoutSettings) -> Bracket:
    """Return the range of the next round: up to the neighbours of all candidates that are as good as the best.

    Where the losses cannot be told apart, nothing is known, and the range stays as wide as these candidates are.
    """
    good = seen.as_good(settings)
    edges = [bracket[0], *np.log(seen.rates).tolist(), bracket[1]]
    return edges[good[0]], edges[good[-1] + 2]


def choose(seen: Comparison, replicas: int, settings: ScoutSettings) -> Verdict:
    """Return the learning rate after the last round.

    Where the best candidate cannot be told from the median one, it is the middle of those around it that are as good.
    Else it is the minimum of a parabola through the best candidate and those around it, in the logarithm of the
    learning rate. Candidates with a much higher loss are left out, because beyond the edge of stability losses do not
    follow a parabola. The minimum is not sought outside of the candidates that were used.
    """
    best, good = seen.best, seen.as_good(settings)
    logs = np.log(seen.rates)
    order = np.argsort(seen.losses, kind="stable")
    if int(order[len(order) // 2]) in good:
        low, high = _run_around(best, good)
        chosen, how = (logs[low] + logs[high]) / 2, "the middle of those that are equally good"
    else:
        chosen, how = _minimum(logs, seen, best, settings)
    return Verdict(float(math.exp(chosen + settings.shift * math.log(replicas))), how)


def _run_around(best: int, good: list[int]) -> tuple[int, int]:
    """Return the first and last of the neighbouring candidates around ``best`` that are all in ``good``."""
    low = high = best
    while low - 1 in good:
        low -= 1
    while high + 1 in good:
        high += 1
    return low, high


def _minimum(logs: Array, seen: Comparison, best: int, settings: ScoutSettings) -> tuple[float, str]:
    used = _near(logs, seen, best, settings)
    if len(used) >= 3:
        x, y = logs[used] - logs[best], seen.losses[used] - seen.losses[best]
        curvature, slope, _ = np.polyfit(x, y / max(y.max(), 1e-300), 2)
        if curvature > 0:
            vertex = float(np.clip(-slope / (2 * curvature), x[0], x[-1]))
            return float(logs[best]) + vertex, f"the minimum of a parabola through {len(used)}"
    return float(logs[best]), "the best one"


def _near(logs: Array, seen: Comparison, best: int, settings: ScoutSettings) -> list[int]:
    """Return the neighbouring candidates around ``best`` that enter the parabola."""
    above = seen.losses - seen.losses[best]
    fell = seen.level - seen.losses[best]
    fine = np.isfinite(above) & ((above <= settings.depth * fell) if fell > 0 else (above >= 0))
    apart = np.abs(logs - logs[best])
    neighbour = np.abs(np.arange(len(logs)) - best) <= 1
    usable = np.flatnonzero(fine & (neighbour | (apart <= settings.reach))).tolist()
    low, high = _run_around(best, usable)
    return list(range(low, high + 1))
