"""Plot recorded results in the style of ``hdet_kernels/report.py``, without pyplot."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench import records
from bench.comparison_table import TITLES, fastest
from bench.records import Entry
from hdet_kernels import report

Point = tuple[str, float, float]

# Colour and mark of each of our backends; peers are grey.
MARKS = {
    "hdet-cuda": ("#c8442d", "o"),
    "hdet-triton": ("#4878d0", "s"),
    "hdet-cpp": ("#c8442d", "o"),
    "hdet-torch": ("#b59a3b", "v"),
}
# Colours of torch's implementations and of other peers.
PEERS = ("#5f6b7a", "#b7bcc6")


def roofline(entries: list[Entry], path: Path) -> bool:
    """Draw bytes a parameter (or element) against the share of the copy bandwidth, a point for each operation.

    A point is the median over models and sizes, without those that fit into the cache.

    Returns:
        Whether there was anything to draw; if not, no file is written.
    """
    found: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for entry in entries:
        info, params = entry["extra_info"], entry["params"] or {}
        if "share" in info and not info["cached"] and params.get("way") in TITLES:
            found.setdefault((_operation(entry), params["way"]), []).append((_bytes_each(entry), info["share"]))
    if not found:
        return False
    points = {key: tuple(map(statistics.median, zip(*values, strict=True))) for key, values in found.items()}
    figure, axes = report.new_figure(
        "Share of the copy bandwidth", "bytes moved for each parameter or element (logarithmic)", "share of a copy"
    )
    figure.set_size_inches(12, 7.5)
    for way in TITLES:
        own = [xy for (_, w), xy in points.items() if w == way]
        if own:
            colour, mark = MARKS.get(way, (report.MUTED, "x"))
            ours = way.startswith("hdet-")
            axes.plot(
                *zip(*own, strict=True),
                mark,
                color=colour if ours else report.MUTED,
                markersize=7 if ours else 5,
                alpha=0.9 if ours else 0.55,
                label=f"our {TITLES[way].strip('`')} backend" if ours else None,
                zorder=3 if ours else 2,
            )
    if any(not way.startswith("hdet-") for _, way in points):
        axes.plot([], [], "x", color=report.MUTED, markersize=5, label="torch and other peers")
    axes.axhline(1.0, color=report.INK, linewidth=1.2, linestyle="--", zorder=1)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.set_ylim(0, 0.25 + max(1.0, *(y for _, y in points.values())))  # room for labels
    main = fastest([way for _, way in points])
    labelled = [(name, *xy) for (name, way), xy in points.items() if way == main]
    axes.margins(x=0.22)
    _label(figure, axes, labelled, list(points.values()))
    axes.legend(frameon=False, loc="lower right")
    report.save(figure, path)
    return True


def bars(entries: list[Entry], path: Path) -> bool:
    """Draw the time of every peer relative to our fastest backend in the same case.

    A bar is the median over models; a line goes from the least to the greatest.

    Returns:
        Whether there was anything to draw; if not, no file is written.
    """
    found: dict[str, dict[str, list[float]]] = {}
    for operation, times in _side_by_side(entries):
        for way, ratio in _relative(times).items():
            found.setdefault(operation, {}).setdefault(way, []).append(ratio)
    if not found:
        return False
    figure, axes = report.new_figure(
        "Time relative to ours: right of the line we are faster", "their time / ours (logarithmic)", ""
    )
    names, places = [], []
    place = 0.0
    for operation, ratios in found.items():
        axes.text(0.0, place, f" {operation}", transform=axes.get_yaxis_transform(), fontsize=8, va="center", zorder=3)
        for way in sorted(ratios, key=list(TITLES).index):
            place += 1
            middle, least, most = statistics.median(ratios[way]), min(ratios[way]), max(ratios[way])
            colour = PEERS[0] if way.startswith("torch-") else PEERS[1]
            axes.barh(place, middle - 1, 0.75, left=1.0, color=colour, zorder=2)
            axes.plot([least, most], [place, place], color=report.INK, linewidth=1, zorder=3)
            axes.annotate(f" {middle:.3g}", (max(most, 1.0), place), fontsize=7, va="center")
            names.append(TITLES[way])
            places.append(place)
        place += 1.4
    figure.set_size_inches(9, max(3.0, 1.2 + 0.155 * place))
    axes.axvline(1.0, color="#c8442d", linewidth=1.5, zorder=4)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_yticks(places, names, fontsize=7)
    axes.grid(False, axis="y")
    axes.set_ylim(place, -1)
    axes.margins(x=0.12)
    report.save(figure, path)
    return True


def _side_by_side(entries: list[Entry]) -> Iterator[tuple[str, dict[str, float]]]:
    """Yield the operation and the time by implementation of every case that several implementations ran."""
    steps: dict[tuple[str, str], dict[str, float]] = {}
    for entry in entries:
        info, params = entry["extra_info"], entry["params"] or {}
        if records.suite(entry) == "optim_step" and "ms" in info:
            steps.setdefault((params["work"], params["model"]), {})[params["way"]] = info["ms"]
        elif "ways" in info and records.suite(entry) != "stack_training":
            yield records.suite(entry), {way: measured["ms"] for way, measured in info["ways"].items()}
    for (work, _), times in steps.items():
        yield work, times


def _relative(times: dict[str, float]) -> dict[str, float]:
    ours = fastest(list(times))
    if ours is None:
        return {}
    return {way: time / times[ours] for way, time in times.items() if way in TITLES and not way.startswith("hdet-")}


def _operation(entry: Entry) -> str:
    """Return a name for the operation and dtype of an entry, without model and size."""
    params, suite = entry["params"], records.suite(entry)
    if suite == "optim_step":
        return str(params["work"])
    if "mean_of_rows" in entry["name"]:
        return f"mean of 8 rows, {params['dtype']}"
    if suite == "stack_step":
        dtype = "" if params.get("dtype", "fp32") == "fp32" else f", {params['dtype']}"
        return f"stack of {params['replicas']}, {params['gradients']}{dtype}"
    named = [params.get(key) for key in ("operation", "format", "dtype", "place")]
    return ", ".join(str(part) for part in (named if named[0] else [suite, *named[1:]]) if part)


def _bytes_each(entry: Entry) -> float:
    """Return the bytes that are moved for each parameter or element."""
    params, info, suite = entry["params"], entry["extra_info"], records.suite(entry)
    if "bytes a parameter" in info:
        return float(info["bytes a parameter"])
    width = {"fp32": 4, "bf16": 2, "fp16": 2}.get(params.get("dtype"), 4)
    if "mean_of_rows" in entry["name"]:
        return 8 * width + 4
    if suite == "wire":
        one = {"bf16": 2.0, "int8": 1 + 4 / 256}[params["format"]]  # in a message; a merge reads 8 shards
        return {"encode": 16 + one, "decode": 12 + one, "merge": one + 1 + one / 8}[params["operation"]]
    return {"reduce": width, "pack": width + 4}.get(suite, 12)


def _label(figure: Any, axes: Any, points: Sequence[Point], others: Sequence[tuple[float, float]]) -> None:
    """Label each point in the nearest free place, with a line to the point where the label is not beside it.

    A label covers neither another label nor one of the ``others``. One that finds no place is left out.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    renderer = canvas.get_renderer()
    scale = figure.dpi / 72
    taken = [(x - 4 * scale, y - 4 * scale, x + 4 * scale, y + 4 * scale) for x, y in axes.transData.transform(others)]
    frame = axes.get_window_extent(renderer)
    full = axes.transData.transform((1, 1))[1]  # the line at 100 %
    taken.append((frame.x0, full - scale, frame.x1, full + scale))
    spots = axes.transData.transform([(x, y) for _, x, y in points])
    for (name, x, y), (px, py) in sorted(zip(points, spots, strict=True), key=lambda item: tuple(item[1])):
        note = axes.annotate(name, (x, y), xytext=(0, 0), textcoords="offset points", fontsize=7, va="bottom")
        size = note.get_window_extent(renderer)
        width, height = size.width / scale, size.height / scale
        for dx, dy in _places(width, height):
            left, low = px + dx * scale, py + dy * scale
            box = (left, low, left + size.width, low + size.height)
            inside = frame.x0 <= box[0] and box[2] <= frame.x1 and frame.y0 <= box[1] and box[3] <= frame.y1
            if inside and not any(_cover(box, other) for other in taken):
                break
        else:
            note.remove()
            continue
        taken.append(box)
        note.set_position((dx, dy))
        nearest = (min(max(0, dx), dx + width), min(max(0, dy), dy + height))
        if math.hypot(*nearest) > 9:
            line = {"arrowstyle": "-", "color": report.MUTED, "linewidth": 0.6, "shrinkA": 0, "shrinkB": 3}
            axes.annotate("", (x, y), xytext=nearest, textcoords="offset points", arrowprops=line)


def _places(width: float, height: float) -> list[tuple[float, float]]:
    """Return offsets of a label's lower left corner from its point, in typographic points, the nearest first."""
    rows = [(level + 0.5) * sign * (height + 1) - height / 2 for level in range(24) for sign in (1, -1)]
    found = [(dx, dy) for dy in rows for dx in (6, -width - 6, -width / 2, 25, -width - 25, 50, -width - 50, 80)]
    return sorted(found, key=lambda place: math.hypot(place[0] + width / 2, 1.5 * (place[1] + height / 2)))


def _cover(a: tuple[float, ...], b: tuple[float, ...]) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]
