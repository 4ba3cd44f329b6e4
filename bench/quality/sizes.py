"""Sizes of the suite: which tasks, parts and seeds are run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .tasks import TASKS

# Learning rates of the grid, as powers of two times the task's ``lr``.
POWERS = range(-5, 5)

# The most seeds of tasks whose runs take most of a GPU.
COSTLY = {"large language": 2}


@dataclass(frozen=True)
class Size:
    """A selection of the suite: tasks, seeds, parts and scalars.

    Args:
        tasks: Names of the tasks.
        seeds: Number of seeds of most parts; the grid has three at most.
        parts: Parts beside the grid, in their order.
        scalars: Scalars of the part "scalars".
        start_seeds: Number of seeds from each start.
        best_seeds: Number of seeds at the best learning rate, where it is more than that.
        training_seeds: At most so many of these seeds are run without a probe too.
        more_seeds: Number of seeds of the part "seeds", by task and start.
        powers: Learning rates of the grid, as powers of two times the task's ``lr``; none: that is the best.
        near_seeds: Number of seeds of the finer grid near the best; 0: there is none.
        leave_out: Whether HDET runs take constants that were fitted without the family of their task.
        options: These constants, by task.
    """

    tasks: tuple[str, ...]
    seeds: int
    parts: tuple[str, ...]
    scalars: tuple[str, ...]
    start_seeds: int
    best_seeds: int = 0
    training_seeds: int = 3
    more_seeds: dict[str, dict[float, int]] = field(default_factory=dict)
    powers: range = POWERS
    near_seeds: int = 0
    leave_out: bool = False
    options: dict[str, dict[str, Any]] = field(default_factory=dict)

    def seeds_of(self, task: str, start: float) -> int:
        """Return the number of seeds of a task from a start."""
        seeds = max(self.start_seeds, self.best_seeds) if start == 1.0 else self.start_seeds
        return min(seeds, COSTLY.get(task, seeds))

    def seeds_near(self, task: str) -> int:
        """Return the number of seeds of a task on the finer grid."""
        return min(self.near_seeds, COSTLY.get(task, self.near_seeds))


SIZES = {
    "ci": Size(("digits",), 3, ("starts", "peers", "scalars"), ("dropout", "label smoothing", "weight_decay"), 10),
    "full": Size(
        ("ratings", "language", "images"),
        5,
        ("starts", "paper", "mixed", "scalars", "schedules", "long", "peers", "seeds"),
        ("temperature",),
        start_seeds=10,
        # A start that is three times off costs less there than the deviation between seeds.
        more_seeds={"images": {1 / 3: 640, 1.0: 192, 3.0: 192}},
    ),
    # The controller was developed without these tasks, except for two rules found on flights (README.md).
    "unseen": Size(("flights", "reconstruction"), 3, ("starts", "schedules", "long"), (), start_seeds=10),
    "zoo": Size(
        # Long runs first: at the end of a seed no worker waits for one.
        tuple(sorted((name for name in TASKS if name != "few digits"), key=lambda name: -TASKS[name].steps)),
        3,
        ("starts", "none", "peers"),
        (),
        start_seeds=3,
        best_seeds=5,
        training_seeds=20,
        powers=range(0),  # each task's lr is the best of an earlier grid
        near_seeds=10,
        leave_out=True,
    ),
}
