"""The slopes of the replicas' losses in the logarithms of their hyperparameters, and how sure they are."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def comparable(losses: Array) -> Array:
    """The losses [N] as they are compared: how bad a bad one is says nothing, and must not drown what the others say.

    From four finite ones on, the highest quarter of them counts as at most twice as far above the next lower one as
    that is above the best. One that is not finite counts as worse than the worst finite one, by the range of those.
    All equal to 0 if none is finite.
    """
    finite = np.isfinite(losses)
    if not finite.any():
        return np.zeros(len(losses))
    found = losses[finite]
    if len(found) > 3:
        ranked = np.sort(found)
        best, usual = ranked[0], ranked[-1 - max(len(found) // 4, 1)]
        found = np.minimum(found, usual + 2 * (usual - best))
    worst = found.max()
    y = np.full(len(losses), worst + max(worst - found.min(), abs(worst) * 1e-3, 1e-12))
    y[finite] = found
    return y


def ordinary(losses: Array) -> Array:
    """Those that are compared as they are, and NaN for the others: an explosion is no noise."""
    return np.where(comparable(losses) == losses, losses, np.nan)


def explodes(losses: Array) -> bool:
    """Whether a loss is not finite, or so high that less than half of what it is above the best is compared."""
    compared = comparable(losses)
    return not bool((losses - compared <= np.ptp(compared)).all())


def level_of(losses: Array) -> float | None:
    """Where the replicas are; None if none is finite."""
    return float(comparable(losses).mean()) if np.isfinite(losses).any() else None


def regress(losses: Array, log_multipliers: Array, ridge: float = 1e-3) -> Array:
    """The slopes b (shape [J]) of centred losses on centred log multipliers ([J, N]), all hyperparameters jointly.

    With J ≥ N − 1 the system has no unique solution: then ``ridge``, relative to the mean square of a column, is added.
    Losses count as :func:`comparable` says.
    """
    y = comparable(losses)
    x = log_multipliers.T - log_multipliers.mean(axis=1)
    replicas, count = x.shape
    if (y == y[0]).all():  # their mean may be another by a rounding, and of that only the sign would be seen
        return np.zeros(count)
    y = y - y.mean()
    if count < replicas - 1:
        return np.linalg.lstsq(x, y, rcond=None)[0]
    gram = x.T @ x
    penalty = ridge * np.trace(gram) / count
    return np.linalg.solve(gram + penalty * np.eye(count), x.T @ y) if penalty > 0 else np.zeros(count)


def significances(losses: Array, log_multipliers: Array, slopes: Array) -> Array:
    """How far each of :func:`regress`'s slopes [J] is from 0, in standard deviations of a normal distribution, by what
    they leave unexplained: of few replicas that is known less surely. NaN where there are too few to tell."""
    spare = _spare(log_multipliers)
    if spare < 2:
        return np.full(len(slopes), np.nan)
    x = log_multipliers.T - log_multipliers.mean(axis=1)
    errors = np.sqrt(np.diag(np.linalg.pinv(x.T @ x))) * unexplained(losses, log_multipliers, slopes)
    return normal(slopes, errors, spare)


def unexplained(losses: Array, log_multipliers: Array, slopes: Array) -> float:
    """The standard deviation of what slopes leave of losses; 0 where there are as many of them as losses less one."""
    spare = _spare(log_multipliers)
    if spare < 1:
        return 0.0
    y = comparable(losses)
    left = y - y.mean() - (log_multipliers.T - log_multipliers.mean(axis=1)) @ slopes
    return float(np.linalg.norm(left)) / math.sqrt(spare)


def _spare(log_multipliers: Array) -> int:
    """How many replicas there are more than are needed for slopes and a mean."""
    count, replicas = log_multipliers.shape
    return replicas - 1 - count


def normal(slopes: Array, errors: Array, spare: float) -> Array:
    """How far slopes are from 0, in standard deviations of a normal distribution, where their errors are known with so
    many degrees of freedom: Student's t as a normal variable. Where that is 1.96, within 2.5 % from six degrees of
    freedom on, lower by 5 % with four and by 19 % with two."""
    most = math.sqrt(2 * spare)
    t = np.divide(np.abs(slopes), errors, out=np.where(slopes != 0, np.inf, 0.0), where=errors > 0)
    t = np.minimum(t, 1e9 * most)
    found: Array = t * (1 - 0.25 / spare) / np.sqrt(1 + (t / most) ** 2)
    return found


#: Losses of equal replicas that differ by less than this share of themselves do so by rounding.
EXACT = 1e-5

#: The degrees of freedom with which the error of losses is known that never differed by more.
SURE = 20


def noise(known: Sequence[float], losses: Array) -> list[float]:
    """What is known of the noise of losses after those of some replicas that had the same values: the sum of squares of
    their deviations and its degrees of freedom, both decaying."""
    found = losses[np.isfinite(losses)]
    squares, spare = known
    if len(found) < 2:
        return [squares, spare]
    return [0.9 * squares + float(((found - found.mean()) ** 2).sum()), 0.9 * spare + len(found) - 1]


def noise_scale(known: Sequence[float], size: float) -> tuple[float, float]:
    """The standard deviation of a loss of this size, and with how many degrees of freedom it is known: 0 if it is
    not."""
    squares, spare = known
    if not spare:
        return 0.0, 0
    found = math.sqrt(squares / spare)
    return (size * EXACT, SURE) if found <= size * EXACT else (found, spare)
