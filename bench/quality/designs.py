"""Compare designs of the controller: harm where the learning rate is right against recovery where it is far off.

``results/designs/*.json`` are results files with the name of a design each. Their HDET runs are compared with the plain
runs of the zoo's own file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .excess import MODES, Excesses
from .spec import Record

DESIGNS = Path(__file__).parent / "results" / "designs"
DEFAULT = "default"


@dataclass(frozen=True)
class Outcome:
    """A design in one mode, over its tasks.

    Args:
        design: Its name.
        mode: With a probe, or with training losses only.
        tasks: Number of tasks at the best learning rate.
        harm: Mean excess at the best learning rate, in percent.
        worst: The worst there.
        recovery: Median excess from ten times too low and ten times too high, over tasks and both starts.
    """

    design: str
    mode: str
    tasks: int
    harm: float
    worst: float
    recovery: float


def read(folder: Path = DESIGNS) -> dict[str, list[Record]]:
    """Return the records of each design by its name; records of a design in several files are joined."""
    found: dict[str, list[Record]] = {}
    for path in sorted(folder.glob("*.json")):
        content = json.loads(path.read_text())
        if not content.get("design"):
            raise ValueError(f"{path} has no name of a design: expected an entry 'design' beside 'records'")
        found.setdefault(content["design"], []).extend(content["records"])
    return found


def outcomes(found: Excesses, designs: Mapping[str, Sequence[Record]]) -> list[Outcome]:
    """Return all designs in both modes, that of ``found`` first; a design needs runs at the best and ten times off."""
    made = []
    for design, compared in {DEFAULT: found, **{name: found.of_runs(runs) for name, runs in designs.items()}}.items():
        for mode in MODES:
            harm = compared.summary(mode, 1.0)
            off = [mean for start in (0.1, 10.0) for mean in compared.means(mode, start).values()]
            if harm is not None and off:
                made.append(Outcome(design, mode, harm.tasks, harm.mean, harm.worst, float(np.median(off))))
    return made


def frontier(found: Sequence[Outcome]) -> list[Outcome]:
    """Return the outcomes that no other beats in harm and recovery, by increasing harm."""
    best: list[Outcome] = []
    for one in sorted(found, key=lambda one: (one.harm, one.recovery)):
        if not best or one.recovery < best[-1].recovery:
            best.append(one)
    return best
