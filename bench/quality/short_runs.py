"""Play the search of ``max_lr=None`` through recorded short runs, in seconds and without a GPU.

``results/short_runs_h200.npz`` has runs of 32 tasks at 13 learning rates, an octave apart, with two seeds: a whole
OneCycleLR in a share of the steps, on a share of the batch. A search by the rules of the package sees the losses of
these runs, interpolated between learning rates and between shares; rounds shorter than the shortest runs see those. Its
choice ends with the loss of runs of full length, and the shorter run costs :data:`COST` for every share of the steps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import hdet_kernels as hk
from bench.markdown import table
from bench.quality.excess import CAP
from bench.quality.observations import EXCESS_SCALE
from bench.quality.search import SHARES
from bench.quality.tasks import TASKS
from hdet_kernels.schedule.scout.rounds import (
    Comparison,
    candidates,
    choose,
    choose_near,
    first_bracket,
    first_pair,
    make_plan,
    narrow,
    next_pair,
    together,
)

Array = NDArray[np.float64]

SHORT_RUNS = Path(__file__).parent / "results" / "short_runs_h200.npz"
# Replicas: the recorded runs have an eighth of the batch, as a replica of eight, or a half, as a team.
REPLICAS = 8
# What a run loses for every share of its steps that it lacks, in percent: the median of runs of 85 % of the steps.
COST = 5.7
# Steps of a simulated run: enough for all of the rounds that a share pays for.
STEPS = 10**6


@dataclass(frozen=True)
class ShortRuns:
    """The runs of one task.

    Args:
        octaves: log2 of the learning rates of the short runs.
        losses: by share of the steps and share of the batch, [seeds, learning rates].
        start: the loss before the first step, by seed.
        final_octaves, final: log2 of the learning rates of runs of full length, and their validation losses.
    """

    octaves: Array
    losses: dict[tuple[float, float], Array]
    start: Array
    final_octaves: Array
    final: Array

    def seen(self, rates: Array, share: float, batch: float, seed: int) -> Comparison:
        """Return the outcome of a round of so many of the steps, on so much of the batch."""
        shares = sorted(each for each, of_batch in self.losses if of_batch == batch)
        place = float(np.interp(math.log(share), np.log(shares), np.arange(len(shares))))
        below, above = (self._at(rates, shares[each], batch, seed) for each in (math.floor(place), math.ceil(place)))
        weight = place - math.floor(place)
        losses = below if weight == 0 else (1 - weight) * below + weight * above
        return Comparison(rates, losses, np.zeros_like(rates), float(self.start[seed]))

    def _at(self, rates: Array, share: float, batch: float, seed: int) -> Array:
        recorded = self.losses[share, batch]
        found = recorded[seed % len(recorded)]  # some have one seed
        diverged = np.interp(np.log2(rates), self.octaves, np.where(np.isfinite(found), 0.0, 1.0)) > 0
        losses: Array = np.interp(np.log2(rates), self.octaves, np.where(np.isfinite(found), found, 0.0))
        return np.where(diverged, np.inf, losses)

    def excess(self, rate: float) -> float:
        """Return how far a run of full length ends above the best learning rate, in percent and at most 100."""
        above = np.fmin(100 * (self.final / self.final.min() - 1), CAP) + EXCESS_SCALE
        return float(np.exp(np.interp(math.log2(rate), self.final_octaves, np.log(above))) - EXCESS_SCALE)


def read(probe: bool, path: Path = SHORT_RUNS) -> dict[str, ShortRuns]:
    """Return the runs by task; their losses on the probe, or else in training."""
    tasks: dict[str, dict[str, Array]] = {}
    with np.load(path) as found:
        for key in found.files:
            if key != "source":
                task, _, name = key.rpartition("/")
                tasks.setdefault(task, {})[name] = found[key].astype(np.float64)
    kind = "probe" if probe else "level"
    return {
        task: ShortRuns(
            arrays["octaves"],
            {
                (float(share), float(batch)): losses
                for name, losses in arrays.items()
                for of_kind, _, rest in [name.partition(" ")]
                if of_kind == kind
                for share, _, batch in [rest.partition(" ")]
            },
            *(arrays[name] for name in ("start", "final_octaves", "final")),
        )
        for task, arrays in tasks.items()
    }


def play(runs: ShortRuns, settings: hk.ScoutSettings, seed: int) -> float:
    """Return the learning rate that the search chooses."""
    plan = make_plan(STEPS, REPLICAS, settings, teams=True)
    bracket, near = first_bracket(settings), None
    for number, length in enumerate(plan.rounds):
        share, last = length / plan.run, number + 1 == len(plan.rounds)
        if plan.in_teams(number):
            near = together(near, runs.seen(np.exp(bracket), share, 0.5, seed))
            if last:
                return choose_near(near, settings).rate
            bracket = next_pair(near, settings)
        else:
            seen = runs.seen(np.array(candidates(bracket, REPLICAS)), share, 1 / REPLICAS, seed)
            if last:
                return choose(seen, settings).rate
            follow = plan.in_teams(number + 1)
            bracket = first_pair(seen, REPLICAS, settings) if follow else narrow(seen, bracket, settings)
    raise AssertionError("a plan has a last round")


def played(share: float, probe: bool) -> dict[str, float]:
    """Return the excess of the choice alone by task, the mean over seeds, without tasks that overfit."""
    settings = hk.ScoutSettings(share=share)
    return {
        task: float(np.mean([runs.excess(play(runs, settings, seed)) for seed in range(len(runs.start))]))
        for task, runs in read(probe).items()
        if not TASKS[task].overfits
    }


def played_table(shares: tuple[float, ...] = SHARES) -> str:
    """Return median, mean and what nine in ten tasks are below, by share; and the median with the shorter run."""
    body = []
    for share in shares:
        cells = []
        for probe in (True, False):
            found = list(played(share, probe).values())
            cells.append(f"{np.median(found):.1f} / {np.mean(found):.1f} / {np.quantile(found, 0.9):.1f}")
            cells.append(f"{np.median(found) + COST * share:.1f} / {np.mean(found) + COST * share:.1f}")
        body.append([f"{share:g}", *cells])
    header = [f"{loss}, {what}" for loss in ("probe", "training loss") for what in ("alone", "with the shorter run")]
    return table(["share", *header], body)
