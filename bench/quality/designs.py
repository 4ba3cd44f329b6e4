"""Compare designs of the controller on recorded plain runs: harm where the learning rate is right against recovery.

A design is played through the observations (``replay.py``), with constants that were fitted without each task's family.
``python -m bench.quality replay --designs`` writes the outcomes into ``results/designs.json``, which the page shows.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .excess import CAP, MODES, PROBE
from .held_out import Constants
from .methods import controller
from .observations import Observed
from .replay import excesses

DESIGNS = Path(__file__).parent / "results" / "designs.json"
DEFAULT = "trust=3 (the default)"

# Other values of the controller's arguments and settings than the default ones, by design.
TRIED: dict[str, dict[str, Any]] = {
    "trust=1: plain training": {"trust": 1.0},
    DEFAULT: {},
    "trust=10": {"trust": 10.0},
    "trust=30": {"trust": 30.0},
    "trust=None": {"trust": None},
    "returns only, no edge": {"edge_cost": 1e300},
    "edge only, no returns": {"undo": 0},
}


@dataclass(frozen=True)
class Outcome:
    """A design in one mode, over its tasks; all in percent. A task counts with at most 100 %.

    Args:
        design: Its name.
        mode: With a probe, or with training losses only.
        tasks: Number of tasks at the best learning rate.
        harm: Mean excess at the best learning rate.
        worst: The worst there.
        low: Median excess from ten times too low.
        high: Median excess from ten times too high.
        recovery: Median excess over the tasks from both of these starts.
    """

    design: str
    mode: str
    tasks: int
    harm: float
    worst: float
    low: float
    high: float
    recovery: float


def outcomes(observed: Mapping[str, Observed], constants: Constants) -> list[Outcome]:
    """Play every design through the observations in both modes."""
    made = []
    for design, options in TRIED.items():
        controllers = {task: controller({**constants.get(task, {}), **options}) for task in observed}
        for mode in MODES:
            best, low, high = (
                [min(own, CAP) for own, _ in excesses(observed, controllers, start, mode == PROBE).values()]
                for start in (1.0, 0.1, 10.0)
            )
            figures = np.mean(best), max(best), np.median(low), np.median(high), np.median([*low, *high])
            made.append(Outcome(design, mode, len(best), *(round(float(figure), 3) for figure in figures)))
    return made


def write(path: Path, found: Sequence[Outcome]) -> None:
    """Write the outcomes as JSON."""
    path.write_text(json.dumps({"outcomes": [asdict(one) for one in found]}, indent=1) + "\n")


def read(path: Path = DESIGNS) -> list[Outcome]:
    """Return the recorded outcomes; none where there is no file."""
    return [Outcome(**one) for one in json.loads(path.read_text())["outcomes"]] if path.exists() else []


def frontier(found: Sequence[Outcome]) -> list[Outcome]:
    """Return the outcomes that no other beats in harm and recovery, by increasing harm."""
    best: list[Outcome] = []
    for one in sorted(found, key=lambda one: (one.harm, one.recovery)):
        if not best or one.recovery < best[-1].recovery:
            best.append(one)
    return best
