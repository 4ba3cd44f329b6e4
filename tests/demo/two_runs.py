"""Made-up results of the demo's two runs on two replicas."""

from __future__ import annotations

from pathlib import Path

from hdet_kernels.demo.options import Options
from hdet_kernels.demo.outcome import Run, gathered
from hdet_kernels.demo.training import ReplicaRun, RunName

OPTIONS = Options(replicas=2, steps=40, task="text", out=Path("out"), seed=0, max_lr=0.3)


def two_runs(plain: float = 2.0, hdet: float = 1.5) -> dict[RunName, Run]:
    """Return both runs with the given held-out losses; HDET doubles the peak learning rate."""
    replicas = [
        [
            ReplicaRun([2.0 + replica] * 40, [0.3] * 40, [0.3] * 40, plain, 1.0, 1000),
            ReplicaRun([1.0 + replica] * 40, [0.4 + 0.4 * replica] * 40, [0.6] * 40, hdet, 2.0, 1000),
        ]
        for replica in range(2)
    ]
    return gathered(replicas)
