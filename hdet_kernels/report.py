"""Format the history of a scheduler as tables and charts.

Every function takes ``scheduler.history``, or the same records as dicts (from a checkpoint or a JSON file). Pictures
need matplotlib (``pip install 'hdet_kernels[demo]'``) and do not change its global state (pyplot, backend).
``history_page.py`` makes an HTML page of the same tables and charts.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from hdet_kernels.checks import check_iterable, check_kind, spell
from hdet_kernels.schedule.history import HistorySummary, SyncRecord, mean_of_finite

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

History = Iterable[SyncRecord | Mapping[str, Any]]
Records = Sequence[SyncRecord]
Path = str | os.PathLike[str]
Size = tuple[float, float]

INK = "#1a1a2e"
MUTED = "#7a7f8c"

#: Sizes of a picture, in inches.
PLOT: Size = (9, 5)
NARROW: Size = (5.0, 3.0)

#: The most replicas that have a curve of their own; more are a band from the lowest to the highest.
MOST_CURVES = 16

#: The most hyperparameters that have a chart, and that share one with errors or bands.
MOST_CHARTS, MOST_TOGETHER = 16, 3

#: Losses above this multiple of the median are drawn at the edge of their chart.
LOSS_CEILING = 30.0

#: Powers of ten that charts of hyperparameters show.
DECADES = 3

#: From this ratio of the highest to the lowest value on, the axis of positive values is logarithmic.
LOG_RATIO = 8.0


def table(history: History) -> str:
    """Return a Markdown table with a row for every sync.

    Columns have the mean, best and worst of the replicas' finite training losses since the last sync ("–" where none
    was recorded), the base value of every hyperparameter, what the controller did, the bytes that this process sent,
    and the time in ms. Below it is a line for every return and every learning rate found, with its reason.
    """
    records = records_of(history)
    names = list(records[0].base) if records else []
    header = ["step", "cycle", "mean loss", "best", "worst", *names, "act", "excluded", "collectives", "bytes", "ms"]
    rows = format_table(header, [_row(record, names) for record in records])
    reasons = [f"- {record.event}" for record in records if record.event is not None]
    return "\n".join([rows, "", *reasons]) if reasons else rows


def summary(history: History) -> dict[str, Any]:
    """Return totals over all syncs.

    The keys are ``syncs``, ``steps``, ``collectives``, ``bytes``, ``seconds``, ``excluded`` (how often a replica was
    left out), ``undone`` (how often all replicas returned to the start), ``lost`` (steps that were undone), ``events``
    (step and reason of each), ``peaks`` (given and last peak of the schedule, by learning rate), ``first_loss`` and
    ``last_loss`` (mean over replicas, None where none was recorded), and ``base``: the ``first``, ``last`` and ``peak``
    value of every hyperparameter at a sync.
    """
    records, totals = records_of(history), HistorySummary()
    for record in records:
        totals.add(record)
    counted = ("collectives", "bytes", "seconds", "excluded", "undone", "lost", "events", "peaks")
    return {
        "syncs": len(records),
        "steps": records[-1].step if records else 0,
        **{name: getattr(totals, name) for name in counted},
        "first_loss": records[0].mean_loss if records else None,
        "last_loss": records[-1].mean_loss if records else None,
        "base": {
            name: {"first": b["first"], "last": b["last"], "peak": b["highest"]} for name, b in totals.base.items()
        },
    }


def plot_losses(history: History, path: Path) -> None:
    """Plot the training loss at every sync to ``path``: every replica, their mean, and the mean loss on the probe."""
    records = _nonempty(history, path)
    losses, _ = loss_charts(records)
    probes = _array([mean_of_finite(record.probes or ()) for record in records])
    losses.curves.append(Curve("mean on the probe", probes, "#d65f5f", dotted=True))
    draw(losses, records, size=PLOT, title=losses.title).savefig(path)


def plot_values(history: History, path: Path, name: str = "lr/0") -> None:
    """Plot hyperparameter ``name`` to ``path``: the value of every replica in each cycle, and the base value.

    Learning rates are named ``lr/0``, ``lr/1``, … by parameter group.

    Raises:
        ValueError: The history is empty or has no such hyperparameter.
    """
    records = _nonempty(history, path)
    check_kind("name", name, str, "the name of a hyperparameter, such as 'lr/0'")
    if name not in records[0].values:
        raise ValueError(f"no hyperparameter {name!r} in this history; choose from {', '.join(records[0].values)}")
    draw(_value_chart(records, name), records, size=PLOT, title=f"{name}: base and replicas").savefig(path)


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 0) -> str:
    """Return a padded Markdown table; the first ``left`` columns are left-aligned, the others right-aligned."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        placed = [c.ljust(w) if i < left else c.rjust(w) for i, (c, w) in enumerate(zip(cells, widths, strict=True))]
        return f"| {' | '.join(placed)} |"

    rule = [("-" * w) if i < left else ("-" * (w - 1) + ":") for i, w in enumerate(widths)]
    return "\n".join([line(header), line(rule), *map(line, rows)])


def format_bytes(count: float) -> str:
    """Format a number of bytes in decimal units: "548.9 kB"."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(count) < 1000 or unit == "TB":
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError("unreachable")


def new_figure(title: str, xlabel: str, ylabel: str, size: Size = PLOT) -> tuple[Figure, Axes]:
    """Return an empty labelled figure that is not registered with pyplot."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("plots need matplotlib, which is not installed: pip install 'hdet_kernels[demo]'") from error
    figure = Figure(figsize=size, dpi=150, layout="constrained", facecolor="white")
    axes = figure.add_subplot()
    axes.set_title(title, loc="left", fontsize=13, color=INK, pad=12)
    axes.set_xlabel(xlabel, color=INK)
    axes.set_ylabel(ylabel, color=INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(MUTED)
    axes.tick_params(colors=MUTED, labelcolor=INK, which="both")
    axes.grid(True, color="#e6e8ee", linewidth=0.8)
    axes.set_axisbelow(True)
    return figure, axes


def replica_colours(count: int) -> list[Any]:
    """Return ``count`` distinguishable colours, one for each replica."""
    import matplotlib

    if count <= 8:
        return list(matplotlib.colormaps["Dark2"].colors[:count])  # type: ignore[attr-defined]
    return [matplotlib.colormaps["turbo"](0.05 + 0.9 * index / (count - 1)) for index in range(count)]


def records_of(history: History) -> list[SyncRecord]:
    """Return the records of a history, those that are dicts as records; raise TypeError or ValueError if it is none."""
    hint = "pass scheduler.history" if hasattr(history, "history") else "pass the history of a scheduler"
    check_iterable("history", history, "a list of sync records", remedy=hint)
    return [record_of(f"history[{index}]", record) for index, record in enumerate(history)]


def record_of(name: str, record: SyncRecord | Mapping[str, Any]) -> SyncRecord:
    """Return a record that may be given as a dict; raise TypeError or ValueError, with ``name``, if it is none."""
    if isinstance(record, SyncRecord):
        return record
    check_kind(name, record, Mapping, "a SyncRecord, or the dict that its to_dict() returns")
    try:
        return SyncRecord(**record)
    except TypeError as error:
        needed = ", ".join(field.name for field in fields(SyncRecord))
        raise ValueError(f"{name} must be a SyncRecord, or a dict with {needed}; got {spell(dict(record))}") from error


def _nonempty(history: History, path: object) -> list[SyncRecord]:
    records = records_of(history)
    if not records:
        raise ValueError("the history is empty: there is nothing to plot before the first sync")
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"path must be the path of an image to write, such as 'losses.png', got {spell(path)}")
    return records


def _row(record: SyncRecord, names: Sequence[str]) -> list[str]:
    excluded = ", ".join(map(str, record.excluded)) or "–"
    return [
        str(record.step),
        str(record.cycle),
        *(format_number(loss) for loss in loss_range(record.losses)),
        *(format_number(record.base[name]) for name in names),
        record.act or "–",
        excluded,
        str(record.collectives),
        format_bytes(record.bytes),
        f"{1000 * record.seconds:.1f}",
    ]


def loss_range(losses: Sequence[float | None]) -> tuple[float | None, float | None, float | None]:
    """Return mean, best and worst of the finite losses; None, which JSON has instead of NaN, is not recorded."""
    finite = [loss for loss in losses if loss is not None and math.isfinite(loss)]
    return (mean_of_finite(finite), min(finite), max(finite)) if finite else (None, None, None)


def format_number(value: float | None) -> str:
    """Format a number that may be unknown or not finite: "–"."""
    return "–" if value is None or not math.isfinite(value) else f"{value:.4g}"


# Charts


@dataclass(frozen=True)
class Curve:
    """A curve over the syncs; NaN is a gap. ``low`` and ``high`` are a band, or error bars of a dotted curve."""

    label: str
    values: np.ndarray
    colour: Any
    low: np.ndarray | None = None
    high: np.ndarray | None = None
    dotted: bool = False
    width: float = 1.5


@dataclass(frozen=True)
class Chart:
    """A chart over the syncs of a run: its curves, and which axis they need."""

    title: str
    unit: str
    note: str
    curves: list[Curve]
    log: bool = False
    zero: bool = False
    wide: bool = False
    decades: int = 300

    def finite(self) -> np.ndarray:
        """Return every finite number that is drawn."""
        parts = [part for curve in self.curves for part in (curve.values, curve.low, curve.high) if part is not None]
        numbers = np.concatenate([*parts, np.zeros(0)])
        return numbers[np.isfinite(numbers)]


def sections_of(records: Records) -> list[tuple[str, list[Chart]]]:
    """Return the sections of the page: a heading, and its charts. Charts without anything to show are left out."""
    sections = [
        ("Learning rates and other values", value_charts(records)),
        ("Losses", loss_charts(records)),
        ("Findings of the controller", [*slope_charts(records), posterior_chart(records)]),
        ("Distance and cost", cost_charts(records)),
    ]
    shown = [(heading, [chart for chart in charts if chart.finite().size]) for heading, charts in sections]
    return [(heading, charts) for heading, charts in shown if charts]


def value_charts(records: Records) -> list[Chart]:
    """Return a chart for every hyperparameter."""
    return [_value_chart(records, name) for name in names_of(records)[:MOST_CHARTS]]


def _value_chart(records: Records, name: str) -> Chart:
    base = _array([record.base.get(name) for record in records])
    note = "Base value and that of every replica in the cycle before a sync."
    known = base[base > 0]
    if known.size and known.max() > 10**DECADES * known.min():
        note += f" The {DECADES} highest powers of ten are shown."
    curves = [Curve("base", base, INK), *_by_replica([r.values.get(name, []) for r in records], dotted=True)]
    names = names_of(records)
    return Chart(title_of(name, names), name, note, curves, log=True, decades=DECADES, wide=len(names) == 1)


def loss_charts(records: Records) -> list[Chart]:
    """Return the charts of the training losses and of those on the probe.

    A loss that exploded would hide all others: the axis ends above the usual ones.
    """
    mean = Curve("mean of the finite ones", _array([record.mean_loss for record in records]), INK, width=2.6)
    of_all = [*_by_replica([record.losses for record in records]), mean]
    meaning = "Mean of each replica since the sync before. Losses that are not finite are gaps."
    probes = _by_replica([record.probes or [] for record in records])
    charts = [
        Chart("Training loss", "loss", meaning, of_all, log=True, wide=True),
        Chart("Loss on the probe", "loss", "The same batch for all replicas.", probes, log=True, wide=True),
    ]
    return [_cut(chart) for chart in charts]


def _cut(chart: Chart) -> Chart:
    finite = chart.finite()
    ceiling = LOSS_CEILING * float(np.median(finite)) if finite.size else 0.0
    if not 0 < ceiling < finite.max(initial=0.0):
        return chart
    curves = [
        replace(c, values=c.values.clip(max=ceiling), high=None if c.high is None else c.high.clip(max=ceiling))
        for c in chart.curves
    ]
    return replace(chart, curves=curves, note=f"{chart.note} Those above {ceiling:.3g} are drawn at the upper edge.")


def slope_charts(records: Records) -> list[Chart]:
    """Return the slopes with their standard errors: in one chart, or in one each where they are many."""
    names, curves = names_of(records), []
    for name, colour in _coloured(records, "slopes"):
        slopes = _array([(record.slopes or {}).get(name) for record in records])
        errors = np.nan_to_num(_array([(record.errors or {}).get(name) for record in records]))
        curves.append(Curve(title_of(name, names), slopes, colour, slopes - errors, slopes + errors, dotted=True))
    note = "Below 0 a larger value lowers the loss. Bars are one standard error."
    unit = "change of the loss for\nan e-fold larger value"
    if len(curves) <= MOST_TOGETHER:
        return [Chart("Slopes of the loss", unit, note, curves, zero=True)]
    return [Chart(f"Slope: {curve.label}", unit, note, [curve], zero=True) for curve in curves]


def posterior_chart(records: Records) -> Chart:
    """Return the chart of the posterior of the right peak, as a factor of the given one."""
    names, curves, found = names_of(records), [], _coloured(records, "posterior")
    band = len(found) <= MOST_TOGETHER
    for name, colour in found:
        mean, deviation = _array([(record.posterior or {}).get(name, (None, None)) for record in records]).T
        low, high = (np.exp(mean - deviation), np.exp(mean + deviation)) if band else (None, None)
        curves.append(Curve(title_of(name, names), np.exp(mean), colour, low, high, width=2.6))
    spread = " and standard deviation" if band else ""
    note = f"The right peak of the schedule over the given one: mean{spread} of its logarithm."
    return Chart("Posterior of the peak", "factor", note, curves, log=True)


def _coloured(records: Records, field: str) -> list[tuple[str, Any]]:
    """Return the hyperparameters that a field of some record knows, with a colour for each."""
    known = [name for name in names_of(records) if any(name in (getattr(record, field) or {}) for record in records)]
    return list(zip(known[:MOST_CHARTS], replica_colours(len(known[:MOST_CHARTS])), strict=True))


def cost_charts(records: Records) -> list[Chart]:
    """Return the charts of the distance between the replicas, and of the time and bytes of a sync."""
    averaged = [record.kind != "scout" for record in records]
    distance = _array([record.distance for record in records])
    seconds = np.where(averaged, _array([record.seconds for record in records]), np.nan)
    sent = np.where(averaged, _array([record.bytes for record in records]), np.nan)
    unit, factor = ("ms", 1e3) if np.nanmax(seconds, initial=0) < 1 else ("s", 1.0)
    power = min(int(math.log10(np.nanmax(sent, initial=1))) // 3, 4)
    prefix = ("bytes", "kB", "MB", "GB", "TB")[power]
    apart = "Root mean square of the distances from the mean of all replicas, over the norm of the mean, at a sync."
    scaled = sent / 1000.0**power if np.nansum(sent) else sent[:0]
    rows = [
        ("Distance between replicas", "relative distance", apart, distance),
        ("Time of a sync", unit, "How long training stood still in this process.", factor * seconds),
        ("Bytes of a sync", prefix, "Payload that this process handed to collectives.", scaled),
    ]
    colours = replica_colours(3)
    return [Chart(*row[:3], [Curve("", row[3], c)], zero=True) for row, c in zip(rows, colours, strict=True)]


def _by_replica(rows: Sequence[Sequence[Any]], *, dotted: bool = False) -> list[Curve]:
    """Return a curve for every replica, with gaps where it was not there; of very many replicas a band."""
    count = max(map(len, rows))
    values = _array([[*row, *[None] * (count - len(row))] for row in rows]).reshape(len(rows), count)
    values[~np.isfinite(values)] = np.nan
    if count <= MOST_CURVES:
        colours = replica_colours(count)
        return [Curve(f"replica {r}", values[:, r], colours[r], dotted=dotted) for r in range(count)]
    known = np.isfinite(values)
    low, high = np.where(known, values, np.inf).min(axis=1), np.where(known, values, -np.inf).max(axis=1)
    label = f"lowest to highest of {count} replicas"
    return [Curve(label, np.full(len(rows), np.nan), replica_colours(1)[0], low, high)]


def draw(chart: Chart, records: Records, *, size: Size = NARROW, title: str = "") -> Figure:
    """Return a chart as a figure of matplotlib."""
    figure, axes = new_figure(title, "step", chart.unit, size=size)
    from matplotlib.ticker import MaxNLocator  # after new_figure, which says how to get it

    wide = size != NARROW
    steps = np.array([record.step for record in records])
    rounds = np.array([record.kind == "scout" for record in records])
    for curve in chart.curves:
        _draw_curve(axes, curve, steps, rounds)
    finite = chart.finite()
    low, high = float(finite.min(initial=math.inf)), float(finite.max(initial=0.0))
    if chart.log and low > 0 and high >= LOG_RATIO * low:
        axes.set_yscale("log")
        axes.set_ylim(bottom=max(low, high / 10**chart.decades) / 1.2)
    if chart.zero:
        axes.axhline(0, color=MUTED, linewidth=1)
    returned = [record for record in records if record.undone is not None]
    marks = {
        "return to the start": ("#b3261e", [record.step for record in returned if record.act != "back"][-100:]),
        "back from a trial": ("#5b6770", [record.step for record in returned if record.act == "back"][-100:]),
    }
    if rounds.any() and not rounds.all():
        marks["end of scouting"] = ("#8a6d00", [int(steps[rounds][-1])])
    first, last = axes.get_xlim()
    for label, (colour, at) in marks.items():
        for number, step in enumerate(step for step in at if first <= step <= last):
            axes.axvline(step, color=colour, linewidth=1.3, linestyle="--", label="" if number else label)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8 if wide else 5))
    axes.xaxis.set_major_formatter(lambda step, _: f"{step:,.0f}")
    shown, labels = axes.get_legend_handles_labels()
    if len(labels) > 1:
        columns = min(len(labels), 9 if wide else 4)
        figure.legend(shown, labels, loc="outside upper left", ncols=columns, frameon=False, fontsize=8)
    return figure


def _draw_curve(axes: Axes, curve: Curve, steps: np.ndarray, rounds: np.ndarray) -> None:
    known = np.isfinite(curve.values)
    seen = np.flatnonzero(known if curve.low is None else known | np.isfinite(curve.low))
    if not seen.size:
        return
    part = slice(seen[0], seen[-1] + 1)  # a controller that acts during a part of a run has an axis of its own
    steps, values, rounds, known = steps[part], curve.values[part], rounds[part], known[part]
    label = curve.label
    if curve.low is not None and curve.high is not None:
        low, high = curve.low[part], curve.high[part]
        if curve.dotted:
            axes.vlines(steps, low, high, color=curve.colour, linewidth=1.2, alpha=0.65)
        else:
            named = "" if known.any() else label
            axes.fill_between(
                steps, low, high, where=np.isfinite(low), color=curve.colour, alpha=0.2, linewidth=1, label=named
            )
    if curve.dotted:
        axes.plot(steps, values, "o", markersize=3, color=curve.colour, label=label)
    elif known.any():
        line = np.where(rounds, np.nan, values)  # scouting rounds are single points: each of them begins anew
        axes.plot(steps, line, color=curve.colour, linewidth=curve.width, label=label)
        # Few points, or single ones between gaps, would not be seen on a line.
        around = np.pad(np.isfinite(line), 1)
        lonely = known if known.sum() <= 40 else known & ~around[:-2] & ~around[2:]
        axes.plot(steps[lonely], values[lonely], "o", markersize=3, color=curve.colour)


def names_of(records: Records) -> list[str]:
    """Return the names of all hyperparameters, in the order in which they come."""
    return list(dict.fromkeys(name for record in records for name in record.base))


def title_of(name: str, names: Sequence[str]) -> str:
    """Return a hyperparameter in words: "Learning rate", or "Learning rate of group 1" where there are several."""
    stem, _, group = name.rpartition("/")
    words = {"lr": "Learning rate"}.get(stem or name, (stem or name).replace("_", " ").capitalize())
    several = sum((other.rpartition("/")[0] or other) == (stem or name) for other in names) > 1
    return f"{words} of group {group}" if several and stem else words


def _array(values: Sequence[Any]) -> np.ndarray:
    """Return numbers as an array with NaN for None, which JSON has instead."""
    return np.array(values, dtype=np.float64)
