"""Extreme learning rates and subnormal numbers: as exact as torch, in every backend that runs here."""

from __future__ import annotations

import pytest

from bench import numerics_extremes as extremes
from bench.numerics_rules import RULES
from tests.ops.cases import BACKENDS, ON_CPU, interpreted

QUICK_RATES = (1e-12, 1e-3, 1e3)

CASES = [
    pytest.param(*backend.values, name, id=f"{backend.id}-{name}", marks=backend.marks)
    for backend in BACKENDS
    for name in RULES
    if backend.id != "triton-cpu" or name in extremes.INTERPRETED
]


@pytest.mark.full
@pytest.mark.parametrize(("backend", "name"), CASES)
def test_learning_rates_from_1e_12_to_1e3(backend: tuple[str, str], name: str) -> None:
    where, device = backend
    rates = extremes.INTERPRETED_RATES if interpreted(backend) else extremes.RATES
    for lr in rates:
        ours, plain = extremes.rate_errors(RULES[name], device, where, lr)
        assert ours <= 2 * plain + 1, f"lr {lr}: {ours} units, torch {plain}"


@pytest.mark.full
@pytest.mark.parametrize(("backend", "name"), CASES)
def test_subnormal_numbers_are_kept(backend: tuple[str, str], name: str) -> None:
    check_subnormals(backend, name)


@pytest.mark.parametrize("backend", [each for each in ON_CPU if each.id != "triton-cpu"])
def test_extremes_of_all_rules(backend: tuple[str, str]) -> None:
    where, device = backend
    for name, rule in RULES.items():
        check_subnormals(backend, name)
        for lr in QUICK_RATES:
            ours, plain = extremes.rate_errors(rule, device, where, lr)
            assert ours <= 2 * plain + 1, f"{name}, lr {lr}: {ours} units, torch {plain}"


def check_subnormals(backend: tuple[str, str], name: str) -> None:
    where, device = backend
    found = extremes.subnormal_case(RULES[name], device, where)
    assert found["flushed"] == 0, f"{name}: {found}"
    # A product or a moment that is itself subnormal has few digits, here as in torch.
    assert found["units from truth"] <= 2 * found["torch from truth"] + 2, f"{name}: {found}"
