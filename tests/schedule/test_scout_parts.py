"""The parts of the scouting phase: its constants, rounds, losses, choice, and gradients of its own."""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import hdet_kernels as hk
from hdet_kernels.ensemble import RowEnsemble
from hdet_kernels.fanout.explore import Hyperparameter
from hdet_kernels.schedule.scout.own_gradients import OwnGradients, differ
from hdet_kernels.schedule.scout.phase import (
    RoundLosses,
    Scouted,
    compare,
    gather_numbers,
    raise_failed_probe,
    ratios_of,
    scout_record,
)
from hdet_kernels.schedule.scout.rounds import (
    Comparison,
    ScoutSettings,
    by_team,
    candidates,
    choose,
    choose_near,
    first_bracket,
    first_pair,
    first_team,
    make_plan,
    middle,
    narrow,
    next_pair,
    rounds_needed,
    tail_steps,
    team_candidates,
    together,
)


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"share": 0.0}, ValueError),
        ({"share": 1.1}, ValueError),
        ({"shortest": 0.4, "longest": 0.3}, ValueError),
        ({"apart": 0.0}, ValueError),
        ({"distance": 1.0}, ValueError),
        ({"share": "all"}, TypeError),
        ({"lowest": 1.0, "highest": 0.1}, ValueError),
        ({"highest": float("inf")}, ValueError),
        ({"factor": 1.0}, ValueError),
        ({"fewest": 3}, ValueError),
        ({"fewest": 4.5}, ValueError),
        ({"deviations": -1.0}, ValueError),
        ({"shift": float("nan")}, ValueError),
    ],
)
def test_constants_without_a_plan_are_refused(given: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error, match=next(iter(given))):
        ScoutSettings(**given)


def test_constants_are_kept_as_plain_numbers() -> None:
    settings = ScoutSettings(share=np.float32(0.25), fewest=np.int64(12), shift=1)
    assert [type(value) for value in (settings.share, settings.fewest, settings.shift)] == [float, int, float]


def test_the_page_lists_every_constant_with_its_default() -> None:
    page = (Path(__file__).parents[2] / "docs" / "usage" / "no-learning-rate.md").read_text()
    listed = re.findall(r"^\| `(\w+)` \| ([\d.e-]+) \|", page, re.M)
    assert {name: float(value) for name, value in listed} == ScoutSettings().to_dict()


DEFAULT = ScoutSettings()


def last_factor(replicas: int) -> float:
    """Return the factor between neighbours in the last round, if the best is never at the edge."""
    low, high = first_bracket(DEFAULT)
    for _ in range(rounds_needed(replicas, DEFAULT) - 1):
        rates = candidates((low, high), replicas)
        edges = [low, *map(math.log, rates), high]
        low, high = edges[replicas // 2], edges[replicas // 2 + 2]
    rates = candidates((low, high), replicas)
    return rates[1] / rates[0]


@pytest.mark.parametrize(
    ("total_steps", "replicas", "share", "rounds", "teams"),
    [
        (1000, 8, 0.3, (57, 173), None),  # gradients cannot be shared in teams
        (1000, 2, 0.3, (24, 32, 42, 56, 76), None),
        (600, 3, 0.15, (13, 23, 42), 0),  # the share does not pay for teams
        (1000, 8, 0.3, (19, 58, 153), 1),
        (1000, 64, 0.3, (19, 58, 153), 1),
        (1000, 3, 0.3, (13, 23, 41, 153), 1),
        (1000, 2, 0.3, (10, 14, 21, 32, 153), 1),
        (1000, 8, 0.5, (16, 51, 133, 133), 2),
        (1000, 8, 0.7, (14, 45, 176, 176), 2),
        (1000, 8, 1.0, (12, 38, 150, 150, 150), 3),
        (300, 8, 0.3, (23, 46), 1),  # too short for two rounds apart
        (100, 8, 0.3, (23,), 0),  # too short for teams
        (44, 8, 0.3, (10,), 0),
    ],
)
def test_lengths_of_the_rounds(
    total_steps: int, replicas: int, share: float, rounds: tuple[int, ...], teams: int | None
) -> None:
    plan = make_plan(total_steps, replicas, ScoutSettings(share=share), teams=teams is not None)
    assert (plan.rounds, plan.run, plan.teams) == (rounds, total_steps - sum(rounds), teams or 0)
    assert plan.total_steps == total_steps
    assert plan.before(1) == rounds[0]
    in_teams = [plan.in_teams(number) for number in range(len(rounds) + 1)]
    assert in_teams == [False] * (len(rounds) - plan.teams) + [True] * plan.teams + [False]


@given(st.integers(110, 10**7), st.integers(2, 64), st.floats(0.0, 1.0), st.floats(0.1, 1.0), st.booleans())
@settings(max_examples=60, deadline=None)
def test_a_plan_keeps_to_the_share_and_leaves_no_step_out(
    total_steps: int, replicas: int, pct_start: float, share: float, teams: bool
) -> None:
    given = ScoutSettings(share=share)
    plan = make_plan(total_steps, replicas, given, teams=teams, workable=lambda steps: float(pct_start * steps) != 1)
    assert plan.total_steps == total_steps
    assert plan.steps / plan.run <= share + 0.05
    assert all(length >= DEFAULT.fewest for length in plan.rounds)
    assert all(length <= 0.31 * plan.run for length in plan.rounds) or not plan.teams
    assert all(float(pct_start * length) != 1 for length in (*plan.rounds, plan.run))
    assert list(plan.rounds) == sorted(plan.rounds)
    assert 1 <= tail_steps(plan.rounds[0], DEFAULT) <= plan.rounds[0]


@pytest.mark.parametrize("replicas", [2, 3, 4, 8, 16, 64])
def test_neighbours_of_the_last_round_are_close(replicas: int) -> None:
    assert last_factor(replicas) <= (2.5 if replicas != 4 else DEFAULT.factor)


@given(st.floats(-20, 5), st.floats(1e-3, 20), st.integers(2, 64))
@settings(max_examples=60, deadline=None)
def test_candidates_are_spaced_evenly_inside_the_range(low: float, width: float, replicas: int) -> None:
    rates = candidates((low, low + width), replicas)
    logs = [low, *map(math.log, rates), low + width]
    gaps = [b - a for a, b in itertools.pairwise(logs)]
    assert gaps == pytest.approx([width / (replicas + 1)] * (replicas + 1), rel=1e-6, abs=1e-9)
    assert rates[0] * rates[-1] == pytest.approx(middle((low, low + width)) ** 2, rel=1e-9)


def test_one_replica_is_refused_with_a_remedy() -> None:
    with pytest.raises(ValueError, match="several replicas"):
        make_plan(1000, 1, DEFAULT)


def test_a_short_run_is_told_the_least_number_of_steps() -> None:
    with pytest.raises(ValueError, match=r"got total_steps=43: pass total_steps of at least 44"):
        make_plan(43, 8, DEFAULT)
    make_plan(44, 8, DEFAULT)


CHOICES = tuple(10.0**exponent for exponent in (-4, -3.5, -3, -2.5, -2, -1.5))
BRACKET = (math.log(1e-5), 0.0)


def seen(losses: Any, *, rates: Any = CHOICES, errors: Any = 0.0, level: float = math.nan) -> Comparison:
    values = np.array(losses, dtype=np.float64)
    return Comparison(np.array(rates), values, np.broadcast_to(np.float64(errors), values.shape), level)


def test_the_range_narrows_to_the_neighbours_of_the_best() -> None:
    assert narrow(seen([5, 4, 3, 4, 5, 9]), BRACKET, DEFAULT) == pytest.approx(
        (math.log(CHOICES[1]), math.log(CHOICES[3]))
    )


@pytest.mark.parametrize(("losses", "expected"), [([1, 2, 3, 4, 5, 6], (-11.5129, 1)), ([6, 5, 4, 3, 2, 1], (4, 0.0))])
def test_at_an_edge_the_range_keeps_its_end(losses: list[float], expected: tuple[Any, Any]) -> None:
    ends = [end if isinstance(end, float) else math.log(CHOICES[end]) for end in expected]
    assert narrow(seen(losses), BRACKET, DEFAULT) == pytest.approx(ends, abs=1e-3)


def test_losses_that_say_nothing_keep_the_range_wide() -> None:
    flat = seen([2.3, 2.301, 2.299, 2.3, 2.31, np.nan], errors=0.02, level=2.3)
    low, high = narrow(flat, BRACKET, DEFAULT)
    assert (low, high) == (BRACKET[0], math.log(CHOICES[5]))
    assert not flat.learned(DEFAULT)
    assert seen([2.3, 1.0, 2.3, 2.3, 2.3, 2.3], level=2.3).learned(DEFAULT)
    assert seen([2.3, 1.0, 2.3, 2.3, 2.3, 2.3]).learned(DEFAULT)  # the level is not known


def test_the_minimum_of_the_parabola_is_chosen() -> None:
    best = math.log(2e-3)
    losses = [1 + (math.log(rate) - best) ** 2 for rate in CHOICES]
    assert choose(seen(losses, level=20.0), DEFAULT).rate == pytest.approx(2e-3, rel=1e-6)


def test_a_diverged_neighbour_does_not_pull() -> None:
    losses = [2.0, 1.5, 1.2, 1.0, np.inf, np.nan]
    verdict = choose(seen(losses, level=2.5), DEFAULT)
    assert CHOICES[2] <= verdict.rate <= CHOICES[3] * 1.0001
    above_the_start = choose(seen([2.0, 1.5, 1.2, 1.0, 400.0, np.nan], level=2.5), DEFAULT)
    assert above_the_start == verdict


def test_a_flat_bottom_gives_its_middle() -> None:
    verdict = choose(seen([3.0, 1.01, 1.0, 1.005, 1.01, 9.0], errors=0.02, level=4.0), DEFAULT)
    assert verdict.rate == pytest.approx(math.sqrt(CHOICES[1] * CHOICES[4]))
    assert "equally good" in verdict.how


def test_the_first_pair_is_around_the_choice_and_raised_with_the_batch_of_a_team() -> None:
    found = seen([9, 3, 1, 3, 9, 20], level=30.0)
    for replicas, raised in ((2, 1.0), (8, math.sqrt(2)), (32, 2.0)):
        low, high = map(math.exp, first_pair(found, replicas, DEFAULT))
        assert math.sqrt(low * high) == pytest.approx(CHOICES[2] * raised)
        assert high / low == pytest.approx(DEFAULT.distance)
    coarse = seen([9, 1, 9], rates=(1e-4, 1e-3, 1e-2), level=30.0)
    assert np.exp(np.diff(first_pair(coarse, 8, DEFAULT))) == pytest.approx(10.0)
    nothing = seen([2.3, 2.31, 2.305, 2.3, 2.4, np.inf], errors=0.01, level=2.3)
    assert np.exp(first_pair(nothing, 8, DEFAULT)) == pytest.approx([1e-3, 1e-1])


@pytest.mark.parametrize(
    ("losses", "octaves"),
    [
        ([1, 2], (-2, 1)),
        ([2, 1], (1, 4)),
        ([5, 2, 1, 3], (3, 5)),
        ([1, 2, 3, 4], (-2, 1)),
        ([3, np.nan], (-2, 1)),
        ([np.nan, np.inf], (-4, -2)),
    ],
)
def test_the_next_pair_is_on_both_sides_of_the_best(losses: list[float], octaves: tuple[float, float]) -> None:
    near = seen(losses, rates=[4.0**index for index in range(len(losses))])
    assert np.log2(np.exp(next_pair(near, DEFAULT))) == pytest.approx(octaves)


def test_team_rounds_choose_together() -> None:
    best = math.log(3e-3)
    outcome: Comparison | None = None
    for pair in ((1e-3, 4e-3), (2e-3, 16e-3)):
        replicas = seen([1 + (math.log(rate) - best) ** 2 for rate in pair for _ in range(3)], rates=np.repeat(pair, 3))
        outcome = together(outcome, by_team(replicas, 3))
    assert outcome is not None
    assert outcome.rates.tolist() == [1e-3, 2e-3, 4e-3, 16e-3]
    assert choose_near(replace(outcome, level=20.0), DEFAULT).rate == pytest.approx(3e-3, rel=1e-6)


def test_a_team_has_the_mean_loss_of_its_replicas_and_is_lost_with_one_of_them() -> None:
    rates = (0.1, 0.1, 0.4, 0.4, 0.4)
    teams = by_team(seen([1, 2, 3, 4, 5], rates=rates, errors=[0.3, 0.4, 0.6, 0.6, 0.3], level=7.0), 2)
    assert (teams.rates.tolist(), teams.losses.tolist(), teams.level) == ([0.1, 0.4], [1.5, 4.0], 7.0)
    assert teams.errors.tolist() == pytest.approx([0.25, 0.3])
    lost = by_team(seen([1, np.nan, 3, 4, 5], rates=rates), 2)
    assert lost.losses.tolist() == [np.inf, 4.0]
    assert choose_near(lost, DEFAULT).rate == pytest.approx(0.4)
    all_lost = choose_near(by_team(seen([np.nan] * 5, rates=rates), 2), DEFAULT)
    assert all_lost.rate == pytest.approx(0.1 / DEFAULT.distance)


@pytest.mark.parametrize(
    ("size", "rows", "first"), [(2, 2, 1), (8, 8, 4), (7, 7, 4), (2, 1, 1), (3, 1, 2), (8, 1, 4), (6, 3, 3), (9, 3, 6)]
)
def test_teams_are_halves_of_whole_processes(size: int, rows: int, first: int) -> None:
    assert first_team(size, rows) == first
    assert team_candidates((0.0, 1.0), first, size) == (1.0,) * first + (math.e,) * (size - first)


def test_without_any_finite_loss_the_learning_rates_are_named() -> None:
    with pytest.raises(RuntimeError, match=r"no loss was finite at any of the learning rates 0.0001, .* pass max_lr"):
        choose(seen([np.nan, np.inf, np.nan, -np.inf, np.nan, np.nan]), DEFAULT)


LOSSES = st.lists(st.one_of(st.floats(0, 100), st.just(math.nan), st.just(math.inf)), min_size=2, max_size=20)


@given(LOSSES, st.floats(0, 1), st.one_of(st.just(math.nan), st.floats(0, 100)))
@settings(max_examples=100, deadline=None)
def test_a_choice_is_near_the_best_and_a_range_holds_it(losses: list[float], error: float, level: float) -> None:
    if not any(map(math.isfinite, losses)):
        losses[0] = 1.0
    rates = np.exp(np.linspace(*BRACKET, len(losses) + 2))[1:-1]
    found = seen(losses, rates=rates, errors=error, level=level)
    low, high = narrow(found, BRACKET, DEFAULT)
    assert BRACKET[0] <= low < math.log(rates[found.best]) < high <= BRACKET[1]
    verdict = choose(found, DEFAULT)
    assert rates[0] * (1 - 1e-9) <= verdict.rate <= rates[-1] * (1 + 1e-9)
    finite = np.isfinite(found.losses)
    used = np.abs(np.log(rates) - math.log(verdict.rate)).argmin()
    assert finite[used] or finite[max(used - 1, 0) : used + 2].any()


def test_the_first_step_and_the_last_ones_count() -> None:
    losses = RoundLosses(1)
    for step, loss in enumerate([8.0, 4.0, 3.0, 1.0]):
        losses.record(loss, step, tail_from=2)
    assert (losses.first.sum, losses.first.count) == (8.0, 1)
    assert (losses.tail.sum, losses.tail.count, losses.squares.sum) == (4.0, 2, 10.0)
    losses.clear()
    assert losses.ever
    assert losses.tail.count == 0


def test_a_loss_that_was_divided_counts_as_it_was() -> None:
    losses = RoundLosses(1)
    for loss in (2.0, torch.tensor(1.0)):
        losses.record(loss, 0, tail_from=0, divided_by=2)
    assert [float(each.sum) for each in (losses.first, losses.tail, losses.squares)] == [6.0, 6.0, 20.0]
    assert losses.tail.count == 2


def test_losses_of_a_stack_are_summed_in_full_precision() -> None:
    losses = RoundLosses(2)
    losses.record(torch.tensor([1.001, 2.0], dtype=torch.bfloat16), 5, tail_from=5)
    losses.record([3.0, 4.0], 6, tail_from=5)
    assert isinstance(losses.squares.sum, torch.Tensor)
    assert losses.squares.sum.dtype is torch.float64
    assert losses.squares.sum.tolist() == [10.0, 20.0]
    with pytest.raises(ValueError, match=r"must have shape \[2\], got \[3\]"):
        losses.record([1.0, 2.0, 3.0], 7, tail_from=5)


def test_sums_are_saved_and_taken_back() -> None:
    losses = RoundLosses(1)
    losses.record(2.0, 0, tail_from=0)
    mark = losses.mark()
    losses.record(5.0, 1, tail_from=0)
    saved = losses.state_dict()
    losses.reset(mark)
    assert losses.tail.sum == 2.0
    other = RoundLosses(1)
    other.load_state_dict(saved)
    assert other.state_dict() == saved


RATES = (0.01, 0.02, 0.04)


def losses_of(*steps: tuple[float, ...], tail_from: int = 1) -> RoundLosses:
    losses = RoundLosses(3)
    for step, values in enumerate(steps):
        losses.record(torch.tensor(values), step, tail_from)
    return losses


def compared(losses: RoundLosses, probe: Any = None, level: Any = math.nan) -> tuple[Any, Any]:
    return compare(RowEnsemble(3), RATES, losses, probe, step=3, level=level)


def test_mean_noise_and_level_come_from_the_training_losses() -> None:
    seen, training = compared(losses_of((4.0, 4.2, 3.8), (1.0, 2.0, math.nan), (3.0, 2.0, 5.0)))
    assert training is None
    assert seen.losses.tolist() == [2.0, 2.0, math.inf]
    assert seen.level == pytest.approx(4.0)
    # The variance of the first is 2, of the second 0: at least the median, 1.
    assert seen.errors[:2].tolist() == pytest.approx([1.0, math.sqrt(1 / 2)])


def test_the_noise_of_a_single_step_is_that_of_the_first_losses() -> None:
    seen, _ = compared(losses_of((4.0, 5.0, 6.0), (1.0, 2.0, 3.0)))
    assert seen.errors.tolist() == pytest.approx([1.0] * 3)


def test_a_probe_takes_the_place_of_the_training_losses() -> None:
    probe = torch.tensor([1.0, 0.5, math.nan])
    seen, training = compared(losses_of((4.0,) * 3, (1.0, 2.0, 3.0)), lambda: probe, torch.tensor([3.0, 3.0, 3.0]))
    assert training.tolist() == [1.0, 2.0, 3.0]
    assert seen.losses.tolist() == [1.0, 0.5, math.inf]
    assert (seen.level, seen.errors.tolist()) == (3.0, [0.0] * 3)


def test_without_losses_it_says_so() -> None:
    with pytest.raises(RuntimeError, match=r"replicas \[0, 1, 2\] recorded no loss in the last steps"):
        compared(losses_of((1.0, 1.0, 1.0)))


def test_a_failed_probe_raises_with_its_cause() -> None:
    failure = KeyError("x")
    with pytest.raises(RuntimeError, match=r"probe\(\) raised on replicas \[1\]") as raised:
        raise_failed_probe(np.array([0.0, 1.0]), failure)
    assert raised.value.__cause__ is failure
    raise_failed_probe(np.zeros(2), None)


def test_numbers_and_rows_are_gathered_by_replica() -> None:
    found = gather_numbers(RowEnsemble(3), {"one": 2.0, "each": torch.tensor([1, 2, 3]), "none": None})
    assert found["one"].tolist() == [2.0] * 3
    assert found["each"].tolist() == [1.0, 2.0, 3.0]
    assert np.isnan(found["none"]).all()


def test_a_record_has_the_peaks_of_all_groups() -> None:
    seen, _ = compared(losses_of((4.0,) * 3, (1.0, 2.0, math.inf)))
    rate = Hyperparameter("lr", 0.3, "linear", None, None, 0, "lr", tied=(1,))
    others = replace(rate, name="lr.2", group=2, tied=()), replace(rate, name="weight_decay", base=0.1, tied=())
    record = scout_record([rate, *others], [0.02, 0.3, 0.01], seen, None, RowEnsemble(3), step=7, number=1)
    assert record.values["lr"] == pytest.approx(RATES)
    assert record.values["lr.2"] == pytest.approx([rate / 2 for rate in RATES])
    assert record.values["weight_decay"] == [0.1] * 3
    assert (record.kind, record.step, record.cycle, record.excluded) == ("scout", 7, 1, [2])


def optimizer(*rates: float | torch.Tensor) -> torch.optim.SGD:
    return torch.optim.SGD([{"params": [nn.Parameter(torch.zeros(1))], "lr": rate} for rate in rates], lr=0.1)


def test_groups_keep_the_ratios_of_their_learning_rates() -> None:
    ratios = ratios_of(optimizer(0.1, torch.tensor(0.05), 0.0))
    assert ratios == pytest.approx([1.0, 0.5, 0.0])
    settings = ScoutSettings()
    scouted = Scouted(make_plan(1000, 8, settings), settings, ratios)
    assert scouted.rates(0.02) == pytest.approx([0.02, 0.01, 0.0])
    assert scouted.found is None
    assert scouted.config["total_steps"] == 1000


@pytest.mark.parametrize("rates", [(0.0,), (0.0, 0.0), (float("inf"),), (float("nan"), 0.1)])
def test_without_a_largest_learning_rate_there_are_no_ratios(rates: tuple[float, ...]) -> None:
    built = optimizer(*[0.1] * len(rates))
    for group, rate in zip(built.param_groups, rates, strict=True):
        group["lr"] = rate
    with pytest.raises(ValueError, match="keeps the ratios of the optimizer's learning rates, got"):
        ratios_of(built)


def stacked(gradients: Any) -> tuple[hk.ReplicaStack, hk.FusedAdamW]:
    stack = hk.ReplicaStack(torch.nn.Linear(3, 2), 2, gradients=gradients)
    return stack, hk.FusedAdamW(stack.parameters())


def one_step(stack: hk.ReplicaStack, optimizer: hk.FusedAdamW) -> torch.Tensor:
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    stack.backward(lambda model, x: (model(x) - x.sum()).square().mean(), x)
    optimizer.step()
    optimizer.zero_grad()
    return next(stack.parameters()).detach().clone()


@pytest.mark.parametrize("gradients", ["shared", "local"])
def test_a_stack_has_gradients_of_each_replica_meanwhile(gradients: Any) -> None:
    stack, optimizer = stacked(gradients)
    own = OwnGradients(optimizer, stack.ensemble, None, "auto")
    assert own.certain
    for _ in range(2):
        own.begin()
        own.begin()  # nothing more
        apart = one_step(stack, optimizer)
        assert not torch.equal(apart[0], apart[1])
        own.end()
        own.end()
        assert stack.gradients == gradients
    before = next(stack.parameters()).detach().clone()
    moved = one_step(stack, optimizer) - before
    assert (torch.allclose(moved[0], moved[1], atol=1e-6)) is (gradients == "shared")
    assert optimizer.shares_state is (gradients == "shared")


def test_another_one_takes_over_without_touching_the_moments() -> None:
    stack, optimizer = stacked("shared")
    first, second = (OwnGradients(optimizer, stack.ensemble, None, "auto") for _ in range(2))
    first.begin()
    one_step(stack, optimizer)
    apart = {name: flat.clone() for name, flat in optimizer.all_state_flats().items()}
    second.take_over(first)
    first.end()
    second.begin()
    assert all(torch.equal(flat, apart[name]) for name, flat in optimizer.all_state_flats().items())
    second.end()
    assert (stack.gradients, optimizer.shares_state) == ("shared", True)


def test_moments_of_each_replica_exist_for_the_phase_only() -> None:
    stack, optimizer = stacked("shared")
    own = OwnGradients(optimizer, stack.ensemble, None, "auto")
    one_step(stack, optimizer)
    shared = {name: flat.clone() for name, flat in optimizer.all_state_flats().items()}
    own.begin()
    assert all(flat.numel() == 2 * shared[name].numel() for name, flat in optimizer.all_state_flats().items())
    own.share_state()
    assert all(torch.equal(flat, shared[name]) for name, flat in optimizer.all_state_flats().items())
    own.separate_state()
    own.end()
    assert all(torch.equal(flat, shared[name]) for name, flat in optimizer.all_state_flats().items())


@pytest.mark.parametrize(
    ("fingerprints", "expected"),
    [([1.0, 2.0], True), ([1.0, 1.0, 2.0], True), ([0.0, 0.0], None), ([np.nan, 1.0], None), ([np.inf, np.inf], None)],
)
def test_gradients_that_differ(fingerprints: list[float], expected: bool | None) -> None:
    assert differ(np.array(fingerprints)) is expected
