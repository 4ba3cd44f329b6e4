"""Comparison of two recorded runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench import compare, records

RESULTS = Path(__file__).parents[2] / "bench" / "results"


def step_entry(way: str, ms: float, **info: Any) -> dict[str, Any]:
    """Return an optimizer step of AdamW on the CPU, with a spread of 1 %."""
    return {
        "fullname": f"bench/test_optim_step.py::test_optim_step[cpu-tiny-adamw-fp32-{way}]",
        "params": {"device": "cpu", "model": "tiny", "work": "adamw-fp32", "way": way},
        "extra_info": {"ms": ms, "spread": 0.01, "share": 0.5} | info,
        "stats": {},
    }


def ratios(*entries: dict[str, Any]) -> dict[str, compare.Ratio]:
    return compare.ratios(entries)


@pytest.mark.parametrize(
    ("old", "new", "verdict"),
    [
        ((1.0, 2.0), (1.0, 2.0), "same"),
        ((1.0, 2.0), (2.0, 4.0), "same"),  # a machine of half the speed
        ((1.0, 2.0), (1.019, 2.0), "same"),  # four spreads of 1 % are 2 % together
        ((1.0, 2.0), (1.021, 2.0), "worse"),
        ((1.0, 2.0), (1.0, 1.95), "worse"),  # the peer became faster
        ((1.0, 2.0), (0.9, 2.0), "better"),
    ],
    ids=["equal", "slower-clock", "within-the-spread", "beyond-it", "faster-peer", "faster"],
)
def test_ratio_is_judged_by_the_spread_of_both_runs(
    old: tuple[float, float], new: tuple[float, float], verdict: str
) -> None:
    before, after = (
        ratios(step_entry("hdet-cpp", ours), step_entry("torch-fused", theirs)) for ours, theirs in (old, new)
    )
    peer, copy = compare.compare(before, after)
    assert (peer.verdict, copy.verdict) == (verdict, "same")
    assert [change.verdict for change in compare.compare(before, after, least=0.2)] == ["same"] * 2


def test_a_step_that_became_slower_is_worse_beside_the_copy_too() -> None:
    old, new = (
        ratios(step_entry("hdet-cpp", ours, share=1 / ours), step_entry("torch-fused", 2.0)) for ours in (1.0, 1.1)
    )
    assert [(change.new.value, change.verdict) for change in compare.compare(old, new)] == [
        (0.55, "worse"),
        (1.1, "worse"),
    ]


def test_recorded_runs_equal_themselves(capsys: pytest.CaptureFixture[str]) -> None:
    assert compare.main([str(RESULTS), str(RESULTS)]) == 0
    assert "0 worse, 0 better" in capsys.readouterr().out


@pytest.mark.parametrize(
    "name", ["h200_optim_step", "cpu_step", "h200_host_time", "cpu_converge", "h200_scheduler_step"]
)
def test_slower_run_is_noticed(name: str) -> None:
    """All of our times are multiplied by 2.5."""
    path = RESULTS / f"{name}.json"
    old, record = compare.ratios(records.entries([path])), json.loads(path.read_text())
    for each in record["benchmarks"]:
        params, info = each["params"], each["extra_info"]
        way = str(params.get("way", params.get("kind", params.get("method", ""))))
        if way.startswith("hdet"):
            each["stats"]["median"] *= 2.5
            for unit in {"ms", "us"} & set(info):
                info[unit] *= 2.5
            if "share" in info:
                info["share"] /= 2.5
        for in_turns, times in info.get("ways", {}).items():
            times["ms"] *= 2.5 if in_turns.startswith("hdet") else 1
    changes = compare.compare(old, compare.ratios(record["benchmarks"]))
    assert len(changes) == len(old) > 0
    assert all(change.new.value / change.old.value == pytest.approx(2.5) for change in changes)
    assert any(change.verdict == "worse" for change in changes)
