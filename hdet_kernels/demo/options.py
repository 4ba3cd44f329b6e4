"""What the demo is asked to do, checked before any process starts."""

from __future__ import annotations

import math
import tempfile
from dataclasses import dataclass
from pathlib import Path

from hdet_kernels.demo.tasks import TASKS

#: With fewer steps the controller, which acts in the first 30 % of the run, would act a few times only.
FEWEST_STEPS = 40


@dataclass(frozen=True)
class Options:
    """One demo. ``steps`` and ``max_lr`` are those of each of the two runs."""

    replicas: int
    steps: int
    task: str
    out: Path
    seed: int
    max_lr: float


def checked_options(
    *, replicas: int, steps: int | None, task: str, out: Path, seed: int, max_lr: float | None
) -> Options:
    """Fill in the task's defaults and check everything; makes the folder ``out``. Raises ValueError."""
    if task not in TASKS:
        raise ValueError(f"--task must be one of {', '.join(TASKS)}, got {task!r}")
    if replicas < 2:
        raise ValueError(
            f"--replicas must be at least 2, got {replicas}: one replica has nobody to compare itself with"
        )
    chosen = TASKS[task]
    steps = chosen.steps if steps is None else steps
    if steps < FEWEST_STEPS:
        raise ValueError(
            f"--steps must be at least {FEWEST_STEPS}, got {steps}: the learning rate is adapted in the first 30 % "
            f"of the run; leave it out for {chosen.steps}"
        )
    max_lr = chosen.poor_lr if max_lr is None else max_lr
    if not (math.isfinite(max_lr) and max_lr > 0):
        raise ValueError(f"--max-lr must be a positive number, got {max_lr}; leave it out for {chosen.poor_lr:g}")
    if not 0 <= seed < 2**32:
        raise ValueError(f"--seed must lie between 0 and 2**32 - 1, got {seed}")
    if (missing := chosen.missing()) is not None:
        raise ValueError(missing)
    _check_writable(out)
    return Options(replicas, steps, task, out, seed, max_lr)


def _check_writable(out: Path) -> None:
    """Now, not after two minutes of training."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        reason = error.strerror or error
        raise ValueError(f"cannot write to --out {out} ({reason}): choose a folder that you may write to") from error
