"""Draw the demo's two plots: training losses and learning rates."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from hdet_kernels import report
from hdet_kernels.demo.options import Options
from hdet_kernels.demo.outcome import TITLES, Run
from hdet_kernels.demo.training import RunName

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS: dict[RunName, str] = {"plain": "#8a8f99", "hdet": "#c8442d"}


def plot_training_losses(runs: dict[RunName, Run], options: Options, path: Path) -> None:
    """Draw the mean training loss of the replicas at every step, raw and smoothed."""
    title = f"Training loss from the same start, peak learning rate {options.max_lr:.0e}"
    figure, axes = report.new_figure(title, "step", "training loss, mean of the replicas (nats)")
    steps = np.arange(1, options.steps + 1)
    for name, run in runs.items():
        axes.plot(steps, run.losses, color=_COLOURS[name], alpha=0.2, linewidth=0.8)
        label = f"{TITLES[name]}: held-out loss {run.held_out:.3f} at the end"
        axes.plot(steps, smoothed(run.losses), color=_COLOURS[name], linewidth=2.2, label=label)
    if any(run.losses.min() > 0 and run.losses.max() > 50 * run.losses.min() for run in runs.values()):
        axes.set_yscale("log")
    _mark_controller(axes, runs["hdet"], "bottom")
    axes.set_xlim(0, options.steps)
    axes.legend(frameon=False, loc="best")
    report.save(figure, path)


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
    _mark_controller(axes, hdet, "top")
    axes.legend(frameon=False, loc="lower center", ncols=2 + (options.replicas > 8))
    report.save(figure, path)


def smoothed(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the moving mean over 5 % of the run; the window is cut at both ends."""
    half = max(len(values) // 40, 1)
    sums = np.concatenate([[0.0], np.cumsum(values)])
    index = np.arange(len(values))
    low, high = np.maximum(index - half, 0), np.minimum(index + half + 1, len(values))
    means: NDArray[np.float64] = (sums[high] - sums[low]) / (high - low)
    return means


def _mark_controller(axes: Axes, run: Run, label_at: Literal["top", "bottom"]) -> None:
    """Shade the part of the run in which the controller moves the base."""
    acting = [record["step"] for record in run.history if record["probes"] is not None]
    if not acting:
        return
    axes.axvspan(acting[0], acting[-1], color="#f3e9d2", alpha=0.6, linewidth=0, zorder=0)
    axes.annotate(
        "HDET adapts\nits base",
        ((acting[0] + acting[-1]) / 2, 0.98 if label_at == "top" else 0.02),
        xycoords=("data", "axes fraction"),
        ha="center",
        va=label_at,
        fontsize=9,
        color=report.MUTED,
    )
