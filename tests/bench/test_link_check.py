"""The check of the cost model: its formulas for gloo, and its record."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from bench import link_check
from tests.bench.entries import RESULTS

RECORD = RESULTS / "cost_check.json"


@pytest.mark.parametrize(
    ("nbytes", "expected_ms"),
    [
        # 1 ms a hop, so 2 with the request before it, and 1 kB/ms. The rows: 2 exchanges, in which 3 rows of 168 bytes
        # arrive. Few bytes: 2·3 rounds of 2 ms and half a chunk. Locally 2 µs a byte, as four ranks share two cores.
        (8, 2 * 2 + 3 * 0.168 + 2 * 3 * (2 + 0.001) + 0.016),
        # Many bytes: 2·3/4 of their time, and one request for each phase.
        (80_000, 2 * 2 + 3 * 0.168 + 120 + 4 + 160),
    ],
)
def test_predictions_by_hand(nbytes: int, expected_ms: float) -> None:
    link = link_check.Link("test", 1e-3, 1e6)
    assert link_check.predicted(4, nbytes, link, 1e-6, 2) == pytest.approx(expected_ms / 1e3)


def averages() -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return each link of the record with each of its averages."""
    links = json.loads(RECORD.read_text())["links"]
    return [(link, entry) for link in links for entry in link["checks"] if entry["operation"] == "converge"]


def test_record_agrees_with_the_formulas() -> None:
    record = json.loads(RECORD.read_text())
    assert averages()
    for link, entry in averages():
        fitted = link_check.Link("fitted", link["fitted"]["hop s"], link["fitted"]["bytes/s"])
        ranks, nbytes = entry["ranks"], entry["bytes"]
        guess = link_check.predicted(ranks, nbytes, fitted, record["local s/byte"], record["cores"])
        assert entry["predicted s"] == pytest.approx(guess, rel=1e-3)
        assert entry["textbook s"] == pytest.approx(link_check.textbook(ranks, nbytes, fitted), rel=1e-3)
        assert entry["error"] == pytest.approx(entry["predicted s"] / entry["measured s"] - 1, abs=1e-3)


def test_record_of_the_gathers_agrees_with_the_formulas() -> None:
    for link in json.loads(RECORD.read_text())["links"]:
        fitted = link_check.Link("fitted", link["fitted"]["hop s"], link["fitted"]["bytes/s"])
        assert [entry["ranks"] for entry in link["gathers"]] == list(link_check.RANKS)
        for entry in link["gathers"]:
            assert entry["predicted s"] == pytest.approx(link_check.predicted_gather(entry["ranks"], fitted), rel=1e-3)
            assert entry["error"] == pytest.approx(entry["predicted s"] / entry["measured s"] - 1, abs=1e-3)


def test_record_covers_all_links_ranks_and_sizes() -> None:
    found = [(link["rate Mb/s"], entry["ranks"], entry["bytes"], entry["repetitions"]) for link, entry in averages()]
    assert found == [
        (rate, ranks, size, link_check.repetitions(size))
        for rate, _, sizes in link_check.LINKS
        for ranks in link_check.RANKS
        for size in sizes
    ]


def test_record_has_no_paths_of_a_machine() -> None:
    assert not re.findall(r"/(?:home|root|tmp|work|usr)\b", RECORD.read_text())
