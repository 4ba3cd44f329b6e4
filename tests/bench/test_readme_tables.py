"""The two tables of README.md."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from bench import pages, readme_tables, records
from tests.bench.quality.made_up_zoo import run, zoo


def test_speed_table_has_six_rows_from_the_records() -> None:
    rows = readme_tables.speed_table(pages.RESULTS).splitlines()[2:]
    assert len(rows) == 6
    entries = records.of(records.entries([pages.RESULTS]), "optim_step")
    for row, model in zip(rows, readme_tables.STEP_MODELS, strict=False):
        found = {
            entry["params"]["way"]: entry["extra_info"]["ms"]
            for entry in entries
            if (entry["params"]["model"], entry["params"]["work"]) == (model, "adamw-fp32")
        }
        assert model in row
        assert f"| {found['hdet-cuda'] / found['torch-fused']:.2f} |" in row


def test_quality_text_has_the_harm_of_both_modes() -> None:
    words, table = readme_tables.quality_text(pages.QUALITY_RESULTS).split("\n\n")
    assert "docs/quality.md" in words
    for said in (
        "on average with a probe",
        "on average with training losses only",
        "two standard errors",
        "median",
        "worst",
    ):
        assert said in " ".join(words.split())
    assert [line.split("|")[1].strip() for line in table.splitlines()[2:]][1] == "at the best"


def test_tasks_are_listed_without_a_zoo(tmp_path: Path) -> None:
    runs = [
        run("start", "digits", method, 0.01, 0, loss, factor=start)
        for method, loss in (("plain", 0.25), ("hdet", 0.125))
        for start in readme_tables.STARTS
    ]
    (tmp_path / "cpu.json").write_text(json.dumps(replace(zoo(runs), size="ci", best={"digits": 0.01}).plain()))
    table = readme_tables.quality_text(tmp_path).split("\n\n")[1]
    assert table.splitlines()[2:] == ["| digits | 0.2500 → 0.1250 | 0.2500 → 0.1250 | 0.2500 → 0.1250 |"]


def test_zoo_replaces_the_table_of_losses(tmp_path: Path) -> None:
    (tmp_path / "zoo.json").write_text(json.dumps(zoo().plain()))
    words, table = readme_tables.quality_text(tmp_path).split("\n\n")
    assert "on average" in words
    assert "worst" in words
    assert [line.split("|")[1].strip() for line in table.splitlines()[2:]] == [
        "10× too low", "at the best", "3× too high", "10× too high", "no learning rate",
    ]  # fmt: skip
