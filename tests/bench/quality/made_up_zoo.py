"""Made-up results of a zoo, for the tests of yardsticks, excess, tables and plots.

The loss of plain training is a parabola in the octaves from the best learning rate, and every seed has its own offset.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from bench.quality.results import Report
from bench.quality.suite import NEAR, STARTS

TASKS = ("digits", "images", "flights")
BEST = 1e-2

# Added to the excess of each mode at the best, and the share of the octaves that it leaves.
HARM = {True: 0.5, False: 1.0}
LEFT = {True: 0.1, False: 0.2}


def run(kind: str, task: str, method: str, lr: float | None, seed: int, val: float, **more: Any) -> dict[str, Any]:
    """Return the record of one run."""
    common = {"kind": kind, "task": task, "method": method, "lr": lr, "seed": seed, "val": val}
    return {**common, "probe": True, "options": {}, **more}


def loss(lr: float, seed: int, left: float = 1.0, harm: float = 0.0) -> float:
    """Return a loss of about 1: 1 % for a squared octave, ``harm`` percent, and 0.1 % of noise."""
    octaves = left * math.log2(lr / BEST)
    return 1.0 + 0.01 * (octaves**2 + harm) + 0.001 * ((7 * seed) % 5 - 2)


def plain_runs(tasks: Iterable[str] = TASKS, seeds: int = 10) -> list[dict[str, Any]]:
    """Return the grid, the finer grid and plain runs from all starts."""
    found = []
    for task in tasks:
        for power in range(-3, 4):
            lr = BEST * 2.0**power
            found += [run("grid", task, "plain", lr, seed, loss(lr, seed)) for seed in range(3)]
        for octaves in NEAR:
            lr = BEST * 2.0**octaves
            found += [run("near", task, "plain", lr, seed, loss(lr, seed)) for seed in range(seeds)]
        for start in STARTS:
            lr = BEST * start
            found += [run("start", task, "plain", lr, seed, loss(lr, seed), factor=start) for seed in range(3)]
    return found


def hdet_runs(tasks: Iterable[str] = TASKS, harm: float = 0.0) -> list[dict[str, Any]]:
    """Return HDET runs from all starts and without a learning rate, in both modes; ``harm`` is added everywhere."""
    found = []
    for task in tasks:
        for probe, own in HARM.items():
            for seed in range(3):
                noise = 0.0005 * ((3 * seed) % 4 - 1)
                for start in STARTS:
                    val = loss(BEST * start, seed, LEFT[probe], own + harm) + noise
                    found.append(run("start", task, "hdet", BEST * start, seed, val, factor=start, probe=probe))
                val = loss(2 * BEST, seed, harm=harm)
                found.append(run("none", task, "scout", None, seed, val, probe=probe))
    return found


def peer_runs(tasks: Iterable[str] = TASKS) -> list[dict[str, Any]]:
    """Return a peer that depends on the start, one that does not, and one that was run at the best only."""
    found = []
    for task in tasks:
        found += [
            run("peer", task, "MoMo", BEST * start, 0, loss(BEST * start, 0, 0.5), factor=start) for start in STARTS
        ]
        found.append(run("peer", task, "Prodigy", BEST, 0, loss(2 * BEST, 0), factor=1.0))
        found.append(run("peer", task, "local SGD", BEST, 0, loss(BEST, 0), factor=1.0))
    return found


def zoo(records: list[dict[str, Any]] | None = None) -> Report:
    """Return the results file of the zoo."""
    found = [*plain_runs(), *hdet_runs(), *peer_runs()] if records is None else records
    return Report("command", "machine", "date", 1.0, "zoo", dict.fromkeys(TASKS, BEST), found)
