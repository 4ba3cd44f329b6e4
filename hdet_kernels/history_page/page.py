"""Put the page together, and write it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from html import escape
from pathlib import Path
from typing import Any

from hdet_kernels.history_page import tables
from hdet_kernels.history_page.charts import MOST_CHARTS, names_of, sections_of
from hdet_kernels.history_page.drawing import draw
from hdet_kernels.history_page.style import STYLE
from hdet_kernels.report import records_of
from hdet_kernels.schedule.history.records import SyncRecord
from hdet_kernels.version import __version__

_THINNED = "Of very many syncs, charts show a part: lines keep their peaks, of dots and error bars every n-th is drawn."

History = Iterable[SyncRecord | Mapping[str, Any]]


def history_page(history: History, title: str = "HDET run") -> str:
    """Return a history as one HTML page that needs nothing else: tables, and charts as SVG.

    Args:
        history: ``scheduler.history``, or the same records as dicts.
        title: heading of the page.

    Raises:
        ValueError: if the history is empty.
    """
    records = records_of(history)
    if not records:
        raise ValueError("the history is empty: there is nothing to show before the first sync")
    body = [tables.cards(records)]
    if found := tables.events(records):
        body.append(f"<h2>Events</h2><div class=box>{found}</div>")
    number = 0
    for heading, charts in sections_of(records):
        figures = []
        for chart in charts:
            figures.append(draw(chart, number))
            number += 1
        body.append(f"<h2>{heading}</h2><div class=charts>{''.join(figures)}</div>")
    if len(names := names_of(records)) > MOST_CHARTS:
        body.append(f"<p class=soft>Charts show the first {MOST_CHARTS} of {len(names)} hyperparameters.</p>")
    body.append(f"<h2>Last sync</h2><div class=box>{tables.last_sync(records)}</div>")
    body.append(f"<h2>Values</h2><div class=box>{tables.value_table(records)}</div>")
    body.append(tables.all_syncs(records))
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body>"
        f"<header><h1>{escape(title)}</h1><p>{_subtitle(records)}</p></header>"
        f"<main>{''.join(body)}</main>"
        f"<footer>{_THINNED} Written by hdet_kernels {__version__}.</footer></body></html>\n"
    )


def write_page(history: History, path: str | os.PathLike[str], title: str = "HDET run") -> None:
    """Write :func:`history_page` to a file. The arguments are checked, and the page is made, before it is opened."""
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"path must be that of a page to write, such as 'history.html', got {path!r}")
    text = history_page(history, title)
    Path(path).write_text(text, encoding="utf-8")


def _subtitle(records: list[SyncRecord]) -> str:
    replicas = len(records[-1].losses)
    names = len(names_of(records))
    return (
        f"{replicas} replica{'s' if replicas != 1 else ''}, {names} hyperparameter{'s' if names != 1 else ''}, "
        f"{len(records):,} sync{'s' if len(records) != 1 else ''} up to step {records[-1].step:,}"
    )
