"""A history read from a file, and its page: complete, well-formed, and without anything from outside."""

from __future__ import annotations

import html.parser
import json
import math
import re
import sys
from pathlib import Path

import pytest

from hdet_kernels import history_page as pages
from hdet_kernels import report
from tests.histories import BROKEN, HISTORIES, record, run

ALL = ["Training loss", "Loss on the probe", "Slopes of the loss", "Posterior of the peak"]
COST = ["Distance between replicas", "Time of a sync", "Bytes of a sync"]
RECORD = json.dumps(run(1)[0].to_dict())


class Parser(html.parser.HTMLParser):
    """Checks that elements are nested, and collects what could load something."""

    def __init__(self) -> None:
        super().__init__()
        self.stack: list[str] = []
        self.sources: list[str] = []
        self.seen: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)
        self.sources += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "data")]
        if tag not in ("meta", "img"):
            self.stack.append(tag)

    def handle_endtag(self, tag: str) -> None:
        while self.stack[-1] in ("td", "th", "tr") and self.stack[-1] != tag:
            self.stack.pop()
        assert self.stack.pop() == tag


QUICK = ("broken",)


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.full) for n in HISTORIES])
def test_a_page_of_every_kind_of_history(name: str) -> None:
    page = pages.history_page(HISTORIES[name], f"run <{name}>")
    parser = Parser()
    parser.feed(page)
    assert parser.stack == []
    assert all(source.startswith("data:image/png;base64,") for source in parser.sources), "nothing is loaded"
    assert not parser.seen & {"script", "link", "iframe", "object"}
    assert "url(" not in page
    assert not re.search(r"\b(nan|inf)\b", re.sub(r'"data:[^"]*"', "", page.split("</style>")[1]).lower())
    assert f"<title>run &lt;{name}&gt;</title>" in page
    assert "<b>" not in page, "names of the user are escaped"


@pytest.mark.full
def test_the_page_of_a_thousand_syncs_stays_small() -> None:
    assert len(pages.history_page(run(1000, replicas=8, groups=8))) < 3_000_000


def test_nothing_is_written_for_a_wrong_argument(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TypeError, match="path"):
        pages.write_page(BROKEN, None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="history is empty"):
        pages.write_page([], tmp_path / "page.html")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install 'hdet_kernels\[demo\]'"):
        pages.write_page(BROKEN, tmp_path / "page.html")
    assert list(tmp_path.iterdir()) == []


def titles(name: str) -> list[str]:
    return [chart.title for _, charts in report.sections_of(HISTORIES[name]) for chart in charts]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("broken", ["Learning rate", *ALL, *COST]),
        ("no loss", ["Learning rate", *ALL[2:], *COST]),
        ("before slopes were recorded", ["Learning rate", ALL[0], *COST[1:]]),
        ("nothing but scouting", ["Learning rate", ALL[0]]),
        ("odd names", ["<b>&\"'", *ALL[:2], *COST]),
        ("8 groups", [*(f"Learning rate of group {g}" for g in range(8)), *ALL[:2]]),
    ],
)
def test_a_chart_is_there_if_it_has_something_to_show(name: str, expected: list[str]) -> None:
    assert titles(name)[:10] == expected
    assert sum(title.startswith("Slope: ") for title in titles(name)) == (8 if name == "8 groups" else 0)


def test_every_replica_has_a_curve_and_very_many_are_a_band() -> None:
    (values,), (losses, _) = report.value_charts(BROKEN), report.loss_charts(BROKEN)
    assert [curve.label for curve in values.curves] == ["base", *(f"replica {r}" for r in range(4))]
    assert values.curves[1].values.tolist() == [each.values["lr/0"][0] for each in BROKEN]
    assert [curve.label for curve in losses.curves] == [*(f"replica {r}" for r in range(4)), "mean of the finite ones"]
    base, band = report.value_charts(HISTORIES["64 replicas"])[0].curves
    assert band.label == "lowest to highest of 64 replicas"
    assert band.low is not None
    assert band.high is not None
    assert (band.low / base.values).tolist() == pytest.approx([0.7] * 20)
    assert (band.high / base.values).tolist() == pytest.approx([1.3] * 20)
    fewer = report.loss_charts(HISTORIES["another number of replicas"])[0]
    assert [math.isnan(value) for value in fewer.curves[3].values] == [False] * 5 + [True] * 5


def test_a_loss_that_exploded_does_not_hide_the_others() -> None:
    losses, _ = report.loss_charts(BROKEN)
    assert 50 < losses.finite().max() < 150
    assert "drawn at the upper edge" in losses.note


def test_events_are_marked_and_scouting_rounds_are_single_points() -> None:
    for name, label, step in (("broken", "return to the start", 70), ("scouting", "end of scouting", 20)):
        (axes,) = report.draw(report.value_charts(HISTORIES[name])[0], HISTORIES[name]).axes
        (mark,) = [line for line in axes.lines if line.get_label() == label]
        assert list(mark.get_xdata()) == [step, step]
    base = axes.lines[0].get_ydata()
    assert [math.isnan(value) for value in base[:3]] == [True, True, False]


def test_findings_are_shown_where_the_controller_acted() -> None:
    records = [*run(20), *(record(step, slopes=None, errors=None, posterior=None) for step in range(210, 1000, 10))]
    slopes, posterior = *report.slope_charts(records), report.posterior_chart(records)
    for chart in (slopes, posterior):
        low, high = report.draw(chart, records).axes[0].get_xlim()
        assert 0 <= low < 10
        assert 200 < high < 250
    (curve,) = posterior.curves
    assert curve.low is not None
    assert (curve.low[0], curve.values[0]) == pytest.approx((math.exp(-0.6), math.exp(0.3)))


def test_titles_are_words() -> None:
    assert report.title_of("lr/0", ["lr/0"]) == "Learning rate"
    assert report.title_of("weight_decay/1", ["lr/0", "weight_decay/1"]) == "Weight decay"


def cells(text: str) -> list[list[str]]:
    """Return the cells of every row."""
    return [re.findall(r"<t[hd][^>]*>([^<]*)", row) for row in text.split("<tr>")[1:]]


def test_the_totals() -> None:
    assert dict(re.findall(r"<dt>([^<]*)</dt><dd>([^<]*)", pages.cards(BROKEN))) == {
        "Steps": "200",
        "Syncs": "20",
        "Replicas": "4",
        "Mean loss": "2.73",
        "Left out": "6",
        "Returns": "1",
        "Waited": "5.0 s",
        "Sent": "10.0 GB",
    }
    assert pages.cards(BROKEN).count("class=bad") == 2
    assert "2 scouting, 7 regular" in pages.cards(HISTORIES["scouting"])


def test_the_last_sync_has_a_row_for_every_replica() -> None:
    header, *rows = cells(pages.last_sync(BROKEN[6:7]))
    assert header == ["", "lr/0", "loss", "probe", "at the sync"]
    assert [(row[0], row[2], row[4]) for row in rows] == [(f"replica {r}", "–", "left out") for r in range(4)]
    assert "the first 64 of 100 replicas" in pages.last_sync(run(1, replicas=100))


def test_events_and_base_values() -> None:
    assert cells(pages.events(BROKEN))[1:] == [
        ["60", "replicas 0, 3 left out of the mean, because not finite"],
        ["70", "replicas 0, 1, 2, 3 left out of the mean, because not finite"],
        ["70", "all are bad"],
    ]
    assert pages.events(run(3)) == ""
    many = pages.events(run(100, excluded=[1]))
    assert "The last 64 of 100" in many
    assert cells(many)[-1][0] == "1,000"
    assert cells(pages.value_table(run(2)))[1] == ["lr/0", "0.001021", "0.001021", "0.001041", "0.001041"]


def test_all_syncs_are_listed_or_every_nth_with_the_events() -> None:
    assert len(cells(pages.all_syncs(BROKEN))) == 21
    records = run(1000)
    records[501] = BROKEN[6]
    steps = [row[0] for row in cells(pages.all_syncs(records))[1:]]
    assert len(steps) < 450
    assert "70" in steps
    assert steps[-1] == "10,000"


def test_a_file_of_lines_and_a_list_are_read_alike(tmp_path: Path) -> None:
    plain = [each.to_dict() for each in run(5)]
    lines, whole = tmp_path / "history.jsonl", tmp_path / "history.json"
    lines.write_text("".join(json.dumps(each) + "\n" for each in plain) + RECORD[:50])  # the last line is cut off
    whole.write_text(json.dumps(plain))
    assert pages.read_history(lines) == pages.read_history(whole) == run(5)


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("", "is empty"),
        ("[]", "has no record"),
        ("hello\n", "line 1"),
        (f"{RECORD}\nhello\n{RECORD}\n", "line 2"),
        ("[1, 2", "not valid JSON"),
        ('{"step": 3}\n', "line 1"),
        (f"[{RECORD}, 7]", "entry 1"),
        ("3\n", "line 1"),
        (RECORD.replace('"losses": [', '"losses": ["x", '), "line 1"),
        (RECORD.replace('"values": {"lr/0"', '"values": {"lr/1"'), "line 1"),
        (RECORD.replace('"base": {"lr/0": ', '"base": {"lr/0": null, "a": '), "line 1"),
        ("\xff", "read as text"),
    ],
)
def test_what_is_no_history_is_refused(tmp_path: Path, text: str, place: str) -> None:
    path = tmp_path / "history.json"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match=place) as refused:
        pages.read_history(path)
    assert str(path) in str(refused.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no file .*missing.jsonl"):
        pages.read_history(tmp_path / "missing.jsonl")
    with pytest.raises(ValueError, match="cannot be read"):
        pages.read_history(tmp_path)
