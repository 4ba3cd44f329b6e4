"""Recorded results as tables and plots, and two runs beside each other."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from bench import compare, comparison_table, plots, records, sections

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "bench" / "results"


MACHINE = {"cpu": {"brand_raw": "a CPU"}, "machine": "x", "gpu": None, "torch": "2.11", "load before": 0.0}
MACHINE |= {"command": "python -m pytest"}
YARDSTICK = {"cpu": {"copied": "64 MiB", "copy B/s": 1e9}}


def entry(way: str, ms: float, spread: float = 0.01, **info: Any) -> dict[str, Any]:
    params = {"device": "cpu", "model": "tiny", "work": "adamw-fp32", "way": way}
    extra = {"ms": ms, "spread": spread, "share": 0.5, "cached": False, "bytes a parameter": 28, "bytes": 28} | info
    return {
        "fullname": f"bench/test_optim_step.py::test_optim_step[cpu-tiny-adamw-fp32-{way}]",
        "name": f"test_optim_step[cpu-tiny-adamw-fp32-{way}]",
        "params": params,
        "extra_info": extra,
        "stats": {"median": ms / 1e3, "iqr": spread * ms / 1e3},
    }


def in_turns(ours: float, fused: float, low: float, high: float) -> dict[str, Any]:
    ways = {"torch-fused": {"ms": fused, "spread": 0.5}, "hdet-cpp": {"ms": ours, "spread": 0.5}}
    extra = {"ways": ways, "ratio": {"ratio": ours / fused, "low": low, "high": high}}
    name = "test_cpp_step[tiny]"
    fullname = f"bench/test_cpp_step.py::{name}"
    return {"fullname": fullname, "name": name, "params": {"model": "tiny"}, "extra_info": extra, "stats": {}}


def write(path: Path, *entries: dict[str, Any]) -> Path:
    record = {
        "machine_info": MACHINE,
        "yardsticks": YARDSTICK,
        "datetime": "2026-11-15T00:00:00",
        "benchmarks": entries,
    }
    path.write_text(json.dumps(record))
    return path


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
def test_a_ratio_is_judged_by_the_spread_of_both_runs(
    old: tuple[float, float], new: tuple[float, float], verdict: str, tmp_path: Path
) -> None:
    before, after = (
        write(tmp_path / name, entry("hdet-cpp", ours), entry("torch-fused", theirs))
        for name, (ours, theirs) in {"old.json": old, "new.json": new}.items()
    )
    found = compare.compare(*(compare.ratios(records.entries([path])) for path in (before, after)))
    assert [change.verdict for change in found] == [verdict]
    assert compare.main([str(before), str(after)]) == (verdict == "worse")
    assert compare.main([str(before), str(after), "--least", "0.1"]) == 0


@pytest.mark.parametrize(("ours", "verdict"), [(1.04, "same"), (1.06, "worse")])
def test_turns_are_judged_by_the_quartiles_of_their_ratios(ours: float, verdict: str, tmp_path: Path) -> None:
    """3 % and 4 % are 5 % together; the spread of the times themselves, 50 %, does not count."""
    old = compare.ratios(records.entries([write(tmp_path / "old", in_turns(1.0, 1.0, 0.98, 1.01))]))
    new = compare.ratios(
        records.entries([write(tmp_path / "new", in_turns(ours, 1.0, ours - 0.02 * ours, ours + 0.02 * ours))])
    )
    assert [(change.case.split()[-3:], change.verdict) for change in compare.compare(old, new)] == [
        (["hdet-cpp", "/", "torch-fused"], verdict)
    ]


def test_without_a_peer_it_is_the_share_of_a_copy(tmp_path: Path) -> None:
    old, new = (
        compare.ratios(records.entries([write(tmp_path / str(share), entry("hdet-cpp", 1.0, share=share))]))
        for share in (0.9, 0.8)
    )
    (change,) = compare.compare(old, new)
    assert change.case.endswith("hdet-cpp / a copy of its bytes")
    assert (change.old.value, change.new.value) == (1 / 0.9, 1 / 0.8)
    assert change.verdict == "worse"


def test_a_case_of_one_run_alone_is_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = write(tmp_path / "old.json", entry("hdet-cpp", 1.0), entry("torch-fused", 2.0), entry("torch-foreach", 3.0))
    new = write(tmp_path / "new.json", entry("hdet-cpp", 1.0), entry("torch-fused", 2.0), entry("optimi", 3.0))
    assert compare.main([str(old), str(new)]) == 0
    text = capsys.readouterr().out
    gone, come = text.split("only in the old run:")[1].split("only in the new run:")
    assert "hdet-cpp / torch-foreach" in gone
    assert "hdet-cpp / optimi" in come
    assert "1 ratios in both" in text


def test_a_record_that_is_not_there_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare.main([str(tmp_path / "old.json"), str(RESULTS)]) == 2
    assert f"there is no record {tmp_path / 'old.json'}" in capsys.readouterr().err


def test_the_recorded_runs_are_as_good_as_themselves(capsys: pytest.CaptureFixture[str]) -> None:
    assert compare.main([str(RESULTS), str(RESULTS)]) == 0
    assert "0 worse, 0 better" in capsys.readouterr().out


def test_a_recorded_run_that_is_made_slower_is_noticed(tmp_path: Path) -> None:
    """All of ours by a half, in records of every kind."""
    slower = {"h200_optim_step", "cpu_step", "h200_host_time", "cpu_converge", "h200_scheduler_step"}
    for name in slower:
        path = RESULTS / f"{name}.json"
        record = json.loads(path.read_text())
        for each in record["benchmarks"]:
            params, info = each["params"], each["extra_info"]
            whoever = str(params.get("way", params.get("kind", params.get("method", ""))))
            if whoever.startswith("hdet") or (name == "cpu_converge" and whoever not in compare.PLAIN):
                each["stats"]["median"] *= 2.5
                for unit in {"ms", "us"} & set(info):
                    info[unit] *= 2.5
                if "share" in info:
                    info["share"] /= 2.5
            for way in info.get("ways", {}):
                info["ways"][way]["ms"] *= 2.5 if way.startswith("hdet") else 1
        (tmp_path / path.name).write_text(json.dumps(record))
        old, new = (compare.ratios(records.entries([file])) for file in (path, tmp_path / path.name))
        changes = compare.compare(old, new)
        assert len(changes) == len(old) > 0
        assert all(change.new.value / change.old.value == pytest.approx(2.5) for change in changes)
        assert any(change.verdict == "worse" for change in changes)


def test_a_peer_that_moves_other_bytes_stands_in_the_same_row(tmp_path: Path) -> None:
    other = {"bytes a parameter": 16.06, "work's bytes a parameter": 28}
    path = write(tmp_path / "a.json", entry("hdet-cpp", 1.0), entry("torchao-8bit", 2.0, **other))
    rows = [line for line in sections.text(records.entries([path])).splitlines() if line.startswith("| adamw")]
    assert rows == ["| adamw-fp32 (28 B) | tiny | 2.000 ms (50.0% of 16.1 B) | 1.000 ms (50.0%) | 0.500 |"]


def test_many_peers_that_few_rows_have_stand_in_a_table_of_their_own(tmp_path: Path) -> None:
    many = [entry(way, 4.0) for way in ("torch-fused", "optimi", "flashoptim", "bitsandbytes")]
    others = [copy.deepcopy(each) for each in (entry("hdet-cpp", 1.0), entry("torch-fused", 4.0)) for _ in range(2)]
    for number, each in enumerate(others):
        each["params"]["model"] = f"other-{number % 2}"
    path = write(tmp_path / "a.json", entry("hdet-cpp", 1.0), *many, *others)
    first, second = sections.text(records.entries([path])).split("each with `cpp` over it:")
    assert [line for line in first.splitlines() if line.startswith(("| work", "| adamw"))] == [
        "| work | model | torch fused | `cpp` | `cpp` / torch fused |",
        *(
            f"| adamw-fp32 (28 B) | {model} | 4.000 ms (50.0%) | 1.000 ms (50.0%) | 0.250 |"
            for model in ("tiny", "other-0", "other-1")
        ),
    ]
    assert [line for line in second.splitlines() if line.startswith(("| work", "| adamw"))] == [
        "| work | model | bitsandbytes | optimi | flashoptim |",
        f"| adamw-fp32 (28 B) | tiny |{' 4.000 ms (50.0%): 0.250 |' * 3}",
    ]


def test_every_recorded_way_has_a_name() -> None:
    ways = {each["params"]["way"] for each in records.entries([RESULTS]) if "way" in (each["params"] or {})}
    assert ways - set(comparison_table.WAYS) == {"addresses"}


def test_names_in_the_roofline_do_not_overlap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Any] = []
    monkeypatch.setattr(plots.report, "save", lambda figure, path: kept.append(figure))
    assert plots.roofline(records.entries([RESULTS]), tmp_path / "roofline.png")
    (axes,) = kept[0].axes
    names = [text for text in axes.texts if text.get_text()]
    assert len(names) > 20
    boxes = [name.get_window_extent() for name in names]
    covering = [
        (names[i].get_text(), names[j].get_text())
        for i in range(len(boxes))
        for j in range(i)
        if boxes[i].shrunk(0.98, 0.98).overlaps(boxes[j].shrunk(0.98, 0.98))
    ]
    assert covering == []


def test_bars_are_relative_to_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Any] = []
    monkeypatch.setattr(plots.report, "save", lambda figure, path: kept.append(figure))
    path = write(tmp_path / "a.json", entry("hdet-cpp", 2.0), entry("torch-fused", 3.0), entry("hdet-torch", 50.0))
    assert plots.bars(records.entries([path]), tmp_path / "bars.png")
    (bar,) = kept[0].axes[0].patches
    assert (bar.get_x(), bar.get_x() + bar.get_width()) == (1.0, 1.5)


def test_nothing_to_draw_is_no_plot(tmp_path: Path) -> None:
    alone = [copy.deepcopy(entry("torch-fused", 1.0))]
    alone[0]["extra_info"].pop("share")
    entries = records.entries([write(tmp_path / "a.json", *alone)])
    assert not plots.roofline(entries, tmp_path / "a.png")
    assert not plots.bars(entries, tmp_path / "b.png")
    assert not list(tmp_path.glob("*.png"))
