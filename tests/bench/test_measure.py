"""Ratios and series of timed calls."""

from __future__ import annotations

import math
import random
from types import SimpleNamespace
from typing import Any

import pytest

from bench import measure


def test_ratio_is_that_of_medians_with_quartiles_of_turns() -> None:
    found = measure.ratio([1.0, 2.0, 3.0, 6.0, 5.0], [2.0, 2.0, 2.0, 2.0, 2.0])
    assert found == {"ratio": 1.5, "low": 1.0, "high": 2.5}


def test_interval_of_a_median_ratio_leaves_out_what_chance_allows() -> None:
    ratios = [0.5, 0.9, *[1.0] * 6, 1.2, 3.0]
    found = measure.median_ratio([2 * ratio for ratio in ratios], [2.0] * 10)
    assert found == {"ratio": 1.0, "low": 0.9, "high": 1.2}, "of ten turns, one on either side is left out"
    assert measure.median_ratio([1.0, 3.0, 2.0], [1.0] * 3) == {"ratio": 2.0, "low": 1.0, "high": 3.0}
    generator = random.Random(0)
    outside = 0
    for _ in range(2000):
        turns = [generator.expovariate(1) for _ in range(20)]
        interval = measure.median_ratio(turns, [1.0] * 20)
        outside += not interval["low"] <= math.log(2) <= interval["high"]
    assert 0.02 < outside / 2000 < 0.06


def test_turns_go_forwards_and_backwards() -> None:
    order: list[str] = []
    benchmark: Any = SimpleNamespace(name="case", extra_info={})
    benchmark.pedantic = lambda turn, rounds: [turn() for _ in range(rounds)]
    calls = {name: lambda name=name: order.append(name) for name in ("torch-fused", "hdet-cpp")}
    times = measure.take_turns(benchmark, calls, "cpu", turns=2, iterations=1)  # type: ignore[arg-type]
    assert order[6:] == ["torch-fused", "hdet-cpp", "hdet-cpp", "torch-fused"]  # after three warm-up calls of each
    assert {name: len(found) for name, found in times.items()} == {"torch-fused": 2, "hdet-cpp": 2}
    assert set(benchmark.extra_info) == {"ways", "ratio"}


@pytest.mark.parametrize("quick", [False, True])
def test_quick_runs_have_few_rounds(quick: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "QUICK", quick)
    assert measure.rounds(20) == (3 if quick else 20)
