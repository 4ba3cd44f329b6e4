"""Plot recorded results and the cost model, without pyplot: the user's global state is not touched."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from bench import cost_model as cost
from bench.records import Entry
from bench.tables import OURS, TITLES, frame

PEERS_PLOT, SCALING_PLOT = "peers.png", "scaling.png"
CAPTIONS = {
    PEERS_PLOT: "Time of each peer relative to ours",
    SCALING_PLOT: "Step time against the number of parameters and of tensors",
}
# What the tests of some suites measure.
OPERATIONS = {
    "until_it_returns": "host time of a step",
    "end_to_end": "whole training step",
    "mean_of_rows": "mean of a stack",
    "reduce": "norm of gradients",
    "rowwise": "row-wise Adagrad",
    "stack_step": "step of a stack",
    "wire": "compression",
}
# A slope against bytes is fitted to times that are at least this many times the shortest of a series.
FLOOR_FACTOR = 5


def new_figure(rows: int, columns: int, width: float, height: float, **shared: Any) -> tuple[Any, Any]:
    """Return a figure and its axes by row and column; width and height are those of one panel, in inches."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width * columns, height * rows), layout="constrained", facecolor="white")
    axes = figure.subplots(rows, columns, squeeze=False, **shared)
    for axis in axes.flat:
        axis.spines[["top", "right"]].set_visible(False)
    return figure, axes


def save(figure: Any, path: Path) -> None:
    """Write a figure with what stands beside its panels."""
    figure.savefig(path, dpi=110, bbox_inches="tight", metadata={"Software": None})


def of_records(entries: Sequence[Entry], folder: Path) -> list[str]:
    """Draw the plots that the entries have data for into ``folder`` and return their names."""
    found = frame(entries)
    if found.empty:
        return []
    drawn = {
        PEERS_PLOT: peers(found, folder / PEERS_PLOT),
        SCALING_PLOT: scaling(found, entries, folder / SCALING_PLOT),
    }
    return [name for name, there in drawn.items() if there]


def peers(found: pd.DataFrame, path: Path) -> bool:
    """Draw the time of every peer relative to our fastest backend in the same case.

    A bar is the median over models; a line goes from the least to the greatest.

    Returns:
        Whether there was anything to draw; if not, no file is written.
    """
    left_out = found["suite"].isin(["stack_training", "memory", "scaling"]) | (found["test"] == "until_it_is_done")
    found = found[found["way"].isin(TITLES) & found["ms"].notna() & ~left_out]
    names = found["test"].replace(OPERATIONS)
    found = found.assign(operation=found["work"].fillna(names) if "work" in found else names)
    times = found.pivot_table(index=["operation", "case"], columns="way", values="ms", sort=False)
    ours = next((way for way in OURS if way in times), None)
    others = [way for way in TITLES if way in times and not way.startswith("hdet-")]
    if ours is None or not others:
        return False
    ratios = times[others].div(times[ours], axis=0).groupby("operation", sort=False).agg(["median", "min", "max"])
    bars = [
        (operation, way, *row[way])
        for operation, row in ratios.iterrows()
        for way in others
        if not math.isnan(row[way]["median"])
    ]
    if not bars:
        return False
    figure, axes = new_figure(1, 1, 9, max(3.0, 1.2 + 0.17 * len(bars)))
    axis = axes[0][0]
    for place, (_, way, middle, least, most) in enumerate(bars):
        axis.barh(place, middle - 1, 0.75, left=1.0, color="#5f6b7a" if way.startswith("torch") else "#b7bcc6")
        axis.plot([least, most], [place, place], color="black", linewidth=1)
        axis.annotate(f" {middle:.3g}", (max(most, 1.0), place), fontsize=7, va="center")
    axis.set_yticks(range(len(bars)), [f"{operation}: {TITLES[way]}" for operation, way, *_ in bars], fontsize=7)
    axis.set(xscale="log", xlabel="their time / ours (logarithmic); right of the line ours is faster")
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.axvline(1.0, color="black", linewidth=1.2)
    axis.invert_yaxis()
    axis.margins(x=0.12, y=0.01)
    save(figure, path)
    return True


def scaling(found: pd.DataFrame, entries: Sequence[Entry], path: Path) -> bool:
    """Draw time against parameters and against tensors, of the GPU if it was measured.

    A dashed line is the time of the bytes at the copy bandwidth.

    Returns:
        Whether there was anything to draw; if not, no file is written.
    """
    found = found[(found["suite"] == "scaling") & found["ms"].notna()]
    if found.empty:
        return False
    device = "cuda" if "cuda" in set(found["device"]) else "cpu"
    found = found[found["device"] == device]
    bandwidth = max(
        entry["record"]["yardsticks"][device]["copy B/s"] for entry in entries if "test_scaling" in entry["fullname"]
    )
    figure, axes = new_figure(1, 2, 5.5, 4.6, sharey=True)
    for panel, axis in zip(axes[0], ("parameters", "tensors"), strict=True):
        of_axis = found[found["axis"] == axis].sort_values(axis)
        for (way, addresses), series in of_axis.groupby(["way", "addresses"], sort=False):
            name = TITLES[way].strip("`") + (f", {addresses}" if way.startswith("hdet") else "")
            fitted = slope(series, axis)
            label = name if fitted is None else f"{name}: slope {fitted:.3f}"
            panel.plot(series[axis], series["ms"], "o-", markersize=4, linewidth=1.6, label=label)
        least = of_axis.drop_duplicates(axis)
        panel.plot(least[axis], least["bytes"] / bandwidth * 1e3, "--", color="0.5", label="a copy")
        panel.set(xscale="log", yscale="log", xlabel=axis)
        panel.grid(color="0.92")
        panel.legend(frameon=False, fontsize=8)
    axes[0][0].set_ylabel("ms, one AdamW step in fp32")
    save(figure, path)
    return True


def slope(series: pd.DataFrame, axis: str) -> float | None:
    """Return the slope of log time against log bytes (axis "parameters") or tensors: 1 is linear, 0 constant.

    Against bytes, sizes at which caches or launches dominate are left out. None with fewer than three sizes.
    """
    if axis == "parameters":
        series = series[~series["cached"].astype(bool) & (series["ms"] >= FLOOR_FACTOR * series["ms"].min())]
    if len(series) < 3:
        return None
    sizes = series["bytes" if axis == "parameters" else "tensors"].astype(float)
    return float(np.polyfit(np.log(sizes), np.log(series["ms"].astype(float)), 1)[0])


def costs(path: Path) -> None:
    """Draw the overhead of averaging against the number of replicas, one panel for each network, beside that of DDP."""
    from matplotlib.lines import Line2D

    figure, axes = new_figure(1, len(cost.NETWORKS), 3.5, 4.4, sharey=True)
    colours = ("tab:blue", "tab:green", "tab:orange", "tab:red")
    styles = {"average, fp32": "-", f"average, int8 behind {cost.CHEAPEST.overlap} steps": "--", "DDP, every step": ":"}
    for panel, network in zip(axes[0], cost.NETWORKS, strict=True):
        for model, colour in zip(cost.MODELS, colours, strict=True):
            lines = [
                [cost.overhead(n, model, network, sync) for n in cost.REPLICAS] for sync in (cost.PLAIN, cost.CHEAPEST)
            ]
            lines.append([cost.ddp_overhead(n, model, network) or math.nan for n in cost.REPLICAS])
            for line, style in zip(lines, styles.values(), strict=True):
                panel.plot(cost.REPLICAS, line, style, color=colour, linewidth=1.6)
        panel.axhline(0.01, color="black", linewidth=1)
        panel.set(title=network.name, xscale="log", yscale="log", ylim=(1e-6, 1e5), xlabel="replicas")
        panel.set_xticks((8, 128, 2048, 16384), ["8", "128", "2048", "16 384"])
        panel.minorticks_off()
        panel.grid(color="0.92")
    axes[0][0].set_yticks([1e-6, 1e-4, 1e-2, 1, 1e2, 1e4])
    axes[0][0].yaxis.set_major_formatter(lambda value, _: f"{100 * value:,.10g} %".replace(",", " "))
    axes[0][0].set_ylabel(f"of the training time (T = {cost.PLAIN.every}); the line is 1 %")
    handles = [Line2D([], [], color=colour) for colour in colours]
    handles += [Line2D([], [], color="black", linestyle=style) for style in styles.values()]
    names = [*(model.name for model in cost.MODELS), *styles]
    figure.legend(handles, names, loc="outside lower center", ncols=len(names), frameon=False, fontsize=9)
    save(figure, path)
