"""Where scripted losses move a learning rate whose best peak is known.

Replica r's loss is Σ_j log cosh log(v/η_c), v = η_j·ρ_r, and noise: its slope in log η is tanh log(η/η_c), which
vanishes at η_c(t) = A/t. A is such that the best peak is 1, as ``docs/controller.md`` says: a start of 30 is 30
times too high.
"""

from __future__ import annotations

import copy
import dataclasses
import io
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from hdet_kernels import HypergradientController, RegressionController, multipliers, permutation
from hdet_kernels.controller import STAYING, Observation, Run, State
from hdet_kernels.explore import Hyperparameter
from hdet_kernels.spread import Spread

Array = NDArray[np.float64]
Schedule = Callable[[float], float]

NAN, INF = math.nan, math.inf
TOTAL, T, N = 2000, 50, 8
REGRESSION = RegressionController()
#: η_c·t/S over the best peak of a schedule that anneals.
GREEDY = 0.011


def one_cycle(share: float) -> float:
    """OneCycleLR over its peak, at a share of the run."""
    if share < 0.3:
        return 1 / 25 + (1 - 1 / 25) * (1 - math.cos(math.pi * share / 0.3)) / 2
    return (1 + math.cos(math.pi * (share - 0.3) / 0.7)) / 2


#: What a schedule is over its peak, the share of the run at which it has it, and where it ends.
SHAPES: dict[str, tuple[Schedule, float, float]] = {
    "onecycle": (one_cycle, 0.3, 0.0),
    "cosine": (lambda share: (1 + math.cos(math.pi * share)) / 2, 0.0, 0.0),
    "constant": (lambda share: 1.0, 0.0, 1.0),
    "half": (lambda share: 1 - share / 2, 0.0, 0.5),
}

STARTS = {"30x low": 1 / 30, "10x low": 1 / 10, "3x low": 1 / 3, "best": 1.0, "3x high": 3.0, "10x high": 10.0,
          "30x high": 30.0}  # fmt: skip


def fan(count: int, cycle: int, seed: int = 0, n: int = N) -> Array:
    orders = [permutation(n, seed=seed, cycle=cycle, hyperparameter=f"lr/{j}") for j in range(count)]
    return np.stack([multipliers(n, 0.3)[order] for order in orders])


@dataclasses.dataclass
class Scripted:
    """A run whose learning rates start at ``starts`` times the best ones."""

    starts: list[float]
    shape: str = "onecycle"
    noise: float = 0.01
    sync_every: int = T
    seed: int = 0
    controller: RegressionController = REGRESSION

    def __post_init__(self) -> None:
        self.schedule, peak, end = SHAPES[self.shape]
        self.run = Run(TOTAL, self.sync_every, peak, (None,) * len(self.starts), tuple(self.starts), end)
        self.reach = GREEDY * (1 + STAYING * end) * TOTAL  # A
        self.random = np.random.default_rng(self.seed)
        self.state: State = self.controller.start(len(self.starts), self.run)

    def base(self, step: float) -> Array:
        scheduled = self.schedule(step / TOTAL)
        return np.array([self.controller.base(self.state, j, s * scheduled) for j, s in enumerate(self.starts)])

    def losses(self, values: Array, step: int) -> Array:
        """[N] from [J, N]."""
        noise = self.random.normal(0, self.noise, values.shape[1])
        found: Array = np.log(np.cosh(np.log(values * step / self.reach))).sum(axis=0) + noise
        return found

    def sync(self, step: int, change: Callable[[Array, Array], Array] = lambda losses, rho: losses) -> None:
        # A cycle trains with the mean of its learning rates.
        base, rho = self.base(step - self.sync_every / 2), fan(len(self.starts), step // self.sync_every, self.seed)
        losses = change(self.losses(base[:, None] * rho, step), rho)
        self.state = self.controller.update(self.run, self.state, Observation(losses, rho, base, step))

    @property
    def syncs(self) -> list[int]:
        steps = range(self.sync_every, TOTAL + 1, self.sync_every)
        return [step for step in steps if self.controller.active(self.run, step)]

    def finish(self) -> Scripted:
        for step in self.syncs:
            self.sync(step)
        return self

    @property
    def mu(self) -> list[float]:
        return list(self.state["mu"])

    @property
    def over_best(self) -> Array:
        """The peaks at the end over the best ones."""
        return np.array(self.starts) * np.exp(self.mu)


class Steep(Scripted):
    """Slopes η·(η/η_c − 1), steep above η_c and flat below: what is too high counts for more than what is too low."""

    def losses(self, values: Array, step: int) -> Array:
        noise = self.random.normal(0, self.noise * values.max(), values.shape[1])
        found: Array = (0.5 * values**2 * step / self.reach - values).sum(axis=0) + noise
        return found


def to_the_right_side(run: Scripted) -> bool:
    return all(start == 1 or (mu > 0) == (start < 1) for start, mu in zip(run.starts, run.mu, strict=True))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("start", STARTS.values(), ids=STARTS)
def test_moves_towards_the_best_learning_rate(start: float, shape: str, seed: int) -> None:
    """Over 20 seeds it ended at 0.50 to 1.49 of the best, and from the best at 0.76 to 1.18; from three times too high,
    under a ceiling, at 0.26 to 0.30: that climbs in steps, and the first of them is above η_c already."""
    run = Scripted([start], shape, seed=seed).finish()
    (ended,) = run.over_best
    assert to_the_right_side(run), f"from {start:.3g} to {ended:.3g}"
    lowest = 0.2 if start == 3.0 and shape != "onecycle" else 0.45
    assert lowest < ended < (1.25 if start == 1 else 1.6)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("start", STARTS.values(), ids=STARTS)
def test_steep_slopes_end_lower(start: float, shape: str, seed: int) -> None:
    """At 0.27 to 1.55 of the best over 20 seeds (0.15 to 0.40 from three times too high), and from the best itself at
    0.30 to 0.33: the later syncs outweigh the first."""
    run = Steep([start], shape, seed=seed).finish()
    (ended,) = run.over_best
    assert to_the_right_side(run), f"from {start:.3g} to {ended:.3g}"
    assert (0.12 if start == 3 else 0.24) < ended < 1.7


@pytest.mark.parametrize("sync_every", [25, 100], ids=["half the usual interval", "twice the usual interval"])
@pytest.mark.parametrize("start", STARTS.values(), ids=STARTS)
def test_moves_at_other_intervals(start: float, sync_every: int) -> None:
    """Four syncs take longer at twice the interval: from starts that are too low it ended lower."""
    run = Scripted([start], sync_every=sync_every).finish()
    assert to_the_right_side(run)
    assert 0.15 < run.over_best[0] < 1.6


@pytest.mark.parametrize(
    "starts",
    [[1 / 30, 10.0], [30.0, 0.1], [0.1, 3.0, 30.0, 1.0], [1 / 30, 1 / 3, 10.0, 1.0]],
    ids=["low, high", "high, low", "four", "other four"],
)
@pytest.mark.parametrize("seed", range(3))
def test_moves_several_at_once(starts: list[float], seed: int) -> None:
    run = Scripted(starts, seed=seed).finish()
    assert to_the_right_side(run), f"ended at {run.over_best} of the best"
    assert run.over_best.min() > 0.15
    assert run.over_best.max() < 1.6


@pytest.mark.parametrize("peak", [1.0, None], ids=["learning rate", "other scalar"])
def test_moves_within_its_window(peak: float | None) -> None:
    """Learning rates at the four syncs from 5 % to 12.5 % of the run, by 0.75 each; other scalars to 30 %."""
    run, moved, state = Run(TOTAL, T, 0.3, (None,), (peak,)), [], REGRESSION.start(1)
    for step in range(T, TOTAL + 1, T):
        if REGRESSION.active(run, step):
            before, rho = state["mu"][0], fan(1, step // T)
            state = REGRESSION.update(run, state, Observation(-np.log(rho[0]), rho, np.ones(1), step))
            if state["mu"][0] != before:
                moved.append((step, pytest.approx(state["mu"][0] - before, rel=1e-9)))
    steps, size = (range(100, 251, T), 0.75) if peak else (range(100, 601, T), 3 / 11)
    assert moved == [(step, size) for step in steps]


@pytest.mark.parametrize(
    ("sync_every", "start_at", "expected"),
    [
        (10, 0.05, list(range(50, 126, 10))),
        (50, 0.05, [50, 100, 150, 200]),
        (50, 0.0, [50, 100, 150, 200]),
        (100, 0.05, [100, 200, 300]),
        (250, 0.05, [250]),
        (400, 0.05, []),
    ],
    ids=["eight", "four, later than 12.5 %", "four from the first", "three to the peak", "one", "none"],
)
def test_at_least_four_syncs_where_there_are_as_many(sync_every: int, start_at: float, expected: list[int]) -> None:
    controller, run = RegressionController(start_at=start_at), Run(1000, sync_every, 0.3, (None,), (1.0,))
    first, last = controller.rates_window(run)
    assert [step for step in range(sync_every, 1001, sync_every) if first <= step <= last + 1e-6] == expected
    state, moves = controller.start(1, run), 0
    for step in range(sync_every, 1001, sync_every):
        if controller.active(run, step):
            rho, before = fan(1, step // sync_every), state["mu"]
            state = controller.update(run, state, Observation(-np.log(rho[0]), rho, np.ones(1), step))
            moves += state["mu"] != before
    assert moves == len(expected)
    assert state["mu"][0] == pytest.approx(min(3.0, 0.75 * moves), rel=1e-9)


# Losses that say nothing


def noise(total_steps: int, sync_every: int, peak: float | None, seed: int, *, n: int = N) -> tuple[float, float]:
    """μ at the end and the highest |μ| on the way, where losses are noise."""
    run, random = Run(total_steps, sync_every, 0.3, (None,), (peak,)), np.random.default_rng(seed)
    state, highest = REGRESSION.start(1, run), 0.0
    for step in range(sync_every, total_steps + 1, sync_every):
        if REGRESSION.active(run, step):
            rho = fan(1, step // sync_every, seed, n)
            state = REGRESSION.update(run, state, Observation(random.normal(2, 1, n), rho, np.ones(1), step))
            highest = max(highest, abs(state["mu"][0]))
    return state["mu"][0], highest


@pytest.mark.parametrize(("n", "mean"), [(2, 1.6), (4, 0.4), (8, 0.4), (16, 0.4)])
def test_noise_moves_an_ordinary_run_little(n: int, mean: float) -> None:
    """Over 200 runs |μ| was 0.30, 0.23 and 0.26 in the mean with 4, 8 and 16 replicas. Two have no errors to gate by:
    1.4. Up as often as down, and never by more than 3."""
    found = [noise(TOTAL, T, 1.0, seed, n=n) for seed in range(200)]
    assert np.mean([abs(mu) for mu, _ in found]) < mean
    assert abs(np.mean([mu for mu, _ in found])) < 0.36
    assert max(highest for _, highest in found) <= 3.0


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("peak", [1.0, None], ids=["learning rate", "other scalar"])
def test_a_thousand_syncs_of_noise(peak: float | None, seed: int) -> None:
    """The highest |μ| on the way of 20 runs was 0.04, for a learning rate and for another scalar."""
    total = 140_000 if peak else 40_000
    run = Run(total, 10, 0.3, (None,), (peak,))
    assert run.syncs(*(REGRESSION.rates_window(run) if peak else REGRESSION.window(run))) > 1000
    assert noise(total, 10, peak, seed)[1] < 0.1


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("loss", [0.0, 2.5, -1e6])
def test_equal_losses_leave_the_schedule_alone(shape: str, loss: float) -> None:
    run = Scripted([0.7], shape)
    for step in run.syncs:
        run.sync(step, lambda losses, rho: np.full(N, loss))
        assert run.mu == [0.0]
    assert run.base(1000)[0] == 0.7 * run.schedule(0.5)


@pytest.mark.parametrize("controller", [RegressionController(), HypergradientController()], ids=["losses", "slopes"])
@pytest.mark.parametrize("told", ["nothing", "not finite"])
def test_syncs_that_tell_nothing_still_release_the_ceiling(controller: Any, told: str) -> None:
    run = Run(TOTAL, T, 0.0, (None,), (1.0,), 1.0)
    state = controller.start(1, run)
    for step in range(2 * T, 601, T):
        rho, quiet = fan(1, step // T), step > 200
        losses = np.full(N, NAN) if quiet else -rho[0]
        slopes = None if quiet and told == "nothing" else np.array([NAN if quiet else -1.0])
        state = controller.update(run, state, Observation(losses, rho, np.ones(1), step, slopes))
    mu = state["mu"][0]
    assert 0 < mu <= 3
    assert [controller.base(state, 0, value) for value in (1.0, 0.5)] == [math.exp(mu), 0.5 * math.exp(mu)]


# Losses that are bad


def with_bad_losses(start: float, bad: float, at: Callable[[int], bool]) -> Scripted:
    """A run in which the replica with the highest learning rate has loss ``bad`` at some syncs."""
    run = Scripted([start])

    def change(losses: Array, rho: Array) -> Array:
        return np.where(np.arange(N) == rho[0].argmax(), bad, losses)

    for step in run.syncs:
        run.sync(step, change if at(step) else lambda losses, rho: losses)
    return run


@pytest.mark.parametrize("bad", [NAN, INF, 1e30, 1e300])
@pytest.mark.parametrize("at", [100, 150, 250])
@pytest.mark.parametrize("start", [0.1, 1.0, 10.0])
def test_a_replica_that_explodes_does_not_raise_it(start: float, at: int, bad: float) -> None:
    """And lowers it as a loss does that is merely bad: how bad says nothing. Where all syncs say down, one large slope
    makes the others small beside it: μ then ended at −2.85 instead of −3."""
    exploded, ordinary = (with_bad_losses(start, value, lambda step: step == at) for value in (bad, 1e3))
    assert exploded.mu[0] <= Scripted([start]).finish().mu[0] + (0.2 if start > 1 else 1e-9)
    if math.isfinite(bad):
        assert exploded.state == ordinary.state
    else:
        assert exploded.mu[0] >= ordinary.mu[0] - 0.1


@pytest.mark.parametrize("bad", [NAN, INF, 1e30])
@pytest.mark.parametrize("start", [0.1, 1.0, 10.0])
def test_one_that_explodes_at_every_sync_does_not_raise_it(start: float, bad: float) -> None:
    exploded = with_bad_losses(start, bad, lambda step: True)
    assert exploded.mu[0] <= max(Scripted([start]).finish().mu[0], 0.0)
    assert exploded.mu[0] >= -3


@pytest.mark.parametrize("size", [1e-300, 1e300])
@pytest.mark.parametrize("peak", [1.0, None], ids=["learning rate", "other scalar"])
@pytest.mark.filterwarnings("error")
def test_takes_slopes_of_any_size(size: float, peak: float | None) -> None:
    controller, run = HypergradientController(), Run(TOTAL, T, 0.3, (None,), (peak,))
    state = controller.start(1, run)
    for step in range(2 * T, 601, T):
        seen = Observation(np.ones(1), np.ones((1, 1)), np.ones(1), step, np.array([-size]))
        state = controller.update(run, state, seen)
        assert all(math.isfinite(state[name][0]) for name in ("mu", "m", "q"))
    assert state["mu"][0] == pytest.approx(3.0 if size > 1 else 0.0, abs=1e-9)


def test_bounds_hold_on_the_way_and_at_the_end() -> None:
    """Around a best rate far above them."""
    hyper = Hyperparameter("lr/0", 0.3, "linear", (0.005, 0.05), None, 0, "lr")
    script = Scripted([0.03])

    class Place:
        size, replica, rows = N, 0, 1

    spread = Spread([hyper], REGRESSION, Place(), seed=0, scheduled=[0.03], run=script.run)  # type: ignore[arg-type]
    for step in range(1, TOTAL + 1):
        spread.rates([0.03 * one_cycle(step / TOTAL)])
        assert 0.005 <= spread.base(0) <= 0.05
        if step % T == 0:
            placed = spread.placement()
            assert placed.values.min() >= 0.005
            assert placed.values.max() <= 0.05
            if REGRESSION.active(script.run, step):
                spread.move(script.run, placed, script.losses(placed.values, step), None, step)
            spread.fan_out(step // T)
    assert spread.control["mu"][0] > 0


# Ceilings


@pytest.mark.parametrize("peak", [0.15, 0.3, 0.5])
def test_a_schedule_that_climbs_has_no_ceiling(peak: float) -> None:
    run = Run(TOTAL, T, peak, (None,), (1.0,))
    state = REGRESSION.start(1, run)
    for step in range(2 * T, 301, T):
        assert state["ceilings"] == []
        rho = fan(1, step // T)
        state = REGRESSION.update(run, state, Observation(np.ones(N), rho, np.ones(1), step))


def test_onecyclelr_is_as_given_until_the_first_move() -> None:
    """Bit for bit, at every step before the first sync of the window, and at all of them where μ stays 0."""
    state = REGRESSION.start(1, Scripted([1.0]).run)
    values = [one_cycle(step / TOTAL) for step in range(TOTAL)]
    assert [REGRESSION.base(state, 0, value) for value in values] == values


@pytest.mark.parametrize("shape", ["cosine", "constant", "half"])
@pytest.mark.parametrize("start", [0.1, 1.0, 10.0])
def test_what_does_not_climb_does_under_the_ceiling(start: float, shape: str) -> None:
    """From OneCycleLR's first value up, by OneCycleLR's law, higher where the schedule does not anneal; never above
    schedule·e^μ; and exactly that when the window is over."""
    run = Scripted([start], shape)
    higher = 1 + STAYING * run.run.end
    held = []
    for step in range(1, TOTAL + 1):
        own = start * run.schedule(step / TOTAL) * math.exp(run.mu[0])
        base = run.base(step)[0]
        assert base <= own
        held.append(base < own)
        ends = 0.5 * 0.05 if step <= 50 else math.ceil(step / T) * T / TOTAL  # of the cycle, or of what came before
        if step <= 600:
            ceiling = start * one_cycle(min(ends, 0.3 - 1e-12)) * higher * math.exp(run.mu[0])
            assert base == pytest.approx(min(own, ceiling), rel=1e-9)
        else:
            assert base == own
        if step in run.syncs:
            run.sync(step)
    assert all(held[:100])
    assert not any(held[600:])
    assert run.state["ceilings"] == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_tensor_learning_rate_is_held_without_a_sync(dtype: torch.dtype) -> None:
    """On the meta device, where there is no value to look at; on the CPU it is the float's."""
    run = Scripted([0.5], "constant")
    (expected,) = run.base(0)
    found = REGRESSION.base(run.state, 0, torch.tensor(0.5, dtype=dtype))
    assert found.dtype == dtype
    assert float(found) == pytest.approx(expected, rel=1e-6)
    assert REGRESSION.base(run.state, 0, torch.empty((), dtype=dtype, device="meta")).device.type == "meta"


def test_other_scalars_and_frozen_groups_have_no_ceiling() -> None:
    run = Run(TOTAL, T, 0.0, (None,) * 2, (1.0, None), 1.0)
    state = REGRESSION.start(2, run)
    assert state["ceilings"][0] < 1
    assert state["ceilings"][1] is None
    assert REGRESSION.base(state, 1, 5.0) == 5.0


@pytest.mark.parametrize(
    "run", [Run(1000, 400, 0.0, (None,), (1.0,)), Run(None, 10, 0.0, (None,), (1.0,)), None], ids=str
)
def test_no_ceiling_that_no_sync_would_lift(run: Run | None) -> None:
    assert REGRESSION.start(1, run)["ceilings"] == []


# States


def test_the_state_is_plain_and_survives_a_file_at_every_sync() -> None:
    straight, stored = (Scripted([0.1, 3.0], "constant") for _ in range(2))
    for step in straight.syncs:
        file = io.BytesIO()
        torch.save(stored.state, file)
        stored.state = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
        assert stored.state == straight.state
        straight.sync(step)
        stored.sync(step)
    assert stored.state == straight.state
    assert 0.0 not in straight.mu


def test_a_state_is_not_changed_in_place() -> None:
    run = Scripted([0.1], "constant")
    run.sync(100)
    state, before = run.state, copy.deepcopy(run.state)
    run.sync(150)
    assert state == before
    assert run.state["ceilings"] != before["ceilings"]
