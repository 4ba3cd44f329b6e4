"""The tables of a history: totals, the last sync, events, and all syncs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from html import escape

from hdet_kernels.history_page.charts import names_of
from hdet_kernels.report import format_bytes, summary
from hdet_kernels.schedule.history.records import SyncRecord

#: The most rows of a table, of replicas or events, and of the table of all syncs.
MOST_ROWS, MOST_SYNCS = 64, 400

Records = Sequence[SyncRecord]
_KINDS = {"sync": "regular", "early": "early", "last": "last", "manual": "manual", "scout": "scouting"}


def cards(records: Records) -> str:
    """Return the totals of the run."""
    totals, last = summary(records), records[-1]
    kinds = Counter(_KINDS[record.kind] for record in records)
    by_kind = ", ".join(f"{count:,} {kind}" for kind, count in kinds.items())
    entries = [
        ("Steps", f"{last.step:,}", f"from the first sync at {records[0].step:,}"),
        ("Syncs", f"{len(records):,}", by_kind),
        ("Replicas", str(len(last.losses)), f"{last.gradients} gradients"),
        ("Mean loss", _number(totals["last_loss"]), f"{_number(totals['first_loss'])} at the first sync"),
        ("Left out", str(totals["excluded"]), "replicas that were not finite"),
        ("Returns", str(totals["undone"]), "to an earlier average"),
        ("Waited", _seconds(totals["seconds"]), "in this process, at syncs"),
        ("Sent", format_bytes(totals["bytes"]), f"in {totals['collectives']:,} collectives"),
    ]
    warned = {"Left out": totals["excluded"], "Returns": totals["undone"]}
    boxes = (
        f"<div{' class=bad' if warned.get(term) else ''}><dt>{term}</dt><dd>{value}<small>{more}</small></dd></div>"
        for term, value, more in entries
    )
    return f"<dl class=cards>{''.join(boxes)}</dl>"


def value_table(records: Records) -> str:
    """Return first, highest and last base value of every hyperparameter."""
    rows = []
    for name in names_of(records)[:MOST_ROWS]:
        values = [record.base[name] for record in records if name in record.base]
        rows.append([name, *(_number(value) for value in (values[0], min(values), max(values), values[-1]))])
    return _table("Base values at the syncs", ["name", "first", "lowest", "highest", "last"], rows)


def last_sync(records: Records) -> str:
    """Return the values and losses of every replica at the last sync."""
    last = records[-1]
    names = list(last.values)[:16]
    probed = last.probes is not None
    rows = []
    for replica, loss in list(enumerate(last.losses))[:MOST_ROWS]:
        values = [last.values[name][replica] if replica < len(last.values[name]) else None for name in names]
        probe = [_number(last.probes[replica])] if last.probes is not None else []
        state = "left out" if replica in last.excluded else "averaged"
        rows.append([f"replica {replica}", *map(_number, values), _number(loss), *probe, state])
    left = f", the first {MOST_ROWS} of {len(last.losses)} replicas" if len(last.losses) > MOST_ROWS else ""
    header = ["", *names, "loss", *(["probe"] if probed else []), "at the sync"]
    return _table(f"Step {last.step:,}{left}", header, rows)


def events(records: Records) -> str:
    """Return the syncs at which replicas were left out or returned; empty if there are none."""
    rows = []
    for record in records:
        if record.excluded:
            several = "s" if len(record.excluded) > 1 else ""
            who = ", ".join(map(str, record.excluded[:16])) + (" …" if len(record.excluded) > 16 else "")
            rows.append([f"{record.step:,}", f"replica{several} {who} left out of the mean, because not finite"])
        if record.undone is not None:
            rows.append([f"{record.step:,}", f"training broke: return to the average of step {record.undone:,}"])
    if not rows:
        return ""
    left = f"The last {MOST_ROWS} of {len(rows)}" if len(rows) > MOST_ROWS else ""
    return _table(left, ["step", "what happened"], rows[-MOST_ROWS:], text=True)


def all_syncs(records: Records) -> str:
    """Return the table of all syncs; of very many every n-th, and those with events."""
    every = math.ceil(len(records) / MOST_SYNCS)
    shown = [r for n, r in enumerate(records) if n % every == 0 or r.undone is not None or r is records[-1]]
    names = names_of(records)[:8]
    header = ["step", "sync", "mean loss", "best", "worst", *names, "distance", "left out", "bytes", "ms"]
    rows = []
    for record in shown[-2 * MOST_SYNCS :]:
        finite = [loss for loss in record.losses if loss is not None and math.isfinite(loss)]
        mean = math.fsum(loss / len(finite) for loss in finite) if finite else None
        losses = (mean, min(finite, default=None), max(finite, default=None))
        rows.append(
            [
                f"{record.step:,}",
                _KINDS[record.kind],
                *map(_number, losses),
                *(_number(record.base.get(name)) for name in names),
                _number(record.distance),
                ", ".join(map(str, record.excluded[:8])) or "–",
                format_bytes(record.bytes),
                f"{1000 * record.seconds:.1f}",
            ]
        )
    text = "All syncs" if every == 1 else f"1 in {every} of {len(records):,} syncs, and those with a return"
    return f"<details class=box><summary>{text}</summary>{_table('', header, rows)}</details>"


def _table(caption: str, header: Sequence[str], rows: Sequence[Sequence[str]], *, text: bool = False) -> str:
    head = "".join(f"<th scope=col>{escape(cell)}" for cell in header)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}' for cell in row)}" for row in rows)
    named = f"<caption>{escape(caption)}</caption>" if caption else ""
    aligned = " class=text" if text else ""
    return f"<div class=scroll><table{aligned}>{named}<thead><tr>{head}</thead><tbody>{body}</tbody></table></div>"


def _number(value: float | None) -> str:
    return "–" if value is None or not math.isfinite(value) else f"{value:.4g}"


def _seconds(seconds: float) -> str:
    if seconds < 1:
        return f"{1000 * seconds:.0f} ms"
    return f"{seconds:.1f} s" if seconds < 120 else f"{seconds / 60:.1f} min"
