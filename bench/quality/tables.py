"""From records to Markdown tables. Every number is computed here, none is typed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .results import Report
from .scalars import SCALARS
from .spec import Record
from .suite import LONG_STARTS, LONGER, MIXED, PAPER, STARTS, select
from .tasks import TASKS

#: The least share of the gap that is to be recovered from each start.
BARS = {1 / 30: 0.7, 1 / 10: 0.9, 1 / 3: 0.9, 3.0: 0.7, 10.0: 0.9, 30.0: 0.7}

#: A run that recovers less of the gap than this has diverged.
DIVERGED = 0.1

PAPER_TASKS = ("ratings", "language")


def all_tables(report: Report) -> str:
    """The tables of all parts that were run, each under its title."""
    parts: list[tuple[str, str, Callable[[], str]]] = [
        ("start", "From wrong starts", lambda: starts_table(report)),
        ("peer", "Beside other methods", lambda: peers_table(report)),
        ("mixed", "Groups with different wrong starts", lambda: mixed_table(report)),
        ("scalar", "Other scalars", lambda: scalars_table(report)),
        ("paper", "The paper's configurations", lambda: paper_table(report)),
        ("schedule", "Other schedules", lambda: schedules_table(report)),
        ("long", f"Runs {LONGER} times as long", lambda: long_table(report)),
    ]
    kinds = {record["kind"] for record in report.records if "val" in record}
    made = [(title, table()) for kind, title, table in parts if kind in kinds]
    written = [f"## {title}\n\n{table}" for title, table in made if table.count("\n") > 1]
    return "\n\n".join([f"## The yardstick: a grid\n\n{grid_table(report)}", *written])


def grid_table(report: Report) -> str:
    rows = []
    for task, best in report.best.items():
        runs = select(report.records, kind="grid", task=task)
        found = report.losses(kind="grid", task=task, lr=best)
        rates = sorted({run["lr"] for run in runs})
        rows.append(
            [task, TASKS[task].title, f"{best:.1e}", _mean(found), f"{len(rates)} rates × {_most_seeds(runs)} seeds"]
        )
    return _table(["task", "data, model", "best learning rate", "validation loss", "cost in runs"], rows)


def starts_table(report: Report) -> str:
    """Share of the gap to the grid's best that is recovered, from each start, with the standard error of that mean over
    seeds; with a probe, and from training losses alone; and where the learning rate ended, as a factor of the best one
    (median)."""
    names = {True: "HDET, probe", False: "HDET, training loss"}
    probes = [probe for probe in names if select(report.records, kind="start", method="hdet", probe=probe)]
    rows = []
    for task in report.best:
        for start in STARTS:
            seeds = {
                run["seed"] for run in select(report.records, kind="start", task=task, method="hdet", factor=start)
            }
            plain = select(report.records, kind="start", task=task, method="plain", factor=start)
            plain = [run for run in plain if run["seed"] in seeds]
            if not plain:
                continue
            cells = [task, _times(start), f"{len(plain)}", _mean(_losses(plain))]
            for probe in probes:
                runs = select(report.records, kind="start", task=task, method="hdet", factor=start, probe=probe)
                if not runs:
                    cells += ["–", "–", "–"]
                    continue
                ends = [start * math.exp(run["mu"][0]) for run in runs]
                recovered = "–" if start == 1.0 else _from_start(report, task, start, runs).recovered
                cells += [_mean(_losses(runs)), recovered, f"{float(np.median(ends)):.2g}"]
            cells.append(verdict(report, task, start))
            rows.append(cells)
    found = [column for probe in probes for column in (names[probe], "recovered", "ends at")]
    return _table(["task", "start", "seeds", "plain", *found, "bar (probe)"], rows)


def verdict(report: Report, task: str, start: float) -> str:
    """The bar for a start, and whether the runs with a probe met it."""
    runs = select(report.records, kind="start", task=task, method="hdet", factor=start, probe=True)
    compared = _from_start(report, task, start, runs)
    if not len(compared.gaps):
        return "–"
    spread = _deviation(best_losses(report, task))
    gap, share, worse = compared.gap, compared.share, -float(np.mean(compared.gained))
    if start == 1.0:
        return f"within one σ ({spread:.4f}): {'met' if worse <= spread else f'missed by {worse - spread:.4f}'}"
    if share is None or (start == 3.0 and gap <= 2 * spread):
        size = "no gap" if share is None else "gap below 2 σ"
        return f"{size}; not worse than plain by σ: {'met' if worse <= spread else 'missed'}"
    size = f"; the gap is {gap / spread:.1f} σ" if spread else ""
    met = "met" if share >= BARS[start] else f"missed{size}"
    if start not in (1 / 30, 30.0):
        return f"{BARS[start]:.0%}: {met}"
    lost = int((~(compared.gained >= DIVERGED * gap)).sum())  # also what is not a number
    return f"{BARS[start]:.0%}, none diverged: {f'missed, {lost} of {len(compared.gaps)} diverged' if lost else met}"


def best_losses(report: Report, task: str) -> list[float]:
    """Validation losses of plain runs at the best learning rate, of all seeds."""
    return list(_by_seed(_best_runs(report, task)).values())  # those of the grid are among those from starts


def _best_runs(report: Report, task: str) -> list[Record]:
    runs = select(report.records, task=task, method="plain", lr=report.best[task])
    return [run for run in runs if run["kind"] in ("grid", "start")]


def peers_table(report: Report) -> str:
    """Validation losses; in brackets the share of the gap to the grid's best, for starts 10× off."""
    methods = sorted({run["method"] for run in report.records if run["kind"] in ("peer", "sweep") and "val" in run})
    rows = []
    for task in report.best:
        for method in ("plain", "hdet", *methods):
            if not select(report.records, task=task, method=method, factor=1.0):
                continue
            cells = [task, "equal-compute sweep" if method == "sweep" else method]
            for start in (0.1, 1.0, 10.0):
                wanted: dict[str, Any] = {"task": task, "method": method, "factor": start}
                if method in ("plain", "hdet"):
                    wanted |= {"kind": "start", "probe": True}
                runs = select(report.records, **wanted)
                compared = _from_start(report, task, start, runs)
                share = f" ({_percent(compared.share)})" if len(compared.gaps) and start != 1.0 else ""
                cells.append(f"{_mean(_losses(runs))}{share}" if runs else "same" if start != 1.0 else "–")
            rows.append(cells)
    return _table(["task", "method", "from best/10", "at the best", "from best×10"], rows)


def mixed_table(report: Report) -> str:
    rows = []
    for task, factors in MIXED.items():
        runs = select(report.records, kind="mixed", task=task, method="hdet")
        plain = select(report.records, kind="mixed", task=task, method="plain")
        if not runs or not plain:
            continue
        sides = []
        for name, factor in factors.items():
            if factor == 1.0:
                continue
            moved = [run["mu"][run["groups"].index(name)] for run in runs]
            right = sum((mu > 0) == (factor < 1) and mu != 0 for mu in moved)
            sides.append(f"{name} {_times(factor)}: {right} of {len(runs)}, by {_factor(moved)}")
        stay = [name for name, factor in factors.items() if factor == 1.0]
        ends = [f"{name} by {_factor([run['mu'][run['groups'].index(name)] for run in runs])}" for name in stay]
        share = _percent(_compared(plain, runs, _best_runs(report, task)).share)
        rows.append([task, "; ".join(sides), "; ".join(ends), _mean(_losses(plain)), _mean(_losses(runs)), share])
    head = ["task", "moved to the right side", "started right, moved", "plain", "HDET", "recovered"]
    return _table(head, rows)


def scalars_table(report: Report) -> str:
    rows = []
    for name, scalar in SCALARS.items():
        fixed = {run["value"]: run["val"] for run in select(report.records, kind="scalar", name=name, explores=False)}
        if not fixed:
            continue
        best = min(fixed, key=lambda value: fixed[value])
        for start in scalar.starts:
            runs = select(report.records, kind="scalar", name=name, explores=True, value=start)
            if not runs:
                continue
            ends = [run["end"] for run in runs]
            right = sum((end > start) == (best > start) and end != start for end in ends)
            said = f"{right} of {len(ends)}" if best != start else "the start is the best of the grid"
            losses = [run["val"] for run in runs]
            rows.append(
                [name, scalar.task, f"{best:g}", f"{start:g}", f"{float(np.median(ends)):.3g}", said,
                 f"{fixed[start]:.4f}" if start in fixed else "–", _mean(losses), f"{fixed[best]:.4f}"]
            )  # fmt: skip
    head = ["scalar", "task", "best of the grid", "start", "ends at (median)", "right side", "loss at the start"]
    return _table([*head, "loss, explored", "loss at the best"], rows)


def paper_table(report: Report) -> str:
    rows = []
    for name, _, _ in PAPER:
        cells = [name]
        for task in PAPER_TASKS:
            losses = report.losses(kind="paper", task=task, configuration=name)
            cells.append(_mean(losses) if losses else "–")
        rows.append(cells)
    return _table(["configuration", *PAPER_TASKS], rows)


def decay_order(report: Report, task: str) -> str:
    """The groups of full HDET by what the controller left of their learning rate in the middle of its reign."""
    runs = select(report.records, kind="paper", task=task, configuration="full HDET")
    if not runs:
        return ""
    names = runs[0]["groups"]
    middle = len(runs[0]["rates"]) * 3 // 4
    left = {name: np.mean([run["rates"][middle][i] for run in runs]) for i, name in enumerate(names)}
    order = sorted(left, key=lambda name: float(left[name]))
    return f"{task}: " + " < ".join(f"{name} ({left[name]:.2e})" for name in order)


def schedules_table(report: Report) -> str:
    rows = []
    for schedule in ("cosine", "constant"):
        for task in report.best:
            cells = _against_grid(report, (0.1, 1.0, 10.0), kind="schedule", task=task, schedule=schedule)
            rows += [[schedule, task, *cells]] if cells else []
    head = ["schedule", "task", "best of the grid", "from OneCycle's best/10", "at OneCycle's best", "from best×10"]
    return _table(head, rows)


def long_table(report: Report) -> str:
    rows = []
    for task in report.best:
        cells = _against_grid(report, LONG_STARTS, kind="long", task=task)
        rows += [[task, f"{LONGER * TASKS[task].steps}", *cells]] if cells else []
    starts = ["at the usual best" if start == 1.0 else f"from {_times(start)}" for start in LONG_STARTS]
    return _table(["task", "steps", "best of the grid", *starts], rows)


def _against_grid(report: Report, starts: Sequence[float], **wanted: object) -> list[str]:
    """The best of all plain runs, and for each start what plain runs and HDET come to, with the share of the gap;
    nothing without plain runs."""
    rates = {run["lr"] for run in select(report.records, **wanted, method="plain")}
    if not rates:
        return []
    grid = {lr: select(report.records, **wanted, method="plain", lr=lr) for lr in rates}
    best = min(grid, key=lambda lr: float(np.mean(_losses(grid[lr]))))
    goal = _losses(grid[best])
    cells = [f"{best:.1e}: {_mean(goal)}"]
    for start in starts:
        plain = select(report.records, **wanted, method="plain", factor=start)
        found = select(report.records, **wanted, method="hdet", factor=start)
        if not plain or not found:
            cells.append("–")
            continue
        compared = _compared(plain, found, grid[best])
        share = compared.share if compared.gap > 2 * _deviation(goal) else None
        cells.append(f"{_mean(_losses(plain))} → {_mean(_losses(found))} ({_percent(share)})")
    return cells


def _percent(share: float | None) -> str:
    return "no gap" if share is None else f"{share:.0%}"


@dataclass(frozen=True)
class _Compared:
    """For each seed, what a run gained on the plain one from its start, and what the best plain one gained on that."""

    gained: NDArray[np.float64]
    gaps: NDArray[np.float64]

    @property
    def gap(self) -> float:
        return float(self.gaps.mean()) if len(self.gaps) else 0.0

    @property
    def share(self) -> float | None:
        """Of the gap; None where there is none."""
        return float(self.gained.mean()) / self.gap if self.gap > 0 else None

    @property
    def recovered(self) -> str:
        """The share, with its standard error where seeds can tell."""
        if self.share is None or len(self.gaps) < 2:
            return _percent(self.share)
        left = self.gained - self.share * self.gaps
        return f"{self.share:.0%} ± {_deviation(left.tolist()) / math.sqrt(len(left)) / self.gap:.0%}"


def _compared(plain: Sequence[Record], found: Sequence[Record], goal: Sequence[Record]) -> _Compared:
    """By the seeds that all of them have, as a seed that is hard for one is hard for all."""
    here, there, best = _by_seed(plain), _by_seed(found), _by_seed(goal)
    seeds = sorted(here.keys() & there.keys() & best.keys())
    start = np.array([here[seed] for seed in seeds])
    return _Compared(start - [there[seed] for seed in seeds], start - [best[seed] for seed in seeds])


def _from_start(report: Report, task: str, start: float, runs: Sequence[Record]) -> _Compared:
    """Runs from a start with plain ones there and at the best."""
    plain = select(report.records, kind="start", task=task, method="plain", factor=start)
    return _compared(plain, runs, _best_runs(report, task))


def _by_seed(runs: Sequence[Record]) -> dict[int, float]:
    return {run["seed"]: run["val"] for run in runs}


def _losses(runs: Sequence[Record]) -> list[float]:
    return [run["val"] for run in runs]


def _deviation(values: Sequence[float]) -> float:
    """From seed to seed; 0 where there is one."""
    return float(np.std(values, ddof=1)) if len(values) > 1 else 0.0


def _mean(values: Sequence[float]) -> str:
    spread = f" ± {_deviation(values):.4f}" if len(values) > 1 else ""
    return f"{np.mean(values):.4f}{spread}"


def _factor(mus: Sequence[float]) -> str:
    return f"×{math.exp(float(np.median(mus))):.2g}"


def _times(start: float) -> str:
    return "best" if start == 1.0 else f"{1 / start:.0f}× too low" if start < 1 else f"{start:.0f}× too high"


def _most_seeds(runs: Sequence[Record]) -> int:
    return len({run["seed"] for run in runs})


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
