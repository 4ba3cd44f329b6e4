"""The paper's controller: move each base value towards the replicas with the lower losses, by softmax weights."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import numpy as np

from hdet_kernels.checks import check_kind, check_number, check_positive, check_share, check_whole, keep_plain, spell
from hdet_kernels.controller.protocol import Array, Observation, Run, State
from hdet_kernels.controller.settings import SoftmaxSettings, repr_of_changes

log = logging.getLogger("hdet_kernels")


@dataclass(frozen=True)
class SoftmaxController:
    """The paper's controller. From ``warmup_steps`` on it replaces the schedule: η̄_j is constant between syncs.

    s_r = (L̄ − L_r)/σ;  w = softmax(s);  Δ_j = Σ_r w_r·η_{j,r} − (1/N)·Σ_r η_{j,r};
    v_j ← β·v_j + (1−β)·Δ_j;  η̄_j ← η̄_j·(1−γ_j) + λ·v_j.

    Args:
        warmup_steps: S_warm, the first step at which a sync updates η̄.
        scale: σ, in units of loss. The paper says 0.1, its released code 0.002.
        rate: λ. One sync moves η̄ by at most λ·α of itself.
        beta: β.
        decay: ``"floor"``: γ by :func:`decay_to_floor`; ``"published"``: γ by :func:`published_decay`, negative at
            torch's default factors (the learning rate then grows); or a number.
        div_factor, final_div_factor: OneCycleLR's, for ``decay="published"``.
        settings: the remaining constants.
    """

    __repr__ = repr_of_changes
    warmup_steps: int = 100_000
    scale: float = 0.1
    rate: float = 0.5
    beta: float = 0.9
    decay: Literal["floor", "published"] | float = "floor"
    div_factor: float = 25.0
    final_div_factor: float = 1e4
    settings: SoftmaxSettings = field(default_factory=SoftmaxSettings, kw_only=True)

    reads: ClassVar[Literal["losses"]] = "losses"

    def __post_init__(self) -> None:
        check_kind("settings", self.settings, SoftmaxSettings, "a SoftmaxSettings")
        for name in ("scale", "rate", "div_factor", "final_div_factor"):
            keep_plain(self, **{name: check_positive(name, getattr(self, name))})
        keep_plain(
            self,
            warmup_steps=check_whole("warmup_steps", self.warmup_steps, at_least=0),
            beta=check_share("beta", self.beta, below_one=True),
            decay=_checked_decay(self.decay),
        )

    def prepare(self, run: Run) -> Run:
        """Return ``run`` as it is; raise if its length is needed and not known."""
        if isinstance(self.decay, float | int):
            return run
        if run.total_steps is None:
            raise ValueError(
                f"SoftmaxController(decay={self.decay!r}) needs the length of the run: pass total_steps= to the "
                "scheduler, or a number as decay"
            )
        if run.floors[0] is None:
            log.warning(
                "SoftmaxController replaces the schedule and decays to its floor, and only OneCycleLR says where that "
                "is: the learning rate will not decay; pass decay= as a number"
            )
        return run

    def active(self, run: Run, step: int) -> bool:
        """Return whether the sync after ``step`` updates η̄."""
        return step >= self.warmup_steps

    def start(self, count: int, run: Run | None = None) -> State:
        """Return the state before the first update: the schedule still gives η̄."""
        return {"eta": [], "velocity": [0.0] * count, "gamma": []}

    def base(self, state: State, index: int, scheduled: Any) -> Any:
        """Return η̄ of hyperparameter ``index``, or ``scheduled`` before the first update."""
        return state["eta"][index] if state["eta"] else scheduled

    def update(self, run: Run, state: State, seen: Observation) -> State:
        """Return the state after a sync, by the equations of the class."""
        gamma = state["gamma"] or self._gammas(run, seen.base)
        eta = seen.base  # equal to the state's, but within the bounds
        values = eta[:, None] * seen.multipliers
        delta = values @ softmax_weights(seen.losses, self.scale) - values.mean(axis=1)
        velocity = self.beta * np.asarray(state["velocity"]) + (1 - self.beta) * delta
        moved = eta * (1 - np.asarray(gamma)) + self.rate * velocity
        # A rate far beyond the paper's must not turn the sign.
        eta = np.maximum(moved, self.settings.smallest_step * eta)
        return {"eta": eta.tolist(), "velocity": velocity.tolist(), "gamma": list(gamma)}

    def _gammas(self, run: Run, base: Array) -> list[float]:
        """Return γ of every hyperparameter; 0 for those that the schedule does not bring down."""
        if isinstance(self.decay, float | int):
            return [float(self.decay)] * len(base)
        syncs = ((run.total_steps or 0) - self.warmup_steps) / run.sync_every
        gammas = []
        for value, floor in zip(base.tolist(), run.floors, strict=True):
            if floor is None:  # weight decay, dropout, …
                gammas.append(0.0)
            elif self.decay == "published":
                gammas.append(published_decay(self.div_factor, self.final_div_factor, syncs))
            else:
                gammas.append(decay_to_floor(value, floor, syncs))
        return gammas


def _checked_decay(decay: object) -> object:
    if isinstance(decay, str) and decay in ("floor", "published"):
        return decay
    try:
        return check_number("decay", decay, below=1)
    except (TypeError, ValueError):
        raise ValueError(f"decay must be 'floor', 'published' or a number below 1, got {spell(decay)}") from None


def decay_to_floor(base: float, floor: float, syncs: float) -> float:
    """Return γ = 1 − (floor/base)^{1/K}, which brings ``base`` to ``floor`` in K = ``syncs`` syncs."""
    if not (base > 0 and floor > 0):
        raise ValueError(f"a geometric decay needs a positive base and floor, got base={base} and floor={floor}")
    return max(1 - (floor / base) ** (1 / max(syncs, 1.0)), 0.0)


def published_decay(div_factor: float, final_div_factor: float, syncs: float) -> float:
    """Return γ = 1 − exp(−log(div_factor/final_div_factor)/K), as published.

    It is negative, so that the learning rate grows, whenever ``div_factor < final_div_factor``, as in torch's defaults.
    """
    return 1 - math.exp(-math.log(div_factor / final_div_factor) / max(syncs, 1.0))


def softmax_weights(losses: Array, scale: float) -> Array:
    """Return w = softmax((L̄ − L_r)/σ) over the finite losses; a replica whose loss is not finite has weight 0."""
    finite = np.isfinite(losses)
    if not finite.any():
        return np.full(len(losses), 1 / len(losses))
    # L̄ cancels in the softmax. Relative to the lowest loss nothing overflows but what has weight 0.
    with np.errstate(over="ignore"):
        score = (losses[finite].min() - losses[finite]) / scale
    weights = np.zeros(len(losses))
    weights[finite] = np.exp(score)
    return weights / weights.sum()


def paper_settings(total_steps: int) -> dict[str, Any]:
    """Return the scheduler's keywords as the paper set them.

    α = 1/9, T = 1000, S_warm = 100 000, β = 0.9, λ = 0.5, σ = 0.1. A run of under 200 000 steps keeps their
    proportions: S_warm is half of it and T a hundredth of S_warm.
    """
    total_steps = check_whole("total_steps", total_steps, at_least=2)
    warmup = min(100_000, total_steps // 2)
    return {
        "spread": 1 / 9,
        "sync_every": max(warmup // 100, 1),
        "auto_lr": SoftmaxController(warmup_steps=warmup),
    }
