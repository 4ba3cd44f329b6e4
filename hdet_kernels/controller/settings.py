"""Every constant of the controllers, once. They are saved with a run, which resumes only under the same values.

A field's comment says what it does and in which unit. "Share" means a share of the run unless it says otherwise.
Logarithms are natural. ``docs/controller.md`` has the equations that use them.
"""

from __future__ import annotations

from dataclasses import MISSING, dataclass, fields
from typing import Any

from hdet_kernels.checks import check_number, check_positive, check_share, check_whole, keep_plain

#: Settings that are shares, weights or probabilities: from 0 to 1.
_SHARES = (
    "begins",
    "moment_weight",
    "warmup_from",
    "warmup_share",
    "early_peak",
    "turned_from",
    "turned_until",
    "doubt_at",
    "watch_until",
    "others_until",
    "others_from",
    "outlier_share",
    "noise_decay",
    "nonlinearity_weight",
    "sign_decay",
    "sign_error",
    "quantile",
    "smallest_step",
)
#: Settings that something is divided by.
_DIVISORS = (
    "turning_length",
    "task_deviation",
    "least_distrust",
    "cut",
    "warmup_share",
    "moment_weight",
)


def repr_of_changes(constants: Any) -> str:
    """Return the repr of a dataclass with the fields that differ from their defaults, and no others."""
    changed = []
    for each in fields(constants):
        default = each.default if each.default_factory is MISSING else each.default_factory()
        if (value := getattr(constants, each.name)) != default:
            changed.append(f"{each.name}={value!r}")
    return f"{type(constants).__name__}({', '.join(changed)})"


def _check_settings(settings: Any) -> None:
    """Raise TypeError or ValueError for a constant that is not of its kind (whole, a share, a number); keep the others
    as plain numbers."""
    for each in fields(settings):
        name, value, default = each.name, getattr(settings, each.name), each.default
        plain: object
        if isinstance(default, int):
            plain = check_whole(name, value, at_least=1)
        elif name in _SHARES:
            plain = check_share(name, value)
        else:
            plain = check_number(name, value, at_least=0)
        if name in _DIVISORS:
            check_positive(name, value)
        keep_plain(settings, **{name: plain})


@dataclass(frozen=True)
class SlopeSettings:
    """Constants of all controllers that move hyperparameters against the slopes of the loss."""

    __repr__ = repr_of_changes

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
    """Constants of the regression controller, the default."""

    __repr__ = repr_of_changes

    # Learning rates. Each is what the tasks of the quality suite measure (docs/controller-why.md).
    #: Default of ``start_at`` for learning rates: the first sync counts.
    begins: float = 0.0
    #: Path length at which the favoured direction turns, over the right peak and √total_steps.
    turning_length: float = 0.5
    #: Standard deviation, between tasks, of the logarithm of that path length.
    task_deviation: float = 1.2
    #: Share of the signs of slopes that are wrong however significant they look.
    sign_error: float = 0.013
    #: Posterior quantile that is chosen: a peak that is too high costs three times as much as one that is too low.
    quantile: float = 0.26
    #: Signs of slopes count where the given learning rate is trusted to less than this factor.
    least_distrust: float = 3.0
    #: Path length, over the peak and the steps of the run, from which on the first slopes are judged.
    turned_from: float = 0.013
    #: The same, until which they are judged.
    turned_until: float = 0.036
    #: Mean of the first slopes over their errors, each at most ``largest_significance``, that marks a learning rate as
    #: too high.
    turned_mean: float = 2.0
    #: Number of slopes whose mean counts in full: that of n fewer ones counts by the root of n over this number.
    turned_count: int = 6
    #: Share of the run at which the first slopes may raise a doubt.
    doubt_at: float = 0.135
    #: Mean of the first slopes over their errors from which on the learning rate is in doubt.
    doubt_mean: float = 0.4
    #: Difference of the mean losses, over the noise of the level, from which on a trial is better.
    better_noise: float = 1.1
    #: Loss, over the total gain, by which training fell back.
    fall_share: float = 0.2
    #: The same loss, over the usual change of the level from sync to sync. A gain counts, for a doubt, above it too.
    fall_noise: float = 4.0
    #: Share of the run until which losses are watched for that.
    watch_until: float = 0.6
    #: Factor by which learning rates are lowered where a run begins anew.
    cut: float = 6.0

    # Other scalars, and losses that are compared (slopes.py, least_squares.py).
    #: Default of ``stop_at`` for scalars other than learning rates.
    others_until: float = 0.9
    #: Default of ``start_at`` for them, as a share of ``stop_at``.
    others_from: float = 1 / 3
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


@dataclass(frozen=True)
class SoftmaxSettings:
    """Constants of the paper's controller that are not its arguments."""

    __repr__ = repr_of_changes

    #: Smallest share of itself that one sync leaves of a base value.
    smallest_step: float = 0.01

    def __post_init__(self) -> None:
        _check_settings(self)
