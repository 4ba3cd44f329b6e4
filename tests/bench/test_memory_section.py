"""Table of the memory suite."""

from __future__ import annotations

from typing import Any

from bench import memory_section
from tests.bench.entries import gpu_entry


def remembered(mode: str, way: str, step: float) -> dict[str, Any]:
    peaks = {"parameters": 4.0, "built": 12.0, "first step": step, "step": step, "loaded": 20.0, "step after it": step}
    info = {"parameters": 124_500_000, "peak B a parameter": peaks, "held B a parameter": 16.0}
    return gpu_entry("memory", {"mode": mode, "way": way}, info)


def test_ratio_is_to_the_lower_peak_of_torch() -> None:
    found = [
        remembered("adamw-fp32", "torch-foreach", 24.0),
        remembered("adamw-bf16-master", "hdet-cuda", 16.0),
        remembered("adamw-fp32", "hdet-cuda", 15.0),
        remembered("adamw-fp32", "torch-fused", 20.0),
    ]
    rows = [line for line in memory_section.section(found).splitlines() if line.startswith("| adamw")]
    assert rows == [
        "| adamw-fp32 | torch foreach | 16.00 | 12.00 | 24.00 | 24.00 | 20.00 | 24.00 | – |",
        "| adamw-fp32 | `cuda` | 16.00 | 12.00 | 15.00 | 15.00 | 20.00 | 15.00 | 0.750 |",
        "| adamw-fp32 | torch fused | 16.00 | 12.00 | 20.00 | 20.00 | 20.00 | 20.00 | – |",
        "| adamw-bf16-master | `cuda` | 16.00 | 12.00 | 16.00 | 16.00 | 20.00 | 16.00 | – |",
    ]
