"""The judgement of stability, on levels and slopes that are written out, and what the controller does with it."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hdet_kernels import RegressionController, multipliers, permutation
from hdet_kernels.controller import peak_posterior
from hdet_kernels.controller.protocol import Observation, Run
from hdet_kernels.controller.stability import Cycle, Stability
from tests.controller.cases import PROPERTY, SETTINGS

#: Cycles that a plateau lasts.
COUNT = 8


def judged(
    stability: Stability,
    level: float,
    slope: float,
    evidence: float,
    rate: float,
    *,
    early: bool = False,
    noise: float = 0.0,
) -> Stability:
    """Return the judgement after one more cycle."""
    cycle = Cycle(level, slope, evidence, rate, noise)
    return stability.after(cycle, early=early, span=COUNT, settings=SETTINGS)


def after(
    *costs: float, first: float = 3.0, level: float = 1.0, evidence: float = 0.9, early: bool = False
) -> Stability:
    """Return the judgement after cycles with these costs, over the total gain, at learning rates of 1, 2, 3, …"""
    stability = Stability(first)
    for index, cost in enumerate(costs):
        stability = judged(stability, level, cost * (first - level), evidence, index + 1.0, early=early)
    return stability


#: Costs that mark the edge of stability.
AT_EDGE = (1.01 * SETTINGS.edge_cost,) * SETTINGS.cost_cycles


@pytest.mark.parametrize("first", [3.0, 1.001, 100.0])
@pytest.mark.parametrize(("more", "at_edge"), [(1.01, True), (0.99, False), (1e6, True), (-5.0, False), (0.0, False)])
def test_the_edge_is_marked_by_the_cost_over_the_total_gain(more: float, at_edge: bool, first: float) -> None:
    stability = after(*[more * SETTINGS.edge_cost] * SETTINGS.cost_cycles, first=first)
    assert stability.edge == (SETTINGS.cost_cycles if at_edge else None)
    assert stability.highest_rate(SETTINGS) == (SETTINGS.edge_margin * SETTINGS.cost_cycles if at_edge else math.inf)


def test_one_costly_cycle_does_not_mark_the_edge() -> None:
    assert after(0.01, 0.01, 0.01, 3.5 * SETTINGS.edge_cost, 0.01, 0.01, 0.01).edge is None
    assert after(*AT_EDGE[1:]).edge is None


def test_the_median_of_the_last_cycles_counts() -> None:
    # A single outlier does not decide in either direction.
    assert (
        after(
            -9.0,
            -9.0,
            0.5 * SETTINGS.edge_cost,
            1.6 * SETTINGS.edge_cost,
            0.5 * SETTINGS.edge_cost,
            1.6 * SETTINGS.edge_cost,
        ).edge
        == 6
    )
    assert after(0.0, 9.0, 0.3 * SETTINGS.edge_cost, 0.3 * SETTINGS.edge_cost, 0.3 * SETTINGS.edge_cost).edge is None
    assert after(0.0, 1.6 * SETTINGS.edge_cost, -9.0, 1.6 * SETTINGS.edge_cost, 1.6 * SETTINGS.edge_cost).edge == 5


@pytest.mark.parametrize("level", [3.0, 3.1])
def test_without_a_gain_there_is_no_edge(level: float) -> None:
    stability = Stability(3.0)
    for _ in range(SETTINGS.cost_cycles):
        stability = judged(stability, level, 1.0, 0.9, 1.0)
    assert stability.edge is None


@pytest.mark.parametrize("evidence", [0.4, 0.0, -0.9])
def test_weak_evidence_does_not_mark_the_edge(evidence: float) -> None:
    assert after(*AT_EDGE, evidence=evidence).edge is None


def test_costs_of_early_cycles_count_later() -> None:
    early = after(*AT_EDGE, early=True)
    assert early.edge is None
    assert judged(early, 1.0, 2.1 * SETTINGS.edge_cost, 0.9, 7.0).edge == 7.0


def test_the_first_edge_stays() -> None:
    for value in (0.1, 9.0):
        assert judged(after(*AT_EDGE), 0.9, 1.0, 0.9, value).edge == SETTINGS.cost_cycles


@pytest.mark.parametrize(("evidence", "ends"), [(-0.9, True), (-0.3, True), (-0.2, False), (0.0, False), (0.9, False)])
def test_evidence_for_a_larger_rate_removes_the_edge_and_progress_does_not(evidence: float, ends: bool) -> None:
    assert (judged(after(*AT_EDGE), 0.2, 1e-3, evidence, 20.0).edge is None) is ends


@PROPERTY
@given(st.lists(st.tuples(st.floats(-10, 10), st.floats(-9, 9), st.floats(-1, 1)), max_size=12))
def test_the_state_survives_json_bit_for_bit(cycles: list[tuple[float, float, float]]) -> None:
    straight = loaded = Stability(3.0)
    for index, cycle in enumerate(cycles):
        straight = judged(straight, *cycle, rate=index + 1.0, early=index < 3)
        loaded = Stability.of(
            json.loads(json.dumps(judged(loaded, *cycle, rate=index + 1.0, early=index < 3).state_dict()))
        )
    assert loaded == straight


@pytest.mark.parametrize(("share", "diverges"), [(1.02, True), (0.98, False), (1e9, True), (-1.0, False)])
@pytest.mark.parametrize("since", [1, 2, COUNT + 3])
def test_a_large_loss_within_one_cycle_is_divergence(share: float, diverges: bool, since: int) -> None:
    """However long ago the lowest level was reached."""
    stability = at_levels(2.5, 2.0, 1.0, *[1.05] * (since - 1))
    stability = judged(stability, 1.0 + share * SETTINGS.divergence_loss * 2.0, 0.0, 0.9, 7.0)
    assert stability.diverged_at == (7.0 if diverges else None)
    assert stability.highest_rate(SETTINGS) == (SETTINGS.divergence_cut * 7.0 if diverges else math.inf)


def test_the_lowest_diverged_rate_counts_for_good() -> None:
    stability = at_levels(2.5, 2.0, 1.0)
    for rate, diverged_at in ((7.0, 7.0), (9.0, 7.0), (3.0, 3.0)):
        stability = judged(stability, 2.0, 0.0, 0.9, rate)
        assert stability.diverged_at == diverged_at
    assert judged(stability, 0.5, -1.0, -0.9, 1.0).highest_rate(SETTINGS) == SETTINGS.divergence_cut * 3.0


@pytest.mark.parametrize("evidence", [0.4, 0.0, -0.9])
def test_weak_evidence_marks_neither_divergence_nor_a_plateau(evidence: float) -> None:
    assert judged(at_levels(2.5, 2.0, 1.0), 9.0, 1.0, evidence, 7.0).diverged_at is None
    assert not at_levels(*[1.0] * (COUNT + 1), evidence=evidence).plateau


@pytest.mark.parametrize(
    ("noise", "real"), [(0.0, True), (1.9 / SETTINGS.real_gain, True), (2.1 / SETTINGS.real_gain, False)]
)
def test_the_gain_must_exceed_the_noise(noise: float, real: bool) -> None:
    stability = at_levels(2.5, 2.0, 1.0)
    assert (judged(stability, 1.5, 0.1, 0.9, 7.0, noise=noise).diverged_at is not None) is real
    stability = at_levels(*[1.0] * COUNT)
    assert judged(stability, 1.0, 0.1, 0.9, 7.0, noise=noise).plateau is real


def test_no_divergence_early_or_without_a_gain() -> None:
    assert judged(at_levels(2.5, 2.0, 1.0), 9.0, 1.0, 0.9, 7.0, early=True).diverged_at is None
    assert judged(at_levels(4.0, 3.5, 3.2), 9.0, 1.0, 0.9, 7.0).diverged_at is None


def at_levels(*levels: float, first: float = 3.0, cost: float = 0.0, evidence: float = 0.9) -> Stability:
    """Return the judgement after cycles that ended at these levels, with this cost over the total gain."""
    stability = Stability(first)
    for index, level in enumerate(levels):
        stability = judged(stability, level, cost * (first - level), evidence, index + 1.0)
    return stability


@pytest.mark.parametrize("first", [3.0, 1.1, 100.0])
@pytest.mark.parametrize(
    ("share", "plateau"),
    [
        (0.0, True),
        (0.9 * SETTINGS.plateau_gain, True),
        (1.1 * SETTINGS.plateau_gain, False),
        (-0.9 * SETTINGS.plateau_loss, True),
        (-1.1 * SETTINGS.plateau_loss, False),
    ],
)
def test_a_plateau_is_a_span_of_cycles_without_gain(share: float, plateau: bool, first: float) -> None:
    """The lowest level of the span counts."""
    there = 1.0 - share * (first - 1.0)
    for lowest in range(COUNT):
        levels = [there + 1e-3 * (first - 1.0)] * COUNT
        levels[lowest] = there
        assert at_levels(1.0, *levels, first=first).plateau is plateau
        assert not at_levels(*levels, first=first).plateau, "no level before the span is known"


@pytest.mark.parametrize(
    ("cost", "plateau"), [(0.9 * SETTINGS.plateau_cost, True), (1.1 * SETTINGS.plateau_cost, False), (-9.0, True)]
)
def test_on_a_plateau_a_larger_rate_costs_little(cost: float, plateau: bool) -> None:
    assert at_levels(*[1.0] * (COUNT + 1), cost=cost).plateau is plateau


def test_no_plateau_without_a_gain() -> None:
    assert not at_levels(*[3.0] * (COUNT + 1)).plateau
    assert not at_levels(*[3.1] * (COUNT + 1)).plateau


PLATEAU = Stability(3.0, (0.0,) * SETTINGS.cost_cycles, levels=(1.0,) * COUNT, lowest_before=1.0).state_dict()


def on_a_plateau(step: int, worst: float | None = None) -> tuple[float, float]:
    """Return μ before and after a sync on a plateau on which a smaller learning rate looks better.

    Args:
        step: step of the sync.
        worst: replaces the highest loss of the eight replicas.
    """
    controller, run = RegressionController(), Run(1000, 10, 0.3, (None,), (1.0,))
    before_it = peak_posterior.updated([], -1.0, 0.9, 0.01, None, SETTINGS)
    before = {
        "log_likelihood": [before_it],
        "slow": [True],
        "mu": [peak_posterior.chosen(before_it, SETTINGS)],
        "stability": PLATEAU,
        "path_length": [0.3 * step],
    }
    rho = multipliers(8, 0.3)[permutation(8, seed=0, cycle=0, hyperparameter="lr/0")][None]
    losses = 1.0 + 0.05 * np.log(rho[0])
    if worst is not None:
        losses[losses.argmax()] = worst
    state = controller.start(1, run) | before
    after = controller.update(run, state, Observation(losses, rho, np.full(1, 0.3), step))
    return state["mu"][0], after["mu"][0]


@pytest.mark.parametrize(
    "share",
    [SETTINGS.stability_from - 0.01, SETTINGS.stability_from, SETTINGS.plateau_until, SETTINGS.plateau_until + 0.01],
)
def test_on_a_plateau_mu_rises_although_a_smaller_rate_looks_better(share: float) -> None:
    """Only in a part of the steps in which learning rates move."""
    before, after = on_a_plateau(round(share * 300))
    assert (after > before + 0.5 * SETTINGS.slow_rise) is (SETTINGS.stability_from <= share <= SETTINGS.plateau_until)
    assert after <= before + SETTINGS.slow_rise + 1e-9


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e30, 1e3])
def test_an_exploding_replica_on_a_plateau_does_not_raise_mu(bad: float) -> None:
    before, after = on_a_plateau(150, bad)
    assert after <= before


EDGE_AT = 0.2
AT_EDGE_STATE = Stability(3.0, AT_EDGE, EDGE_AT).state_dict()


def after_a_sync(
    stability: dict[str, Any] | None, *, rates: int = 1, rate: float | None = None, slope: float = 0.1
) -> Any:
    """Return the state after a sync of eight replicas without a gain, with learning rates at their peak."""
    controller, run = RegressionController(rate=rate), Run(1000, 10, 0.3, (None,) * rates, (1.0,) * rates)
    orders = [permutation(8, seed=0, cycle=0, hyperparameter=f"lr/{j}") for j in range(rates)]
    rho = np.stack([multipliers(8, 0.3)[order] for order in orders])
    losses = 1.0 + slope * np.log(rho).sum(axis=0)
    state = controller.start(rates, run) | {"stability": stability}
    return controller.update(run, state, Observation(losses, rho, np.ones(rates), 290))


def test_the_peak_is_held_near_the_edge() -> None:
    held, free = after_a_sync(AT_EDGE_STATE), after_a_sync(None)
    assert held["mu"] == pytest.approx([math.log(SETTINGS.edge_margin * EDGE_AT)])
    assert free["mu"][0] > held["mu"][0] + 0.5
    assert held["log_likelihood"] == free["log_likelihood"]


def test_rate_bounds_the_move_to_the_edge() -> None:
    assert after_a_sync(AT_EDGE_STATE, rate=0.05)["mu"] == pytest.approx([-0.05])


def test_a_better_larger_rate_releases_the_peak() -> None:
    assert after_a_sync(AT_EDGE_STATE, slope=-0.1)["stability"]["edge"] is None


def test_stability_is_not_judged_with_several_learning_rates() -> None:
    """The gain is due to all of them."""
    assert after_a_sync(None, rates=2)["stability"] is None


@pytest.mark.parametrize("probed", [True, False])
@pytest.mark.parametrize("slope", [0.9 * SETTINGS.edge_cost, 1.2 * SETTINGS.edge_cost])
def test_the_edge_is_found_from_the_losses_of_a_probe(slope: float, probed: bool) -> None:
    """The cost is the same from the first sync on; it counts once stability is judged."""
    controller, run = RegressionController(), Run(1000, 10, 0.3, (None,), (1.0,), probed=probed, early=(1, 2, 5))
    state = controller.start(1, run)
    for index, step in enumerate([1, 2, 5, *range(10, 121, 10)]):
        rho = multipliers(8, 0.3)[permutation(8, seed=0, cycle=index, hyperparameter="lr/0")][None]
        level = 3.0 - 0.1 * index
        losses = level + slope * (3.0 - level) * np.log(rho[0])
        state = controller.update(run, state, Observation(losses, rho, np.full(1, step / 1000), step))
    if not probed:
        assert state["stability"] is None
    else:
        assert state["stability"]["initial_level"] == pytest.approx(3.0)
        at = math.ceil(SETTINGS.stability_from * 300 / 10) * 10 / 1000
        assert state["stability"]["edge"] == (pytest.approx(at) if slope > SETTINGS.edge_cost else None)
