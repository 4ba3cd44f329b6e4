"""The two tables of README.md."""

from __future__ import annotations

from bench import pages, readme_tables, records


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
    table = readme_tables.quality_table(pages.QUALITY_RESULTS)
    rows = {line.split("|")[1].strip(): line for line in table.splitlines()[2:]}
    assert set(rows) == {"images", "ratings", "language", "flights", "reconstruction", "digits"}
    plain, hdet = (float(number) for number in rows["flights"].split("|")[3].split("→"))
    assert hdet > plain  # at the best learning rate HDET ends above plain training on this task
