"""Sizes of the suite."""

from __future__ import annotations

from bench.quality import suite
from bench.quality.sizes import SIZES


def test_noisy_tasks_have_more_seeds_at_the_best() -> None:
    """A standard error of 0.5 % needs four seeds for a deviation of 1 %, sixteen for 2 %, and too many for 19 %."""
    size = SIZES["zoo"].with_noise({"images": 1.0, "flights": 2.0, "digits": 19.0})
    assert [size.seeds_of(task, 1.0) for task in ("images", "flights", "digits", "language")] == [5, 16, 20, 5]
    assert {size.seeds_of(task, 0.1) for task in size.tasks} == {3}
    jobs = suite.near_jobs(size, dict.fromkeys(("images", "flights", "digits"), 1.0))
    seeds = {
        task: 1 + max(job["spec"]["seed"] for job in jobs if job["task"] == task) for task in ("images", "flights")
    }
    assert seeds == {"images": 10, "flights": 16}


def test_small_part_has_no_noisy_tasks() -> None:
    size = SIZES["ci"].with_noise({"digits": 19.0})
    assert size.seeds_of("digits", 1.0) == 10
    assert suite.near_jobs(size, {"digits": 1.0}) == []
