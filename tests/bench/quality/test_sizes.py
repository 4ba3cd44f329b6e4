"""Sizes of the suite."""

from __future__ import annotations

from bench.quality import suite
from bench.quality.sizes import COSTLY, SIZES


def test_costly_tasks_have_few_seeds() -> None:
    size, (costly, most) = SIZES["zoo"], next(iter(COSTLY.items()))
    assert (size.seeds_of("digits", 0.1), size.seeds_of("digits", 1.0), size.seeds_near("digits")) == (3, 5, 10)
    assert {size.seeds_of(costly, 1.0), size.seeds_near(costly)} == {most}


def test_small_part_has_no_finer_grid() -> None:
    assert SIZES["ci"].seeds_of("digits", 1.0) == 10
    assert suite.near_jobs(SIZES["ci"], {"digits": 1.0}) == []
