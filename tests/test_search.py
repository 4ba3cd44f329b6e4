"""The search for a learning rate on scripted losses whose best learning rate is known.

Replica r's loss is Σ_j K·(½·v²/η_c − v), v = η_j·ρ_r, and noise of standard deviation ν·K·max η: its slope in log η is
K·η·(η/η_c − 1), which vanishes at η_c(t) = A/t. The law says that A/(h·S) is best, and A is chosen so that this is 1: a
start of 30 is 30 times too high.
"""

from __future__ import annotations

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
from hdet_kernels.controller import Observation, Run, State
from hdet_kernels.explore import Hyperparameter
from hdet_kernels.search import (
    CEILING,
    DEAD,
    RISE,
    STAYING,
    UNTIL,
    USUAL_INTERVAL,
    Search,
    Sync,
    applied,
    begin,
    searched,
)
from hdet_kernels.spread import Spread

Array = NDArray[np.float64]
Schedule = Callable[[float], float]

NAN, INF = math.nan, math.inf
TOTAL, T, N = 2000, 50, 8
REGRESSION = RegressionController()


def one_cycle(share: float) -> float:
    """OneCycleLR over its peak, at a share of the run."""
    if share < 0.3:
        return 1 / 25 + (1 - 1 / 25) * (1 - math.cos(math.pi * share / 0.3)) / 2
    return (1 + math.cos(math.pi * (share - 0.3) / 0.7)) / 2


#: What a schedule is over its peak, and where it ends.
SHAPES: dict[str, tuple[Schedule, float]] = {
    "onecycle": (one_cycle, 0.0),
    "cosine": (lambda share: (1 + math.cos(math.pi * share)) / 2, 0.0),
    "constant": (lambda share: 1.0, 1.0),
    "half": (lambda share: 1 - share / 2, 0.5),
}

STARTS = {"30x low": 1 / 30, "10x low": 1 / 10, "3x low": 1 / 3, "best": 1.0, "3x high": 3.0, "10x high": 10.0,
          "30x high": 30.0}  # fmt: skip


def fan(count: int, cycle: int, n: int = N, seed: int = 0) -> Array:
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
        self.schedule, end = SHAPES[self.shape]
        self.run = Run(TOTAL, self.sync_every, 0.3, (None,) * len(self.starts), tuple(self.starts), end)
        share = self.sync_every / TOTAL / USUAL_INTERVAL
        self.reach = self.controller.horizon * (1 + STAYING * end) * math.sqrt(share) * TOTAL  # A
        self.random = np.random.default_rng(self.seed)
        self.state: State = self.controller.start(len(self.starts), self.run)

    def base(self, step: int) -> Array:
        scheduled = self.schedule(step / TOTAL)
        return np.array([self.controller.base(self.state, j, s * scheduled) for j, s in enumerate(self.starts)])

    def losses(self, values: Array, step: int) -> Array:
        """[N] from [J, N]."""
        noise = self.random.normal(0, self.noise * values.max(), values.shape[1])
        found: Array = (0.5 * values**2 * step / self.reach - values).sum(axis=0) + noise
        return found

    def sync(self, step: int, change: Callable[[Array, Array], Array] = lambda losses, rho: losses) -> None:
        base, rho = self.base(step), fan(len(self.starts), step // self.sync_every, seed=self.seed)
        losses = change(self.losses(base[:, None] * rho, step), rho)
        self.state = self.controller.update(self.run, self.state, Observation(losses, rho, base, None, step))

    @property
    def syncs(self) -> list[int]:
        steps = range(self.sync_every, TOTAL + 1, self.sync_every)
        return [step for step in steps if self.controller.active(self.run, step)]

    def finish(self) -> Scripted:
        for step in self.syncs:
            self.sync(step)
        return self

    @property
    def off(self) -> Array:
        """log of the found peaks over the best."""
        return np.log(self.starts) + np.array(self.state["mu"])


class Bounded(Scripted):
    """Slopes tanh(log η/η_c): each learning rate is as clear as the others, however far off it is."""

    def losses(self, values: Array, step: int) -> Array:
        noise = self.random.normal(0, self.noise, values.shape[1])
        found: Array = np.log(np.cosh(np.log(values * step / self.reach))).sum(axis=0) + noise
        return found


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("start", STARTS.values(), ids=STARTS)
def test_finds_the_best_learning_rate(start: float, shape: str, seed: int) -> None:
    """To the dead zone, and a quarter for the steps of e² in which it is approached."""
    run = Scripted([start], shape, seed=seed).finish()
    assert abs(run.off[0]) < DEAD + 0.25, f"ended at {math.exp(run.off[0]):.2f} of the best"


@pytest.mark.parametrize("sync_every", [25, 100], ids=["half the usual interval", "twice the usual interval"])
@pytest.mark.parametrize("start", STARTS.values(), ids=STARTS)
def test_finds_it_at_other_intervals(start: float, sync_every: int) -> None:
    """Longer cycles have fewer syncs to find it in: a factor of e more is theirs."""
    run = Scripted([start], sync_every=sync_every).finish()
    assert abs(run.off[0]) < DEAD + (0.25 if sync_every < T else 1.0), f"ended at {math.exp(run.off[0]):.2f}"


@pytest.mark.parametrize(
    "starts",
    [[1 / 30, 10.0], [30.0, 0.1], [0.1, 3.0, 30.0, 1.0], [1 / 30, 1 / 3, 10.0, 1.0]],
    ids=["low, high", "high, low", "four", "other four"],
)
@pytest.mark.parametrize("seed", range(3))
def test_finds_several_at_once(starts: list[float], seed: int) -> None:
    run = Bounded(starts, seed=seed).finish()
    assert np.abs(run.off).max() < DEAD + 0.5, f"ended at {np.exp(run.off)} of the best"


def test_the_peak_is_approached_from_below_and_reached() -> None:
    """After the search η never rises by more than e^RISE at a sync, and is schedule·e^μ when the window is over."""
    run = Scripted([1 / 30])
    rates, found = [run.base(run.syncs[0])[0]], [False]
    for step in run.syncs:
        run.sync(step)
        rates.append(run.base(step + T - 1)[0])
        found.append(run.state["searches"][0]["found"])
    after = [(now, then) for now, then, was in zip(rates[1:], rates, found, strict=False) if was]
    assert after
    assert all(now <= then * math.exp(RISE) * (1 + 1e-12) for now, then in after)
    assert run.base(1000)[0] == pytest.approx(run.schedule(0.5) * math.exp(run.off[0]), rel=1e-12)
    assert found.index(True) <= sum(step <= UNTIL * TOTAL for step in run.syncs)


@pytest.mark.parametrize("scheduled", [0.5, torch.tensor(0.5), torch.tensor(0.5, dtype=torch.float64)], ids=str)
def test_the_ceiling_holds_until_the_first_sync(scheduled: Any) -> None:
    below, above = applied(begin(1.0), scheduled * CEILING), applied(begin(1.0), scheduled)
    assert type(below) is type(above) is type(scheduled)
    assert float(below) == pytest.approx(0.5 * CEILING, rel=1e-6)
    assert float(above) == pytest.approx(CEILING, rel=1e-6)


# Losses that say nothing


def noise(total_steps: int, sync_every: int, peak: float | None, seed: int, *, n: int = N) -> tuple[float, float]:
    """μ at the end and the highest |μ| on the way, where losses are noise."""
    run, random = Run(total_steps, sync_every, 0.3, (None,), (peak,)), np.random.default_rng(seed)
    state, highest = REGRESSION.start(1, run), 0.0
    for step in range(sync_every, total_steps + 1, sync_every):
        if REGRESSION.active(run, step):
            base = np.array([REGRESSION.base(state, 0, one_cycle(step / total_steps))])
            rho = fan(1, step // sync_every, n, seed)
            state = REGRESSION.update(run, state, Observation(random.normal(2, 1, n), rho, base, None, step))
            highest = max(highest, abs(state["mu"][0]))
    return state["mu"][0], highest


@pytest.mark.parametrize(("n", "bound"), [(4, 1.8), (8, 1.0), (16, 0.8)], ids=lambda v: str(v))
def test_noise_moves_it_little(n: int, bound: float) -> None:
    """The mean of |μ| over 200 runs was 1.45, 0.83 and 0.59 for 4, 8 and 16 replicas: the fewer there are, the less
    their errors are known."""
    found = [noise(TOTAL, T, 1.0, seed, n=n) for seed in range(200)]
    assert np.mean([abs(mu) for mu, _ in found]) < bound
    assert max(highest for _, highest in found) <= REGRESSION.limit


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("peak", "bound"), [(1.0, REGRESSION.limit), (None, 0.5)], ids=["learning rate", "scalar without schedule"]
)
def test_a_thousand_syncs_of_noise(peak: float | None, bound: float, seed: int) -> None:
    """A search has its limit, and ended within 1.1 in 20 runs. Any other scalar walks 3/1001 at a sync at most: a walk
    of independent steps would have gone 3/√1001 = 0.1, and the highest of 20 runs was 0.2."""
    run = Run(40_000, 10, 0.3, (None,), (peak,))
    assert run.syncs(*REGRESSION.window(run)) > 1000
    mu, highest = noise(40_000, 10, peak, seed)
    assert highest <= bound
    assert abs(mu) <= 1.5


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("loss", [0.0, 2.5, -1e6])
def test_equal_losses_leave_the_schedule_alone(shape: str, loss: float) -> None:
    run = Scripted([0.7], shape)
    for step in run.syncs:
        run.sync(step, lambda losses, rho: np.full(N, loss))
        assert run.state["mu"] == [0.0]
        assert run.base(step + 1)[0] == 0.7 * run.schedule((step + 1) / TOTAL)


def test_losses_that_become_equal_end_it_where_it_was() -> None:
    run = Scripted([0.1])
    for step in run.syncs:
        run.sync(step, lambda losses, rho: losses if step < 200 else np.ones(N))  # noqa: B023
    assert run.state["searches"][0]["found"]
    assert abs(run.off[0]) < 1.5


@pytest.mark.parametrize("controller", [RegressionController(), HypergradientController()], ids=["losses", "slopes"])
@pytest.mark.parametrize("told", ["nothing", "not finite"])
def test_a_run_whose_last_syncs_tell_nothing_goes_back_to_its_schedule(controller: Any, told: str) -> None:
    """And not on with the constant rate of the search."""
    run = Run(TOTAL, T, 0.3, (None,), (1.0,))
    state = controller.start(1, run)
    for step in range(2 * T, 601, T):
        rho, base = fan(1, step // T), np.array([controller.base(state, 0, one_cycle(step / TOTAL))])
        quiet = step > 200
        losses = np.full(N, NAN) if quiet else -base[0] * rho[0]
        slopes = np.array([NAN if quiet else -base[0]])
        seen = Observation(losses, rho, base, None if quiet and told == "nothing" else slopes, step)
        state = controller.update(run, state, seen)
    mu = state["mu"][0]
    assert [controller.base(state, 0, value) for value in (1.0, 0.5)] == [math.exp(mu), 0.5 * math.exp(mu)]
    assert abs(mu) <= controller.limit


# Losses that are bad


def with_bad_loss(start: float, at: int, bad: float | None) -> Scripted:
    """A run in which the replica with the highest learning rate has loss ``bad`` at one sync; None: it is as bad as a
    loss can be that counts."""
    run = Scripted([start])

    def change(losses: Array, rho: Array) -> Array:
        losses = losses.copy()
        losses[rho[0].argmax()] = 1e3 if bad is None else bad
        return losses

    for step in run.syncs:
        run.sync(step, change if step == at else lambda losses, rho: losses)
    return run


@pytest.mark.parametrize("bad", [NAN, INF, 1e30, 1e300])
@pytest.mark.parametrize("at", [100, 150, 250])
@pytest.mark.parametrize("start", [0.1, 1.0, 10.0])
def test_a_replica_that_explodes_lowers_the_learning_rate_by_no_more_than_a_bad_one(
    start: float, at: int, bad: float
) -> None:
    ordinary, exploded, plain = (
        with_bad_loss(start, at, None),
        with_bad_loss(start, at, bad),
        Scripted([start]).finish(),
    )
    assert exploded.off[0] <= plain.off[0] + 1e-9, "never higher for it"
    if math.isfinite(bad):
        assert exploded.state == ordinary.state, "how bad it is says nothing"
    else:
        assert exploded.off[0] > ordinary.off[0] - 0.25


@pytest.mark.parametrize("bad", [NAN, INF, 1e30])
@pytest.mark.parametrize("start", [0.1, 1.0, 10.0])
def test_one_that_explodes_at_every_sync_does_not_raise_it(start: float, bad: float) -> None:
    def change(losses: Array, rho: Array) -> Array:
        losses = losses.copy()
        losses[rho[0].argmax()] = bad
        return losses

    run = Scripted([start])
    for step in run.syncs:
        run.sync(step, change)
    assert run.state["mu"][0] <= max(Scripted([start]).finish().state["mu"][0], 0.0)


@pytest.mark.parametrize("size", [1e-300, 1e-160, 1e-30, 1.0, 1e30, 1e160, 1e300])
@pytest.mark.parametrize("error", [0.0, 1e-300, 1.0, 1e300])
def test_slopes_of_any_size_are_the_same_search(size: float, error: float) -> None:
    state, reference = begin(1.0), begin(1.0)
    for step, slope in zip(range(100, 400, T), (-1.0, -0.8, -0.5, 0.6, -0.2, 0.1), strict=True):
        options: Any = {"peak": 1.0, "horizon": REGRESSION.horizon, "enough": INF, "limit": 4.0}
        state = searched(state, Sync(slope * size, error, 0.1, step, TOTAL, T, False), **options)
        reference = searched(reference, Sync(slope, 0.0, 0.1, step, TOTAL, T, False), **options)
        assert all(math.isfinite(value) for value in (state.rate or 0.0, state.mu, state.m, state.size, state.total))
        assert state.rate == pytest.approx(reference.rate, rel=1e-9)


@pytest.mark.parametrize("size", [1e-300, 1e300])
@pytest.mark.parametrize("peak", [1.0, None], ids=["searched", "μ law"])
@pytest.mark.filterwarnings("error")
def test_the_controller_takes_slopes_of_any_size(size: float, peak: float | None) -> None:
    controller, run = HypergradientController(), Run(TOTAL, T, 0.3, (None,), (peak,))
    state = controller.start(1, run)
    for step in range(2 * T, 601, T):
        base = np.array([controller.base(state, 0, 1.0)])
        state = controller.update(run, state, Observation(np.ones(1), np.ones((1, 1)), base, np.array([-size]), step))
        assert math.isfinite(state["mu"][0])
        assert math.isfinite(state["q"][0])


def test_bounds_hold_on_the_way_and_at_the_end() -> None:
    """Around a best rate far above them: the search is cut at every sync, and is over in time."""
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
    assert spread.control["searches"][0]["found"]
    assert spread.control["mu"][0] > 0


# States


def test_the_state_is_plain_and_survives_a_file_at_every_sync() -> None:
    straight, stored = Scripted([0.1, 3.0]), Scripted([0.1, 3.0])
    for step in straight.syncs:
        file = io.BytesIO()
        torch.save(stored.state, file)
        stored.state = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
        assert stored.state == straight.state
        straight.sync(step)
        stored.sync(step)
    assert {type(v) for search in straight.state["searches"] for v in search.values()} <= {float, int, bool, type(None)}


def test_a_searched_state_is_not_changed_in_place() -> None:
    run = Scripted([0.1])
    run.sync(100)
    before = [dict(search) for search in run.state["searches"]]
    state = run.state
    run.sync(150)
    assert state["searches"] == before
    assert run.state["searches"] != before
    with pytest.raises(dataclasses.FrozenInstanceError):
        Search().mu = 1.0  # type: ignore[misc]
