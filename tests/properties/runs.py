"""The runs in which the schedulers are compared with the reference, and their schedules in closed form."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

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
