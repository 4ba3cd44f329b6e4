"""The tables of a page."""

from __future__ import annotations

import re

from hdet_kernels.history_page import tables
from tests.history_page.histories import BROKEN, HISTORIES, run


def cells(html: str) -> list[list[str]]:
    """Return the cells of every row."""
    return [re.findall(r"<t[hd][^>]*>([^<]*)", row) for row in html.split("<tr>")[1:]]


def test_the_totals() -> None:
    found = dict(re.findall(r"<dt>([^<]*)</dt><dd>([^<]*)", tables.cards(BROKEN)))
    assert found == {
        "Steps": "200",
        "Syncs": "20",
        "Replicas": "4",
        "Mean loss": "2.73",
        "Left out": "6",
        "Returns": "1",
        "Waited": "5.0 s",
        "Sent": "10.0 GB",
    }
    assert tables.cards(BROKEN).count("class=bad") == 2
    assert "class=bad" not in tables.cards(run(3))
    assert "2 scouting, 7 regular" in tables.cards(HISTORIES["scouting"])


def test_the_last_sync_has_a_row_for_every_replica() -> None:
    last = BROKEN[6:7]
    header, *rows = cells(tables.last_sync(last))
    assert header == ["", "lr/0", "loss", "probe", "at the sync"]
    assert [(row[0], row[2], row[4]) for row in rows] == [(f"replica {r}", "–", "left out") for r in range(4)]
    assert cells(tables.last_sync(run(2, probes=None)))[0] == ["", "lr/0", "loss", "at the sync"]
    assert "the first 64 of 100 replicas" in tables.last_sync(run(1, replicas=100))


def test_events_are_what_went_wrong() -> None:
    assert cells(tables.events(BROKEN))[1:] == [
        ["60", "replicas 0, 3 left out of the mean, because not finite"],
        ["70", "replicas 0, 1, 2, 3 left out of the mean, because not finite"],
        ["70", "training broke: return to the average of step 50"],
    ]
    assert tables.events(run(3)) == ""
    many = run(100, excluded=[1])
    assert "The last 64 of 100" in tables.events(many)
    assert cells(tables.events(many))[-1][0] == "1,000"


def test_base_values() -> None:
    header, row = cells(tables.value_table(run(2)))
    assert header == ["name", "first", "lowest", "highest", "last"]
    assert row == ["lr/0", "0.001021", "0.001021", "0.001041", "0.001041"]


def test_all_syncs_are_listed_or_every_nth_with_the_events() -> None:
    assert len(cells(tables.all_syncs(BROKEN))) == 21
    records = run(1000)
    records[501] = BROKEN[6]
    shown = tables.all_syncs(records)
    assert "1 in 3 of 1,000 syncs" in shown
    steps = [row[0] for row in cells(shown)[1:]]
    assert len(steps) < 450
    assert "70" in steps
    assert steps[-1] == "10,000"
