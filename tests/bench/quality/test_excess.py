"""Excess over plain training at its best."""

from __future__ import annotations

import math

import numpy as np
import pytest

from bench.quality.excess import PLAIN, PROBE, TRAINING, Excesses, excesses
from bench.quality.suite import STARTS
from bench.quality.yardstick import Yardstick
from tests.bench.quality.made_up_zoo import BEST, TASKS, hdet_runs, plain_runs, run, zoo


def made(losses: dict[int, float], **more: object) -> Excesses:
    """Return the excess of HDET runs at the best on digits, beside plain training on three tasks."""
    runs = [run("start", "digits", "hdet", BEST, seed, val, factor=1.0, **more) for seed, val in losses.items()]
    return excesses([*plain_runs(), *runs])


def test_excess_is_taken_seed_by_seed() -> None:
    """Seeds 0 and 1 have losses of 0.998 and 1; the mean of the yardstick's is 1."""
    found = made({0: 0.998 * 1.01, 1: 1.01})
    assert found.yardsticks["digits"].mean == pytest.approx(1.0)
    assert found.cells[PROBE, 1.0]["digits"] == pytest.approx({0: 0.998, 1: 1.0})
    assert made({99: 1.02}).means(PROBE, 1.0) == pytest.approx({"digits": 2.0}), "a seed without a yardstick"


@pytest.mark.parametrize(("val", "counted"), [(math.inf, 100.0), (math.nan, 100.0), (7.0, 100.0), (1.4, 40.0)])
def test_no_run_counts_with_more_than_all_of_the_loss(val: float, counted: float) -> None:
    assert made({1: val}).means(PROBE, 1.0) == pytest.approx({"digits": counted})


def test_diverged_runs_count_as_untrained() -> None:
    assert made({1: math.inf}, initial=1.3).means(PROBE, 1.0) == pytest.approx({"digits": 30.0})
    assert made({1: math.inf}, initial=5.0).means(PROBE, 1.0) == pytest.approx({"digits": 100.0})


def test_run_that_raised_counts_as_diverged() -> None:
    record = run("start", "digits", "hdet", BEST, 1, 0.0, factor=1.0, error="every replica is NaN")
    del record["val"]
    assert excesses([*plain_runs(), record]).means(PROBE, 1.0) == {"digits": 100.0}


def test_starts_are_factors_of_the_learning_rate_they_were_run_around() -> None:
    """The finer grid may choose another best learning rate than the one that the starts are factors of."""
    moved = [
        run("start", "digits", "hdet", 1.4 * BEST * start, 0, 1.0, factor=start) for start in (1.0, 10.0)
    ]  # fmt: skip
    found = excesses([*(record for record in plain_runs() if record["kind"] != "start"), *moved])
    assert found.yardsticks["digits"].best == pytest.approx(BEST)
    assert found.means(PROBE, 1.0) == pytest.approx({"digits": 0.2})
    assert set(found.cells) == {(PROBE, 1.0), (PROBE, 10.0), *((PLAIN, start) for start in (1.0,))}
    assert set(excesses(zoo().records).cells) >= {(PLAIN, start) for start in STARTS}


def test_summary_over_tasks() -> None:
    found = excesses([*plain_runs(), *hdet_runs(TASKS[:2]), *hdet_runs(TASKS[2:], harm=10.0)])
    summary = found.summary(PROBE, 1.0)
    assert summary is not None
    assert (summary.tasks, summary.compared, summary.worst_task) == (3, 3, "flights")
    assert summary.worst == pytest.approx(10 + summary.median)
    assert summary.mean == pytest.approx(summary.median + 10 / 3)
    assert summary.worse == 3
    errors = [one.error for one in found.differences(PROBE, 1.0).values()]
    assert summary.error == pytest.approx(math.sqrt(sum(error**2 for error in errors)) / 3)
    assert found.share_within(PROBE, 1.0, 5.0) == pytest.approx(2 / 3)
    off = found.summary(TRAINING, 10.0)
    assert off is not None
    assert (off.worse, off.better) == (1, 2), "plain training has 11 %, HDET with harm 11.4 %"
    assert found.summary("Prodigy", None) is None


def test_differences_are_those_of_pairs() -> None:
    """An offset of all runs of a seed is no difference."""
    base = excesses([*plain_runs(), *hdet_runs()]).differences(PROBE, 3.0)
    shifted = [
        record | {"val": record["val"] + 0.05 * record["seed"] * (record["kind"] == "start")}
        for record in (*plain_runs(), *hdet_runs())
    ]
    assert excesses(shifted).differences(PROBE, 3.0)["digits"].mean == pytest.approx(base["digits"].mean)


def test_difference_of_one_seed_has_the_noise_of_two_runs() -> None:
    """The yardstick has a deviation of 0.149 % over its ten seeds, and the difference √2 times that."""
    records = [*plain_runs(), *(record for record in hdet_runs() if record["seed"] == 0)]
    found = excesses(records)
    deviation = found.yardsticks["digits"].relative_deviation
    assert deviation == pytest.approx(0.149, abs=1e-3)
    difference = found.differences(PROBE, 1.0)["digits"]
    assert difference.error == pytest.approx(math.sqrt(2) * deviation)
    assert difference.mean == pytest.approx(0.45)
    assert found.single_seeds
    assert not excesses(zoo().records).single_seeds


def test_nothing_is_known_of_the_noise_of_one_seed_everywhere() -> None:
    records = [record for record in (*plain_runs(), *hdet_runs()) if record["seed"] == 0]
    assert excesses(records).differences(PROBE, 1.0) == {}


def test_two_standard_errors_are_rare_without_a_difference() -> None:
    """Tasks whose noise differs by a factor of 100 are judged alike, with three seeds each."""
    random, worse = np.random.default_rng(0), []
    noise = {f"task {index}": 0.1 * 10 ** (index / 15) for index in range(30)}
    for _ in range(10):
        rulers = {
            task: Yardstick(1.0, dict(enumerate(100 + size * random.standard_normal(10))), 1.0, False)
            for task, size in noise.items()
        }
        found = Excesses(rulers, {})
        for way in (PLAIN, PROBE):
            found.cells[way, 1.0] = {
                task: dict(enumerate(size * random.standard_normal(3))) for task, size in noise.items()
            }
        worse.append([one.worse for one in found.differences(PROBE, 1.0).values()])
    assert 0.01 < np.mean(worse) < 0.1
    assert abs(np.mean(worse, axis=0)[:15].mean() - np.mean(worse, axis=0)[15:].mean()) < 0.08


def test_sensitivity_is_the_mean_over_the_starts() -> None:
    found = excesses(zoo().records)
    by_start = [found.means("MoMo", start)["digits"] for start in STARTS]
    assert found.sensitivity("MoMo")["digits"] == pytest.approx(np.mean(by_start))
    assert found.sensitivity("Prodigy") == found.means("Prodigy", None), "it does not depend on the start"
    assert found.sensitivity("local SGD") == {}, "it does, and was run from one"
    assert found.means("local SGD", 1.0)


def test_task_without_a_start_has_no_sensitivity() -> None:
    records = [
        record for record in zoo().records
        if not (record["method"] == "hdet" and record["task"] == "images" and record["factor"] == 30.0)
    ]  # fmt: skip
    assert set(excesses(records).sensitivity(PROBE)) == {"digits", "flights"}
