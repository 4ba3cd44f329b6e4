"""The loss of training in a precision beside float64: what float32 and 8-bit state must reach, and what is noticed."""

from __future__ import annotations

from dataclasses import replace

from bench.numerics_losses import SEEDS, SPREADS, losses
from bench.numerics_rules import RULES

STEPS = 60
ADAMW = replace(RULES["adamw"], options={"lr": 0.1, "weight_decay": 0.0})  # which arrives in so few steps


def test_float32_and_8_bit_state_reach_the_loss_of_float64_and_worse_training_is_seen() -> None:
    precisions = {"fp32": {}, "int8": {"state_dtype": "int8"}, "worse": {"eps": 1.0}}
    by_spread = losses(ADAMW, STEPS, "cpu", precisions)
    assert list(by_spread) == [str(spread) for spread in SPREADS]
    for spread, found in by_spread.items():
        assert found["fp64"]["runs"] == SEEDS
        start = 0.5 * sum(float(spread) ** (-2 * (1 - i / 255)) for i in range(256))
        assert found["fp64"]["loss"] < 0.2 * start
        for name, within in (("fp32", 1e-3), ("int8", 0.05)):
            entry = found[name]
            assert entry["low"] <= entry["ratio"] <= entry["high"]
            assert abs(entry["ratio"] - 1) < within
    assert by_spread["100"]["worse"]["low"] > 1.1
