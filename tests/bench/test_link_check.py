"""The check of the cost model: its formulas for gloo, its record, and what it says where links cannot be limited."""

from __future__ import annotations

import importlib
import json
import re
import shutil
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
RECORD = ROOT / "bench" / "results" / "cost_check.json"


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "bench")  # as for a script there
    return importlib.import_module("link_check")


@pytest.fixture
def links(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "bench")
    return importlib.import_module("limited_links")


@pytest.mark.parametrize(
    ("operation", "ranks", "nbytes", "expected_ms"),
    [
        # 1 ms a hop, so 2 with the question before it, and 1 kB/ms. Few bytes: 2·3 rounds of 2 ms and half a chunk.
        ("all_reduce", 4, 8, 2 * 3 * (2 + 0.001)),
        # Many bytes: their 2·3/4 of the time, and one hop for each phase.
        ("all_reduce", 4, 80_000, 120 + 4),
        # The row's 160 bytes in 3 rounds, the AllReduce, and 2 µs a byte when four ranks share two cores.
        ("converge", 4, 80_000, 3 * (2 + 0.08) + 124 + 160),
        ("all_reduce behind work", 4, 80_000, 62),
        ("two-phase", 4, 80_000, (2 + 60) + (60 + 2)),
        ("two-phase, receives first", 4, 80_000, 2 * (2 + 60)),
    ],
)
def test_predictions_by_hand(check: ModuleType, operation: str, ranks: int, nbytes: int, expected_ms: float) -> None:
    link = check.Link("test", 1e-3, 1e6)
    assert check.predicted(operation, ranks, nbytes, link, 1e-6, 2) == pytest.approx(expected_ms / 1e3)


def _entries() -> list[tuple[dict[str, Any], dict[str, Any]]]:
    return [(link, entry) for link in json.loads(RECORD.read_text())["links"] for entry in link["checks"]]


def test_the_record_has_what_the_formulas_say(check: ModuleType) -> None:
    record = json.loads(RECORD.read_text())
    assert _entries()
    for link, entry in _entries():
        fitted = check.Link("fitted", link["fitted"]["hop s"], link["fitted"]["bytes/s"])
        what = entry["operation"], entry["ranks"], entry["bytes"], fitted
        guess = check.predicted(*what, record["local s/byte"], record["cores"])
        assert entry["predicted s"] == pytest.approx(guess, rel=1e-3)
        assert entry["textbook s"] == pytest.approx(check.textbook(*what), rel=1e-3)
        assert entry["error"] == pytest.approx(entry["predicted s"] / entry["measured s"] - 1, abs=1e-3)


def test_the_record_covers_all_that_is_checked(check: ModuleType) -> None:
    found = [(link["rate Mb/s"], entry["ranks"], entry["operation"], entry["bytes"]) for link, entry in _entries()]
    wanted = [
        (rate, ranks, operation, size)
        for rate, _, sizes in check.LINKS
        for ranks in check.RANKS
        for operation, size, _ in check.plan(sizes)
    ]
    assert found == wanted


def test_the_record_names_no_place() -> None:
    text = RECORD.read_text()
    assert not re.findall(r"/(?:home|root|tmp|work|usr)\b", text)


def test_a_missing_tool_is_named(links: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links.platform, "system", lambda: "Linux")
    monkeypatch.setattr(shutil, "which", lambda tool: None if tool == "tc" else tool)
    with pytest.raises(SystemExit, match="limited links need tc: install"):
        links.require_namespaces()


def test_a_missing_device_is_named(links: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links.platform, "system", lambda: "Linux")
    monkeypatch.setattr(shutil, "which", lambda tool: tool)
    monkeypatch.setattr(links.os, "access", lambda path, mode: False)
    with pytest.raises(SystemExit, match="limited links need /dev/net/tun"):
        links.require_namespaces()


def test_forbidden_namespaces_are_named(links: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links.platform, "system", lambda: "Linux")
    monkeypatch.setattr(shutil, "which", lambda tool: tool)
    monkeypatch.setattr(links.os, "access", lambda path, mode: True)
    monkeypatch.delenv(links.INSIDE, raising=False)
    refused = subprocess.CompletedProcess([], 1, "", "unshare failed: Operation not permitted\n")
    monkeypatch.setattr(links.subprocess, "run", lambda *args, **kwargs: refused)
    with pytest.raises(SystemExit, match="not allowed here: unshare failed: Operation not permitted"):
        links.require_namespaces()


def test_another_system_is_named(links: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links.platform, "system", lambda: "Darwin")
    with pytest.raises(SystemExit, match="which only Linux has"):
        links.require_namespaces()
