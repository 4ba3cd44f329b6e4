"""Format the records of the quality suite as Markdown tables."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from .recovery import best_losses, best_runs, deviation, losses, percent, recovery, recovery_from
from .results import Report
from .scalars import SCALARS
from .selection import select
from .spec import Record
from .suite import LONG_STARTS, LONGER, MIXED, PAPER, STARTS
from .tasks import TASKS

# The goal for each start: the share of the gap that is to be recovered.
GOALS = {1 / 30: 0.7, 1 / 10: 0.9, 1 / 3: 0.9, 3.0: 0.7, 10.0: 0.9, 30.0: 0.7}

# A run that recovers less of the gap than this is lost: it diverged, or stayed at a start that was far too low.
LOST = 0.1

PAPER_TASKS = ("ratings", "language")


def all_tables(report: Report) -> str:
    """Return the tables of all parts that were run, each under its title."""
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
    written = [f"### {title}\n\n{table}" for title, table in made if table.count("\n") > 1]
    return "\n\n".join([f"### The reference: a grid of learning rates\n\n{grid_table(report)}", *written])


def grid_table(report: Report) -> str:
    """Return the best learning rate of plain training on a grid, for each task."""
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
    """Return losses from each start, the recovered share of the gap, and the final learning rate.

    Shares have their standard error over seeds. The final learning rate is the median, as a factor of the best one.
    HDET runs with a probe and with training losses alone have columns of their own.
    """
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
            cells = [task, _times(start), f"{len(plain)}", _mean(losses(plain))]
            for probe in probes:
                runs = select(report.records, kind="start", task=task, method="hdet", factor=start, probe=probe)
                if not runs:
                    cells += ["–", "–", "–"]
                    continue
                ends = [start * math.exp(run["mu"][0]) for run in runs]
                recovered = "–" if start == 1.0 else recovery_from(report, task, start, runs).recovered
                cells += [_mean(losses(runs)), recovered, f"{float(np.median(ends)):.2g}"]
            cells.append(verdict(report, task, start))
            rows.append(cells)
    found = [column for probe in probes for column in (names[probe], "recovered", "ends at")]
    return _table(["task", "start", "seeds", "plain", *found, "goal (probe)"], rows)


def verdict(report: Report, task: str, start: float) -> str:
    """Return the goal for a start, and whether the runs with a probe met it."""
    runs = select(report.records, kind="start", task=task, method="hdet", factor=start, probe=True)
    compared = recovery_from(report, task, start, runs)
    if not len(compared.gaps):
        return "–"
    spread = deviation(best_losses(report, task))
    gap, share, worse = compared.gap, compared.share, -float(np.mean(compared.gained))
    if start == 1.0:
        return f"within one σ ({spread:.4f}): {'met' if worse <= spread else f'missed by {worse - spread:.4f}'}"
    if share is None or (start == 3.0 and gap <= 2 * spread):
        size = "no gap" if share is None else "gap below 2 σ"
        return f"{size}; not worse than plain by σ: {'met' if worse <= spread else 'missed'}"
    size = f"; the gap is {gap / spread:.1f} σ" if spread else ""
    met = "met" if share >= GOALS[start] else f"missed{size}"
    if start not in (1 / 30, 30.0):
        return f"{GOALS[start]:.0%}: {met}"
    lost = int((~(compared.gained >= LOST * gap)).sum())  # NaN counts as lost
    if lost:
        met = f"missed, {lost} of {len(compared.gaps)} below"
    return f"{GOALS[start]:.0%}, no run below {LOST:.0%}: {met}"


def peers_table(report: Report) -> str:
    """Return validation losses of all methods; in brackets the share of the gap, for starts that are 10× off."""
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
                compared = recovery_from(report, task, start, runs)
                share = f" ({percent(compared.share)})" if len(compared.gaps) and start != 1.0 else ""
                cells.append(f"{_mean(losses(runs))}{share}" if runs else "same" if start != 1.0 else "–")
            rows.append(cells)
    return _table(["task", "method", "from best/10", "at the best", "from best×10"], rows)


def mixed_table(report: Report) -> str:
    """Return runs whose parameter groups start with different errors: which way each group moved."""
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
        share = percent(recovery(plain, runs, best_runs(report, task)).share)
        rows.append([task, "; ".join(sides), "; ".join(ends), _mean(losses(plain)), _mean(losses(runs)), share])
    head = ["task", "moved to the right side", "started right, moved", "plain", "HDET", "recovered"]
    return _table(head, rows)


def scalars_table(report: Report) -> str:
    """Return runs that explore another scalar: the direction of its movement, and the losses."""
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
            rows.append(
                [name, scalar.task, f"{best:g}", f"{start:g}", f"{float(np.median(ends)):.3g}", said,
                 f"{fixed[start]:.4f}" if start in fixed else "–", _mean(losses(runs)), f"{fixed[best]:.4f}"]
            )  # fmt: skip
    head = ["scalar", "task", "best of the grid", "start", "ends at (median)", "right side", "loss at the start"]
    return _table([*head, "loss, explored", "loss at the best"], rows)


def paper_table(report: Report) -> str:
    """Return the validation losses of the paper's configurations."""
    rows = []
    for name, _, _ in PAPER:
        cells = [name]
        for task in PAPER_TASKS:
            found = report.losses(kind="paper", task=task, configuration=name)
            cells.append(_mean(found) if found else "–")
        rows.append(cells)
    return _table(["configuration", *PAPER_TASKS], rows)


def decay_order(report: Report, task: str) -> str:
    """Return the parameter groups of full HDET in the order of their learning rates at three quarters of the run."""
    runs = select(report.records, kind="paper", task=task, configuration="full HDET")
    if not runs:
        return ""
    names = runs[0]["groups"]
    middle = len(runs[0]["rates"]) * 3 // 4
    left = {name: np.mean([run["rates"][middle][i] for run in runs]) for i, name in enumerate(names)}
    order = sorted(left, key=lambda name: float(left[name]))
    return f"{task}: " + " < ".join(f"{name} ({left[name]:.2e})" for name in order)


def schedules_table(report: Report) -> str:
    """Return plain training and HDET with cosine and constant schedules."""
    rows = []
    for schedule in ("cosine", "constant"):
        for task in report.best:
            cells = _against_grid(report, (0.1, 1.0, 10.0), kind="schedule", task=task, schedule=schedule)
            rows += [[schedule, task, *cells]] if cells else []
    head = ["schedule", "task", "best of the grid", "from OneCycle's best/10", "at OneCycle's best", "from best×10"]
    return _table(head, rows)


def long_table(report: Report) -> str:
    """Return plain training and HDET on longer runs."""
    rows = []
    for task in report.best:
        cells = _against_grid(report, LONG_STARTS, kind="long", task=task)
        rows += [[task, f"{LONGER * TASKS[task].steps}", *cells]] if cells else []
    starts = ["at the usual best" if start == 1.0 else f"from {_times(start)}" for start in LONG_STARTS]
    return _table(["task", "steps", "best of the grid", *starts], rows)


def _against_grid(report: Report, starts: Sequence[float], **wanted: object) -> list[str]:
    """Return the best plain runs and, for each start, losses of plain training and HDET with the share of the gap.

    The result is empty without plain runs.
    """
    rates = {run["lr"] for run in select(report.records, **wanted, method="plain")}
    if not rates:
        return []
    grid = {lr: select(report.records, **wanted, method="plain", lr=lr) for lr in rates}
    best = min(grid, key=lambda lr: float(np.mean(losses(grid[lr]))))
    goal = losses(grid[best])
    cells = [f"{best:.1e}: {_mean(goal)}"]
    for start in starts:
        plain = select(report.records, **wanted, method="plain", factor=start)
        found = select(report.records, **wanted, method="hdet", factor=start)
        if not plain or not found:
            cells.append("–")
            continue
        compared = recovery(plain, found, grid[best])
        share = compared.share if compared.gap > 2 * deviation(goal) else None
        cells.append(f"{_mean(losses(plain))} → {_mean(losses(found))} ({percent(share)})")
    return cells


def _mean(values: Sequence[float]) -> str:
    spread = f" ± {deviation(values):.4f}" if len(values) > 1 else ""
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
