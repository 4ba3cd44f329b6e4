"""Tables of whole training steps."""

from __future__ import annotations

from typing import Any

import pytest

from bench import end_to_end_section, test_end_to_end
from tests.bench.entries import gpu_entry


def trained(model: str, ratio: float, parts: Any) -> dict[str, Any]:
    def of(value: float) -> dict[str, float]:
        return {"ratio": value, "low": value - 0.01, "high": value + 0.01}

    ways = {"torch-fused": (20.0, 3072.0), "hdet-cuda": (20.0 * ratio, 3000.0), "a sync every step": (25.0, 3500.0)}
    info = {
        "ways": {way: {"ms": ms, "peak MiB": peak} for way, (ms, peak) in ways.items()},
        "ratio": of(ratio),
        "amortised": {"1000": of(ratio + 0.001), "100": of(ratio + 0.01)},
        "sync": {"ms": 5.0, "bytes": 1, "collectives": 2},
        "batch": "8192 tokens",
        "least ratio": 0.9,
        "parts": {"torch-fused": parts, "hdet-cuda": parts},
    }
    return gpu_entry("end_to_end", {"model": model, "clipping": "clip-1.0"}, info)


class TestEndToEnd:
    def test_the_section_has_every_ratio_and_says_where_the_claim_fails(self) -> None:
        parts = {"forward": {"device ms": 5.0}, "optimizer": {"device ms": 1.25}, "elsewhere": {"device ms": 0.0}}
        found = [trained("gpt2-124M", 0.97, parts), trained("resnet50", 0.995, "failed: no counters")]
        text = end_to_end_section.section(found)
        assert (
            "in 2 of 4 cases; the others are resnet50, 8192 tokens, clip-1.0 with T = 1000: 0.996 (0.986–1.006);"
            in text
        )
        assert "with T = 100: 1.005 (0.995–1.015)." in text
        assert "| 20.00 ms, 3.0 GiB | 19.40 ms, 2.9 GiB | 5.000 ms, 3.4 GiB | 0.970 (0.960–0.980) |" in text
        assert "| gpt2-124M, 8192 tokens, clip-1.0 | `cuda` | 5.000 | 1.250 | 0.000 | 6.250 |" in text
        assert "failed: no counters" in text

    def test_a_sync_is_shared_by_the_steps_between(self) -> None:
        times = {"torch-fused": [10.0, 20.0], "hdet-cuda": [9.0, 18.0], "a sync every step": [19.0, 28.0]}
        found = test_end_to_end.amortised(times, "hdet-cuda", 100)
        assert found == pytest.approx({"ratio": 0.9075, "low": 0.905, "high": 0.91})
