"""Options of the demo, checked before any process starts."""

from __future__ import annotations

import math
import tempfile
from dataclasses import dataclass
from pathlib import Path

from hdet_kernels.demo.tasks import TASKS

# The controller acts in the first 30 % of a run; with fewer steps it would act only a few times.
FEWEST_STEPS = 40


@dataclass(frozen=True)
class Options:
    """Options of one demo. ``steps`` and ``max_lr`` apply to each of its two runs."""

    replicas: int
    steps: int
    task: str
    out: Path
    seed: int
    max_lr: float


def checked_options(
    *, replicas: int, steps: int | None, task: str, out: Path, seed: int, max_lr: float | None
) -> Options:
    """Check the options, fill in the task's defaults, and create the folder ``out``.

    Raises:
        ValueError: An option is invalid, the task's data is missing, or ``out`` cannot be written.
    """
    if task not in TASKS:
        raise ValueError(f"--task must be one of {', '.join(TASKS)}, got {task!r}")
    if replicas < 2:
        raise ValueError(f"--replicas must be at least 2, got {replicas}: HDET compares replicas with each other")
    chosen = TASKS[task]
    steps = chosen.steps if steps is None else steps
    if steps < FEWEST_STEPS:
        raise ValueError(
            f"--steps must be at least {FEWEST_STEPS}, got {steps}: the learning rate is adapted in the first 30 % "
            f"of the run; omit the option for {chosen.steps}"
        )
    max_lr = chosen.poor_lr if max_lr is None else max_lr
    if not (math.isfinite(max_lr) and max_lr > 0):
        raise ValueError(f"--max-lr must be a positive number, got {max_lr}; omit the option for {chosen.poor_lr:g}")
    if not 0 <= seed < 2**32:
        raise ValueError(f"--seed must lie between 0 and 2**32 - 1, got {seed}")
    if (missing := chosen.missing()) is not None:
        raise ValueError(missing)
    _check_writable(out)
    return Options(replicas, steps, task, out, seed, max_lr)


def _check_writable(out: Path) -> None:
    """Check that files can be created in ``out``, before two minutes of training."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        reason = error.strerror or error
        raise ValueError(f"cannot write to --out {out} ({reason}): choose a writable folder") from error
