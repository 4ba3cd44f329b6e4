"""Harm and recovery of designs."""

from __future__ import annotations

from pathlib import Path

from bench.quality import designs
from bench.quality.excess import MODES, PROBE
from tests.bench.quality.scripted_runs import scripted

SEEN = {"census": scripted(breaks_from=8.0, too_low=2.0, too_high=8.0)}


def test_designs_are_played_through_recorded_runs() -> None:
    found = {(one.design, one.mode): one for one in designs.outcomes(SEEN, {})}
    assert set(found) == {(design, mode) for design in designs.TRIED for mode in MODES}
    plain, own = found["trust=1: plain training", PROBE], found[designs.DEFAULT, PROBE]
    assert own.high < plain.high, "what breaks is lowered"
    assert (own.low, own.harm) == (plain.low, plain.harm), "and nothing else is changed"
    assert found["edge only, no returns", PROBE].high == plain.high, "nothing here is at the edge"
    assert found["returns only, no edge", PROBE].high == own.high


def test_outcomes_are_kept_in_a_file(tmp_path: Path) -> None:
    made = [designs.Outcome("trust=3", PROBE, 3, 0.1, 0.2, 10.0, 5.0, 7.5)]
    designs.write(tmp_path / "designs.json", made)
    assert designs.read(tmp_path / "designs.json") == made
    assert designs.read(tmp_path / "none.json") == []


def test_frontier_has_those_that_no_other_beats() -> None:
    points = {"a": (0.1, 9.0), "b": (0.5, 2.0), "c": (0.6, 3.0), "d": (2.0, 1.0), "e": (3.0, 1.0)}
    found = [designs.Outcome(name, PROBE, 3, harm, harm, 0.0, 0.0, end) for name, (harm, end) in points.items()]
    assert [one.design for one in designs.frontier(found)] == ["a", "b", "d"]
