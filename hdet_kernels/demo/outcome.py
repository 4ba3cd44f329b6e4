"""Merge the replicas' results, and show them as a table, a sentence, JSON and two plots."""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from hdet_kernels import report
from hdet_kernels.demo.training import RUNS, Options, ReplicaRun, RunName
from hdet_kernels.schedule.acts import EVENTS
from hdet_kernels.schedule.history import without_nan

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TITLES: dict[RunName, str] = {"plain": "plain OneCycleLR", "hdet": "HDET"}
_COLOURS: dict[RunName, str] = {"plain": "#8a8f99", "hdet": "#c8442d"}


@dataclass(frozen=True)
class Run:
    """One run over all replicas: what :class:`.ReplicaRun` has of one."""

    losses: NDArray[np.float64]  # [steps], mean of the replicas
    rates: NDArray[np.float64]  # [replicas, steps]
    base: NDArray[np.float64]  # [steps]
    held_out: float
    seconds: float
    gradient_bytes: int
    history: list[dict[str, Any]]

    @property
    def last_losses(self) -> float:
        """The mean training loss of the last 10 % of the steps."""
        return float(self.losses[-max(len(self.losses) // 10, 1) :].mean())

    @property
    def peak(self) -> float:
        """The base learning rate at the peak of the schedule: before it, HDET may have lowered a higher one."""
        return float(self.base[max(len(self.base) * 3 // 10 - 1, 0) :].max())

    def numbers(self) -> dict[str, Any]:
        totals = report.summary(self.history)
        return {
            "held_out_loss": self.held_out,
            "training_loss_last_tenth": self.last_losses,
            "peak_base_lr": self.peak,
            "seconds": self.seconds,
            "syncs": totals["syncs"],
            "collectives": totals["collectives"],
            "bytes": totals["bytes"],
            "converge_seconds": totals["seconds"],
            "converge_share": totals["seconds"] / self.seconds,
            "gradient_bytes": self.gradient_bytes,
        }


def gathered(replicas: Sequence[Sequence[ReplicaRun]]) -> dict[RunName, Run]:
    """Merge one list of runs for each replica into one :class:`Run` over all replicas, by name."""
    found = {}
    for name, runs in zip(RUNS, zip(*replicas, strict=True), strict=True):
        first = runs[0]  # base, held-out loss and history are the same on all
        found[name] = Run(
            losses=np.mean([run.losses for run in runs], axis=0),
            rates=np.array([run.rates for run in runs]),
            base=np.array(first.base),
            held_out=first.held_out,
            seconds=max(run.seconds for run in runs),
            gradient_bytes=first.gradient_bytes,
            history=first.history,
        )
    return found


def comparison(runs: dict[RunName, Run], options: Options) -> str:
    numbers = {name: run.numbers() for name, run in runs.items()}

    def row(label: str, key: str, style: str) -> list[str]:
        return [label, *(format(numbers[name][key], style) for name in RUNS)]

    def cost(label: str, key: str, form: Any) -> list[str]:
        return [label, *(form(numbers[name][key]) if numbers[name]["syncs"] else "-" for name in RUNS)]

    rows = [
        row("held-out loss of the averaged model", "held_out_loss", ".4f"),
        row("training loss, mean of the last 10 %", "training_loss_last_tenth", ".4f"),
        ["peak learning rate: given", *(f"{options.max_lr:.2e}" for _ in RUNS)],
        row("peak learning rate: used (base)", "peak_base_lr", ".2e"),
        row("wall time of the run, s", "seconds", ".1f"),
        cost("converge: seconds", "converge_seconds", lambda s: f"{s:.2f}"),
        cost("converge: share of the wall time", "converge_share", lambda share: f"{100 * share:.1f} %"),
        cost("converge: collectives", "collectives", str),
        cost("converge: sent by a replica", "bytes", report.format_bytes),
        ["gradients, all-reduced by DDP", *(report.format_bytes(numbers[n]["gradient_bytes"]) for n in RUNS)],
    ]
    return report.format_table(["", *(TITLES[name] for name in RUNS)], rows, left=1)


def acts(run: Run) -> list[str]:
    return [f"- {record['why']}" for record in run.history if record.get("act") in EVENTS]


def verdict(runs: dict[RunName, Run]) -> str:
    """Summarise the table in one sentence."""
    plain, hdet = runs["plain"].held_out, runs["hdet"].held_out
    factor = runs["hdet"].base[-1] / runs["plain"].base[-1]  # the peak may have been lowered before it was reached
    found = f"HDET changed the peak learning rate by a factor of {factor:.2g}"
    if not (math.isfinite(plain) and math.isfinite(hdet)):
        return f"{found}; a held-out loss is not finite: try a lower --max-lr."
    return f"{found} and ended {abs(plain - hdet):.3f} {'below' if hdet <= plain else 'ABOVE'} the plain held-out loss."


def write_json(runs: dict[RunName, Run], options: Options, backend: str, path: Path) -> None:
    content = {
        "options": {
            **{name: getattr(options, name) for name in ("replicas", "steps", "seed", "max_lr")},
            "process_group": backend,
            "python": platform.python_version(),
            "torch": torch.__version__,
        },
        "runs": {
            name: {
                **run.numbers(),
                "losses": run.losses.tolist(),
                "base_lr": run.base.tolist(),
                "replica_lr": run.rates.tolist(),
                "history": run.history,
            }
            for name, run in runs.items()
        },
    }
    path.write_text(json.dumps(without_nan(content), indent=1) + "\n", encoding="utf-8")


def plot_training_losses(runs: dict[RunName, Run], options: Options, path: Path) -> None:
    title = f"Training loss from the same start, peak learning rate {options.max_lr:.0e}"
    figure, axes = report.new_figure(title, "step", "training loss, mean of the replicas (nats)")
    steps = np.arange(1, options.steps + 1)
    for name, run in runs.items():
        axes.plot(steps, run.losses, color=_COLOURS[name], alpha=0.2, linewidth=0.8)
        label = f"{TITLES[name]}: held-out loss {run.held_out:.3f} at the end"
        axes.plot(steps, smoothed(run.losses), color=_COLOURS[name], linewidth=2.2, label=label)
    if any(run.losses.min() > 0 and run.losses.max() > 50 * run.losses.min() for run in runs.values()):
        axes.set_yscale("log")
    _mark_controller(axes, runs["hdet"])
    axes.set_xlim(0, options.steps)
    axes.legend(frameon=False, loc="best")
    figure.savefig(path)


def plot_learning_rates(runs: dict[RunName, Run], options: Options, path: Path) -> None:
    """Draw the learning rates of the replicas and the base of the HDET run, and that of the plain run."""
    plain, hdet = runs["plain"], runs["hdet"]
    figure, axes = report.new_figure("Learning rate of every replica", "step", "learning rate (logarithmic)")
    steps = np.arange(1, options.steps + 1)
    colours = report.replica_colours(options.replicas)
    for replica, (rates, colour) in enumerate(zip(hdet.rates, colours, strict=True)):
        axes.plot(steps, rates, color=colour, linewidth=1.0, alpha=0.9, label=f"HDET, replica {replica}")
    axes.plot(steps, hdet.base, color=report.INK, linewidth=2.2, label="HDET, base")
    axes.plot(steps, plain.base, color=_COLOURS["plain"], linewidth=2.2, linestyle="--", label="plain OneCycleLR")
    axes.set_yscale("log")
    # OneCycleLR ends at 1/250 000 of its peak: the last steps would compress the rest of the axis.
    lowest, highest = min(plain.base[0], hdet.rates[:, 0].min()), max(hdet.rates.max(), plain.peak)
    axes.set_ylim(lowest / 2, highest * 1.6)
    axes.set_xlim(0, options.steps)
    _mark_controller(axes, hdet)
    axes.legend(frameon=False, loc="lower center", ncols=2 + (options.replicas > 8))
    figure.savefig(path)


def smoothed(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the moving mean over 5 % of the run; the window is cut at both ends."""
    window = np.ones(2 * max(len(values) // 40, 1) + 1)
    return np.convolve(values, window, "same") / np.convolve(np.ones(len(values)), window, "same")


def _mark_controller(axes: Axes, run: Run) -> None:
    """Shade the part of the run in which the controller watches, and mark all that it did."""
    if acting := [record["step"] for record in run.history if record["probes"] is not None]:
        axes.axvspan(
            acting[0], acting[-1], color="#f3e9d2", alpha=0.6, linewidth=0, zorder=0, label="the controller watches"
        )
    for number, record in enumerate(record for record in run.history if record.get("act") in EVENTS):
        label = "" if number else "return to the start, or back"
        axes.axvline(record["step"], color=report.INK, linewidth=1.0, linestyle=":", zorder=1, label=label)
