"""Comparison of two recorded runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import compare, records
from tests.bench.entries import RESULTS, step_entry, turns_entry, write_record


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
    old: tuple[float, float], new: tuple[float, float], verdict: str, tmp_path: Path
) -> None:
    before, after = (
        write_record(tmp_path / name, step_entry("hdet-cpp", ours), step_entry("torch-fused", theirs))
        for name, (ours, theirs) in {"old.json": old, "new.json": new}.items()
    )
    found = compare.compare(*(compare.ratios(records.entries([path])) for path in (before, after)))
    assert [change.verdict for change in found] == [verdict]
    assert compare.main([str(before), str(after)]) == (verdict == "worse")
    assert compare.main([str(before), str(after), "--least", "0.1"]) == 0


@pytest.mark.parametrize(("ours", "verdict"), [(1.04, "same"), (1.06, "worse")])
def test_turns_are_judged_by_the_quartiles_of_their_ratios(ours: float, verdict: str, tmp_path: Path) -> None:
    """3 % and 4 % are 5 % together; the spread of the single times, 50 %, does not count."""
    old = compare.ratios(records.entries([write_record(tmp_path / "old", turns_entry(1.0, 1.0, 0.98, 1.01))]))
    new = compare.ratios(
        records.entries(
            [write_record(tmp_path / "new", turns_entry(ours, 1.0, ours - 0.02 * ours, ours + 0.02 * ours))]
        )
    )
    assert [(change.case.split()[-3:], change.verdict) for change in compare.compare(old, new)] == [
        (["hdet-cpp", "/", "torch-fused"], verdict)
    ]


def test_without_a_peer_the_copy_bandwidth_is_compared(tmp_path: Path) -> None:
    old, new = (
        compare.ratios(records.entries([write_record(tmp_path / str(share), step_entry("hdet-cpp", 1.0, share=share))]))
        for share in (0.9, 0.8)
    )
    (change,) = compare.compare(old, new)
    assert change.case.endswith("hdet-cpp / a copy of its bytes")
    assert (change.old.value, change.new.value) == (1 / 0.9, 1 / 0.8)
    assert change.verdict == "worse"


def test_cases_of_only_one_run_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = write_record(
        tmp_path / "old.json",
        step_entry("hdet-cpp", 1.0),
        step_entry("torch-fused", 2.0),
        step_entry("torch-foreach", 3.0),
    )
    new = write_record(
        tmp_path / "new.json", step_entry("hdet-cpp", 1.0), step_entry("torch-fused", 2.0), step_entry("optimi", 3.0)
    )
    assert compare.main([str(old), str(new)]) == 0
    text = capsys.readouterr().out
    gone, come = text.split("only in the old run:")[1].split("only in the new run:")
    assert "hdet-cpp / torch-foreach" in gone
    assert "hdet-cpp / optimi" in come
    assert "1 ratios in both" in text


def test_missing_record_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare.main([str(tmp_path / "old.json"), str(RESULTS)]) == 2
    assert f"no record at {tmp_path / 'old.json'}" in capsys.readouterr().err


def test_recorded_runs_equal_themselves(capsys: pytest.CaptureFixture[str]) -> None:
    assert compare.main([str(RESULTS), str(RESULTS)]) == 0
    assert "0 worse, 0 better" in capsys.readouterr().out


def test_slower_run_is_noticed(tmp_path: Path) -> None:
    """All of our times are multiplied by 2.5, in records of every kind."""
    slower = {"h200_optim_step", "cpu_step", "h200_host_time", "cpu_converge", "h200_scheduler_step"}
    for name in slower:
        path = RESULTS / f"{name}.json"
        record = json.loads(path.read_text())
        for each in record["benchmarks"]:
            params, info = each["params"], each["extra_info"]
            way = str(params.get("way", params.get("kind", params.get("method", ""))))
            if way.startswith("hdet") or (name == "cpu_converge" and way not in compare.PLAIN):
                each["stats"]["median"] *= 2.5
                for unit in {"ms", "us"} & set(info):
                    info[unit] *= 2.5
                if "share" in info:
                    info["share"] /= 2.5
            for name_in_turns, times in info.get("ways", {}).items():
                times["ms"] *= 2.5 if name_in_turns.startswith("hdet") else 1
        (tmp_path / path.name).write_text(json.dumps(record))
        old, new = (compare.ratios(records.entries([file])) for file in (path, tmp_path / path.name))
        changes = compare.compare(old, new)
        assert len(changes) == len(old) > 0
        assert all(change.new.value / change.old.value == pytest.approx(2.5) for change in changes)
        assert any(change.verdict == "worse" for change in changes)
