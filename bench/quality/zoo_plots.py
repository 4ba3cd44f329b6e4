"""Plot the zoo: excess against the start, sensitivity of every method, and harm against recovery of designs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .bars import HARM, RECOVERY
from .designs import DEFAULT, Outcome, frontier
from .excess import CAP, MODES, PLAIN, PROBE, TRAINING, Excesses
from .figures import new_figure, save
from .suite import STARTS
from .zoo_tables import sensitivities

STARTS_PLOT, SENSITIVITY_PLOT = "quality_zoo_starts.png", "quality_zoo_sensitivity.png"
FRONTIER_PLOT = "quality_frontier.png"

COLOURS = {PLAIN: "0.45", PROBE: "C0", TRAINING: "C1"}

# Excesses are linear below this many percent and logarithmic above: they may be negative, and range over decades.
LINEAR = 1.0
TICKS = (-1, 0, 1, 3, 10, 30, 100)


def plots(found: Excesses, outcomes: Sequence[Outcome]) -> dict[str, tuple[str, Callable[[Path], None]]]:
    """Return caption and function of each plot that there are data for, by file name."""
    made: dict[str, tuple[str, Callable[[Path], None]]] = {}
    if any(found.means(mode, start) for mode in MODES for start in STARTS):
        caption = "Excess over plain training at its best against the learning rate at the start"
        made[STARTS_PLOT] = caption, lambda path: plot_starts(found, path)
    if len(sensitivities(found)) > 1:
        caption = "Learning-rate sensitivity of every method"
        made[SENSITIVITY_PLOT] = caption, lambda path: plot_sensitivity(found, path)
    if outcomes:
        caption = "Harm at the best learning rate against recovery from ten times off"
        made[FRONTIER_PLOT] = caption, lambda path: plot_frontier(outcomes, path)
    return made


def plot_starts(found: Excesses, path: Path) -> None:
    """Plot the excess against the start: plain training and both modes with their range, and the others' medians."""
    others = [way for way in found.ways if way not in COLOURS]
    figure, axes = new_figure(2, 2, 4.6, 3.6, sharey=True)
    panels = [axis for row in axes for axis in row]
    for axis, way in zip(panels, COLOURS, strict=False):
        starts = [start for start in STARTS if found.means(way, start)]
        values = [list(found.means(way, start).values()) for start in starts]
        colour = COLOURS[way]
        if starts:
            for low, high, alpha in ((0, 100, 0.15), (10, 90, 0.3)):
                band = [[float(np.percentile(seen, share)) for seen in values] for share in (low, high)]
                axis.fill_between(starts, *band, color=colour, alpha=alpha, linewidth=0)
            medians = [float(np.median(seen)) for seen in values]
            axis.plot(starts, medians, color=colour, marker="o", linewidth=2, label="median; 10 to 90 %; range")
        none = list(found.means(way, None).values())
        if none:
            middle = float(np.median(none))
            axis.axhline(middle, color=colour, linestyle="--", linewidth=1.4, label="median without a learning rate")
        axis.set_title(way, fontsize=10)
        axis.legend(frameon=False, fontsize=8, loc="upper center")
    _plot_others(panels[3], found, others)
    for axis in panels:
        axis.set(xscale="log", xlabel="start, as a factor of the best")
        axis.set_xticks(STARTS, ["1/30", "1/10", "1/3", "1", "3", "10", "30"])
        axis.minorticks_off()
        axis.axhline(0.0, color="0.7", linewidth=0.8, zorder=0)
        axis.grid(axis="y", color="0.92")
    for row in axes:
        _scale_excess(row[0], "y", (-1.0, 3 * CAP))  # room for the legends
        row[0].set_ylabel("excess, % of the loss")
    save(figure, path)


def plot_sensitivity(found: Excesses, path: Path) -> None:
    """Plot the sensitivity of every method as a bar (mean over tasks), with its median as a mark."""
    shown = sensitivities(found)
    figure, axes = new_figure(1, 1, 8.0, 1.2 + 0.3 * len(shown))
    axis = axes[0][0]
    for row, (name, by_task) in enumerate(shown.items()):
        values = list(by_task.values())
        mean, median = float(np.mean(values)), float(np.median(values))
        ours = next((COLOURS[mode] for mode in MODES if name.startswith(mode)), COLOURS[PLAIN])
        axis.barh(row, mean, color=ours, alpha=0.85 if name in COLOURS else 0.5)
        axis.plot([median], [row], "|", color="k", markersize=12, markeredgewidth=1.6)
        axis.annotate(f"{mean:.1f}", (max(mean, median, 0.0), row), (6, 0), textcoords="offset points", va="center",
                      fontsize=8)  # fmt: skip
    names = [f"{name} ({len(by_task)} tasks)" for name, by_task in shown.items()]
    axis.set_yticks(range(len(shown)), names, fontsize=8)
    axis.invert_yaxis()
    _scale_excess(axis, "x")
    lowest = min(float(np.median(list(by_task.values()))) for by_task in shown.values())
    axis.set_xlim(min(lowest - 0.1, 0.0), 1.6 * CAP)
    axis.set_xlabel("mean excess over seven starts, % of the loss (bar: mean over tasks, mark: median)")
    axis.spines[["top", "right"]].set_visible(False)
    save(figure, path)


def plot_frontier(outcomes: Sequence[Outcome], path: Path) -> None:
    """Plot harm against recovery for each design, one panel for each mode; numbers stand for the names beside them."""
    numbers = {design: index + 1 for index, design in enumerate(dict.fromkeys(one.design for one in outcomes))}
    figure, axes = new_figure(1, 2, 4.6, 4.4)
    for axis, mode in zip(axes[0], MODES, strict=True):
        shown = [one for one in outcomes if one.mode == mode]
        best = frontier(shown)
        axis.step([one.harm for one in best], [one.recovery for one in best], where="post", color="0.7", zorder=1)
        for one in shown:
            colour = "C3" if one.design == DEFAULT else COLOURS[mode]
            axis.plot(one.harm, one.recovery, "o", color=colour, markersize=6, zorder=2)
        axis.axvline(HARM[MODES.index(mode)], color="C2", linestyle=":", linewidth=1.2, zorder=0)
        axis.axhline(RECOVERY[MODES.index(mode)], color="C2", linestyle=":", linewidth=1.2, zorder=0)
        _scale_excess(axis, "x", [one.harm for one in outcomes])
        _scale_excess(axis, "y", [one.recovery for one in outcomes])
        axis.set_title(mode, fontsize=10)
        axis.set(xlabel="at the best: mean excess, %", ylabel="10× off: median excess, %")
        axis.grid(color="0.92")
    figure.tight_layout()
    for axis, mode in zip(axes[0], MODES, strict=True):
        _number(axis, {numbers[one.design]: (one.harm, one.recovery) for one in outcomes if one.mode == mode})
    names = "\n".join([*(f"{number}  {design}" for design, number in numbers.items()), "dotted: the goals"])
    figure.text(1.0, 0.5, names, fontsize=9, va="center")
    save(figure, path)


def _number(axis: Any, points: Mapping[int, tuple[float, float]]) -> None:
    """Write each point's number beside it, on the side that is farthest from other points and numbers."""
    taken = [axis.transData.transform(point) for point in points.values()]
    angles = np.arange(0.25, 2.0, 0.25) * np.pi
    around = [radius * np.array([np.cos(angle), np.sin(angle)]) for radius in (9.0, 16.0) for angle in angles]
    for number, point in points.items():
        place = axis.transData.transform(point)
        offset = max(around, key=lambda step: min(14.0, *(float(np.hypot(*(place + step - one))) for one in taken)))
        taken.append(place + offset)
        points_per_pixel = 72 / axis.figure.dpi
        axis.annotate(f"{number}", point, tuple(offset * points_per_pixel), textcoords="offset points", fontsize=8,
                      ha="center", va="center")  # fmt: skip


def _plot_others(axis: Any, found: Excesses, others: Sequence[str]) -> None:
    """Plot the medians of other methods: lines over the starts, or dashed ones for those that do not depend on it."""
    styles = [(f"C{index % 10}", "osv^"[index // 10 % 4]) for index in range(2, 2 + len(others))]
    for way, (colour, mark) in zip(others, styles, strict=True):
        starts = [start for start in STARTS if found.means(way, start)]
        medians = [float(np.median(list(found.means(way, start).values()))) for start in starts]
        if starts:
            axis.plot(starts, medians, color=colour, marker=mark, markersize=4, linewidth=1.2, label=way)
        none = list(found.means(way, None).values())
        if none:
            axis.plot([STARTS[0], STARTS[-1]], [float(np.median(none))] * 2, color=colour, linestyle="--", marker=mark,
                      markersize=4, linewidth=1.2, label=way)  # fmt: skip
    axis.set_title("others: medians", fontsize=10)
    axis.set_visible(bool(others))
    if others:
        axis.legend(frameon=False, fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))


def _scale_excess(axis: Any, name: str, values: Sequence[float] = (-1.0, CAP)) -> None:
    """Make an axis of excesses linear near 0 and logarithmic beyond, with ticks for the values that it shows."""
    getattr(axis, f"set_{name}scale")("symlog", linthresh=LINEAR, linscale=0.6)
    getattr(axis, f"set_{name}ticks")(TICKS, [f"{tick}".replace("-", "−") for tick in TICKS])
    low, high = min(values), max(values)
    getattr(axis, f"set_{name}lim")(min(low - 0.3, -0.3), max(high * 1.4, high + 0.3, LINEAR))
    axis.minorticks_off()
