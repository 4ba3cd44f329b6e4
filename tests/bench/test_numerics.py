"""Errors of the update rules over many steps, at extreme rates and with subnormal numbers: as small as torch's."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from bench import numerics
from bench.numerics import RULES, SPREADS, losses
from tests.ops.cases import BACKENDS, ON_CPU, interpreted

#: Precisions of ``make test``; the others are compared with these by ``make test-full``.
QUICK = ("fp32", "bf16, master", "bf16, stochastic rounding", "bf16, master, state bf16", "fp32, state int8")
CASES = [
    pytest.param(*backend.values, name, id=f"{backend.id}-{name}", marks=backend.marks)
    for backend in BACKENDS
    for name in RULES
    if backend.id != "triton-cpu" or name in numerics.INTERPRETED
]


def check(found: dict[str, dict[str, float]]) -> None:
    """Check each precision against the baseline that does as much work: twice its error, and a rounding of float32."""
    for name in numerics.PRECISIONS.keys() & found.keys():
        baseline = numerics.PRECISIONS[name][2]
        allowed = 2 * found[baseline]["rms"] + torch.finfo(torch.float32).eps
        assert found[name]["rms"] <= allowed, f"{name}: {found[name]['rms']:.3g}, {baseline} has {found[baseline]}"
    # Masters are float32: their error is that of float32 parameters, whatever the dtype of the parameters.
    assert found["bf16, master"] == found.get("fp16, master", found["fp32"]) == found["fp32"]


@pytest.mark.parametrize("rule", ["adamw", "lion"])
def test_errors_after_hundreds_of_steps(rule: str) -> None:
    check(numerics.errors(RULES[rule], 300, precisions=QUICK))


@pytest.mark.full
@pytest.mark.parametrize(("backend", "steps"), [("cpp", 2000), ("torch", 200)])
@pytest.mark.parametrize("rule", RULES)
def test_errors_of_all_rules_and_precisions(rule: str, backend: str, steps: int) -> None:
    check(numerics.errors(RULES[rule], steps, backend=backend))


def check_extremes(backend: tuple[str, str], name: str, rates: tuple[float, ...]) -> None:
    """Check that subnormal numbers are kept, and that errors at all learning rates are as small as torch's."""
    where, device = backend
    found = numerics.subnormal_case(RULES[name], device, where)
    assert found["flushed"] == 0, f"{name}: {found}"
    # A product or a moment that is itself subnormal has few digits, here as in torch.
    assert found["units from truth"] <= 2 * found["torch from truth"] + 2, f"{name}: {found}"
    for lr in rates:
        ours, plain = numerics.rate_errors(RULES[name], device, where, lr)
        assert ours <= 2 * plain + 1, f"{name}, lr {lr}: {ours} units, torch {plain}"


@pytest.mark.parametrize("backend", [each for each in ON_CPU if each.id != "triton-cpu"])
def test_extremes_of_all_rules(backend: tuple[str, str]) -> None:
    for name in RULES:
        check_extremes(backend, name, (1e-12, 1e-3, 1e3))


@pytest.mark.full
@pytest.mark.parametrize(("backend", "name"), CASES)
def test_extremes_of_all_backends(backend: tuple[str, str], name: str) -> None:
    check_extremes(backend, name, numerics.INTERPRETED_RATES if interpreted(backend) else numerics.RATES)


def test_float32_and_8_bit_state_reach_the_loss_of_float64() -> None:
    """A larger eps makes training worse, and is noticed."""
    rule = replace(RULES["adamw"], options={"lr": 0.1, "weight_decay": 0.0})  # which arrives in so few steps
    by_spread = losses(rule, 60, "cpu", {"fp32": {}, "int8": {"state_dtype": "int8"}, "worse": {"eps": 1.0}})
    assert list(by_spread) == [str(spread) for spread in SPREADS]
    for found in by_spread.values():
        assert found["fp32"]["ratio"] == pytest.approx(1, abs=1e-3)
        assert found["int8"]["ratio"] == pytest.approx(1, abs=0.05)
    assert by_spread["100"]["worse"]["low"] > 1.1
