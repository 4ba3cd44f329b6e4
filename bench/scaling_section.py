"""Format the records of ``test_scaling.py``: tables, fitted slopes and a plot of step time against size.

A slope is that of a straight line through log time against log bytes, or log tensors, by least squares: 1 is linear, 0
constant. Time against bytes is fitted only where neither caches nor launches dominate: to sizes that are not ``cached``
and take at least ``FLOOR_FACTOR`` times as long as the shortest. Time against tensors is fitted to all sizes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench import records
from bench.comparison_table import NOTHING, TITLES, short
from bench.markdown import section_text, table_lines
from bench.records import Entry

# Times that are fitted are at least this many times the shortest of a series.
FLOOR_FACTOR = 5
# Clocks of a step: key in the record, and its unit in ms.
CLOCKS = {"in a row": ("ms", 1.0), "device busy": ("device ms", 1.0), "host": ("host us", 1e-3)}


@dataclass(frozen=True)
class Fit:
    """A fitted slope with its standard error and the number of points."""

    slope: float
    error: float
    points: int

    def __str__(self) -> str:
        return f"{self.slope:.3f} ± {self.error:.3f}"


def fit(xs: Sequence[float], ys: Sequence[float]) -> Fit | None:
    """Fit log y against log x; return None with fewer than three distinct points, which have no standard error."""
    if len(set(xs)) < 3:
        return None
    logs = [(math.log(x), math.log(y)) for x, y in zip(xs, ys, strict=True)]
    n = len(logs)
    mean_x, mean_y = math.fsum(x for x, _ in logs) / n, math.fsum(y for _, y in logs) / n
    spread = math.fsum((x - mean_x) ** 2 for x, _ in logs)
    slope = math.fsum((x - mean_x) * (y - mean_y) for x, y in logs) / spread
    left = math.fsum((y - mean_y - slope * (x - mean_x)) ** 2 for x, y in logs)
    return Fit(slope, math.sqrt(left / (n - 2) / spread), n)


def above_the_floor(series: Iterable[Entry], clock: str = "in a row") -> list[Entry]:
    """Return the results that a slope against bytes is fitted to."""
    known = [info for info in series if _time(info, clock) is not None]
    floor = min((_time(info, clock) or 0.0 for info in known), default=0.0)
    return [info for info in known if not info["cached"] and (_time(info, clock) or 0.0) >= FLOOR_FACTOR * floor]


def slope(axis: str, series: Sequence[Entry], clock: str = "in a row") -> Fit | None:
    """Fit the slope of a series against bytes (axis "parameters") or tensors."""
    used = above_the_floor(series, clock) if axis == "parameters" else series
    points = [(info["bytes" if axis == "parameters" else "tensors"], _time(info, clock)) for info in used]
    known = [(x, y) for x, y in points if y is not None]
    return fit([x for x, _ in known], [y for _, y in known])


def section(found: list[Entry]) -> str:
    """Return the sections of the suite's entries on one device."""
    found = [entry for entry in found if "ms" in entry["extra_info"]]
    descriptions = {
        "parameters": (
            "An AdamW step in fp32 with {tensors} tensors: ms, share of the copy bandwidth. \\* fits into the cache "
            "in part. The last row is the slope of log time against log bytes, without the sizes at which caches and "
            "launches dominate, with its standard error: 1 is linear."
        ),
        "tensors": (
            "An AdamW step in fp32 with {parameters} parameters in all, in ms: a step in a series of steps; the device "
            "is busy; the call returns. The last row has the slopes of log time against log tensors: 0 is constant."
        ),
    }
    parts = []
    for axis, description in descriptions.items():
        of_axis = [entry for entry in found if entry["params"]["axis"] == axis]
        if of_axis:
            first = of_axis[0]["extra_info"]
            text = description.format(tensors=first["tensors"], parameters=_count(first["parameters"]))
            heading = f"Step time against the number of {axis}"
            parts.append(section_text(heading, text, records.sources(of_axis), _table(axis, of_axis)))
    return "\n\n".join(parts)


def _measured(entries: list[Entry], device: str) -> list[Entry]:
    of_suite = records.of(entries, "scaling")
    return [entry for entry in of_suite if records.device_of(entry) == device and "ms" in entry["extra_info"]]


def series_of(found: Iterable[Entry], axis: str) -> dict[str, list[Entry]]:
    """Return the results of every implementation, by its title, in ascending order."""
    by_way: dict[str, list[Entry]] = {}
    for entry in found:
        params = entry["params"]
        if params["axis"] == axis:
            by_way.setdefault(_label(axis, params), []).append(entry["extra_info"])
    return {way: sorted(series, key=lambda info: info[axis]) for way, series in by_way.items()}


def _table(axis: str, found: list[Entry]) -> list[str]:
    by_way = series_of(found, axis)
    counts = sorted({info[axis] for series in by_way.values() for info in series})
    body = []
    for count in counts:
        at = {way: next((info for info in series if info[axis] == count), None) for way, series in by_way.items()}
        body.append([_count(count), *(_cell(axis, info) for info in at.values())])
    fits = [_slopes(axis, series) for series in by_way.values()]
    return table_lines([axis, *by_way], [*body, ["slope", *fits]])


def _slopes(axis: str, series: list[Entry]) -> str:
    if axis == "parameters":
        found, busy = slope(axis, series), slope(axis, series, "device busy")
        text = NOTHING if found is None else f"{found} ({found.points} sizes)"
        return text if busy is None else f"{text}; device busy {busy}"
    return "; ".join(NOTHING if (found := slope(axis, series, clock)) is None else str(found) for clock in CLOCKS)


def _cell(axis: str, info: Entry | None) -> str:
    if info is None:
        return NOTHING
    if axis == "parameters":
        return f"{short(info['ms'])} ({info['share']:.1%}){' *' if info['cached'] else ''}".replace("*", "\\*")
    times = (_time(info, clock) for clock in CLOCKS)
    return "; ".join(NOTHING if time is None else short(time) for time in times)


def _time(info: Entry, clock: str) -> float | None:
    """Return milliseconds, or None where the profiler saw no work of the device."""
    name, unit = CLOCKS[clock]
    return info[name] * unit if info.get(name) else None


def _label(axis: str, params: Entry) -> str:
    name = TITLES[params["way"]]
    return name if axis == "parameters" or params["way"].startswith("torch") else f"{name}, {params['addresses']}"


def _count(value: int) -> str:
    """Format a round number as a power of ten: 10⁴, 4·10⁹."""
    power = len(str(value)) - 1
    if power < 3 or value % 10**power:
        return str(value)
    tens = "10" + str(power).translate(str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return tens if value == 10**power else f"{value // 10**power}·{tens}"


def plot(entries: list[Entry], path: str | Path) -> bool:
    """Draw time against parameters and against tensors, of the GPU if it was measured.

    A dashed line is the time of the bytes at the copy bandwidth.

    Returns:
        Whether there was anything to draw.
    """
    from matplotlib.figure import Figure

    device = "cuda" if _measured(entries, "cuda") else "cpu"
    found = _measured(entries, device)
    if not found:
        return False
    bandwidth = found[0]["record"]["yardsticks"][device]["copy B/s"]
    figure = Figure(figsize=(11, 4.6), dpi=130, layout="constrained", facecolor="white")
    panels = figure.subplots(1, 2, sharey=True)
    for panel, axis in zip(panels, ("parameters", "tensors"), strict=True):
        by_way = series_of(found, axis)
        for way, series in by_way.items():
            fitted = slope(axis, series)
            named = way.replace("`", "") + (f": slope {fitted}" if fitted else "")
            panel.plot([i[axis] for i in series], [i["ms"] for i in series], "o-", markersize=4, lw=1.6, label=named)
        least = sorted({(info[axis], info["bytes"]) for series in by_way.values() for info in series})
        panel.plot([x for x, _ in least], [b / bandwidth * 1e3 for _, b in least], "--", color="0.5", label="a copy")
        panel.set(xscale="log", yscale="log", xlabel=axis)
        panel.grid(color="0.92")
        panel.spines[["top", "right"]].set_visible(False)
        panel.legend(frameon=False, fontsize=8)
    panels[0].set_ylabel("ms, one AdamW step in fp32")
    figure.savefig(path)
    return True
