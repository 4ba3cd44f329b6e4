"""Which charts a history has, and what they show."""

from __future__ import annotations

import math

import pytest

from hdet_kernels.history_page.charts import colour, sections_of, title_of, value_charts
from tests.history_page.histories import BROKEN, HISTORIES, record, run


def titles(name: str) -> list[str]:
    return [chart.title for _, charts in sections_of(HISTORIES[name]) for chart in charts]


ALL = ["Training loss", "Loss on the probe", "Slopes of the loss", "Posterior of the peak"]
COST = ["Distance between replicas", "Time of a sync", "Bytes of a sync"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("broken", ["Learning rate", *ALL, *COST]),
        ("one record", ["Learning rate", *ALL, *COST]),
        ("no loss", ["Learning rate", *ALL[2:], *COST]),
        ("before slopes were recorded", ["Learning rate", ALL[0], *COST[1:]]),
        ("nothing but scouting", ["Learning rate", ALL[0]]),
        ("odd names", ["<b>&\"'", *ALL[:2], *COST]),
    ],
)
def test_a_chart_is_there_if_it_has_something_to_show(name: str, expected: list[str]) -> None:
    assert titles(name) == expected


def test_every_group_has_a_chart_of_its_values_and_its_slopes() -> None:
    found = titles("8 groups")
    assert [title for title in found if title.startswith("Learning")] == [
        f"Learning rate of group {g}" for g in range(8)
    ]
    assert sum(title.startswith("Slope: ") for title in found) == 8


def test_every_replica_has_a_curve_and_very_many_are_a_band() -> None:
    (_, (values, *_)), (_, (losses, *_)), *_ = sections_of(HISTORIES["broken"])
    assert [curve.label for curve in values.curves] == ["base", *(f"replica {r}" for r in range(4))]
    assert list(values.curves[1].ys) == [each.values["lr/0"][0] for each in BROKEN]
    assert [curve.label for curve in losses.curves] == [*(f"replica {r}" for r in range(4)), "mean of the finite ones"]
    (_, (values, *_)), *_ = sections_of(HISTORIES["64 replicas"])
    assert [curve.label for curve in values.curves] == ["base", "lowest to highest of 64 replicas"]


def test_a_replica_that_is_no_longer_there_has_a_gap() -> None:
    _, (_, (losses, *_)), *_ = sections_of(HISTORIES["another number of replicas"])
    assert [value is None for value in losses.curves[3].ys] == [False] * 5 + [True] * 5


def test_a_loss_that_exploded_does_not_hide_the_others() -> None:
    _, (_, (losses, *_)), *_ = sections_of(BROKEN)
    assert 50 < losses.ceiling < 150
    assert "drawn at the upper edge" in losses.note
    _, (_, (calm, *_)), *_ = sections_of(run(5))
    assert math.isinf(calm.ceiling)


def test_returns_and_the_end_of_scouting_are_marked() -> None:
    (_, (chart, *_)), *_ = sections_of(BROKEN)
    assert list(chart.marks) == [(70.0, "bad", "return to an earlier average")]
    (_, (chart, *_)), *_ = sections_of(HISTORIES["scouting"])
    assert list(chart.marks) == [(20.0, "scout", "end of scouting")]
    assert chart.curves[0].ys[1] is None, "rounds are no line: each begins anew"


def test_findings_are_shown_where_the_controller_acted() -> None:
    later = [record(step, slopes=None, errors=None, posterior=None) for step in range(210, 1000, 10)]
    sections = dict(sections_of([*run(20), *later]))
    assert [chart.steps for chart in sections["Findings of the controller"]] == [(10, 200)] * 2
    assert [chart.steps for chart in sections["Losses"]] == [(10, 990)] * 2


def test_the_posterior_is_a_factor() -> None:
    band, mean = dict(sections_of(run(3)))["Findings of the controller"][1].curves
    assert list(mean.ys) == pytest.approx([math.exp(0.3)] * 3)
    assert (band.lows[0], band.ys[0]) == (pytest.approx(math.exp(-0.6)), pytest.approx(math.exp(1.2)))


def test_titles_are_words() -> None:
    assert title_of("lr/0", ["lr/0"]) == "Learning rate"
    assert title_of("weight_decay/1", ["lr/0", "weight_decay/1"]) == "Weight decay"
    assert title_of("dropout", ["lr/0", "dropout"]) == "Dropout"


def test_colours_differ() -> None:
    for count in (2, 8, 16):
        assert len({colour(number, count) for number in range(count)}) == count


@pytest.mark.parametrize(("lowest", "cut"), [(1e-3, False), (1e-7, True)])
def test_values_that_are_cut_off_are_named(lowest: float, cut: bool) -> None:
    (chart,) = value_charts([record(step, base={"lr/0": base}) for step, base in ((1, 0.1), (2, lowest))])
    assert ("powers of ten are shown" in chart.note) is cut
