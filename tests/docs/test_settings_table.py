"""The tables of settings in docs/controller.md are those of the settings classes."""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from hdet_kernels.controller import RegressionSettings, SlopeSettings, SoftmaxSettings

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("settings_table", DOCS / "settings_table.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_up_to_date(generator: ModuleType) -> None:
    page = (DOCS / "controller.md").read_text()
    assert generator.with_tables(page) == page, "run python docs/settings_table.py"


@pytest.mark.parametrize("settings", [SlopeSettings, RegressionSettings, SoftmaxSettings])
def test_every_setting_is_in_the_table_with_its_meaning(generator: ModuleType, settings: type) -> None:
    lines = [line.split("|") for line in generator.tables().replace("\\|", "/").splitlines() if line.startswith("| `")]
    documented = {line[1].strip(" `"): line[3].strip() for line in lines}
    for field in dataclasses.fields(settings):
        assert documented.get(field.name), f"{settings.__name__}.{field.name} has no comment"


def test_a_page_without_markers_is_refused(generator: ModuleType) -> None:
    with pytest.raises(ValueError, match="the page needs the lines <!-- settings --> and <!-- /settings -->"):
        generator.with_tables("a page")
