"""Tasks of the quality suite."""

from __future__ import annotations

from typing import Any


def test_probe_and_validation_share_no_example(digits: Any) -> None:
    probe = {tuple(row) for row in digits.probe()[0].tolist()}
    assert not probe & {tuple(row) for row in digits.validation()[0].tolist()}
