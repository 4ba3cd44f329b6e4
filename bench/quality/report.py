"""Write docs/quality.md and its plots from results files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .figures import new_figure, save
from .results import Report, joined
from .selection import select
from .spec import Record
from .suite import PAPER
from .tables import PAPER_TASKS, all_tables, decay_order
from .tasks import TASKS
from .zoo_page import zoo_plots, zoo_section

Array = NDArray[np.float64]

INTRODUCTION = """# Does it find the learning rate?

Written by `python -m bench.pages` from the records in `bench/quality/results`. `bench/quality/README.md` describes the
tasks and the methods. *Plain* is torch's optimizer with `OneCycleLR`. *Probe*: the controller reads the loss on one
held-out batch that is the same for all replicas; *training loss*: it reads the replicas' training losses."""

RECOVERED = """In the tables below, numbers are validation losses: mean ± standard deviation over seeds, with AdamW.
*Recovered* is the share of the gap between plain training from that start and plain training at the best learning rate
of the grid, ± its standard error over seeds. *Ends at* is the peak learning rate that HDET ended with, as a factor of
the best one (median). σ is the standard deviation of plain training at the best."""

TITLES = {
    "zoo": "The zoo (`--size zoo`)",
    "full": "Ratings, language and images (`--size full`)",
    "unseen": "Tasks that the controller was not developed on (`--size unseen`)",
    "ci": "Digits (`make quality`)",
}


def read(folder: Path) -> list[Report]:
    """Read all results files of a folder; a file without records, such as the constants', is none."""
    contents = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    return [Report(**content) for content in contents if "records" in content]


def zoo_of(reports: Sequence[Report]) -> Report | None:
    """Return the results of the zoo, of several files together; None without any."""
    found = [report for report in reports if report.size == "zoo"]
    return joined(found) if found else None


def write_report(reports: Sequence[Report], folder: Path) -> None:
    """Write quality.md and its plots into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    draw_plots(reports, folder)
    (folder / "quality.md").write_text(text(reports))


def text(reports: Sequence[Report]) -> str:
    """Return the page: the zoo, then the other results, those with most runs first."""
    parts, zoo = [INTRODUCTION], zoo_of(reports)
    if zoo is not None:
        parts += [f"## {TITLES[zoo.size]}", zoo_section(zoo)]
    for index, report in enumerate(_others(reports)):
        parts += [RECOVERED] if index == 0 else []
        parts += [f"## {TITLES.get(report.size, report.size)}", *report.sources, all_tables(report)]
        parts += [f"![{caption}]({name})" for name, (caption, _) in _plots(report).items()]
        orders = [order for task in PAPER_TASKS if (order := decay_order(report, task))]
        if orders:
            parts.append("Learning rates of the parameter groups at three quarters of full HDET, lowest first:")
            parts.append("\n".join(f"- {order}" for order in orders))
    return "\n\n".join(parts) + "\n"


def draw_plots(reports: Sequence[Report], folder: Path) -> None:
    """Draw the plots of all results files into ``folder``."""
    if (zoo := zoo_of(reports)) is not None:
        for name, (_, draw_zoo) in zoo_plots(zoo).items():
            draw_zoo(folder / name)
    for report in _others(reports):
        for name, (_, draw) in _plots(report).items():
            draw(report, folder / name)


def _others(reports: Sequence[Report]) -> list[Report]:
    found = [report for report in reports if report.size != "zoo"]
    return sorted(found, key=lambda report: len(report.records), reverse=True)


def _plots(report: Report) -> dict[str, tuple[str, Any]]:
    """Return caption and function of each plot that the records have data for, by file name."""
    found: dict[str, tuple[str, Any]] = {}
    if select(report.records, kind="start", method="hdet"):
        caption = "Validation loss against the learning rate at the start of a run"
        found[f"quality_starts_{report.size}.png"] = caption, _plot_starts
    if select(report.records, kind="paper"):
        caption = "Training losses of the paper's configurations"
        found[f"quality_curves_{report.size}.png"] = caption, _plot_curves
        caption = "Learning rates of every group and replica over time"
        found[f"quality_rates_{report.size}.png"] = caption, _plot_rates
    return found


def _plot_starts(report: Report, path: Path) -> None:
    figure, axes = new_figure(1, len(report.best), 4.2, 3.4)
    for axis, (task, best) in zip(axes[0], report.best.items(), strict=True):
        plain = _by(report, "lr", kind="grid", task=task)
        axis.plot(list(plain), list(plain.values()), color="0.6", marker=".", label="plain")
        shown = [min(plain.values())]
        for probe, color, label in ((True, "C0", "HDET, probe"), (False, "C1", "HDET, training loss")):
            found = _by(report, "lr", kind="start", task=task, method="hdet", probe=probe)
            if found:
                axis.plot(list(found), list(found.values()), color=color, marker="o", label=label)
            shown += found.values() if probe else ()
        top = min(max(shown) * 1.1, shown[0] * 3)
        axis.set(xscale="log", title=task, xlabel="learning rate at the start", ylim=(min(shown) * 0.95, top))
        axis.axvline(best, color="0.8", linewidth=1)
    axes[0][0].set_ylabel("validation loss")
    axes[0][0].legend(frameon=False)
    save(figure, path)


def _plot_curves(report: Report, path: Path) -> None:
    figure, axes = new_figure(1, len(PAPER_TASKS), 5, 3.6)
    for axis, task in zip(axes[0], PAPER_TASKS, strict=True):
        lowest = []
        for name, _, _ in PAPER:
            runs = select(report.records, kind="paper", task=task, configuration=name)
            if runs:
                curve = np.mean([run["curve"] for run in runs], axis=0)
                axis.plot(_steps(runs[0], len(curve)), curve, linewidth=1, label=name)
                lowest.append(float(np.min(curve)))
        if lowest:
            axis.set(title=task, xlabel="step", ylim=(min(lowest) * 0.98, min(lowest) * 1.4))
    axes[0][0].set_ylabel("training loss")
    axes[0][0].legend(frameon=False, fontsize=7)
    save(figure, path)


def _plot_rates(report: Report, path: Path) -> None:
    shown = [name for name in ("full HDET", "ours") if select(report.records, kind="paper", configuration=name)]
    figure, axes = new_figure(len(shown), len(PAPER_TASKS), 5, 3.2)
    for row, name in zip(axes, shown, strict=True):
        for axis, task in zip(row, PAPER_TASKS, strict=True):
            runs = select(report.records, kind="paper", task=task, configuration=name, seed=0)
            for index, group in enumerate(runs[0]["groups"] if runs else ()):
                values = np.array([sync[index] for sync in runs[0]["values"]])
                steps = _steps(runs[0], len(values))
                axis.plot(steps, values, color=f"C{index}", linewidth=0.4, alpha=0.6)
                axis.plot(steps, values.mean(axis=1), color=f"C{index}", linewidth=1.4, label=group)
            axis.set(yscale="log", title=f"{name}, {task}", xlabel="step")
    axes[0][0].legend(frameon=False, fontsize=7)
    axes[0][0].set_ylabel("learning rate")
    save(figure, path)


def _steps(run: Record, count: int) -> Array:
    """Return the steps of ``count`` syncs: one a cycle, and extra ones at halves, quarters … of the first cycle."""
    every = run["every"]
    early = max(count - TASKS[run["task"]].steps // every, 0)
    halves = 0.5 ** np.arange(early, 0, -1)
    found: Array = every * np.concatenate([halves, np.arange(1, count - early + 1)])
    return found


def _by(report: Report, key: str, **wanted: object) -> dict[float, float]:
    """Return the mean validation loss by ``key``, sorted."""
    values: dict[float, list[float]] = {}
    for record in select(report.records, **wanted):
        values.setdefault(record[key], []).append(record["val"])
    return {value: float(np.mean(values[value])) for value in sorted(values)}
