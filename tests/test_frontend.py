"""The contract for frontends: every name is public, documented and typed, and the page and the API list it."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_type_hints

import pytest

import hdet_kernels as hk
from hdet_kernels import frontend

DOCS = Path(__file__).parents[1] / "docs"

#: Names of the contract that the top level does not have: it has no functions that check arguments.
CHECKS = {name for name in frontend.__all__ if name.startswith("check_")}


def members(name: str) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield the functions of a name: itself, or the methods and properties that its class defines."""
    found = getattr(frontend, name)
    if not inspect.isclass(found):
        yield name, found
        return
    for member, value in vars(found).items():
        if member.startswith("_") and not (member == "__init__" and _is_written(found)):
            continue
        if isinstance(value, property):
            assert value.fget is not None
            yield f"{name}.{member}", value.fget
        elif isinstance(value, staticmethod | classmethod):
            yield f"{name}.{member}", value.__func__
        elif inspect.isfunction(value):
            yield f"{name}.{member}", value


def _is_written(found: Any) -> bool:
    """Return whether a class has a constructor in its text: dataclasses and protocols get theirs made."""
    return not dataclasses.is_dataclass(found) and not getattr(found, "_is_protocol", False)


def test_the_contract_is_at_the_top_level_except_for_the_checks() -> None:
    assert sorted(frontend.__all__) == frontend.__all__
    assert len(CHECKS) == 5
    for name in set(frontend.__all__) - CHECKS:
        assert name in hk.__all__
        assert getattr(hk, name) is getattr(frontend, name)
    assert CHECKS.isdisjoint(hk.__all__)


@pytest.mark.parametrize("name", frontend.__all__)
def test_every_name_of_the_contract_has_docstrings_and_type_hints(name: str) -> None:
    assert (inspect.getdoc(getattr(frontend, name)) or "").strip()
    documented = {member for member in vars(hk.Ensemble) if not member.startswith("_")}
    for path, function in members(name):
        member = path.split(".")[-1]
        if member != "__init__" and not (name == "ProcessEnsemble" and member in documented):
            assert (function.__doc__ or "").strip(), f"{path} has no docstring"
        hints = get_type_hints(function)
        arguments = [argument for argument in inspect.signature(function).parameters if argument not in ("self", "cls")]
        assert [argument for argument in (*arguments, "return") if argument not in hints] == [], path


@pytest.mark.parametrize("page", ["frontend.md", "api.md"])
def test_every_name_of_the_contract_is_on_the_page(page: str) -> None:
    words = set(re.findall(r"\w+", (DOCS / page).read_text()))
    assert sorted(set(frontend.__all__) - words) == []


def test_every_field_of_the_exchanged_records_is_documented() -> None:
    """Those that a frontend fills or reads."""
    for record in (hk.Run, hk.Observation, hk.Report, hk.AverageRequest, hk.Outcome, hk.SyncRecord, hk.Placement):
        described = set(re.findall(r"\w+", record.__doc__ or ""))
        assert sorted(set(record.__dataclass_fields__) - described) == []


def test_every_wish_and_fact_of_a_run_is_on_the_page() -> None:
    words = set(re.findall(r"\w+", (DOCS / "frontend.md").read_text()))
    assert sorted(set(hk.Run.__dataclass_fields__) - words) == []
