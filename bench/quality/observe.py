"""Run every task of the zoo at many learning rates and record what a controller would have seen."""

from __future__ import annotations

import numpy as np
import torch

from .observations import CLIMB, Array, Observed
from .rows import Seen, train_rows
from .tasks import Task

# Learning rates as powers of two times the task's ``lr``, and seeds; fewer for the largest model.
POWERS, SEEDS = range(-6, 7), range(2)
FEWER, FEWER_POWERS, FEWER_SEEDS = "large language", range(-4, 6), range(1)

# Steps between two syncs, as a share of the run.
SYNC_SHARE = 0.0125

SEEN = ("level", "probe", "slope", "error", "probe_slope", "rate")


def observe(task: Task, device: torch.device, *, steps: int | None = None) -> Observed:
    """Train all runs of a task at once and return what was seen while the learning rate climbed.

    Args:
        task: The task.
        device: Where.
        steps: Steps of each run; default: the task's.
    """
    powers, seeds = (FEWER_POWERS, FEWER_SEEDS) if task.name == FEWER else (POWERS, SEEDS)
    total = steps or task.steps
    runs = [(task.lr * 2.0**power, seed) for seed in seeds for power in powers]
    lrs, chosen = [lr for lr, _ in runs], [seed for _, seed in runs]
    found = train_rows(task, lrs, chosen, device, steps=total, sync_every=max(round(SYNC_SHARE * total), 2))
    climb = [seen for seen in found.seen if seen.step <= CLIMB * total]
    return Observed(
        steps=total,
        lrs=np.array(lrs),
        seeds=np.array(chosen, dtype=np.float64),
        val=found.val,
        step=np.array([seen.step for seen in climb], dtype=np.float64),
        **{name: _stacked(climb, name) for name in SEEN},
    )


def _stacked(climb: list[Seen], name: str) -> Array:
    return np.array([getattr(seen, name) for seen in climb])
