"""Write a history as one HTML page: ``python -m hdet_kernels report history.jsonl``.

:func:`read_history` reads the records from a file; :func:`write_page` writes tables, and charts that matplotlib draws
(``pip install 'hdet_kernels[demo]'``). The page needs nothing else: no script, no font, no other file.
"""

from __future__ import annotations

import base64
import io
import json
import math
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hdet_kernels import report
from hdet_kernels.report import INK, MUTED, History, format_bytes, record_of, records_of, summary
from hdet_kernels.schedule.history import SyncRecord
from hdet_kernels.version import __version__

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: The most replicas that have a curve of their own; more are a band from the lowest to the highest.
MOST_CURVES = 16

#: The most hyperparameters that have a chart, and that share one with errors or bands.
MOST_CHARTS, MOST_TOGETHER = 16, 3

#: The most rows of a table, and of the table of all syncs.
MOST_ROWS, MOST_SYNCS = 64, 400

#: Losses above this multiple of the median are drawn at the edge of their chart.
LOSS_CEILING = 30.0

#: Powers of ten that charts of hyperparameters show.
DECADES = 3

#: From this ratio of the highest to the lowest value on, the axis of positive values is logarithmic.
LOG_RATIO = 8.0

Records = Sequence[SyncRecord]
_KINDS = {"sync": "regular", "early": "early", "last": "last", "manual": "manual", "scout": "scouting"}

# Charts are light; in the dark their lightness is inverted and their hues stay.
STYLE = """
:root{color-scheme:light dark;--page:#f6f7f9;--card:#fff;--ink:#1b2330;--soft:#596273;--line:#dfe3ea;--bad:#b3261e}
@media (prefers-color-scheme:dark){:root{--page:#12161c;--card:#1a2029;--ink:#e7ebf1;--soft:#a3adbb;--line:#2f3844;
--bad:#ff8a80}figure img{filter:invert(.9) hue-rotate(180deg)}}
*{box-sizing:border-box}body{margin:0;padding:2rem 1rem 4rem;background:var(--page);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif}
main,header,footer{max-width:1080px;margin:0 auto}footer{padding-top:2.5rem;font-size:.85rem;color:var(--soft)}
h1{font-size:1.6rem;margin:0 0 .2rem}h2{font-size:1.2rem;margin:2.2rem 0 .7rem}h3{font-size:1rem;margin:0}
header p,figcaption p,.soft{color:var(--soft);margin:0}figcaption p{font-size:.85rem}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(210px,1fr));gap:.8rem;margin:1.4rem 0 0;padding:0}
.cards div,figure,.box{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:.8rem 1rem}
.cards dt{color:var(--soft);font-size:.82rem}.cards .bad dd{color:var(--bad)}
.cards dd{margin:0;font-size:1.25rem;font-weight:600;font-variant-numeric:tabular-nums}
.cards dd small{display:block;font-size:.8rem;font-weight:400;color:var(--soft)}
.charts{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,460px),1fr));gap:1rem}
figure{margin:0;min-width:0}figure.wide{grid-column:1/-1}figure img{display:block;width:100%;height:auto}
.scroll{overflow-x:auto}table{border-collapse:collapse;font-variant-numeric:tabular-nums;font-size:.88rem;width:100%}
th,td{text-align:right;padding:.3rem .7rem;border-bottom:1px solid var(--line);white-space:nowrap}
th:first-child,td:first-child,.text th,.text td{text-align:left}th{color:var(--soft);font-weight:600}
caption{text-align:left;color:var(--soft)}tr:last-child td{border-bottom:0}
.text td{white-space:normal}.text td:first-child{width:5rem}
details{margin-top:1rem}summary{cursor:pointer;font-weight:600}
details .scroll{margin-top:.7rem;max-height:30rem;overflow:auto}
"""


def read_history(path: str | os.PathLike[str]) -> list[SyncRecord]:
    """Return the records of a file, oldest first: the lines of ``history_file=``, or a JSON list of records.

    A last line that was cut off while it was written is left out.

    Raises:
        ValueError: if the file cannot be read, is empty, or holds something else. The message names the line.
    """
    path = Path(path)
    expected = "pass the history_file= of a scheduler, with one record to a line, or a JSON list of its records"
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise ValueError(f"there is no file {path}: {expected}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read as text: {error}") from error
    if not text.strip():
        raise ValueError(f"{path} is empty: there is nothing to show before the first sync of a run")
    if text.lstrip().startswith("["):
        pieces = [("the list", text)]
    else:
        pieces = [(f"line {number}", line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    entries: list[tuple[str, Any]] = []
    for place, piece in pieces:
        try:
            entries.append((place, json.loads(piece)))
        except ValueError as error:
            if not entries or place != pieces[-1][0] or text.endswith("\n"):
                raise ValueError(f"{path}, {place} is not valid JSON ({error}): {expected}") from error
    if entries[0][0] == "the list":
        entries = [(f"entry {number}", entry) for number, entry in enumerate(entries[0][1])]
    if not entries:
        raise ValueError(f"{path} has no record: there is nothing to show before the first sync of a run")
    return [_checked(path, place, entry) for place, entry in entries]


def _checked(path: Path, place: str, entry: Any) -> SyncRecord:
    try:
        record = record_of(place, entry)
        if record.base.keys() != record.values.keys() or not record.losses:
            raise ValueError("base, values and losses do not fit each other")
        record.metrics()
    except (TypeError, ValueError, AttributeError, KeyError) as error:
        raise ValueError(f"{path}, {place} is not the record of a sync: {error}") from error
    return record


def write_page(history: History, path: str | os.PathLike[str], title: str = "HDET run") -> None:
    """Write :func:`history_page` to a file. The arguments are checked, and the page is made, before it is opened."""
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"path must be that of a page to write, such as 'history.html', got {path!r}")
    text = history_page(history, title)
    Path(path).write_text(text, encoding="utf-8")


def history_page(history: History, title: str = "HDET run") -> str:
    """Return a history as one HTML page that needs nothing else: tables, and charts as pictures.

    Args:
        history: ``scheduler.history``, or the same records as dicts.
        title: heading of the page.

    Raises:
        ValueError: if the history is empty.
        ImportError: if matplotlib is not installed.
    """
    records = records_of(history)
    if not records:
        raise ValueError("the history is empty: there is nothing to show before the first sync")
    names, replicas = names_of(records), len(records[-1].losses)
    body = [cards(records)]
    if found := events(records):
        body.append(f"<h2>Events</h2><div class=box>{found}</div>")
    for heading, charts in sections_of(records):
        figures = (_figure(chart, records, wide=chart.wide or len(charts) == 1) for chart in charts)
        body.append(f"<h2>{heading}</h2><div class=charts>{''.join(figures)}</div>")
    if len(names) > MOST_CHARTS:
        body.append(f"<p class=soft>Charts show the first {MOST_CHARTS} of {len(names)} hyperparameters.</p>")
    body.append(f"<h2>Last sync</h2><div class=box>{last_sync(records)}</div>")
    body.append(f"<h2>Values</h2><div class=box>{value_table(records)}</div>")
    body.append(all_syncs(records))
    subtitle = f"{_count(replicas, 'replica')}, {_count(len(names), 'hyperparameter')}, {_count(len(records), 'sync')}"
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body>"
        f"<header><h1>{escape(title)}</h1><p>{subtitle} up to step {records[-1].step:,}</p></header>"
        f"<main>{''.join(body)}</main><footer>Written by hdet_kernels {__version__}.</footer></body></html>\n"
    )


def cards(records: Records) -> str:
    """Return the totals of the run."""
    totals, last = summary(records), records[-1]
    kinds = Counter(_KINDS[record.kind] for record in records)
    entries = [
        ("Steps", f"{last.step:,}", f"from the first sync at {records[0].step:,}"),
        ("Syncs", f"{len(records):,}", ", ".join(f"{count:,} {kind}" for kind, count in kinds.items())),
        ("Replicas", str(len(last.losses)), f"{last.gradients} gradients"),
        ("Mean loss", _number(totals["last_loss"]), f"{_number(totals['first_loss'])} at the first sync"),
        ("Left out", str(totals["excluded"]), "replicas that were not finite"),
        ("Returns", str(totals["undone"]), f"to the start; {_count(totals['lost'], 'step')} lost"),
        ("Waited", _seconds(totals["seconds"]), "in this process, at syncs"),
        ("Sent", format_bytes(totals["bytes"]), f"in {totals['collectives']:,} collectives"),
    ]
    bad = {"Left out": totals["excluded"], "Returns": totals["undone"]}
    for name, (given, used) in list(totals["peaks"].items())[:MOST_TOGETHER]:
        entries.append((f"Peak of {name}", _number(used), "as given" if given == used else f"{_number(given)} given"))
    boxes = (
        f"<div{' class=bad' if bad.get(term) else ''}><dt>{term}</dt><dd>{value}<small>{more}</small></dd></div>"
        for term, value, more in entries
    )
    return f"<dl class=cards>{''.join(boxes)}</dl>"


def events(records: Records) -> str:
    """Return what happened beside the schedule: replicas left out, and returns; empty if there is nothing."""
    rows = []
    for record in records:
        if record.excluded:
            several = "s" if len(record.excluded) > 1 else ""
            who = ", ".join(map(str, record.excluded[:16])) + (" …" if len(record.excluded) > 16 else "")
            rows.append([f"{record.step:,}", f"replica{several} {who} left out of the mean, because not finite"])
        if record.event is not None:
            rows.append([f"{record.step:,}", record.event.removeprefix(f"step {record.step}: ")])
    left = f"The last {MOST_ROWS} of {len(rows)}" if len(rows) > MOST_ROWS else ""
    return _table(left, ["step", "what happened"], rows[-MOST_ROWS:], text=True) if rows else ""


def last_sync(records: Records) -> str:
    """Return the values and losses of every replica at the last sync."""
    last = records[-1]
    names = list(last.values)[:16]
    rows = []
    for replica, loss in list(enumerate(last.losses))[:MOST_ROWS]:
        values = [last.values[name][replica] if replica < len(last.values[name]) else None for name in names]
        probe = [_number(last.probes[replica])] if last.probes is not None else []
        state = "left out" if replica in last.excluded else "averaged"
        rows.append([f"replica {replica}", *map(_number, values), _number(loss), *probe, state])
    left = f", the first {MOST_ROWS} of {len(last.losses)} replicas" if len(last.losses) > MOST_ROWS else ""
    header = ["", *names, "loss", *(["probe"] if last.probes is not None else []), "at the sync"]
    return _table(f"Step {last.step:,}{left}", header, rows)


def value_table(records: Records) -> str:
    """Return first, lowest, highest and last base value of every hyperparameter."""
    rows = []
    for name in names_of(records)[:MOST_ROWS]:
        values = [record.base[name] for record in records if name in record.base]
        rows.append([name, *(_number(value) for value in (values[0], min(values), max(values), values[-1]))])
    return _table("Base values at the syncs", ["name", "first", "lowest", "highest", "last"], rows)


def all_syncs(records: Records) -> str:
    """Return the table of all syncs; of very many every n-th, and those with a return."""
    every = math.ceil(len(records) / MOST_SYNCS)
    shown = [r for n, r in enumerate(records) if n % every == 0 or r.event or r is records[-1]]
    names = names_of(records)[:8]
    header = ["step", "sync", "mean loss", "best", "worst", *names, "act", "distance", "left out", "bytes", "ms"]
    rows = [
        [
            f"{record.step:,}",
            _KINDS[record.kind],
            *map(_number, report.loss_range(record.losses)),
            *(_number(record.base.get(name)) for name in names),
            record.act or "–",
            _number(record.distance),
            ", ".join(map(str, record.excluded[:8])) or "–",
            format_bytes(record.bytes),
            f"{1000 * record.seconds:.1f}",
        ]
        for record in shown[-2 * MOST_SYNCS :]
    ]
    text = "All syncs" if every == 1 else f"1 in {every} of {len(records):,} syncs, and those with an event"
    return f"<details class=box><summary>{text}</summary>{_table('', header, rows)}</details>"


def _table(caption: str, header: Sequence[str], rows: Sequence[Sequence[str]], *, text: bool = False) -> str:
    head = "".join(f"<th scope=col>{escape(cell)}" for cell in header)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}' for cell in row)}" for row in rows)
    named = f"<caption>{escape(caption)}</caption>" if caption else ""
    aligned = " class=text" if text else ""
    return f"<div class=scroll><table{aligned}>{named}<thead><tr>{head}</thead><tbody>{body}</tbody></table></div>"


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
    """Return a chart for every hyperparameter: the base value, and that of each replica."""
    names = names_of(records)
    charts = []
    for name in names[:MOST_CHARTS]:
        base = _array([record.base.get(name) for record in records])
        note = "Base value and that of every replica in the cycle before a sync."
        known = base[base > 0]
        if known.size and known.max() > 10**DECADES * known.min():
            note += f" The {DECADES} highest powers of ten are shown."
        curves = [Curve("base", base, INK), *_by_replica([r.values.get(name, []) for r in records], dotted=True)]
        charts.append(Chart(title_of(name, names), name, note, curves, log=True, decades=DECADES, wide=len(names) == 1))
    return charts


def loss_charts(records: Records) -> list[Chart]:
    """Return the charts of the training losses and of those on the probe.

    A loss that exploded would hide all others: the axis ends above the usual ones.
    """
    mean = Curve("mean of the finite ones", _array([report.loss_range(r.losses)[0] for r in records]), INK, width=2.6)
    of_all = [*_by_replica([record.losses for record in records]), mean]
    meaning = "Mean of each replica since the sync before. Losses that are not finite are gaps."
    probes = _by_replica([record.probes or [] for record in records])
    charts = []
    for title, note, curves in (
        ("Training loss", meaning, of_all),
        ("Loss on the probe", "The same batch for all replicas.", probes),
    ):
        chart = Chart(title, "loss", note, curves, log=True, wide=True)
        ceiling = LOSS_CEILING * float(np.median(chart.finite())) if chart.finite().size else 0.0
        if 0 < ceiling < chart.finite().max():
            cut = [
                replace(
                    c, values=np.minimum(c.values, ceiling), high=None if c.high is None else c.high.clip(max=ceiling)
                )
                for c in curves
            ]
            chart = replace(chart, curves=cut, note=f"{note} Those above {ceiling:.3g} are drawn at the upper edge.")
        charts.append(chart)
    return charts


def slope_charts(records: Records) -> list[Chart]:
    """Return the slopes with their standard errors: in one chart, or in one each where they are many."""
    names = names_of(records)
    found = [name for name in names if any(name in (record.slopes or {}) for record in records)][:MOST_CHARTS]
    curves = []
    for name, colour in zip(found, report.replica_colours(len(found)), strict=True):
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
    names = names_of(records)
    found = [name for name in names if any(name in (record.posterior or {}) for record in records)][:MOST_CHARTS]
    band = len(found) <= MOST_TOGETHER
    curves = []
    for name, colour in zip(found, report.replica_colours(len(found)), strict=True):
        mean, deviation = _array([(record.posterior or {}).get(name, (None, None)) for record in records]).T
        low, high = (np.exp(mean - deviation), np.exp(mean + deviation)) if band else (None, None)
        curves.append(Curve(title_of(name, names), np.exp(mean), colour, low, high, width=2.6))
    spread = " and standard deviation" if band else ""
    note = f"The right peak of the schedule over the given one: mean{spread} of its logarithm."
    return Chart("Posterior of the peak", "factor", note, curves, log=True)


def cost_charts(records: Records) -> list[Chart]:
    """Return the charts of the distance between the replicas, and of the time and bytes of a sync."""
    averaged = [record.kind != "scout" for record in records]
    distance = _array([record.distance for record in records])
    seconds = np.where(averaged, _array([record.seconds for record in records]), np.nan)
    sent = np.where(averaged, _array([record.bytes for record in records]), np.nan)
    unit, factor = ("ms", 1e3) if np.nanmax(seconds, initial=0) < 1 else ("s", 1.0)
    power = min(int(math.log10(np.nanmax(sent, initial=1))) // 3, 4)
    rows = [
        (
            "Distance between replicas",
            "relative distance",
            "Root mean square of the distances from the mean of all replicas, over the norm of the mean, at a sync.",
            distance,
        ),
        ("Time of a sync", unit, "How long training stood still in this process.", factor * seconds),
        (
            "Bytes of a sync",
            ("bytes", "kB", "MB", "GB", "TB")[power],
            "Payload that this process handed to collectives.",
            sent / 1000.0**power if np.nansum(sent) else sent[:0],
        ),
    ]
    colours = report.replica_colours(3)
    return [Chart(*row[:3], [Curve("", row[3], c)], zero=True) for row, c in zip(rows, colours, strict=True)]


def _by_replica(rows: Sequence[Sequence[Any]], *, dotted: bool = False) -> list[Curve]:
    """Return a curve for every replica, with gaps where it was not there; of very many replicas a band."""
    count = max(map(len, rows))
    values = _array([[*row, *[None] * (count - len(row))] for row in rows]).reshape(len(rows), count)
    values[~np.isfinite(values)] = np.nan
    if count <= MOST_CURVES:
        colours = report.replica_colours(count)
        return [Curve(f"replica {r}", values[:, r], colours[r], dotted=dotted) for r in range(count)]
    known = np.isfinite(values)
    low, high = np.where(known, values, np.inf).min(axis=1), np.where(known, values, -np.inf).max(axis=1)
    label = f"lowest to highest of {count} replicas"
    return [Curve(label, np.full(len(rows), np.nan), report.replica_colours(1)[0], low, high)]


def _figure(chart: Chart, records: Records, *, wide: bool) -> str:
    """Return a chart with its caption as HTML."""
    picture = io.BytesIO()
    draw(chart, records, wide=wide).savefig(picture, format="png", metadata={"Software": None})
    data = base64.b64encode(picture.getvalue()).decode()
    finite = chart.finite()
    names = ", ".join(curve.label for curve in chart.curves if curve.label)
    text = f"{chart.title}: {' '.join(chart.unit.split())} from {finite.min():.4g} to {finite.max():.4g}; {names}"
    return (
        f"<figure{' class=wide' if wide else ''}><figcaption><h3>{escape(chart.title)}</h3>"
        f"<p>{escape(chart.note)}</p></figcaption>"
        f'<img alt="{escape(text)}" src="data:image/png;base64,{data}"></figure>'
    )


def draw(chart: Chart, records: Records, *, wide: bool = False) -> Figure:
    """Return a chart as a figure of matplotlib."""
    from matplotlib.ticker import MaxNLocator

    figure, axes = report.new_figure("", "step", chart.unit, size=(10.4, 3.6) if wide else (5.0, 3.0))
    steps = np.array([record.step for record in records])
    rounds = np.array([record.kind == "scout" for record in records])
    for curve in chart.curves:
        _draw_curve(axes, curve, steps, rounds)
    finite = chart.finite()
    low, high = float(finite.min()), float(finite.max())
    if chart.log and low > 0 and high >= LOG_RATIO * low:
        axes.set_yscale("log")
        axes.set_ylim(bottom=max(low, high / 10**chart.decades) / 1.2)
    if chart.zero:
        axes.axhline(0, color=MUTED, linewidth=1)
    marks = {
        "return to the start": ("#b3261e", [r.step for r in records if r.undone is not None][-100:]),
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


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _number(value: float | None) -> str:
    return "–" if value is None or not math.isfinite(value) else f"{value:.4g}"


def _seconds(seconds: float) -> str:
    if seconds < 1:
        return f"{1000 * seconds:.0f} ms"
    return f"{seconds:.1f} s" if seconds < 120 else f"{seconds / 60:.1f} min"
