"""Plain runs of one task at many learning rates, as a controller would have seen them at every sync of the climb.

``results/observations_h200.npz`` has those of the zoo, one array for each ``task/field``. ``fit.py`` measures the
controller's constants on them, and ``replay.py`` tries a controller on them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hdet_kernels.controller.protocol import Controller, Observation, Run

Array = NDArray[np.float64]

OBSERVATIONS = Path(__file__).parent / "results" / "observations_h200.npz"

# Share of the run that is recorded, in which the learning rate climbs: later syncs are of no use to the controller.
CLIMB = 0.3

# A loss at a learning rate that diverged, over the best one, where it has to be a number.
DIVERGED = 100.0

# Added to an excess before its logarithm is interpolated, in percent.
EXCESS_SCALE = 0.05


@dataclass(frozen=True)
class Observed:
    """All runs of one task. Arrays are [runs] or, at the syncs, [syncs, runs]; see :class:`.rows.Seen`.

    Args:
        steps: Steps of a run.
        lrs, seeds: Peak learning rate and seed of each run.
        val: Validation loss at the end; infinite where it is not finite.
        step: The step that each sync follows, [syncs].
        level, probe, slope, error, probe_slope, rate: What was seen.
        warm_up: Share of the run in which the learning rate climbs.
    """

    steps: int
    lrs: Array
    seeds: Array
    val: Array
    step: Array
    level: Array
    probe: Array
    slope: Array
    error: Array
    probe_slope: Array
    rate: Array
    warm_up: float = CLIMB

    @property
    def sync_every(self) -> int:
        """Steps between two syncs."""
        return int(self.step[0])

    @cached_property
    def grid(self) -> tuple[Array, Array]:
        """Learning rates as powers of two, ascending, and the mean over seeds of the loss at each, over the best."""
        powers, place = np.unique(np.log2(self.lrs).round(4), return_inverse=True)
        loss = np.array([self.val[place == index].mean() for index in range(len(powers))])
        found: Array = np.where(np.isfinite(loss), loss / loss.min(), DIVERGED)
        return powers, found

    @cached_property
    def best(self) -> float:
        """The best learning rate as a power of two: the vertex of a parabola through the logarithm of the loss at the
        best of the grid and beside it."""
        powers, loss = self.grid
        at = int(loss.argmin())
        if not 0 < at < len(loss) - 1:
            return float(powers[at])
        below, lowest, above = np.log(np.minimum(loss[at - 1 : at + 2], 1.2))
        bend = below - 2 * lowest + above
        return float(powers[at] + (np.clip(0.5 * (below - above) / bend, -0.5, 0.5) if bend > 0 else 0.0))

    @cached_property
    def octaves(self) -> Array:
        """How far the learning rate of each run is above the best, in octaves."""
        found: Array = np.log2(self.lrs) - self.best
        return found

    def near(self, octaves: float, within: float) -> list[int]:
        """Return the runs whose learning rate is ``octaves`` above the best, up to ``within`` octaves."""
        return [int(run) for run in np.flatnonzero(np.abs(self.octaves - octaves) <= within)]

    def excess(self, octaves: float) -> float:
        """Return how far plain training ends above the best of the grid, in percent and at most 100, from a learning
        rate that is ``octaves`` above the best: interpolated in the grid, and that of its end beyond it."""
        powers, loss = self.grid
        logs = np.log(np.minimum(100 * (loss - 1), 100) + EXCESS_SCALE)
        return float(np.exp(np.interp(octaves, powers - self.best, logs)) - EXCESS_SCALE)

    def reaches(self, octaves: float) -> bool:
        """Return whether the grid has a learning rate that is ``octaves`` above the best, up to half an octave."""
        powers = self.grid[0] - self.best
        return bool(powers[0] - 0.5 <= octaves <= powers[-1] + 0.5)

    def described(self, controller: Controller, probe: bool) -> Run:
        """Return a run with shared gradients and a peak of 1 as ``controller`` sees it, with a probe or without."""
        facts = {"total_steps": self.steps, "sync_every": self.sync_every, "peak": self.warm_up, "gradients": "shared"}
        return controller.prepare(Run(**facts, floors=(None,), peaks=(1.0,), probed=probe))  # type: ignore[arg-type]

    def observation(self, at: int, run: int, probe: bool, mu: float = 0.0) -> Observation:
        """Return one sync of a run as a controller sees it.

        Args:
            at: Which sync.
            run: Which run.
            probe: Whether losses are those of the probe.
            mu: Logarithm of the factor by which the run's learning rate is the given one.
        """
        later = at > 1  # the first cycle has no displacement before it, and that of the first is not known
        return Observation(
            losses=(self.probe if probe else self.level)[at, run : run + 1],
            multipliers=np.ones((1, 1)),
            base=self.rate[at, run : run + 1] * np.exp(mu),
            step=int(self.step[at]),
            slopes=self.slope[at, run : run + 1] if later else None,
            errors=self.error[at, run : run + 1] if later else None,
        )


def write(path: Path, observed: Mapping[str, Observed], source: str) -> None:
    """Write the observations of all tasks into one compressed file.

    Args:
        path: The file.
        observed: By task.
        source: Command, machine and date.
    """
    arrays = {
        f"{task}/{field.name}": np.asarray(getattr(found, field.name), dtype=np.float32)
        for task, found in observed.items()
        for field in fields(found)
    }
    np.savez_compressed(path, source=np.array(source), **arrays)  # type: ignore[arg-type]


def source(path: Path) -> str:
    """Return command, machine and date of a file of observations."""
    with np.load(path) as found:
        return str(found["source"])


def read(path: Path = OBSERVATIONS) -> dict[str, Observed]:
    """Return the observations by task."""
    tasks: dict[str, dict[str, Array]] = {}
    with np.load(path) as found:
        for key in found.files:
            if key != "source":
                task, _, field = key.rpartition("/")
                tasks.setdefault(task, {})[field] = found[key].astype(np.float64)
    numbers = {"steps": int, "warm_up": float}
    return {
        task: Observed(**{name: numbers[name](array) if name in numbers else array for name, array in arrays.items()})  # type: ignore[arg-type]
        for task, arrays in tasks.items()
    }
