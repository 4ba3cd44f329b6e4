"""Records by their entries."""

from __future__ import annotations

from bench.quality.selection import same, select
from tests.bench.quality.scripted import run_record


def test_numbers_are_equal_up_to_the_digits_of_a_file() -> None:
    assert same(0.33333, 1 / 3)
    assert not same(0.333, 1 / 3)
    assert same({"slack": 0.33333, "law": "root"}, {"slack": 1 / 3, "law": "root"})
    assert not same({"slack": 0.33333}, {"slack": 1 / 3, "law": "root"})
    assert not same(None, 1 / 3)


def test_failed_runs_are_not_selected() -> None:
    good = run_record("start", "hdet", 0.1, 0, 1.0, options={})
    failed = {**good, "error": "raised"}
    del failed["val"]
    assert select([good, failed], kind="start", lr=0.1, options={}) == [good]
    assert select([good], options={"slack": 0.9}) == []
