"""Multipliers against tables computed by hand, and permutations as functions of their arguments alone."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import hdet_kernels
from hdet_kernels import multipliers, permutation
from hdet_kernels.fanout.multipliers import check_spread, pairs

ROOT = Path(hdet_kernels.__file__).parents[1]
PROPERTY = settings(deadline=None, max_examples=80)

counts = st.integers(1, 64)
linear_spreads = st.floats(1e-6, 0.999)
log_spreads = st.floats(1e-6, 1e3)

LINEAR = [
    (1, 0.3, [1.0]),
    (2, 0.3, [0.7, 1.3]),
    (3, 0.5, [0.5, 1.0, 1.5]),
    (4, 0.3, [0.7, 0.9, 1.1, 1.3]),
    (4, 1 / 9, [8 / 9, 26 / 27, 28 / 27, 10 / 9]),
    (8, 0.7, [0.3, 0.5, 0.7, 0.9, 1.1, 1.3, 1.5, 1.7]),
]
LOG = [
    (1, 3.0, [1.0]),
    (2, 1.0, [0.5, 2.0]),
    (3, 3.0, [0.25, 1.0, 4.0]),
    (4, 7.0, [1 / 8, 1 / 2, 2.0, 8.0]),
    (8, 127.0, [1 / 128, 1 / 32, 1 / 8, 1 / 2, 2.0, 8.0, 32.0, 128.0]),
]


def table_id(row: object) -> str | None:
    return f"{len(row)} values" if isinstance(row, list) else None


class TestMultipliers:
    @pytest.mark.parametrize(("n", "spread", "expected"), LINEAR, ids=table_id)
    def test_linear_table(self, n: int, spread: float, expected: list[float]) -> None:
        assert multipliers(n, spread).tolist() == pytest.approx(expected, rel=1e-14)

    @pytest.mark.parametrize(("n", "spread", "expected"), LOG, ids=table_id)
    def test_log_table(self, n: int, spread: float, expected: list[float]) -> None:
        assert multipliers(n, spread, "log").tolist() == pytest.approx(expected, rel=1e-14)

    @PROPERTY
    @given(counts, linear_spreads)
    def test_linear_has_mean_one_and_is_symmetric_in_its_range(self, n: int, spread: float) -> None:
        rho = multipliers(n, spread)
        assert rho.shape == (n,)
        assert rho.dtype == np.float64
        assert rho.mean() == pytest.approx(1, abs=1e-14)
        np.testing.assert_allclose(rho + rho[::-1], 2, rtol=0, atol=1e-14)
        np.testing.assert_allclose(np.diff(rho, 2), 0, atol=1e-14)
        if n > 1:
            assert rho[[0, -1]].tolist() == [1 - spread, 1 + spread]

    @PROPERTY
    @given(counts, log_spreads)
    def test_log_has_geometric_mean_one_and_is_symmetric_in_its_range(self, n: int, spread: float) -> None:
        rho = multipliers(n, spread, "log")
        assert np.log(rho).mean() == pytest.approx(0, abs=1e-13)
        np.testing.assert_allclose(rho * rho[::-1], 1, rtol=1e-13)
        np.testing.assert_allclose(np.diff(np.log(rho), 2), 0, atol=1e-13)
        if n > 1:
            np.testing.assert_allclose(rho[[0, -1]], [1 / (1 + spread), 1 + spread], rtol=1e-14)

    @PROPERTY
    @given(st.integers(2, 64), linear_spreads, st.sampled_from(["linear", "log"]))
    def test_positive_and_strictly_increasing(self, n: int, spread: float, spacing: str) -> None:
        rho = multipliers(n, spread, spacing)
        assert (rho > 0).all()
        assert (np.diff(rho) > 0).all()

    @pytest.mark.parametrize("spacing", ["linear", "log"])
    @pytest.mark.parametrize("n", [1, 2, 3, 4, 8, 17])
    def test_no_spread_is_exactly_one(self, n: int, spacing: str) -> None:
        assert multipliers(n, 0, spacing).tolist() == [1.0] * n

    def test_linear_is_the_default(self) -> None:
        assert multipliers(5, 0.4).tolist() == multipliers(5, 0.4, "linear").tolist()

    @pytest.mark.parametrize("n", [0, -3, 2.5])
    def test_refuses_a_number_of_replicas(self, n: int) -> None:
        with pytest.raises(ValueError, match=f"replicas must be a whole number of at least 1, got {n}"):
            multipliers(n, 0.3)
        with pytest.raises(ValueError, match=f"replicas must be a whole number of at least 1, got {n}"):
            permutation(n, seed=0, cycle=0, hyperparameter="lr/0")

    @pytest.mark.parametrize(
        ("spread", "spacing", "message"),
        [
            (-0.1, "linear", "finite number of at least 0, got -0.1"),
            (-0.1, "log", "finite number of at least 0, got -0.1"),
            (float("nan"), "linear", "finite number of at least 0, got nan"),
            (float("inf"), "log", "finite number of at least 0, got inf"),
            (1, "linear", "below 1 with linear spacing, got 1: .* 1 − spread would be 0; .*spacing='log'"),
            (1.5, "linear", "below 1 with linear spacing, got 1.5: .* would be -0.5"),
            (0.3, "cubic", "spacing must be one of 'linear', 'log', got 'cubic'"),
        ],
    )
    def test_refuses_a_spread(self, spread: float, spacing: str, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            multipliers(4, spread, spacing)

    def test_the_message_names_the_spread(self) -> None:
        with pytest.raises(ValueError, match=r"^spread of 'eps' must be below 1"):
            check_spread(2, "linear", "spread of 'eps'")

    def test_wide_log_and_narrow_linear_spreads_are_accepted(self) -> None:
        check_spread(1, "log")
        check_spread(99, "log")
        check_spread(0.999999, "linear")


GOLDEN = [
    ({"n": 1, "seed": 0, "cycle": 0, "hyperparameter": "lr/0"}, [0]),
    ({"n": 8, "seed": 0, "cycle": 0, "hyperparameter": "lr/0"}, [7, 2, 5, 0, 3, 6, 4, 1]),
    ({"n": 8, "seed": 0, "cycle": 1, "hyperparameter": "lr/0"}, [7, 0, 6, 3, 1, 5, 4, 2]),
    ({"n": 4, "seed": 3, "cycle": 17, "hyperparameter": "weight_decay/1"}, [3, 2, 1, 0]),
    ({"n": 5, "seed": 2**63, "cycle": 10**12, "hyperparameter": "température"}, [2, 3, 4, 1, 0]),
]


def draw(n: int = 8, seed: int = 0, cycle: int = 0, hyperparameter: str = "lr/0") -> list[int]:
    return permutation(n, seed=seed, cycle=cycle, hyperparameter=hyperparameter).tolist()


class TestPermutation:
    @PROPERTY
    @given(counts, st.integers(0, 2**70), st.integers(0, 10**12), st.text("lr/0é✓ ", max_size=12))
    def test_holds_every_index_once(self, n: int, seed: int, cycle: int, name: str) -> None:
        order = permutation(n, seed=seed, cycle=cycle, hyperparameter=name)
        assert sorted(order.tolist()) == list(range(n))
        assert order.dtype == np.int64

    @pytest.mark.parametrize(("arguments", "expected"), GOLDEN, ids=lambda v: None if isinstance(v, list) else str(v))
    def test_golden_values(self, arguments: dict, expected: list[int]) -> None:
        """A resumed run draws its permutations anew: another algorithm would silently change them."""
        assert permutation(**arguments).tolist() == expected

    @pytest.mark.full
    def test_the_same_in_a_process_with_other_seeds(self) -> None:
        asked = [arguments for arguments, _ in GOLDEN]
        code = (
            "import json, random, sys, numpy, torch\n"
            "random.seed(5); numpy.random.seed(6); torch.manual_seed(7)\n"
            "from hdet_kernels import permutation\n"
            "print(json.dumps([permutation(**a).tolist() for a in json.loads(sys.argv[1])]))"
        )
        env = {**os.environ, "PYTHONHASHSEED": "1234", "PYTHONPATH": str(ROOT)}
        out = subprocess.run(
            [sys.executable, "-c", code, json.dumps(asked)], env=env, check=True, capture_output=True, text=True
        )
        assert json.loads(out.stdout) == [permutation(**arguments).tolist() for arguments in asked]

    def test_neither_reads_nor_writes_a_global_generator(self) -> None:
        before = draw()
        for seed in (1, 2):
            random.seed(seed)
            np.random.seed(seed)  # noqa: NPY002
            torch.manual_seed(seed)
            states = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
            assert draw() == before
            now = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
            assert now[0] == states[0]
            assert now[1][0] == states[1][0]
            assert np.array_equal(now[1][1], states[1][1])
            assert now[1][2:] == states[1][2:]
            assert torch.equal(now[2], states[2])

    @pytest.mark.parametrize(
        "others",
        [
            [{"seed": s} for s in range(6)],
            [{"cycle": c} for c in range(6)],
            [{"hyperparameter": h} for h in ("lr/0", "lr/1", "lr/10", "weight_decay/0", "lr", "")],
            [{"seed": 1, "cycle": 11}, {"seed": 11, "cycle": 1}, {"seed": 0, "cycle": 111}, {"seed": 111, "cycle": 0}],
        ],
        ids=["seed", "cycle", "hyperparameter", "digits of seed and cycle do not mix"],
    )
    def test_every_argument_matters(self, others: list[dict]) -> None:
        drawn = [tuple(draw(n=16, **arguments)) for arguments in others]
        assert len(set(drawn)) == len(drawn)

    @pytest.mark.parametrize("n", [2, 3, 4, 8])
    def test_every_replica_gets_every_multiplier_about_equally_often(self, n: int) -> None:
        cycles = 2000
        seen = np.zeros((n, n))
        for cycle in range(cycles):
            seen[np.arange(n), draw(n, cycle=cycle)] += 1
        # (n−1)/n times Pearson's statistic of permutation matrices has (n−1)² degrees of freedom.
        statistic = (n - 1) / n * ((seen - cycles / n) ** 2 / (cycles / n)).sum()
        assert statistic < chi_square_bound((n - 1) ** 2)

    @pytest.mark.parametrize(
        ("this", "that"),
        [
            ({"hyperparameter": "lr/0"}, {"hyperparameter": "lr/1"}),
            ({"hyperparameter": "lr/0"}, {"hyperparameter": "weight_decay/0"}),
            ({"seed": 0}, {"seed": 1}),
        ],
        ids=["two groups", "two scalars", "two seeds"],
    )
    def test_two_streams_are_independent(self, this: dict, that: dict) -> None:
        """Otherwise the regression could not separate two hyperparameters."""
        pairs = [(draw(4, cycle=c, **this)[0], draw(4, cycle=c, **that)[0]) for c in range(2000)]
        assert pair_statistic(pairs) < chi_square_bound(15)

    def test_consecutive_cycles_are_independent(self) -> None:
        pairs = [(draw(4, cycle=c)[0], draw(4, cycle=c + 1)[0]) for c in range(2000)]
        assert pair_statistic(pairs) < chi_square_bound(15)


def chi_square_bound(freedom: int) -> float:
    """Return six standard deviations above the mean of a chi-square variable. The draws are fixed."""
    return freedom + 6 * (2 * freedom) ** 0.5


def pair_statistic(pairs: list[tuple[int, int]]) -> float:
    seen = np.zeros((4, 4))
    for a, b in pairs:
        seen[a, b] += 1
    expected = len(pairs) / seen.size
    return float(((seen - expected) ** 2 / expected).sum())


class TestPairs:
    """Multipliers [J, n] in which every replica departs in at most one hyperparameter."""

    @staticmethod
    def of(n: int, count: int, look: int = 0, seed: int = 0) -> np.ndarray:
        return pairs(n, [(0.3, "linear")] * count, seed=seed, sync=look)

    @PROPERTY
    @given(counts, st.integers(1, 9), st.integers(0, 50), st.integers(0, 5))
    def test_departures_are_symmetric_and_no_replica_departs_twice(
        self, n: int, count: int, look: int, seed: int
    ) -> None:
        found = self.of(n, count, look, seed)
        assert found.shape == (count, n)
        assert ((found != 1).sum(axis=0) <= 1).all()
        np.testing.assert_allclose(found.mean(axis=1), 1, rtol=1e-14)
        for row in found:
            departing = row[row != 1]
            np.testing.assert_allclose(np.sort(departing), multipliers(max(len(departing), 1), 0.3)[: len(departing)])

    @pytest.mark.parametrize(("n", "equal"), [(1, 1), (2, 0), (3, 1), (4, 2), (5, 3), (8, 2), (9, 3), (16, 2)], ids=str)
    def test_from_four_replicas_on_at_least_two_have_the_base_values(self, n: int, equal: int) -> None:
        for count in (1, 2, 4):
            assert (self.of(n, count) == 1).all(axis=0).sum() == equal

    @pytest.mark.parametrize(("n", "count"), [(2, 1), (2, 3), (4, 2), (8, 2), (8, 4), (8, 5), (16, 4)], ids=str)
    def test_all_hyperparameters_are_explored_equally_often(self, n: int, count: int) -> None:
        found = np.stack([self.of(n, count, look) for look in range(count)])
        often = (found != 1).sum(axis=(0, 2))
        assert set(often.tolist()) == {2 * (n // 2 - (n >= 4))}

    def test_a_hyperparameter_without_spread_is_left_out(self) -> None:
        found = pairs(8, [(0.3, "linear"), (0.0, "linear"), (2.0, "log")], seed=0, sync=0)
        assert (found[1] == 1).all()
        assert (found[[0, 2]] != 1).any(axis=1).all()
        assert found[2].max() == 3.0
        assert (pairs(8, [(0.0, "linear")], seed=0, sync=0) == 1).all()

    def test_replicas_change_places_with_the_sync_and_the_seed(self) -> None:
        places = {self.of(8, 1, look, seed).tobytes() for look in range(5) for seed in range(5)}
        assert len(places) == 25
        assert (self.of(8, 3, 7, 2) == self.of(8, 3, 7, 2)).all()
