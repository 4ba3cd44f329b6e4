"""Tables of the zoo."""

from __future__ import annotations

import pytest

from bench.quality import zoo_tables
from bench.quality.designs import Outcome
from bench.quality.excess import PROBE, excesses
from tests.bench.quality.made_up_zoo import TASKS, hdet_runs, plain_runs, zoo


def rows(table: str) -> list[list[str]]:
    """Return the cells of a table's rows."""
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]


def test_tasks_have_a_row_each_and_harm_is_bold() -> None:
    found = excesses([*plain_runs(), *hdet_runs(TASKS[:2], harm=-0.5), *hdet_runs(TASKS[2:], harm=9.5)])
    table = zoo_tables.tasks_table(found, PROBE)
    assert table.splitlines()[0].count("|") == 10
    cells = {row[0]: row[1:] for row in rows(table)}
    assert set(cells) == set(TASKS)
    assert cells["digits"][3] == "0.0"
    assert cells["flights"][3] == "**10**"


def test_sensitivity_beside_peers() -> None:
    found = rows(zoo_tables.sensitivity_table(excesses(zoo().records)))
    assert [row[0] for row in found] == [
        "HDET, probe", "Prodigy", "HDET, probe, no learning rate", "HDET, training loss, no learning rate",
        "HDET, training loss", "MoMo", "plain", "local SGD",
    ]  # fmt: skip
    assert {row[0]: row[5] for row in found}["Prodigy"] == "same"
    assert found[-1][2:5] == ["–"] * 3


def test_bars_and_summaries_have_all_starts() -> None:
    found = excesses(zoo().records)
    assert len(rows(zoo_tables.bars_table(found))) == 17
    assert zoo_tables.bars_met(found).count("of 17") == 2
    assert len(rows(zoo_tables.summary_table(found))) == 7 + 8 + 8


def test_tasks_that_are_no_longer_in_the_suite_are_shown() -> None:
    records = [{**record, "task": "gone"} for record in plain_runs(["digits"])]
    assert rows(zoo_tables.yardsticks_table(excesses(records)))[0][:2] == ["gone", "–"]


def test_designs_on_the_frontier_are_marked() -> None:
    found = [Outcome(name, PROBE, 3, harm, harm, 0, 0, recovery) for name, harm, recovery in (("a", 1, 2), ("b", 2, 3))]
    assert [(row[0], row[-1]) for row in rows(zoo_tables.designs_table(found))] == [("a", "yes"), ("b", "")]


@pytest.mark.parametrize(
    ("value", "text"), [(-0.04, "0.0"), (-0.2, "−0.2"), (9.94, "9.9"), (9.96, "10"), (99.9, "100")]
)
def test_percents(value: float, text: str) -> None:
    assert zoo_tables.percent(value) == text
