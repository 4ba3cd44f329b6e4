"""Tables that compare implementations."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest

from bench import comparison_table, records, sections
from tests.bench.entries import RESULTS, step_entry, write_record


@pytest.mark.parametrize(("value", "text"), [(0.08403, "0.08403"), (12.3456, "12.35"), (1234.5, "1234")])
def test_numbers_have_four_digits(value: float, text: str) -> None:
    assert comparison_table.short(value) == text


def test_peer_that_moves_other_bytes_is_in_the_same_row(tmp_path: Path) -> None:
    other = {"bytes a parameter": 16.06, "work's bytes a parameter": 28}
    path = write_record(tmp_path / "a.json", step_entry("hdet-cpp", 1.0), step_entry("torchao-8bit", 2.0, **other))
    rows = [line for line in sections.text(records.entries([path])).splitlines() if line.startswith("| adamw")]
    assert rows == ["| adamw-fp32 (28 B) | tiny | 2.000 ms (50.0% of 16.1 B) | 1.000 ms (50.0%) | 0.500 |"]


def test_rare_peers_get_a_table_of_their_own(tmp_path: Path) -> None:
    many = [step_entry(way, 4.0) for way in ("torch-fused", "optimi", "flashoptim", "bitsandbytes")]
    others = [
        copy.deepcopy(each) for each in (step_entry("hdet-cpp", 1.0), step_entry("torch-fused", 4.0)) for _ in range(2)
    ]
    for number, each in enumerate(others):
        each["params"]["model"] = f"other-{number % 2}"
    path = write_record(tmp_path / "a.json", step_entry("hdet-cpp", 1.0), *many, *others)
    first, second = sections.text(records.entries([path])).split("the ratio of `cpp` to the peer:")
    assert [line for line in first.splitlines() if line.startswith(("| optimizer", "| adamw"))] == [
        "| optimizer | model | torch fused | `cpp` | `cpp` / torch fused |",
        *(
            f"| adamw-fp32 (28 B) | {model} | 4.000 ms (50.0%) | 1.000 ms (50.0%) | 0.250 |"
            for model in ("tiny", "other-0", "other-1")
        ),
    ]
    assert [line for line in second.splitlines() if line.startswith(("| optimizer", "| adamw"))] == [
        "| optimizer | model | bitsandbytes | optimi | flashoptim |",
        f"| adamw-fp32 (28 B) | tiny |{' 4.000 ms (50.0%): 0.250 |' * 3}",
    ]


def test_every_recorded_implementation_has_a_title() -> None:
    ways = {each["params"]["way"] for each in records.entries([RESULTS]) if "way" in (each["params"] or {})}
    assert ways - set(comparison_table.TITLES) == {"addresses", "gradients"}
