"""Base values, multipliers and the controller together, without a schedule or processes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from hdet_kernels import Explore, HypergradientController, RegressionController, SoftmaxController
from hdet_kernels.controller.protocol import MeasuredSlopes, Observation, Run, State
from hdet_kernels.fanout.explore import Hyperparameter
from hdet_kernels.fanout.spread import Spread

RUN = Run(1000, 10, 0.3, (None, None))


class Place:
    size, replica, rows = 4, 1, 1


class Listening(RegressionController):
    """A controller that keeps its observations."""

    seen: list[Observation]

    def update(self, run: Run, state: State, seen: Observation) -> State:
        self.seen.append(seen)
        return super().update(run, state, seen)


def spread(controller: Any, bounds: tuple[float, float] | None = None) -> Spread:
    rate = Hyperparameter("lr/0", 0.3, "linear", bounds, None, 0, "lr")
    other = Hyperparameter("x", 0.5, "linear", None, 2.0)
    return Spread([rate, other], controller, Place(), seed=0, scheduled=[0.1])  # type: ignore[arg-type]


def test_the_controller_sees_multipliers_after_bounds() -> None:
    controller = Listening()
    object.__setattr__(controller, "seen", [])
    values = spread(controller, bounds=(0.08, 0.11))
    values.move(RUN, values.observe(values.placement(), np.array([1.0, 2.0, 3.0, 4.0]), 70))
    (seen,) = controller.seen
    assert seen.step == 70
    assert seen.base.tolist() == [0.1, 2.0]
    assert sorted(seen.multipliers[0]) == pytest.approx([0.8, 0.9, 1.1, 1.1])
    assert sorted(seen.multipliers[1]) == pytest.approx([0.5, 1 - 0.5 / 3, 1 + 0.5 / 3, 1.5])


def test_slopes_are_those_of_the_learning_rates_and_zero_for_the_others() -> None:
    controller = Listening()
    object.__setattr__(controller, "seen", [])
    values = spread(controller)
    values.move(RUN, values.observe(values.placement(), np.ones(4), 70, MeasuredSlopes([0.7], [0.1])))
    slopes = controller.seen[0].slopes
    assert slopes is not None
    assert slopes.tolist() == [0.7, 0.0]
    errors = controller.seen[0].errors
    assert errors is not None
    assert errors.tolist() == [0.1, np.inf]


def test_softmax_continues_from_the_bounded_base() -> None:
    controller = SoftmaxController(warmup_steps=0, scale=0.1, rate=0.5, decay=0.0)
    values = spread(controller, bounds=(0.09, 0.101))
    rho = values.placement().values[0]
    losses = -rho  # a higher value is better: the base would rise without end
    for _ in range(30):
        values.move(RUN, values.observe(values.placement(), losses * 100, 70))
    assert values.base(0) == 0.101
    assert values.controller_state["eta"][0] < 0.101 * 1.2, "it does not grow beyond the bound"


def test_softmax_never_changes_the_sign() -> None:
    controller = SoftmaxController(warmup_steps=0, scale=1e-3, rate=3.0, decay=0.0)
    rate = Hyperparameter("lr/0", 0.9, "linear", None, None, 0, "lr")
    values = Spread([rate], controller, Place(), seed=0, scheduled=[0.1])  # type: ignore[arg-type]
    for cycle in range(20):
        values.fan_out(cycle)
        values.move(RUN, values.observe(values.placement(), values.placement().values[0] * 1e3, 70))
        assert values.base(0) > 0


def test_multipliers_are_one_where_replicas_do_not_depart() -> None:
    values = spread(None)
    assert values.diverges
    for in_pairs in (False, True):
        values.fan_out(3, 5, in_pairs=in_pairs, departs=(False, True))
        applied = values.placement().applied
        assert (applied[0] == 1).all()
        assert (applied[1] != 1).any()
        values.fan_out(3, 5, in_pairs=in_pairs, departs=(False, False))
        assert (values.placement().applied == 1).all()
        assert not values.diverges


def test_pairs_depart_in_at_most_one_hyperparameter() -> None:
    values = spread(None)
    values.fan_out(0, 1, in_pairs=True)
    first = values.placement().applied
    assert ((first != 1).sum(axis=0) <= 1).all()
    values.fan_out(0, 2, in_pairs=True)
    assert (values.placement().applied != first).any(), "the sync decides who departs, not the cycle"


def test_the_state_of_the_controller_is_copied() -> None:
    values = spread(RegressionController())
    state = values.state_dict()
    values.controller_state["mu"][0] = 7.0
    assert state["controller"]["mu"] == [0.0, 0.0]
    values.load_state_dict(state, [{"lr": 0.1}])
    state["controller"]["mu"][0] = 9.0
    assert values.controller_state["mu"] == [0.0, 0.0]
    assert values.scheduled == [0.1]


class Rows:
    """Replicas 2 and 3 of four, in one process."""

    size, replica, rows = 4, 2, 2


def test_a_process_with_one_replica_writes_that_replicas_values() -> None:
    values, written = spread(None), []
    values.hyperparameters = (values.hyperparameters[0], replace(values.hyperparameters[1], apply=written.append))
    groups: list[dict[str, Any]] = [{"lr": 0.1}]
    values.write(groups)
    placed = values.placement()
    assert groups == [{"lr": pytest.approx(placed.values[0, Place.replica])}]
    assert written == [pytest.approx(placed.values[1, Place.replica])]
    assert values.rates([0.2]) == [pytest.approx(2 * placed.values[0, Place.replica])]
    values.write_rates(groups)
    assert "per_replica" not in groups[0]


def test_a_process_with_several_replicas_writes_base_and_values() -> None:
    rate = Hyperparameter("lr/0", 0.3, "linear", None, None, 0, "lr")
    values = Spread([rate], None, Rows(), seed=0, scheduled=[0.1])  # type: ignore[arg-type]
    groups: list[dict[str, Any]] = [{"lr": 0.1}]
    values.write(groups)
    own = values.placement().values[0, 2:4].tolist()
    assert groups[0]["lr"] == 0.1
    assert groups[0]["per_replica"]["lr"] == pytest.approx(tuple(own))
    assert values.rates([0.2]) == [0.2], "the optimizer's group holds the base"
    values.write_rates(groups)
    assert groups[0]["per_replica"]["lr"] == pytest.approx(tuple(2 * value for value in own))


@pytest.mark.parametrize(("reads", "expected"), [("losses", True), ("slopes", False)])
def test_only_controllers_that_read_losses_compare_them(reads: str, expected: bool) -> None:
    controller = RegressionController() if reads == "losses" else HypergradientController()
    assert spread(controller).reads_losses is expected
    assert not spread(None).reads_losses


def test_a_cycle_begins_as_the_controller_wished() -> None:
    """Early syncs count for pairs, the number of the cycle for permutations."""
    run = Run(100, 10, 0.3, (None, None), early=(4,), departs=((0, 20), None))
    values, other = spread(None), spread(None)
    for step in (0, 4, 10, 20):
        for in_pairs in (False, True):
            values.begin_cycle(replace(run, in_pairs=in_pairs), step)
            syncs = step // 10 + (step >= 4)
            other.fan_out(step // 10, syncs, in_pairs=in_pairs, departs=(step < 20, True))
            np.testing.assert_array_equal(values.placement().applied, other.placement().applied)


def test_the_spread_of_an_optimizer_follows_the_schedule_and_gives_back() -> None:
    groups = [{"lr": 0.1, "weight_decay": 0.5}, {"lr": torch.tensor(0.2)}]
    run = Run(100, 10, 0.3, (None,) * 3)
    explore = [Explore("weight_decay", groups=[0])]
    values = Spread.of(groups, Place(), run=run, spread=0.3, explore=explore)  # type: ignore[arg-type]
    assert [hyper.name for hyper in values.hyperparameters] == ["lr/0", "lr/1", "weight_decay/0"]
    values.follow(groups)
    expected = values.placement().values[:, 1]
    found = [float(number) for number in (groups[0]["lr"], groups[1]["lr"], groups[0]["weight_decay"])]
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert found[0] != 0.1
    values.give_back(groups)
    assert (groups[0]["lr"], groups[1]["lr"]) == (0.1, torch.tensor(0.2))
    groups[0]["lr"] = 0.05
    values.follow(groups)
    assert values.bases() == {"lr/0": "5.000000e-02", "lr/1": "2.000000e-01", "weight_decay/0": "5.000000e-01"}


def test_a_run_that_describes_other_hyperparameters_is_refused() -> None:
    run = Run(100, 10, 0.3, (None, None))
    with pytest.raises(ValueError, match=r"run\.floors has 2 entries, expected one for each of lr/0: the learning"):
        Spread.of([{"lr": 0.1}], Place(), run=run, spread=0.3)  # type: ignore[arg-type]


def test_the_spread_of_an_optimizer_can_tie_its_groups() -> None:
    groups = [{"lr": 0.1, "weight_decay": 0.5}, {"lr": 0.1, "weight_decay": 0.0}, {"lr": 0.3}]
    run = Run(100, 10, 0.3, (None,) * 2)
    values = Spread.of(groups, Place(), run=run, spread=0.3, tie_groups=[[0, 1]])  # type: ignore[arg-type]
    assert values.tied == [(0, 1), (2,)]
    values.follow(groups)
    assert groups[0]["lr"] == groups[1]["lr"] == values.placement().values[0, 1] != 0.1
    with pytest.raises(ValueError, match="tie_groups must be"):
        Spread.of(groups, Place(), run=run, spread=0.3, tie_groups="all")  # type: ignore[arg-type]
