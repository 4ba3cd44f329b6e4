"""Scripted results of the quality suite, for the tests of tables and reports."""

from __future__ import annotations

import math
from typing import Any

from bench.quality.results import Report


def scripted(starts: dict[float, tuple[float, float]], best: float = 1.0) -> Report:
    """Return records of plain training and HDET with the given losses from each start; at the best both are 1 ± 0.1."""
    records: list[dict[str, Any]] = []
    for seed, noise in ((0, -0.1), (1, 0.1)):
        records.append(run_record("grid", "plain", 1.0, seed, best + noise))
        for factor, (plain, found) in {1.0: (best, best), **starts}.items():
            records.append(run_record("start", "plain", factor, seed, plain + noise, factor=factor))
            records.append(
                run_record("start", "hdet", factor, seed, found + noise, factor=factor, mu=[-math.log(factor)])
            )
    return Report("command", "machine", "date", 1.0, "ci", {"digits": 1.0}, records)


def run_record(kind: str, method: str, lr: float, seed: int, val: float, **more: Any) -> dict[str, Any]:
    """Return the record of one run on digits."""
    return {"kind": kind, "task": "digits", "method": method, "lr": lr, "seed": seed, "probe": True, "val": val, **more}
