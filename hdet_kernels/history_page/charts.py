"""The charts of a history: values, losses, findings of the controller, distance and cost."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace

from hdet_kernels.history_page.drawing import Chart, Curve, Number
from hdet_kernels.history_page.scale import short
from hdet_kernels.history_page.style import COLOURS
from hdet_kernels.schedule.history.records import SyncRecord

#: The most replicas that have a curve of their own; more are a band from the lowest to the highest.
MOST_CURVES = 16

#: Losses above this multiple of the median are drawn at the edge of their chart.
LOSS_CEILING = 30.0

#: The most hyperparameters that one chart shows with errors or bands.
MOST_TOGETHER = 3

#: The most hyperparameters that have a chart.
MOST_CHARTS = 16

Records = Sequence[SyncRecord]

#: Powers of ten that charts of values show.
DECADES = 3


def sections_of(records: Records) -> list[tuple[str, list[Chart]]]:
    """Return the sections of the page: a heading, and its charts. Charts without anything to show are left out."""
    sections = [
        ("Learning rates and other values", value_charts(records)),
        ("Losses", [loss_chart(records), probe_chart(records)]),
        ("Findings of the controller", [*slope_charts(records), posterior_chart(records)]),
        ("Distance and cost", [distance_chart(records), seconds_chart(records), bytes_chart(records)]),
    ]
    marks = _marks(records)
    placed = [
        (heading, [_placed(chart, records, marks) for chart in charts if not chart.empty])
        for heading, charts in sections
    ]
    alone = [(heading, [replace(charts[0], wide=True)] if len(charts) == 1 else charts) for heading, charts in placed]
    return [(heading, charts) for heading, charts in alone if charts]


def _placed(chart: Chart, records: Records, marks: Sequence[tuple[float, str, str]]) -> Chart:
    """Return a chart with its steps, those of the run unless it has a part of its own, and the marks that are there."""
    first, last = chart.steps or (records[0].step, records[-1].step)
    return replace(chart, steps=(first, last), marks=[mark for mark in marks if first <= mark[0] <= last])


def names_of(records: Records) -> list[str]:
    """Return the names of all hyperparameters, in the order in which they come."""
    return list(dict.fromkeys(name for record in records for name in record.base))


def title_of(name: str, names: Sequence[str]) -> str:
    """Return a hyperparameter in words: "Learning rate", or "Learning rate of group 1" where there are several."""
    stem, _, group = name.rpartition("/")
    words = {"lr": "Learning rate"}.get(stem or name, (stem or name).replace("_", " ").capitalize())
    several = sum((other.rpartition("/")[0] or other) == (stem or name) for other in names) > 1
    return f"{words} of group {group}" if several and stem else words


def colour(number: int, count: int) -> str:
    """Return the colour of one of ``count`` curves."""
    if count <= len(COLOURS):
        return f"c{number}"
    return f"hsl({230 - 220 * number / (count - 1):.0f},62%,52%)"


def value_charts(records: Records) -> list[Chart]:
    """Return a chart for every hyperparameter: the base value, and that of each replica."""
    names = names_of(records)
    return [
        Chart(
            title_of(name, names),
            name,
            [
                _line("base", records, [record.base.get(name) for record in records], "base"),
                *_by_replica(records, lambda record, name=name: record.values.get(name, ()), kind="dots"),  # type: ignore[misc]
            ],
            log=True,
            decades=DECADES,
            note=_note_on_values([record.base.get(name, math.nan) for record in records]),
            wide=len(names) == 1,
        )
        for name in names[:MOST_CHARTS]
    ]


def _note_on_values(base: Sequence[float]) -> str:
    """Return the note of a chart of values, which says where low ones are cut off."""
    known = [value for value in base if math.isfinite(value) and value > 0]
    cut = bool(known) and max(known) > 10**DECADES * min(known)
    note = "Base value and that of every replica in the cycle before a sync."
    return f"{note} The {DECADES} highest powers of ten are shown." if cut else note


def loss_chart(records: Records) -> Chart:
    """Return the chart of the training losses."""
    means = [record.mean_loss for record in _without_none(records)]
    curves = [
        *_by_replica(records, lambda record: record.losses),
        _line("mean of the finite ones", records, means, "base", strong=True),
    ]
    note = "Mean of each replica since the sync before. Losses that are not finite are gaps."
    return _loss_chart("Training loss", curves, note)


def probe_chart(records: Records) -> Chart:
    """Return the chart of the losses on the probe."""
    curves = _by_replica(records, lambda record: record.probes or ())
    return _loss_chart("Loss on the probe", curves, "The same batch for all replicas.")


def _loss_chart(title: str, curves: Sequence[Curve], note: str) -> Chart:
    """Return a chart of losses. One that exploded would hide all others: the axis ends above the usual ones."""
    finite = [value for curve in curves for value in curve.finite()]
    ceiling = LOSS_CEILING * statistics.median(finite) if finite else math.inf
    if ceiling > 0 and finite and max(finite) > ceiling:
        note += f" Those above {short(ceiling)} are drawn at the upper edge."
    else:
        ceiling = math.inf
    return Chart(title, "loss", curves, note, log=True, ceiling=ceiling, wide=True)


def slope_charts(records: Records) -> list[Chart]:
    """Return the slopes with their standard errors: in one chart, or in one each where they are many."""
    names = names_of(records)
    found = [name for name in names if any(name in (record.slopes or {}) for record in records)][:MOST_CHARTS]
    curves = []
    for number, name in enumerate(found):
        seen = [record for record in records if name in (record.slopes or {})]
        slopes = [(record.slopes or {})[name] for record in seen]
        errors = [(record.errors or {}).get(name) for record in seen]
        at = [record.step for record in seen]
        curves.append(Curve(title_of(name, names), at, slopes, colour(number, len(found)), "errors", errors))
    note = "Below 0 a larger value lowers the loss. Bars are one standard error."
    unit, steps = "change of the loss for an e-fold larger value", _acting(records)
    if len(curves) <= MOST_TOGETHER:
        return [Chart("Slopes of the loss", unit, curves, note, zero=True, steps=steps)]
    each = [(f"Slope: {curve.label}", replace(curve, colour="c0")) for curve in curves]
    return [Chart(title, unit, [curve], note, zero=True, steps=steps) for title, curve in each]


def posterior_chart(records: Records) -> Chart:
    """Return the chart of the posterior of the right peak."""
    names = names_of(records)
    found = [name for name in names if any(name in (record.posterior or {}) for record in records)][:MOST_CHARTS]
    curves = []
    for number, name in enumerate(found):
        seen = [(record.step, (record.posterior or {})[name]) for record in records if name in (record.posterior or {})]
        steps, shade = [step for step, _ in seen], colour(number, len(found))
        low, mean, high = (
            [math.exp(m + side * d) if m is not None and d is not None else None for _, (m, d) in seen]
            for side in (-1, 0, 1)
        )
        curves.append(Curve(title_of(name, names), steps, mean, shade, strong=True))
        if len(found) <= MOST_TOGETHER:
            curves.insert(0, Curve("", steps, high, shade, "band", lows=low))
    spread = " and standard deviation" if len(found) <= MOST_TOGETHER else ""
    note = f"The right peak of the schedule over the given one: mean{spread} of its logarithm."
    return Chart("Posterior of the peak", "factor", curves, note, log=True, steps=_acting(records))


def _acting(records: Records) -> tuple[float, float] | None:
    """Return the first and the last step at which the controller found something."""
    steps = [record.step for record in records if record.slopes or record.posterior]
    return (steps[0], steps[-1]) if steps else None


def distance_chart(records: Records) -> Chart:
    """Return the chart of the distance between the replicas."""
    note = "Root mean square of the distances from the mean of all replicas, over the norm of the mean, at every sync."
    curve = _line("", records, [record.distance for record in records], "c0")
    return Chart("Distance between replicas", "relative distance", [curve], note, zero=True)


def seconds_chart(records: Records) -> Chart:
    """Return the chart of the time that training waited."""
    seconds = [record.seconds for record in records if record.kind != "scout"]
    unit, factor = ("ms", 1e3) if max(seconds, default=0) < 1 else ("s", 1.0)
    values = [None if record.kind == "scout" else factor * record.seconds for record in records]
    note = "How long training stood still in this process."
    return Chart("Time of a sync", unit, [_line("", records, values, "c4")], note, zero=True)


def bytes_chart(records: Records) -> Chart:
    """Return the chart of the bytes that the process sent."""
    most = max(record.bytes for record in records)
    unit, factor = next(
        ((unit, 1000.0**power) for power, unit in ((4, "TB"), (3, "GB"), (2, "MB"), (1, "kB")) if most >= 1000**power),
        ("bytes", 1.0),
    )
    values = [None if record.kind == "scout" or most == 0 else record.bytes / factor for record in records]
    note = "Payload that this process handed to collectives."
    return Chart("Bytes of a sync", unit, [_line("", records, values, "c6")], note, zero=True)


def _line(label: str, records: Records, values: Sequence[Number], shade: str, *, strong: bool = False) -> Curve:
    """Return a line over the syncs. Scouting rounds are single points: each of them begins anew."""
    steps: list[float] = []
    heights: list[Number] = []
    for number, (record, value) in enumerate(zip(records, values, strict=True)):
        if number and records[number - 1].kind == "scout":
            steps.append(record.step)
            heights.append(None)
        steps.append(record.step)
        heights.append(value)
    return Curve(label, steps, heights, shade, strong=strong)


def _by_replica(records: Records, of: Callable[[SyncRecord], Sequence[Number]], *, kind: str = "line") -> list[Curve]:
    """Return a curve for every replica; with very many of them a band around all."""
    rows = [of(record) for record in records]
    count = max(map(len, rows))
    if count > MOST_CURVES:
        finite = [[value for value in row if value is not None and math.isfinite(value)] for row in rows]
        lows, highs = ([edge(row) if row else None for row in finite] for edge in (min, max))
        return [
            Curve(f"lowest to highest of {count} replicas", [r.step for r in records], highs, "c0", "band", lows=lows)
        ]
    curves = []
    for replica in range(count):
        values = [row[replica] if replica < len(row) else None for row in rows]
        curves.append(replace(_line(f"replica {replica}", records, values, colour(replica, count)), kind=kind))
    return curves


def _marks(records: Records) -> list[tuple[float, str, str]]:
    """Return the vertical lines of all charts: returns to an earlier average, and the end of scouting."""
    returns = [(float(r.step), "bad", "return to an earlier average") for r in records if r.undone is not None][-100:]
    scouts = [record.step for record in records if record.kind == "scout"]
    ends = [(float(scouts[-1]), "scout", "end of scouting")] if scouts and len(scouts) < len(records) else []
    return [*ends, *returns]


def _without_none(records: Records) -> list[SyncRecord]:
    """Return the records with NaN for None among the losses, which JSON has instead."""
    return [
        replace(record, losses=[math.nan if loss is None else loss for loss in record.losses]) for record in records
    ]
