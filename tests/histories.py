"""Made-up histories of every kind, for the tests of the page."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from hdet_kernels.schedule.history import SyncRecord


def record(step: int, replicas: int = 4, groups: int = 1, **changes: Any) -> SyncRecord:
    """Return a regular sync at which everything is known."""
    base = {f"lr/{group}": 1e-3 * (group + 1) * (1 + math.sin(step / 500)) + 1e-6 for group in range(groups)}
    order = [(replica + step // 10) % replicas for replica in range(replicas)]
    content: dict[str, Any] = {
        "step": step,
        "cycle": step // 10 - 1,
        "kind": "sync",
        "losses": [3 * math.exp(-step / 2000) + 0.01 * place for place in order],
        "probes": [3 * math.exp(-step / 2000) + 0.02 * place for place in order],
        "base": base,
        "values": {
            name: [value * (0.7 + 0.6 * p / max(replicas - 1, 1)) for p in order] for name, value in base.items()
        },
        "excluded": [],
        "gradients": "shared",
        "bytes": 498_000_000,
        "collectives": 3,
        "seconds": 0.25,
        "landed": step,
        "slopes": dict.fromkeys(base, -0.02),
        "errors": dict.fromkeys(base, 0.005),
        "posterior": {name: [0.3, 0.9] for name in base},
        "distance": 0.01,
    }
    return SyncRecord(**{**content, **changes})


def run(count: int, **options: Any) -> list[SyncRecord]:
    return [record(10 * number, **options) for number in range(1, count + 1)]


NAN = math.nan
BROKEN = run(20)
BROKEN[5] = replace(BROKEN[5], losses=[NAN, 1.0, 1e6, math.inf], excluded=[0, 3])
BROKEN[6] = replace(
    BROKEN[6],
    losses=[NAN] * 4,
    excluded=[0, 1, 2, 3],
    undone=50,
    act="return",
    why="step 70: all are bad",
    slopes={},
    errors={},
    distance=None,
)

_OLD: dict[str, Any] = dict.fromkeys(("slopes", "errors", "posterior", "distance", "probes"))

HISTORIES: dict[str, list[SyncRecord]] = {
    "one replica": run(12, replicas=1),
    "one record": run(1),
    "8 groups": run(20, groups=8),
    "64 replicas": run(20, replicas=64, groups=2),
    "scouting": [record(5, kind="scout", **_OLD), record(20, kind="scout", **_OLD), *run(9)[2:]],
    "nothing but scouting": [record(5, kind="scout", **_OLD)],
    "broken": BROKEN,
    "no loss": run(5, losses=[NAN] * 4, probes=None),
    "before slopes were recorded": run(5, **_OLD),
    "another number of replicas": [*run(5), *(replace(each, step=each.step + 50) for each in run(5, replicas=2))],
    "zeros": run(
        3, base={"lr/0": 0.0}, values={"lr/0": [0.0] * 4}, losses=[0.0] * 4, bytes=0, seconds=0.0, distance=0.0
    ),
    "huge": run(3, losses=[1e300, 1e-300, -5.0, 2.0], bytes=10**15, seconds=1e5),
    "odd names": run(3, base={"<b>&\"'": 1.0}, values={"<b>&\"'": [1.0] * 4}, slopes=None, errors=None, posterior=None),
}
