"""Compare designs of the controller on recorded plain runs: harm where the learning rate is right against recovery.

A design is played through the observations, with constants that were fitted without each task's family.
``python -m bench.quality replay --designs`` writes the outcomes into ``results/designs.json``, which the page shows.

At each sync the controller sees the recorded run whose learning rate is nearest to the one that it has chosen. Where it
finds that training broke, the run begins again, over the steps that remain. Where it doubts the learning rate it does
so as a trial, and may go back. A run ends with the loss that the grid has at its last learning rate, and with what a
shorter run costs."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.markdown import table
from bench.quality.excess import CAP, MODES, PROBE
from bench.quality.held_out import Constants
from bench.quality.methods import controller
from bench.quality.observations import Observed
from bench.quality.suite import STARTS
from hdet_kernels.controller.protocol import State
from hdet_kernels.controller.regression import RegressionController

# A task counts as worse than plain from so many percent on: the log-interpolated grid is not more exact.
WORSE = 0.3
# Excess of a run in half of the steps, in percent: that of a share s is (1/s - 1) times it. Measured at s = 0.85, in
# the median of 31 tasks.
SHORTER = 5.7


def replay(seen: Observed, controller: RegressionController, start: float, seed: int, probe: bool) -> float:
    """Return how far a run ends above the best, in percent.

    Args:
        seen: The recorded runs of the task.
        controller: The controller.
        start: Learning rate at the start over the best.
        seed: Which seed of the recorded runs.
        probe: Whether the controller reads the probe instead of training losses.
    """
    runs = np.flatnonzero(seen.seeds == seed)
    run, state, left = seen.described(controller, probe), controller.start(1), controller.undo
    at, share = 0, 1.0
    aside: State | None = None  # of the attempt that a trial is compared with
    while at < len(seen.step):
        mu = state["mu"][0]
        octaves = math.log2(start) + mu / math.log(2)
        nearest = int(runs[np.abs(seen.octaves[runs] - octaves).argmin()])
        observation = seen.observation(at, nearest, probe, mu)
        spent = observation.step / seen.steps
        finite = bool(np.isfinite(observation.losses).any())
        if left and (not finite or controller.broke(run, state, observation)):
            state, left, aside = controller.begun_anew(run, state, observation), left - 1, None
            at, share = 0, share * (1 - spent)
            continue
        if finite:
            if aside is not None and controller.worse(run, state, observation):
                # The steps of the trial are lost instead of those that were set aside, which are as many.
                state, aside, at = aside, None, at + 1
                continue
            before, state = state, controller.update(run, state, observation)
            aside = aside if state["trial"] else None
            if left and aside is None and controller.doubts(run, before, observation):
                aside, state, left = state, controller.tried(run, before, observation), left - 1
                at, share = 0, share * (1 - spent)
                continue
        at += 1
    octaves = math.log2(start) + float(state["mu"][0]) / math.log(2)
    return seen.excess(octaves) + SHORTER * (1 / share - 1)


def excesses(
    observed: Mapping[str, Observed], controllers: Mapping[str, RegressionController], start: float, probe: bool
) -> dict[str, tuple[float, float]]:
    """Return the excess of HDET and of plain training from a start, in percent, by task: the mean over seeds."""
    found = {}
    for task, seen in observed.items():
        if seen.reaches(math.log2(start)):
            own = [replay(seen, controllers[task], start, int(seed), probe) for seed in np.unique(seen.seeds)]
            found[task] = float(np.mean(own)), seen.excess(math.log2(start))
    return found


def replay_table(observed: Mapping[str, Observed], controllers: Mapping[str, RegressionController]) -> str:
    """Return a table of the excess over the best of the grid, by start and mode, beside plain training."""
    rows = []
    for start in STARTS:
        for mode, probe in {"probe": True, "training loss": False}.items():
            found = excesses(observed, controllers, start, probe)
            own, plain = np.array(list(found.values())).T
            figures = (
                f"{figure:.1f}" for figure in (np.median(own), own.mean(), own.max(), np.median(plain), plain.mean())
            )
            rows.append([f"{start:.3g}", mode, str(len(own)), *figures, f"{np.mean(own > plain + WORSE):.0%}"])
    head = ["start", "mode", "tasks", "median", "mean", "worst", "plain: median", "mean", "worse than plain"]
    return table(head, rows, left=2)


DESIGNS = Path(__file__).parent / "results" / "designs.json"
DEFAULT = "trust=3 (the default)"

# Other values of the controller's arguments and settings than the default ones, by design.
TRIED: dict[str, dict[str, Any]] = {
    "trust=1: plain training": {"trust": 1.0},
    DEFAULT: {},
    "trust=10": {"trust": 10.0},
    "trust=30": {"trust": 30.0},
    "trust=None": {"trust": None},
    "without the first slopes": {"turned_mean": 1e300},
    "without doubts": {"doubt_mean": 1e300},
    "without falling back": {"fall_share": 1e300},
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
