"""The page of the controllers' constants has every setting, with its meaning."""

from __future__ import annotations

import dataclasses
import runpy
from pathlib import Path

from hdet_kernels.controller import RegressionSettings, SlopeSettings, SoftmaxSettings

DOCS = Path(__file__).parents[2] / "docs"


def test_the_page_is_up_to_date_and_complete() -> None:
    page = runpy.run_path(str(DOCS / "settings_table.py"))["page"]()
    assert (DOCS / "controller-constants.md").read_text() == page, "run python docs/settings_table.py"
    rows = [line.split("|") for line in page.replace("\\|", "/").splitlines() if line.startswith("| `")]
    documented = {row[1].strip(" `"): row[3].strip() for row in rows}
    for settings in (SlopeSettings, RegressionSettings, SoftmaxSettings):
        for field in dataclasses.fields(settings):
            assert documented.get(field.name), f"{settings.__name__}.{field.name} has no comment"
