"""Try a controller on recorded plain runs, in seconds: an estimate of what it would do, before it is run.

At each sync the controller sees the recorded run whose learning rate is nearest to the one that it has chosen. A run
ends with the loss that the grid has at its last learning rate. A return to an earlier average therefore costs nothing
but the lower learning rate, and a run that was far too high ends as if it never had been.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from bench.markdown import table
from hdet_kernels.controller.regression import RegressionController

from .observations import Observed
from .suite import STARTS

# A task counts as worse than plain from so many percent on: the log-interpolated grid is not more exact.
WORSE = 0.3


def replay(seen: Observed, controller: RegressionController, start: float, seed: int, probe: bool) -> float:
    """Return how many octaves above the best a run ends.

    Args:
        seen: The recorded runs of the task.
        controller: The controller.
        start: Learning rate at the start over the best.
        seed: Which seed of the recorded runs.
        probe: Whether the controller reads the probe instead of training losses.
    """
    runs = np.flatnonzero(seen.seeds == seed)
    run, state, left = seen.described(controller, probe), controller.start(1), controller.undo
    for at in range(len(seen.step)):
        mu = state["mu"][0]
        octaves = math.log2(start) + mu / math.log(2)
        nearest = int(runs[np.abs(seen.octaves[runs] - octaves).argmin()])
        observation = seen.observation(at, nearest, probe, mu)
        finite = bool(np.isfinite(observation.losses).any())
        broken = not finite or controller.judge(run, state, observation) == "broken"
        if broken and left:
            state, left = controller.undone(run, state, observation), left - 1
        elif finite:
            state = controller.update(run, state, observation)
    return math.log2(start) + float(state["mu"][0]) / math.log(2)


def excesses(
    observed: Mapping[str, Observed], controllers: Mapping[str, RegressionController], start: float, probe: bool
) -> dict[str, tuple[float, float]]:
    """Return the excess of HDET and of plain training from a start, in percent, by task: the mean over seeds."""
    found = {}
    for task, seen in observed.items():
        if seen.reaches(math.log2(start)):
            ends = [replay(seen, controllers[task], start, int(seed), probe) for seed in np.unique(seen.seeds)]
            found[task] = float(np.mean([seen.excess(end) for end in ends])), seen.excess(math.log2(start))
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
