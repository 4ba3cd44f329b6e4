"""Every constant of the controllers, once. They are saved with a run, which resumes only under the same values.

A field's comment says what it does and in which unit. "Share" means a share of the run unless it says otherwise.
Logarithms are natural. ``docs/controller.md`` has the equations that use them.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from hdet_kernels.checks import check_number, check_positive, check_sequence, check_share, check_whole, keep_plain

#: Settings that may be negative.
_SIGNED = ("past_elasticity", "uninformative_elasticity", "edge_release", "stability_evidence", "slow_rise_evidence")
#: Settings that are shares, weights or probabilities: from 0 to 1.
_SHARES = (
    "begins",
    "moment_weight",
    "warmup_from",
    "warmup_share",
    "early_peak",
    "others_until",
    "others_from",
    "outlier_share",
    "noise_decay",
    "nonlinearity_weight",
    "sign_decay",
    "reference_cycle",
    "quantile",
    "sign_error",
    "stability_from",
    "divergence_cut",
    "plateau_span",
    "plateau_until",
    "smallest_step",
)
#: Settings that something is divided by.
_DIVISORS = ("sign_scale", "task_deviation", "distance_deviation", "reference_cycle", "warmup_share", "moment_weight")


def _check_settings(settings: Any) -> None:
    """Raise TypeError or ValueError for a constant that is not of its kind (whole, a share, a number); keep the others
    as plain numbers."""
    for each in fields(settings):
        name, value, default = each.name, getattr(settings, each.name), each.default
        plain: object
        if isinstance(default, tuple):
            shares = check_sequence(name, value, "a tuple of shares of the first cycle")
            plain = tuple(check_share(name, share) for share in shares)
        elif isinstance(default, int):
            plain = check_whole(name, value, at_least=1)
        elif name in _SHARES:
            plain = check_share(name, value)
        else:
            plain = check_number(name, value, at_least=None if name in _SIGNED else 0)
        if name in _DIVISORS:
            check_positive(name, value)
        keep_plain(settings, **{name: plain})


@dataclass(frozen=True)
class SlopeSettings:
    """Constants of all controllers that move hyperparameters against the slopes of the loss."""

    #: Default of ``start_at``: the share of the run from which learning rates are moved.
    begins: float = 0.05
    #: Weight of the newest value in the running means of squared slopes and squared significances.
    moment_weight: float = 0.1
    #: The most that one sync moves μ.
    largest_move: float = 0.75
    #: Sum of the default moves over all active syncs: the distance that μ can travel, e³ ≈ 20 as a factor.
    total_travel: float = 3.0
    #: Standard errors that a slope counts as being away from 0, at most.
    largest_significance: float = 4.0
    #: Largest absolute slope that is used, so that its square does not overflow.
    largest_slope: float = 1e150
    #: Cap on learning rates under schedules that have no warm-up: share of the peak that it starts from.
    warmup_from: float = 1 / 25
    #: Share of the run after which that cap reaches the peak; learning rates are moved at least until then.
    warmup_share: float = 0.3
    #: Schedules that peak before this share of the run have no warm-up of their own and get the cap.
    early_peak: float = 0.15
    #: A constant schedule's best learning rate is 1/(1 + this) of the best peak of a schedule that anneals.
    constant_factor: float = 3.0

    def __post_init__(self) -> None:
        _check_settings(self)


@dataclass(frozen=True)
class RegressionSettings(SlopeSettings):
    """Constants of the regression controller, the default.

    They were fitted on three tasks (``docs/controller-experiments.md``).
    """

    # When it acts.
    #: Default of ``start_at`` for learning rates: the first sync counts.
    begins: float = 0.0
    #: Shares of the first cycle after which learning rates are compared on a probe.
    early_syncs: tuple[float, ...] = (1 / 8, 1 / 4, 1 / 2)
    #: Default of ``stop_at`` for scalars other than learning rates.
    others_until: float = 0.9
    #: Default of ``start_at`` for them, as a share of ``stop_at``.
    others_from: float = 1 / 3

    # Losses and their noise (least_squares.py).
    #: Share of the highest finite losses that may be outliers.
    outlier_share: float = 0.25
    #: Distance from the best loss at which an outlier is clipped, over the range of the other losses.
    outlier_distance: float = 2.0
    #: A loss that is not finite counts as worse than the worst finite one by at least this share of it.
    bad_loss_margin: float = 1e-3
    #: Decay, from sync to sync, of the sum of squares by which the noise of losses is estimated.
    noise_decay: float = 0.9
    #: Losses of equal replicas that differ by less than this share of themselves differ by rounding only.
    rounding_noise: float = 1e-5
    #: Degrees of freedom with which the error of such losses counts as known.
    rounding_freedom: int = 20
    #: Weight of the residual of a straight line in a slope's error, where replicas come in pairs.
    nonlinearity_weight: float = 0.5
    #: Weight of the past in the running mean of the slopes' signs.
    sign_decay: float = 0.5
    #: Mean squared significance from which a learning rate's slopes count as evidence; pure noise has 1.
    noise_demand: float = 1.5

    # How μ follows.
    #: Evidence for a smaller learning rate after which μ may rise only slowly.
    slow_rise_evidence: float = 0.25
    #: Most that μ then rises for each percent of the run.
    slow_rise: float = 0.2

    # The posterior over the right peak (peak_posterior.py). θ is the right peak over the given one.
    #: Path length at which the favoured direction turns, over the right peak and √total_steps.
    path_coefficient: float = 0.18
    #: Share of the run that the reference cycle lasts. A shorter cycle counts as less evidence.
    reference_cycle: float = 0.0125
    #: The turning point grows with the length of a cycle by this power.
    cycle_exponent: float = 0.8
    #: Number of steps above which the turning point grows with the length of the run beyond its square root.
    long_run: int = 2000
    #: Power by which it then grows further, as a precaution.
    long_run_exponent: float = 0.5
    #: Standard deviation, between tasks, of the logarithm of the turning point.
    task_deviation: float = 0.4
    #: Scale of the logarithm over which the sign of a slope changes around the turning point.
    sign_scale: float = 0.2
    #: Prior mean of −log θ where the given learning rate is too high.
    prior_below: float = 2.0
    #: Prior mean of log θ where the given learning rate is too low.
    prior_above: float = 3.0
    #: Posterior quantile that is chosen: a peak that is too high costs more than one that is too low.
    quantile: float = 0.35
    #: Share of signs that are wrong however significant they look.
    sign_error: float = 0.03
    #: Distance to a turning point ahead, as a logarithm, for each unit of positive elasticity.
    distance_ahead: float = 3.0
    #: Distance to a turning point behind, as a logarithm, for each unit of negative elasticity.
    distance_behind: float = 1.0
    #: Standard deviation of these distances.
    distance_deviation: float = 0.5
    #: Elasticity from which the turning point is only known to be at least ``far_distance`` ahead.
    far_elasticity: float = 0.6
    #: Least distance to the turning point, as a logarithm, from that elasticity on.
    far_distance: float = 1.5
    #: Elasticity below which the turning point is only known to be at least that elasticity's distance behind.
    past_elasticity: float = -0.75
    #: Elasticity above which a cycle says nothing: gains that grow faster than the learning rate leave a plateau.
    uninformative_elasticity: float = 1.25
    #: Largest |log θ| of the grid on which likelihoods are tabulated.
    grid_reach: float = 6.0
    #: Number of points of that grid.
    grid_points: int = 241

    # Stability and plateaus (stability.py). Costs and gains are shares of all that was gained since the start.
    #: Share of the part of the run in which learning rates move, before which stability is not judged.
    stability_from: float = 0.25
    #: Evidence for a smaller learning rate that every rule of stability needs.
    stability_evidence: float = 0.5
    #: Number of cycles over which costs are collected.
    cost_cycles: int = 4
    #: Median cost of an e-fold larger learning rate that marks the edge of stability.
    edge_cost: float = 0.15
    #: Highest peak over the learning rate at which the edge was seen.
    edge_margin: float = 1.5
    #: Evidence that removes the mark (negative: a larger learning rate is better).
    edge_release: float = -0.25
    #: Loss within one cycle that counts as divergence.
    divergence_loss: float = 0.2
    #: Highest peak over the learning rate at which that happened.
    divergence_cut: float = 0.5
    #: Share of the run that a plateau lasts at least.
    plateau_span: float = 0.1
    #: Largest gain over a plateau.
    plateau_gain: float = 0.0075
    #: Largest loss over a plateau.
    plateau_loss: float = 0.05
    #: Largest mean cost, on a plateau, of an e-fold larger learning rate.
    plateau_cost: float = 0.1
    #: Share of the part of the run in which learning rates move, after which a plateau raises nothing.
    plateau_until: float = 0.8
    #: Standard deviations of a loss's noise by which the total gain must exceed 0.
    real_gain: float = 5.0


@dataclass(frozen=True)
class SoftmaxSettings:
    """Constants of the paper's controller that are not its arguments."""

    #: Smallest share of itself that one sync leaves of a base value.
    smallest_step: float = 0.01

    def __post_init__(self) -> None:
        _check_settings(self)
