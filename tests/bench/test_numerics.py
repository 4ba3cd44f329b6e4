"""Errors over many steps: ours are not larger than torch's for the same work."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import numerics
from bench.numerics_rules import RULES

RESULTS = Path(__file__).parents[2] / "bench" / "results"


#: Precisions of ``make test``; the others are compared with these by ``make test-full``.
QUICK = ("fp32", "bf16, master", "bf16, stochastic rounding", "bf16, master, state bf16", "fp32, state int8")


def check(found: dict[str, dict[str, float]]) -> None:
    """Check each precision against the baseline that does as much work: twice its error, and a rounding of float32."""
    for name in numerics.PRECISIONS.keys() & found.keys():
        baseline = numerics.PRECISIONS[name][2]
        allowed = 2 * found[baseline]["rms"] + torch.finfo(torch.float32).eps
        assert found[name]["rms"] <= allowed, f"{name}: {found[name]['rms']:.3g}, {baseline} has {found[baseline]}"
    # Masters are float32: their error is that of float32 parameters, whatever the dtype of the parameters.
    assert found["bf16, master"] == found.get("fp16, master", found["fp32"]) == found["fp32"]


@pytest.mark.parametrize("rule", RULES)
def test_errors_after_a_thousand_steps(rule: str) -> None:
    check(numerics.errors(RULES[rule], 1000, precisions=QUICK))


@pytest.mark.full
@pytest.mark.parametrize("backend", ["cpp", "torch"])
@pytest.mark.parametrize("rule", RULES)
def test_errors_after_ten_thousand_steps(rule: str, backend: str) -> None:
    check(numerics.errors(RULES[rule], 10_000, backend=backend))


def test_the_recorded_run_has_every_rule_and_holds_the_same() -> None:
    records = [json.loads(path.read_text()) for path in sorted(RESULTS.glob("numerics_cpu*.json"))]
    for record in records:
        assert record["steps"] == numerics.STEPS
        assert record["errors"].keys() == RULES.keys()
    for rule in RULES:
        measured: dict[str, dict[str, float]] = {}
        for record in records:
            measured |= record["errors"][rule]
        assert numerics.PRECISIONS.keys() < measured.keys()
        check(measured)


def test_gradients_are_exact_in_every_precision() -> None:
    for g in itertools.islice(numerics.gradients(20, "cpu"), 20):
        for dtype in (torch.bfloat16, torch.float16):
            assert torch.equal(g.to(dtype).float(), g)


def test_the_command_writes_a_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def few(*_: Any) -> dict[str, Any]:
        return {}

    out = tmp_path / "found.json"
    monkeypatch.setattr(sys, "argv", ["numerics", "--steps", "3", "--out", str(out)])
    monkeypatch.setattr(numerics, "learning_rates", few)
    monkeypatch.setattr(numerics, "subnormals", few)
    threads = torch.get_num_threads()
    numerics.main()
    torch.set_num_threads(threads)
    record = json.loads(out.read_text())
    assert record["command"] == "python -m bench.numerics --steps 3 --device cpu --out found.json"
    assert record["errors"].keys() == RULES.keys()
