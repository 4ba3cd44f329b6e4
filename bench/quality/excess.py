"""Compute by how much runs end above plain training at its best learning rate, over all tasks.

The excess of a run is its validation loss less that of the yardstick with the same seed (or their mean, for a seed that
the yardstick does not have), in percent of the yardstick's mean. A run that raised an error, is not finite or ends
above the level of the untrained model (``initial`` in the records of its task) counts as one at that level, and no run
counts with more than 100 %.

The difference to plain training from the same start is taken seed by seed. A task has few seeds from a start, too few
for a standard error of its own, but its yardstick has many. So the variance of the differences is averaged with the one
to be expected: the yardstick's variance times a ratio, the median over all tasks of variance of the differences to
variance of the yardstick, from the same start (2 where no task has two seeds). The expected one counts like four more
degrees of freedom.

The lowest of several means is lower than the mean of what was chosen, because noise helps to choose. So the learning
rate is chosen by the even seeds and its loss is taken from the odd ones, and the other way round: every seed has a loss
at a learning rate that it had no part in choosing, and the yardstick is the mean of these losses."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import fmean

import numpy as np

from bench.quality.results import Record
from bench.quality.suite import STARTS
from bench.quality.tasks import TASKS

# Losses by learning rate and seed.
Grid = dict[float, dict[int, float]]


@dataclass(frozen=True)
class Yardstick:
    """Plain training at the best learning rate of a task.

    Args:
        best: The learning rate with the lowest mean loss over all seeds.
        losses: By seed, the loss at the learning rate that the seeds of the other parity choose.
    """

    best: float
    losses: dict[int, float]

    @cached_property
    def mean(self) -> float:
        return fmean(self.losses.values())

    @cached_property
    def deviation(self) -> float:
        """Return the standard deviation over seeds; 0 for a single one."""
        return float(np.std(list(self.losses.values()), ddof=1)) if len(self.losses) > 1 else 0.0

    @property
    def relative_deviation(self) -> float:
        """Return the standard deviation in percent of the mean."""
        return 100 * self.deviation / self.mean


def yardsticks(records: Iterable[Record]) -> dict[str, Yardstick]:
    """Return the yardstick of every task that has plain runs on a grid; the finer grid is used where there is one.

    A task that diverges with some seed at every learning rate of its grid has none.
    """
    coarse, near = dict[str, Grid](), dict[str, Grid]()
    for record in records:
        if record["kind"] in ("grid", "near") and "val" in record:
            grid = (coarse if record["kind"] == "grid" else near).setdefault(record["task"], {})
            grid.setdefault(_digits(record["lr"]), {})[record["seed"]] = record["val"]
    return {task: measured(grid) for task, grid in (coarse | near).items() if _usable(grid)}


def best_rates(records: Iterable[Record]) -> dict[str, float]:
    """Return the learning rate with the lowest mean validation loss, by task."""
    return {task: found.best for task, found in yardsticks(records).items()}


def measured(grid: Grid) -> Yardstick:
    """Return the yardstick by a grid."""
    grid = _usable(grid)
    best = _best(grid)
    losses: dict[int, float] = {}
    for parity in (0, 1):
        judges = {lr: _of_parity(found, parity) for lr, found in grid.items()}
        chosen = _best(judges) if all(judges.values()) else best
        losses |= _of_parity(grid[chosen], 1 - parity)
    return Yardstick(best, losses)


def _usable(grid: Grid) -> Grid:
    """Return the learning rates at which no seed diverges, and of which a time limit did not leave out half the seeds.

    Where a seed diverges is not the best, however well the others end.
    """
    most = max(len(losses) for losses in grid.values())
    return {
        lr: losses for lr, losses in grid.items() if 2 * len(losses) > most and np.isfinite(list(losses.values())).all()
    }


def _best(grid: Mapping[float, Mapping[int, float]]) -> float:
    return min(grid, key=lambda lr: fmean(grid[lr].values()))


def _of_parity(losses: Mapping[int, float], parity: int) -> dict[int, float]:
    return {seed: loss for seed, loss in losses.items() if seed % 2 == parity}


def _digits(lr: float) -> float:
    """Round to the five digits of results files, so that runs of this process and recorded ones are at one rate."""
    return float(f"{lr:.5g}")


PLAIN, PROBE, TRAINING = "plain", "HDET, probe", "HDET, training loss"
MODES = (PROBE, TRAINING)
# A learning rate at the start, as a factor of the best one; None: the run has none, or does not depend on it.
Start = float | None
# The most that a run counts with, in percent; and the weight of the expected variance, in degrees of freedom.
CAP = 100.0
PRIOR = 4
# Runs that plain training is known by; further kinds have other schedules, lengths or parameter groups.
PLAIN_KINDS = ("grid", "near", "start")
# Methods that are run at the best learning rate only, although their results depend on it.
FIXED = ("local SGD", "DiLoCo")


@dataclass(frozen=True)
class Difference:
    """Excess over plain training from the same start on one task: mean over seeds, and its standard error."""

    mean: float
    error: float

    @property
    def worse(self) -> bool:
        """Return whether plain training is better by more than two standard errors."""
        return self.mean > 2 * self.error

    @property
    def better(self) -> bool:
        return self.mean < -2 * self.error


@dataclass(frozen=True)
class Summary:
    """Excess over the tasks in percent, and on how many of them it is worse and better than plain training from there.

    Nine tasks in ten are at or below ``nine_in_ten``.
    ``compared`` is the number of tasks that have plain runs from the same start, and ``error`` the standard error of
    their mean difference to these; None without any.
    """

    tasks: int
    mean: float
    median: float
    nine_in_ten: float
    worst: float
    worst_task: str
    worse: int
    better: int
    compared: int
    error: float | None


@dataclass(frozen=True)
class Excesses:
    """Excess in percent by way of training, start, task and seed, and the yardsticks by task."""

    yardsticks: dict[str, Yardstick]
    caps: dict[str, float]
    cells: dict[tuple[str, Start], dict[str, dict[int, float]]] = field(default_factory=dict)

    @property
    def ways(self) -> list[str]:
        """Return the ways of training: plain, HDET's, then the others by name."""
        found = {way for way, _ in self.cells}
        first = [way for way in (PLAIN, *MODES) if way in found]
        return first + sorted(found.difference(first))

    def of_runs(self, records: Sequence[Record]) -> Excesses:
        """Return the excess of other runs over the same yardsticks."""
        result = Excesses(self.yardsticks, self.caps)
        free, centres = _free_of_start(records), _centres(records)
        for record in records:
            ruler, way = self.yardsticks.get(record["task"]), way_of(record)
            if ruler is None or way is None or not record.keys() & {"val", "error"}:
                continue
            start = None
            if way not in free and record["lr"] is not None:
                start = _start(record["lr"] / centres.get(record["task"], ruler.best))
                if start is None:  # a learning rate between two starts
                    continue
            task, seed, cap = record["task"], record["seed"], self.caps[record["task"]]
            loss = record.get("val", math.inf)
            value = 100 * (loss - ruler.losses.get(seed, ruler.mean)) / ruler.mean
            seeds = result.cells.setdefault((way, start), {}).setdefault(task, {})
            seeds[seed] = min(value, cap) if math.isfinite(value) else cap
        return result

    def of_tasks(self, names: Collection[str]) -> Excesses:
        """Return the excess on some of the tasks."""
        cells = {
            key: {task: seeds for task, seeds in found.items() if task in names} for key, found in self.cells.items()
        }
        return Excesses(self.yardsticks, self.caps, cells)

    def means(self, way: str, start: Start) -> dict[str, float]:
        """Return the mean excess over seeds, by task."""
        found = self.cells.get((way, start), {})
        return {task: fmean(seeds.values()) for task, seeds in sorted(found.items())}

    def differences(self, way: str, start: Start) -> dict[str, Difference]:
        """Return the difference to plain training from the same start, by task; none where no seed is common."""
        pairs = {
            task: paired
            for task, seeds in self.cells.get((way, start), {}).items()
            if (paired := _paired(seeds, self.cells.get((PLAIN, start), {}).get(task, {})))
        }
        variances = {task: float(np.var(found, ddof=1)) for task, found in pairs.items() if len(found) > 1}
        ratios = [variance / self._noise(task) for task, variance in variances.items() if self._noise(task) > 0]
        # Without two seeds anywhere, the differences are taken for those of independent runs.
        usual, result = float(np.median(ratios)) if ratios else 2.0, dict[str, Difference]()
        for task, found in sorted(pairs.items()):
            freedom = len(found) - 1
            if not freedom and not self._noise(task) > 0:
                continue  # one seed here and at the best: nothing is known of its noise
            squares = PRIOR * usual * self._noise(task) + freedom * variances.get(task, 0.0)
            result[task] = Difference(fmean(found), math.sqrt(squares / (PRIOR + freedom) / len(found)))
        return result

    def _noise(self, task: str) -> float:
        """Return the variance of plain training at the best over seeds, in percent squared."""
        return self.yardsticks[task].relative_deviation ** 2

    def summary(self, way: str, start: Start) -> Summary | None:
        """Return the excess over all tasks, or None without runs."""
        means = self.means(way, start)
        if not means:
            return None
        values = list(means.values())
        worst = max(means, key=lambda task: means[task])
        found = self.differences(way, start).values()
        return Summary(
            tasks=len(means),
            mean=fmean(values),
            median=float(np.median(values)),
            nine_in_ten=float(np.percentile(values, 90)),
            worst=means[worst],
            worst_task=worst,
            worse=sum(one.worse for one in found),
            better=sum(one.better for one in found),
            compared=len(found),
            error=math.hypot(*(one.error for one in found)) / len(found) if found else None,
        )

    def sensitivity(self, way: str) -> dict[str, float]:
        """Return the learning-rate sensitivity by task: the mean excess over the starts (arXiv 2309.14322).

        Tasks without runs from one of the starts are left out. A way that does not depend on the start has one excess.
        """
        found = [self.means(way, start) for start in STARTS]
        if not any(found):
            return self.means(way, None)
        complete = set.intersection(*(set(means) for means in found))
        return {task: float(np.mean([means[task] for means in found])) for task in sorted(complete)}


def excesses(records: Sequence[Record]) -> Excesses:
    """Return the excess of all runs of tasks that have a grid."""
    rulers = yardsticks(records)
    caps = dict.fromkeys(rulers, CAP)
    for record in records:
        if (task := record["task"]) in rulers and record.get("initial") is not None:
            caps[task] = min(caps[task], 100 * (record["initial"] / rulers[task].mean - 1))
    return Excesses(rulers, caps).of_runs(records)


def way_of(record: Record) -> str | None:
    """Return the way of training as tables name it; None for a run that is not compared."""
    kind, method = record["kind"], record.get("method")
    if method == PLAIN:
        return PLAIN if kind in PLAIN_KINDS else None
    if (kind, method) in (("start", "hdet"), ("none", "scout")):
        return PROBE if record["probe"] else TRAINING
    return method if kind in ("peer", "sweep") else None


def _free_of_start(records: Sequence[Record]) -> set[str]:
    """Return the peers that were run from one start only, because their results do not depend on it."""
    factors: dict[str, set[object]] = {}
    for record in records:
        if record["kind"] in ("peer", "sweep"):
            factors.setdefault(record.get("method", ""), set()).add(record.get("factor"))
    return {method for method, found in factors.items() if found == {1.0} and method not in FIXED}


def _centres(records: Sequence[Record]) -> dict[str, float]:
    """Return the learning rate that the starts of each task are factors of: the best one when they were run."""
    return {
        record["task"]: record["lr"] / record["factor"]
        for record in records
        if record.get("factor") and record.get("lr") and record["kind"] == "start"
    }


def _start(factor: float) -> float | None:
    """Return the start that a factor of the best learning rate is, or None for one in between."""
    return next((start for start in STARTS if math.isclose(factor, start, rel_tol=1e-3)), None)


def _paired(runs: Mapping[int, float], plain: Mapping[int, float]) -> list[float]:
    return [runs[seed] - plain[seed] for seed in sorted(runs.keys() & plain.keys())]


@dataclass(frozen=True)
class Goal:
    """A goal of HDET with its defaults, which reads training losses: most of a figure, in percent, from one start.

    Args:
        start: Learning rate at the start, as a factor of the best.
        text: What is limited.
        limit: The most that it may be.
        figure: Return it from the summary over tasks.
        group: Key of ``GROUPS``: the tasks that it holds for.
    """

    start: Start
    text: str
    limit: float
    figure: Callable[[Summary], float]
    group: str = "most tasks"

    def measured(self, found: Excesses) -> float | None:
        """Return the figure, or None without runs."""
        one = found.of_tasks(GROUPS[self.group]).summary(TRAINING, self.start)
        return None if one is None else self.figure(one)


# Groups of tasks: those that overfit want a learning rate that no training loss shows, and are apart from all others.
GROUPS: dict[str, frozenset[str]] = {
    "most tasks": frozenset(name for name, task in TASKS.items() if not task.overfits),
    "transformers": frozenset(name for name, task in TASKS.items() if task.architecture == "transformer"),
    "overfitting": frozenset(name for name, task in TASKS.items() if task.overfits),
}


def _worse_than_plain(found: Summary) -> float:
    return 100 * found.worse / found.compared if found.compared else 0.0


GOALS = (
    Goal(1.0, "mean", 0.3, lambda found: found.mean),
    Goal(1.0, "worst", 3.0, lambda found: found.worst),
    Goal(1.0, "share of tasks worse than plain", 6.0, _worse_than_plain),
    Goal(3.0, "median", 3.0, lambda found: found.median),
    Goal(3.0, "mean", 9.0, lambda found: found.mean),
    Goal(10.0, "median", 3.0, lambda found: found.median),
    Goal(10.0, "nine in ten", 15.0, lambda found: found.nine_in_ten),
    Goal(10.0, "worst of the transformers", 10.0, lambda found: found.worst, "transformers"),
    Goal(30.0, "median", 5.0, lambda found: found.median),
    Goal(30.0, "nine in ten", 25.0, lambda found: found.nine_in_ten),
)
