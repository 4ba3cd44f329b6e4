"""Made-up recorded benchmarks for the tests of tables and comparisons."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "bench" / "results"

CPU_RECORD: dict[str, Any] = {
    "machine_info": {
        "cpu": {"brand_raw": "a CPU"},
        "machine": "x",
        "gpu": None,
        "torch": "2.11",
        "load before": 0.0,
        "command": "python -m pytest",
    },
    "yardsticks": {"cpu": {"copied": "64 MiB", "copy B/s": 1e9}},
    "datetime": "2026-11-15T00:00:00",
}
GPU_RECORD: dict[str, Any] = {
    "machine_info": {"gpu": "a GPU", "torch": "2.11", "command": "python -m pytest bench", "load before": 0.0},
    "datetime": "2026-11-15T12:00:00",
    "yardsticks": {"cuda": {"copy B/s": 4e12, "copied": "4096 MiB", "under load": None}},
}


def step_entry(way: str, ms: float, spread: float = 0.01, **info: Any) -> dict[str, Any]:
    """Return an optimizer step of AdamW on the CPU."""
    params = {"device": "cpu", "model": "tiny", "work": "adamw-fp32", "way": way}
    extra = {"ms": ms, "spread": spread, "share": 0.5, "cached": False, "bytes a parameter": 28, "bytes": 28} | info
    return {
        "fullname": f"bench/test_optim_step.py::test_optim_step[cpu-tiny-adamw-fp32-{way}]",
        "name": f"test_optim_step[cpu-tiny-adamw-fp32-{way}]",
        "params": params,
        "extra_info": extra,
        "stats": {"median": ms / 1e3, "iqr": spread * ms / 1e3},
    }


def turns_entry(ours: float, fused: float, low: float, high: float) -> dict[str, Any]:
    """Return a CPU step that was measured in turns with torch's fused step."""
    ways = {"torch-fused": {"ms": fused, "spread": 0.5}, "hdet-cpp": {"ms": ours, "spread": 0.5}}
    extra = {"ways": ways, "ratio": {"ratio": ours / fused, "low": low, "high": high}}
    name = "test_cpp_step[tiny]"
    fullname = f"bench/test_cpp_step.py::{name}"
    return {"fullname": fullname, "name": name, "params": {"model": "tiny"}, "extra_info": extra, "stats": {}}


def write_record(path: Path, *entries: dict[str, Any]) -> Path:
    """Write a record with these entries."""
    path.write_text(json.dumps(CPU_RECORD | {"benchmarks": entries}))
    return path


def gpu_entry(suite: str, params: dict[str, Any], info: dict[str, Any]) -> dict[str, Any]:
    """Return an entry of any suite on the GPU, with its record."""
    name = f"bench/test_{suite}.py::test_{suite}[gpu]"
    return {
        "fullname": name,
        "name": name,
        "params": {"device": "cuda", **params},
        "extra_info": info,
        "record": GPU_RECORD,
    }
