"""Where scripted runs move a learning rate whose best peak is known."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest

from hdet_kernels.controller.protocol import Observation, Run
from hdet_kernels.fanout.multipliers import pairs
from tests.controller.cases import INF, NAN
from tests.controller.scripted import REGRESSION, SHAPES, STARTS, TOTAL, Array, N, Scripted, Steep, T, fan


def cases(shapes: Iterable[str] = SHAPES, quick: Iterable[str] = ("30x low", "3x low", "30x high")) -> list[Any]:
    """Return (start, shape, seed) of all runs; ``make test`` has the ``quick`` starts, OneCycleLR and one seed."""
    found = []
    for name, start in STARTS.items():
        for shape in shapes:
            for seed in range(3):
                marks = () if (shape, seed) == ("onecycle", 0) and name in quick else (pytest.mark.full,)
                found.append(pytest.param(start, shape, seed, marks=marks, id=f"{name}-{shape}-{seed}"))
    return found


def moved_towards_the_best(run: Scripted) -> bool:
    return all(start == 1 or (mu > 0) == (start < 1) for start, mu in zip(run.starts, run.mu, strict=True))


def between(ended: float, measured: tuple[float, float]) -> bool:
    """Return whether a result is within the range of 20 seeds, widened by a tenth."""
    return 0.9 * measured[0] < ended < 1.1 * measured[1]


#: Final peaks over the best one for each start: lowest and highest of all shapes and 20 seeds. Then the same with steep
#: slopes, with a noisy probe, and without a probe at twice the interval.
ENDED = {1 / 30: (0.44, 0.55), 1 / 10: (0.53, 0.58), 1 / 3: (0.61, 0.63), 1.0: (0.83, 0.84), 3.0: (0.94, 0.97),
         10.0: (0.78, 0.81), 30.0: (0.80, 0.82)}  # fmt: skip
ENDED_STEEP = {1 / 30: (0.44, 0.49), 1 / 10: (0.52, 0.53), 1 / 3: (0.33, 0.60), 1.0: (0.30, 0.48), 3.0: (0.34, 0.46),
               10.0: (0.29, 0.46), 30.0: (0.55, 0.75)}  # fmt: skip
ENDED_NOISY = {1 / 30: (0.38, 0.50), 1 / 10: (0.49, 0.56), 1 / 3: (0.55, 0.62), 1.0: (0.73, 0.80), 3.0: (0.83, 0.98),
               10.0: (0.96, 1.10), 30.0: (1.02, 1.05)}  # fmt: skip
ENDED_UNPROBED = {1 / 30: (0.50, 0.66), 1 / 10: (0.54, 0.60), 1 / 3: (0.60, 0.62), 1.0: (0.59, 0.61),
                  3.0: (0.49, 0.62), 10.0: (0.35, 0.69), 30.0: (0.55, 0.55)}  # fmt: skip


@pytest.mark.parametrize(("start", "shape", "seed"), cases(quick=STARTS))
def test_moves_towards_the_best_learning_rate(start: float, shape: str, seed: int) -> None:
    """It ends at 0.44 to 0.97 of the best."""
    run = Scripted([start], shape, seed=seed).finish()
    (ended,) = run.over_best
    assert moved_towards_the_best(run), f"from {start:.3g} to {ended:.3g}"
    assert between(ended, ENDED[start])


@pytest.mark.parametrize(("start", "shape", "seed"), cases())
def test_steep_slopes_end_lower(start: float, shape: str, seed: int) -> None:
    """They mark the edge of stability, and the peak is held near it."""
    (ended,) = Steep([start], shape, seed=seed).finish().over_best
    assert between(ended, ENDED_STEEP[start])


@pytest.mark.parametrize(("start", "shape", "seed"), cases(["onecycle"]))
def test_a_noisy_probe_ends_about_where_an_exact_one_does(start: float, shape: str, seed: int) -> None:
    """Equal replicas show the noise. It ends at 0.38 to 1.10 of the best."""
    run = Scripted([start], shape, noise=0.01, seed=seed).finish()
    (ended,) = run.over_best
    assert moved_towards_the_best(run), f"from {start:.3g} to {ended:.3g}"
    assert between(ended, ENDED_NOISY[start])


@pytest.mark.parametrize(("start", "shape", "seed"), cases())
def test_ends_lower_without_a_probe(start: float, shape: str, seed: int) -> None:
    """There are no early syncs and no elasticity. It ends at 0.35 to 0.69 of the best."""
    run = Scripted([start], shape, seed=seed, sync_every=2 * T, probed=False).finish()
    (ended,) = run.over_best
    assert run.run.early == ()
    assert moved_towards_the_best(run), f"from {start:.3g} to {ended:.3g}"
    assert between(ended, ENDED_UNPROBED[start])


FROM_LOW_TO_HIGH = np.geomspace(1 / 30, 30, 35).tolist()


def ends(**options: Any) -> Array:
    """Return the final peaks, over the best, of 35 starts from 30 times too low to 30 times too high."""
    return np.array([Scripted([start], **options).finish().over_best[0] for start in FROM_LOW_TO_HIGH])


def geometric_mean(values: Array) -> float:
    return float(np.exp(np.log(values).mean()))


@pytest.mark.parametrize(
    ("shape", "lowest", "mean", "highest"),
    [
        pytest.param("onecycle", 0.44, 0.71, 0.96, marks=pytest.mark.full),
        pytest.param("cosine", 0.44, 0.72, 0.97, marks=pytest.mark.full),
        pytest.param("constant", 0.51, 0.73, 0.97, marks=pytest.mark.full),
        pytest.param("half", 0.44, 0.72, 0.97, marks=pytest.mark.full),
    ],
)
def test_where_all_starts_end(shape: str, lowest: float, mean: float, highest: float) -> None:
    ended = ends(shape=shape)
    assert between(ended.min(), (lowest, lowest))
    assert between(geometric_mean(ended), (mean, mean))
    assert between(ended.max(), (highest, highest))


@pytest.mark.full
@pytest.mark.parametrize(("off", "mean"), [(0.5, 0.53), (2.0, 1.91)], ids=["half", "twice"])
def test_another_turning_length_changes_the_end_by_about_that_factor(off: float, mean: float) -> None:
    """In the mean of all starts; single ones by 0.40 to 0.68 and by 1.6 to 2.5."""
    ratios = ends(off=off) / ends()
    assert between(geometric_mean(ratios), (mean, mean))
    assert between(ratios.min(), (0.40, 0.40) if off < 1 else (1.59, 1.59))
    assert between(ratios.max(), (0.68, 0.68) if off < 1 else (2.45, 2.45))


@pytest.mark.full
def test_cycles_four_times_as_short_end_about_the_same() -> None:
    """The mean of all starts is higher by a seventh; single ones are at 0.94 to 1.54 of the other end."""
    ratios = ends(sync_every=10) / ends(sync_every=40)
    assert between(geometric_mean(ratios), (1.14, 1.14))
    assert between(ratios.min(), (0.94, 0.94))
    assert between(ratios.max(), (1.54, 1.54))


@pytest.mark.parametrize(
    ("sync_every", "lowest", "mean", "highest"),
    [
        pytest.param(5, 0.65, 0.82, 1.01, marks=pytest.mark.full),
        pytest.param(12, 0.56, 0.77, 0.99, marks=pytest.mark.full),
        pytest.param(50, 0.37, 0.64, 0.90, marks=pytest.mark.full),
        (100, 0.23, 0.62, 1.03),
    ],
    ids=["a fifth of the usual interval", "half", "twice", "four times"],
)
def test_moves_at_other_intervals(sync_every: int, lowest: float, mean: float, highest: float) -> None:
    ended = ends(sync_every=sync_every)
    for start, found in zip(FROM_LOW_TO_HIGH, ended, strict=True):
        assert (found > start) == (start < 1) or 0.5 < start < 2
    assert between(ended.min(), (lowest, lowest))
    assert between(geometric_mean(ended), (mean, mean))
    assert between(ended.max(), (highest, highest))


@pytest.mark.parametrize(
    "starts",
    [[1 / 30, 10.0], [30.0, 0.1], [0.1, 3.0, 30.0, 1.0], [1 / 30, 1 / 3, 10.0, 1.0]],
    ids=["low, high", "high, low", "four", "other four"],
)
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in (1, 2))])
def test_moves_several_learning_rates_at_once(starts: list[float], seed: int) -> None:
    """They end at 0.42 to 1.31 of the best over 20 seeds."""
    run = Scripted(starts, seed=seed).finish()
    assert moved_towards_the_best(run), f"ended at {run.over_best} of the best"
    assert all(between(ended, (0.42, 1.31)) for ended in run.over_best)


def noise(
    total_steps: int, sync_every: int, peak: float | None, seed: int, *, n: int = N, shape: str = "onecycle",
    probed: bool = True,
) -> tuple[float, float]:  # fmt: skip
    """Return the final μ and the highest |μ| of a run whose losses are noise, of a probe or of training."""
    schedule, at, end = SHAPES[shape]
    run, random = Run(total_steps, sync_every, at, (None,), (peak,), end, probed), np.random.default_rng(seed)
    run = REGRESSION.prepare(dataclasses.replace(run, others=peak is None))
    state, highest = REGRESSION.start(1, run), 0.0
    for step in (*run.early, *range(sync_every, total_steps + 1, sync_every)):
        if REGRESSION.active(run, step):
            rho = fan(1, step // sync_every, seed, n)
            if probed:
                rho = pairs(n, [(0.3, "linear")], seed=seed, sync=run.syncs_before(step - 1))
            base = np.array([REGRESSION.base(state, 0, schedule((step - 1) / total_steps))])
            state = REGRESSION.update(run, state, Observation(random.normal(2, 1, n), rho, base, step))
            highest = max(highest, abs(state["mu"][0]))
    return state["mu"][0], highest


@pytest.mark.parametrize(
    ("n", "probed", "mean", "aside", "worst", "shape"),
    [
        (4, False, 0.12, 0.04, 2.1, "onecycle"),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in [
                (2, True, 0.25, 0.05, 3.5, "onecycle"),
                (3, True, 0.25, 0.13, 4.0, "onecycle"),
                (4, True, 0.18, 0.12, 3.0, "onecycle"),
                (8, True, 0.03, 0.02, 1.3, "onecycle"),
                (16, True, 0.04, 0.02, 1.5, "onecycle"),
                (2, False, 0.25, 0.06, 3.3, "onecycle"),
                (3, False, 0.21, 0.05, 3.0, "onecycle"),
                (8, False, 0.25, 0.04, 3.4, "onecycle"),
                (16, False, 0.34, 0.06, 3.6, "onecycle"),
                (8, True, 0.03, 0.02, 1.3, "constant"),
                (8, False, 0.25, 0.04, 3.4, "constant"),
            ]
        ),
    ],
)
def test_noise_moves_a_learning_rate_little(
    n: int, probed: bool, mean: float, aside: float, worst: float, shape: str
) -> None:
    """Pure noise moves a learning rate little.

    Over 200 runs with 4, 8 and 16 replicas the mean |μ| was 0.14, 0.02 and 0.03 with a probe, and 0.10, 0.22 and 0.30
    with training losses; the worst moment of the worst run was 2.7, 1.1 and 1.3, and 1.9, 2.9 and 3.3. With two and
    three replicas, whose errors are not known, the mean was 0.2. From four replicas on, this test makes 100 runs.
    """
    every, runs = T if probed else 2 * T, 200 if n < 4 else 100
    found = [noise(TOTAL, every, 1.0, seed, n=n, shape=shape, probed=probed) for seed in range(runs)]
    assert np.mean([abs(mu) for mu, _ in found]) < mean
    assert abs(np.mean([mu for mu, _ in found])) < aside
    assert max(highest for _, highest in found) <= worst


@pytest.mark.parametrize(
    ("n", "probed", "mean", "worst"),
    [
        pytest.param(4, True, 0.05, 0.35, marks=pytest.mark.full),
        pytest.param(8, True, 0.02, 0.12, marks=pytest.mark.full),
        pytest.param(4, False, 0.02, 0.1, marks=pytest.mark.full),
        pytest.param(8, False, 0.06, 0.3, marks=pytest.mark.full),
    ],
)
def test_noise_moves_another_scalar_little(n: int, probed: bool, mean: float, worst: float) -> None:
    """Over 100 runs the mean |μ| was 0.01 to 0.05 with 4 and 8 replicas, the worst 0.08 to 0.33."""
    found = [noise(TOTAL, T, None, seed, n=n, probed=probed) for seed in range(50)]
    assert np.mean([abs(mu) for mu, _ in found]) < mean
    assert max(highest for _, highest in found) < worst


@pytest.mark.full
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("probed", [True, False], ids=["probe", "training"])
@pytest.mark.parametrize("peak", [1.0, None], ids=["learning rate", "other scalar"])
def test_a_thousand_syncs_of_noise_move_next_to_nothing(peak: float | None, probed: bool, seed: int) -> None:
    """The highest |μ| measured was 0.03."""
    total = 34_000 if peak else 17_000
    run = Run(total, 10, 0.3, (None,), (peak,))
    assert run.syncs(*(REGRESSION.rate_steps if peak else REGRESSION.slope_steps)(run)) > 1000
    assert noise(total, 10, peak, seed, probed=probed)[1] < 0.05


QUICK_EQUAL = [("onecycle", 0.0), ("constant", 2.5), ("half", -1e6)]


@pytest.mark.parametrize(
    ("shape", "loss"),
    [
        pytest.param(shape, loss, marks=() if (shape, loss) in QUICK_EQUAL else pytest.mark.full)
        for shape in SHAPES
        for loss in (0.0, 2.5, -1e6)
    ],
)
def test_equal_losses_leave_the_schedule_alone(shape: str, loss: float) -> None:
    run = Scripted([0.7], shape)
    for step in run.syncs:
        run.sync(step, lambda losses, rho: np.full(N, loss))
        assert run.mu == [0.0]
    assert run.base(1000)[0] == 0.7 * run.schedule(0.5)


def thinned(*values: list[float]) -> list[Any]:
    """Return all combinations, of which ``make test`` runs one for each entry of the longest list."""
    most = max(map(len, values))
    quick = [tuple(each[index % len(each)] for each in values) for index in range(most)]
    return [pytest.param(*case, marks=() if case in quick else pytest.mark.full) for case in itertools.product(*values)]


def with_worst_highest(bad: float) -> Callable[[Array, Array], Array]:
    """Return a change of losses: the replica with the highest learning rate has loss ``bad``."""
    return lambda losses, rho: np.where(np.arange(N) == rho[0].argmax(), bad, losses)


def with_worst_equal(bad: float) -> Callable[[Array, Array], Array]:
    """Return a change of losses: a replica with the base values has loss ``bad``."""
    return lambda losses, rho: np.where(np.arange(N) == (rho[0] == 1).argmax(), bad, losses)


def with_bad_losses(start: float, bad: float, at: Callable[[int], bool]) -> Scripted:
    """Finish a run in which the replica with the highest learning rate has loss ``bad`` at some syncs."""
    run = Scripted([start])
    for step in run.syncs:
        run.sync(step, with_worst_highest(bad) if at(step) else lambda losses, rho: losses)
    return run


@pytest.mark.parametrize(
    ("start", "at", "bad"), thinned([0.1, 1.0, 10.0], [50, 100, 150, 250], [NAN, INF, 1e30, 1e300])
)
def test_an_exploding_replica_does_not_raise_the_learning_rate(start: float, at: int, bad: float) -> None:
    """Where μ would rise, it rises less or falls. Where it would fall, it falls by at most 0.24 less (except near the
    edge of stability), because the slope is less significant. The size of a finite outlier does not matter."""
    plain, exploded, ordinary = (Scripted([start]) for _ in range(3))
    for step in range(T, at, T):
        for run in (plain, exploded, ordinary):
            run.sync(step)
    before = plain.mu[0]
    plain.sync(at)
    exploded.sync(at, with_worst_highest(bad))
    ordinary.sync(at, with_worst_highest(1e3))
    if plain.mu[0] > before:
        assert exploded.mu[0] < plain.mu[0]
    else:
        assert exploded.mu[0] <= before
        assert exploded.mu[0] <= plain.mu[0] + 0.3 or plain.state["stability"]["edge"] is not None
    assert exploded.state == ordinary.state or not math.isfinite(bad)


@pytest.mark.parametrize(("start", "at", "bad"), thinned([0.1, 1.0, 10.0], [50, 100, 150, 250], [NAN, INF, 1e30]))
def test_a_run_recovers_from_one_explosion(start: float, at: int, bad: float) -> None:
    """A start that is too low ends at 0.50 to 0.60 of the best instead of 0.60; other starts end at 0.73 to 0.82
    instead of 0.81 and 0.82."""
    (ended,) = with_bad_losses(start, bad, lambda step: step == at).over_best
    assert between(ended, (0.50, 0.60) if start < 1 else (0.73, 0.82))


@pytest.mark.parametrize(("start", "at", "bad"), thinned([0.1, 1.0, 10.0], [50, 100], [NAN, INF, 1e30]))
def test_an_exploding_replica_with_base_values_does_not_count_as_noise(start: float, at: int, bad: float) -> None:
    """As noise it would make later slopes insignificant. A finite outlier changes the mean loss and so the gain: the
    run ends near those above."""
    run = Scripted([start])
    for step in run.syncs:
        run.sync(step, with_worst_equal(bad) if step == at else lambda losses, rho: losses)
    assert run.state["noise"][0] < 1e-20
    assert between(run.over_best[0], (0.50, 0.82))


@pytest.mark.parametrize(("start", "bad"), thinned([0.1, 1.0, 10.0], [NAN, INF, 1e30]))
def test_explosions_at_every_sync_do_not_raise_the_learning_rate(start: float, bad: float) -> None:
    """The replica with the highest learning rate explodes each time, so lower ones are better."""
    exploded = with_bad_losses(start, bad, lambda step: True)
    assert -REGRESSION.limit <= exploded.mu[0] < min(Scripted([start]).finish().mu[0], -0.2)
