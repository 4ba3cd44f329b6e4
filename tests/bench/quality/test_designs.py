"""Harm and recovery of designs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.quality import designs
from bench.quality.excess import PROBE, excesses
from tests.bench.quality.made_up_zoo import hdet_runs, zoo


def test_designs_are_compared_with_the_zoos_plain_runs(tmp_path: Path) -> None:
    for name, harm in (("careful", -0.4), ("rash", 3.0)):
        (tmp_path / f"{name}.json").write_text(json.dumps({"design": name, "records": hdet_runs(harm=harm)}))
    found = designs.outcomes(excesses(zoo().records), designs.read(tmp_path))
    harms = {one.design: one.harm for one in found if one.mode == PROBE}
    assert list(harms) == ["default", "careful", "rash"]
    assert harms["careful"] == pytest.approx(harms["default"] - 0.4)
    assert harms["rash"] == pytest.approx(harms["default"] + 3)
    assert {one.tasks for one in found} == {3}
    assert all(one.recovery > one.harm for one in found)


def test_file_without_a_name_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(json.dumps({"records": []}))
    with pytest.raises(ValueError, match=r"x\.json has no name of a design: expected an entry 'design'"):
        designs.read(tmp_path)


def test_frontier_has_those_that_no_other_beats() -> None:
    points = {"a": (0.1, 9.0), "b": (0.5, 2.0), "c": (0.6, 3.0), "d": (2.0, 1.0), "e": (3.0, 1.0)}
    found = [designs.Outcome(name, PROBE, 3, harm, harm, recovery) for name, (harm, recovery) in points.items()]
    assert [one.design for one in designs.frontier(found)] == ["a", "b", "d"]
