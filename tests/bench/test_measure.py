"""Ratios and series of timed calls."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from bench import measure


def test_ratio_is_that_of_medians_with_quartiles_of_turns() -> None:
    found = measure.ratio([1.0, 2.0, 3.0, 6.0, 5.0], [2.0, 2.0, 2.0, 2.0, 2.0])
    assert found == {"ratio": 1.5, "low": 1.0, "high": 2.5}


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
