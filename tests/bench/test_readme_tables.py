"""The two tables of README.md."""

from __future__ import annotations

import json
from pathlib import Path

from bench import pages, readme_tables, records
from tests.bench.quality.made_up_zoo import zoo


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


def test_quality_table_has_every_task_and_tells_where_hdet_harms() -> None:
    words, table = readme_tables.quality_text(pages.QUALITY_RESULTS).split("\n\n")
    assert "docs/quality.md" in words
    rows = {line.split("|")[1].strip(): line for line in table.splitlines()[2:]}
    assert set(rows) == {"images", "ratings", "language", "flights", "reconstruction", "digits"}
    plain, hdet = (float(number) for number in rows["flights"].split("|")[3].split("→"))
    assert hdet > plain  # at the best learning rate HDET ends above plain training on this task


def test_zoo_replaces_the_table_of_losses(tmp_path: Path) -> None:
    (tmp_path / "zoo.json").write_text(json.dumps(zoo().plain()))
    words, table = readme_tables.quality_text(tmp_path).split("\n\n")
    assert "on average" in words
    assert "at worst" in words
    assert [line.split("|")[1].strip() for line in table.splitlines()[2:]] == [
        "30× too low", "10× too low", "3× too low", "at the best", "3× too high", "10× too high", "30× too high",
        "no learning rate",
    ]  # fmt: skip
