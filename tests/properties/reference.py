"""HDET in 60 lines of numpy, written from the equations of docs/method.md. It shares no code with the package.

Replica r of N has parameters θ[r, j] of hyperparameter j (the learning rate of parameter group j) and trains by SGD
with momentum μ and L2 penalty λ_j.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

SIGMA, RATE, BETA = 0.1, 0.5, 0.9  # of the paper's controller
SMALLEST = 0.01  # ours: one sync takes η no lower than this share of itself

GROUPS, WIDTH = 2, 3
PEAKS = (0.1, 0.3)  # the highest learning rate of each parameter group


@dataclass(frozen=True)
class Setup:
    """A run. ``kind``: one replica, the rows of a stack, or a process of a group."""

    kind: Literal["single", "stack", "rank"] = "stack"
    replicas: int = 3
    shared: bool = True
    fused: bool = True
    schedule: Literal["one-cycle", "cosine"] = "one-cycle"
    spread: float = 0.3
    log_spacing: bool = False
    every: int = 3
    total: int = 20
    warmup: int | None = None  # of the paper's controller; None: without it
    momentum: float = 0.9

    @property
    def schedules(self) -> list[Callable[[int], float]]:
        """The scheduled learning rate of each group, as a function of the step."""
        make = one_cycle if self.schedule == "one-cycle" else cosine
        return [make(peak, self.total) for peak in PEAKS]

    @property
    def floors(self) -> list[float]:
        """The value that the controller decays to; OneCycleLR's end, and above all others where it does not decay."""
        return [peak / 25e4 if self.schedule == "one-cycle" else math.inf for peak in PEAKS]


def one_cycle(peak: float, total: int) -> Callable[[int], float]:
    """Return OneCycleLR with torch's defaults: half a cosine from peak/25 up, another down to peak/25e4."""

    def at(t: int) -> float:
        top = 0.3 * total - 1
        low, share = (peak / 25, t / top) if t <= top else (peak / 25e4, 1 - (t - top) / (total - 1 - top))
        return low + (peak - low) * (1 - math.cos(math.pi * share)) / 2

    return at


def cosine(peak: float, total: int) -> Callable[[int], float]:
    """Return CosineAnnealingLR: half a cosine from the peak down to 0."""
    return lambda t: peak * (1 + math.cos(math.pi * t / total)) / 2


class Reference:
    def __init__(self, setup: Setup, start: Array) -> None:
        self.setup, self.schedules, self.floors = setup, setup.schedules, np.array(setup.floors)
        self.theta = np.tile(start, (setup.replicas, 1, 1))  # [N, J, D]
        self.velocity, self.momentum, self.decay = np.zeros_like(self.theta), setup.momentum, np.zeros(len(start))
        self.t, self.syncs, self.losses = 0, 0, list[Array]()
        self.edited = dict[int, float]()  # learning rates that a user wrote, until the next step
        self.eta: Array | None = None  # base values; None: the schedule's
        self.v = np.zeros(len(start))

    def multipliers(self) -> Array:
        """Return ρ_{π_{j,k}(r)}, [N, J]; π sorts the words of a SHAKE-128 stream."""
        n, spread = self.setup.replicas, self.setup.spread
        u = (np.arange(n) - (n - 1) / 2) / max((n - 1) / 2, 0.5)
        rho = (1 + spread) ** u if self.setup.log_spacing else 1 + spread * u
        streams = [hashlib.shake_128(f"0/{self.t // self.setup.every}/lr/{j}".encode()) for j in range(len(self.v))]
        orders = [np.argsort(np.frombuffer(stream.digest(8 * n), "<u8"), kind="stable") for stream in streams]
        return np.stack([rho[order] for order in orders], axis=1)

    def base(self) -> Array:
        return np.array([schedule(self.t) for schedule in self.schedules]) if self.eta is None else self.eta

    def rates(self) -> Array:
        rates = self.base() * self.multipliers()
        for j, lr in self.edited.items():
            rates[:, j] = lr
        return rates

    def train(self, gradients: Array, stepped: Sequence[bool]) -> None:
        """Take a step with gradients [N, J, D], for those j that ``stepped`` names."""
        if self.setup.shared:
            gradients = np.broadcast_to(gradients.mean(0), gradients.shape)
        for j in np.flatnonzero(stepped):
            d = gradients[:, j] + self.decay[j] * self.theta[:, j]
            if self.momentum:
                d = self.velocity[:, j] = self.momentum * self.velocity[:, j] + d
            self.theta[:, j] -= self.rates()[:, j, None] * d

    def converge(self) -> None:
        self.theta[:] = self.theta.mean(0)
        if not self.setup.shared:
            self.velocity[:] = self.velocity.mean(0)

    def end_step(self) -> None:
        """Sync every T steps and at the end; then the schedule moves on."""
        step, warmup = self.t + 1, self.setup.warmup
        if step % self.setup.every == 0 or step == self.setup.total:
            self.converge()
            if warmup is not None and step >= warmup and self.setup.spread:
                self.move(self.base(), np.mean(self.losses, axis=0), (self.setup.total - warmup) / self.setup.every)
            self.losses, self.syncs = [], self.syncs + 1
        self.t, self.edited = step, {}

    def move(self, eta: Array, losses: Array, syncs: float) -> None:
        """Let the paper's controller move the base values."""
        if self.eta is None:
            self.gamma = np.maximum(1 - (self.floors / eta) ** (1 / max(syncs, 1)), 0)
        w = np.exp((losses.min() - losses) / SIGMA)
        values = eta * self.multipliers()
        self.v = BETA * self.v + (1 - BETA) * (w / w.sum() @ values - values.mean(0))
        self.eta = np.maximum(eta * (1 - self.gamma) + RATE * self.v, SMALLEST * eta)
