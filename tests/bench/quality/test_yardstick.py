"""The best learning rate of a grid, and its loss without the flattery of the choice."""

from __future__ import annotations

import math

import numpy as np
import pytest

from bench.quality.yardstick import best_rates, measured, yardsticks
from tests.bench.quality.made_up_zoo import BEST, plain_runs, run
from tests.bench.quality.scripted import run_record


def test_best_learning_rate_of_a_grid() -> None:
    records = [run_record("grid", "plain", lr, seed, lr + 0.01 * seed) for lr in (3.0, 1.0, 2.0) for seed in (0, 1)]
    assert best_rates(records) == {"digits": 1.0}


def test_finer_grid_replaces_the_first() -> None:
    first = [run("grid", "digits", "plain", lr, 0, loss) for lr, loss in ((1.0, 0.9), (2.0, 1.0), (4.0, 1.2))]
    losses = {1.0: 1.1, 1.4142: 1.0, 2.0: 1.05}
    finer = [run("near", "digits", "plain", lr, seed, loss) for lr, loss in losses.items() for seed in range(4)]
    (found,) = yardsticks([*first, *finer]).values()
    assert found.best == 1.4142
    assert found.mean == pytest.approx(1.0)
    assert found.claimed == 0.9
    assert found.flattery == pytest.approx(10)
    assert not found.at_the_end
    assert yardsticks(first)["digits"].at_the_end


def test_each_half_of_the_seeds_is_measured_where_the_other_half_is_best() -> None:
    grid = {1.0: {0: 1.0, 1: 2.0, 2: 1.0, 3: 2.0}, 2.0: {0: 1.8, 1: 1.1, 2: 1.8, 3: 1.1}}
    found = measured(grid, grid)
    assert found.best == 2.0, "1.45 is below 1.5"
    assert found.losses == {1: 2.0, 3: 2.0, 0: 1.8, 2: 1.8}
    assert found.claimed == pytest.approx(1.45)


def test_choice_among_equals_does_not_flatter() -> None:
    """Of many learning rates that are equally good, the lowest mean is below the truth and the yardstick is not."""
    random, claimed, means = np.random.default_rng(0), [], []
    for _ in range(40):
        grid = {float(lr): dict(enumerate(1 + 0.1 * random.standard_normal(10))) for lr in range(1, 6)}
        found = measured(grid, grid)
        claimed.append(found.claimed)
        means.append(found.mean)
    assert np.mean(claimed) < 0.97
    assert abs(np.mean(means) - 1) < 0.015


def test_learning_rates_with_few_seeds_are_left_out() -> None:
    grid = {1.0: dict.fromkeys(range(10), 1.0), 2.0: {0: 0.5}}
    assert measured(grid, grid).best == 1.0


def test_diverged_runs_are_not_best() -> None:
    grid = {1.0: {0: 1.0, 1: 1.0}, 2.0: {0: 0.5, 1: math.inf}}
    assert measured(grid, grid).best == 1.0


def test_task_that_diverges_everywhere_has_no_yardstick() -> None:
    """One seed that diverges is enough: on average over seeds, nobody would choose such a learning rate."""
    losses = {1.0: (0.5, math.inf), 2.0: (math.nan, 0.5)}
    runs = [
        run("near", "digits", "plain", lr, seed, loss) for lr, two in losses.items() for seed, loss in enumerate(two)
    ]
    assert yardsticks(runs) == {}
    assert yardsticks([*runs, run("near", "digits", "plain", 4.0, 0, 1.0)]) == {}, "one seed of two is too few"
    sound = [run("near", "digits", "plain", 4.0, seed, 1.0) for seed in (0, 1)]
    assert yardsticks([*runs, *sound])["digits"].best == 4.0


def test_recorded_and_new_runs_are_at_one_learning_rate() -> None:
    runs = [run("near", "digits", "plain", lr, seed, 1.0) for seed, lr in enumerate((2**0.5, 1.4142))]
    assert len(yardsticks(runs)["digits"].losses) == 2


def test_made_up_zoo_has_its_best() -> None:
    assert best_rates(plain_runs()) == pytest.approx(dict.fromkeys(("digits", "images", "flights"), BEST))
