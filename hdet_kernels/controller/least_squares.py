"""Slopes of the replicas' losses in the logarithms of their hyperparameters, and their statistical significance."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from hdet_kernels.controller.protocol import Array
from hdet_kernels.controller.settings import RegressionSettings


def clipped_losses(losses: Array, settings: RegressionSettings) -> Array:
    """Return the losses [N] with outliers clipped, so that one bad replica does not dominate a regression.

    With four finite losses or more, the highest quarter is clipped to at most twice as far above the next lower loss as
    that one is above the best. A loss that is not finite counts as worse than the worst finite one, by the range of the
    finite ones. All are 0 if none is finite.
    """
    finite = np.isfinite(losses)
    if not finite.any():
        return np.zeros(len(losses))
    found = losses[finite]
    if len(found) > 3:
        ranked = np.sort(found)
        best, usual = ranked[0], ranked[-1 - max(int(len(found) * settings.outlier_share), 1)]
        found = np.minimum(found, usual + settings.outlier_distance * (usual - best))
    worst = found.max()
    margin = max(worst - found.min(), abs(worst) * settings.bad_loss_margin, 1e-12)
    clipped = np.full(len(losses), worst + margin)
    clipped[finite] = found
    return clipped


def without_outliers(losses: Array, settings: RegressionSettings) -> Array:
    """Return the losses with NaN in place of those that :func:`clipped_losses` changes."""
    return np.where(clipped_losses(losses, settings) == losses, losses, np.nan)


def mean_level(losses: Array, settings: RegressionSettings) -> float | None:
    """Return the mean of the clipped losses; None if no loss is finite."""
    return float(clipped_losses(losses, settings).mean()) if np.isfinite(losses).any() else None


def regress(losses: Array, log_multipliers: Array, ridge: float, settings: RegressionSettings) -> Array:
    """Return the slopes b [J] of the losses [N] on the log multipliers [J, N], all hyperparameters jointly.

    Both sides are centred, and losses are clipped by :func:`clipped_losses`. With J ≥ N − 1 the system has no unique
    solution: then ``ridge``, relative to the mean square of a column, is added to its diagonal.
    """
    y = clipped_losses(losses, settings)
    x = log_multipliers.T - log_multipliers.mean(axis=1)
    replicas, count = x.shape
    if (y == y[0]).all():  # centring equal losses may leave a rounding error, whose sign would count
        return np.zeros(count)
    y = y - y.mean()
    if count < replicas - 1:
        return np.linalg.lstsq(x, y, rcond=None)[0]
    gram = x.T @ x
    penalty = ridge * np.trace(gram) / count
    return np.linalg.solve(gram + penalty * np.eye(count), x.T @ y) if penalty > 0 else np.zeros(count)


def significances(losses: Array, log_multipliers: Array, slopes: Array, settings: RegressionSettings) -> Array:
    """Return how many standard errors each slope [J] of :func:`regress` is away from 0, from the residuals.

    The result is that of a normal distribution: with few replicas, Student's t is converted. NaN where there are too
    few replicas to estimate an error.
    """
    errors = standard_errors(losses, log_multipliers, slopes, settings)
    if np.isnan(errors).any():
        return errors
    return normal_significance(slopes, errors, _degrees_of_freedom(log_multipliers))


def standard_errors(losses: Array, log_multipliers: Array, slopes: Array, settings: RegressionSettings) -> Array:
    """Return the standard error of each slope [J] of :func:`regress`, from the residuals; NaN with too few replicas."""
    if _degrees_of_freedom(log_multipliers) < 2:
        return np.full(len(slopes), np.nan)
    x = log_multipliers.T - log_multipliers.mean(axis=1)
    scale = residual_deviation(losses, log_multipliers, slopes, settings)
    errors: Array = np.sqrt(np.diag(np.linalg.pinv(x.T @ x))) * scale
    return errors


def residual_deviation(losses: Array, log_multipliers: Array, slopes: Array, settings: RegressionSettings) -> float:
    """Return the standard deviation of the residuals; 0 without a degree of freedom."""
    freedom = _degrees_of_freedom(log_multipliers)
    if freedom < 1:
        return 0.0
    y = clipped_losses(losses, settings)
    residual = y - y.mean() - (log_multipliers.T - log_multipliers.mean(axis=1)) @ slopes
    return float(np.linalg.norm(residual)) / math.sqrt(freedom)


def _degrees_of_freedom(log_multipliers: Array) -> int:
    """Return the number of replicas beyond those that the slopes and the mean use up."""
    count, replicas = log_multipliers.shape
    return replicas - 1 - count


def normal_significance(slopes: Array, errors: Array, freedom: float) -> Array:
    """Return Student's t of the slopes as the equivalent number of normal standard deviations.

    The approximation t·(1 − 1/(4ν))/√(1 + t²/(2ν)) is, where the exact value is 1.96, within 2.5 % from ν = 6 degrees
    of freedom on, 5 % low at ν = 4 and 19 % low at ν = 2.
    """
    most = math.sqrt(2 * freedom)
    t = np.divide(np.abs(slopes), errors, out=np.where(slopes != 0, np.inf, 0.0), where=errors > 0)
    t = np.minimum(t, 1e9 * most)
    found: Array = t * (1 - 0.25 / freedom) / np.sqrt(1 + (t / most) ** 2)
    return found


def updated_noise(noise: Sequence[float], losses: Array, settings: RegressionSettings) -> list[float]:
    """Return the noise estimate after the losses of replicas that trained with the same values.

    The estimate is [sum of squared deviations, degrees of freedom], both decaying from sync to sync.
    """
    found = losses[np.isfinite(losses)]
    squares, freedom = noise
    if len(found) < 2:
        return [squares, freedom]
    decay = settings.noise_decay
    return [decay * squares + float(((found - found.mean()) ** 2).sum()), decay * freedom + len(found) - 1]


def noise_deviation(noise: Sequence[float], level: float, settings: RegressionSettings) -> tuple[float, float]:
    """Return the standard deviation of a loss of this level and its degrees of freedom (0: not known)."""
    squares, freedom = noise
    if not freedom:
        return 0.0, 0
    found, rounding = math.sqrt(squares / freedom), level * settings.rounding_noise
    return (rounding, settings.rounding_freedom) if found <= rounding else (found, freedom)
