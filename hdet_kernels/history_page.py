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
from html import escape
from pathlib import Path
from typing import Any

from hdet_kernels.report import (
    MOST_CHARTS,
    MOST_TOGETHER,
    NARROW,
    Chart,
    History,
    Records,
    Size,
    draw,
    format_bytes,
    format_number,
    loss_range,
    names_of,
    record_of,
    records_of,
    sections_of,
    summary,
)
from hdet_kernels.schedule.history import HistorySummary, SyncRecord
from hdet_kernels.version import __version__

#: The most rows of a table, and of the table of all syncs.
MOST_ROWS, MOST_SYNCS = 64, 400

WIDE: Size = (10.4, 3.6)
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
    totals, last = summary(records), records[-1]
    kinds = Counter(_KINDS[record.kind] for record in records)
    entries = [
        ("Steps", f"{last.step:,}", f"from the first sync at {records[0].step:,}"),
        ("Syncs", f"{len(records):,}", ", ".join(f"{count:,} {kind}" for kind, count in kinds.items())),
        ("Replicas", str(len(last.losses)), f"{last.gradients} gradients"),
        ("Mean loss", format_number(totals["last_loss"]), f"{format_number(totals['first_loss'])} at the first sync"),
        ("Left out", str(totals["excluded"]), "replicas that were not finite"),
        ("Returns", str(totals["undone"]), f"to the start; {_count(totals['lost'], 'step')} lost"),
        ("Waited", _seconds(totals["seconds"]), "in this process, at syncs"),
        ("Sent", format_bytes(totals["bytes"]), f"in {totals['collectives']:,} collectives"),
    ]
    bad = {"Left out": totals["excluded"], "Returns": totals["undone"]}
    for name, (given, used) in list(totals["peaks"].items())[:MOST_TOGETHER]:
        entries.append(
            (f"Peak of {name}", format_number(used), "as given" if given == used else f"{format_number(given)} given")
        )
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
    last = records[-1]
    names = list(last.values)[:16]
    rows = []
    for replica, loss in list(enumerate(last.losses))[:MOST_ROWS]:
        values = [last.values[name][replica] if replica < len(last.values[name]) else None for name in names]
        probe = [format_number(last.probes[replica])] if last.probes is not None else []
        state = "left out" if replica in last.excluded else "averaged"
        rows.append([f"replica {replica}", *map(format_number, values), format_number(loss), *probe, state])
    left = f", the first {MOST_ROWS} of {len(last.losses)} replicas" if len(last.losses) > MOST_ROWS else ""
    header = ["", *names, "loss", *(["probe"] if last.probes is not None else []), "at the sync"]
    return _table(f"Step {last.step:,}{left}", header, rows)


def value_table(records: Records) -> str:
    totals = HistorySummary()
    for record in records:
        totals.add(record)
    rows = [[name, *map(format_number, values.values())] for name, values in list(totals.base.items())[:MOST_ROWS]]
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
            *map(format_number, loss_range(record.losses)),
            *(format_number(record.base.get(name)) for name in names),
            record.act or "–",
            format_number(record.distance),
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


def _figure(chart: Chart, records: Records, *, wide: bool) -> str:
    picture = io.BytesIO()
    draw(chart, records, size=WIDE if wide else NARROW).savefig(picture, format="png", metadata={"Software": None})
    data = base64.b64encode(picture.getvalue()).decode()
    finite = chart.finite()
    names = ", ".join(curve.label for curve in chart.curves if curve.label)
    text = f"{chart.title}: {' '.join(chart.unit.split())} from {finite.min():.4g} to {finite.max():.4g}; {names}"
    return (
        f"<figure{' class=wide' if wide else ''}><figcaption><h3>{escape(chart.title)}</h3>"
        f"<p>{escape(chart.note)}</p></figcaption>"
        f'<img alt="{escape(text)}" src="data:image/png;base64,{data}"></figure>'
    )


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _seconds(seconds: float) -> str:
    if seconds < 1:
        return f"{1000 * seconds:.0f} ms"
    return f"{seconds:.1f} s" if seconds < 120 else f"{seconds / 60:.1f} min"
