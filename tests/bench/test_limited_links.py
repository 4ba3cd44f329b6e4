"""Limited links: the messages where a machine cannot create them."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from bench import limited_links as links


@pytest.fixture(autouse=True)
def _linux(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links.platform, "system", lambda: "Linux")
    monkeypatch.setattr(shutil, "which", lambda tool: tool)


def test_missing_tool_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda tool: None if tool == "tc" else tool)
    with pytest.raises(SystemExit, match="limited links need tc: install"):
        links.require_namespaces("bench.link_check")


def test_missing_device_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links.os, "access", lambda path, mode: False)
    with pytest.raises(SystemExit, match="limited links need /dev/net/tun"):
        links.require_namespaces("bench.link_check")


def test_refused_namespaces_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links.os, "access", lambda path, mode: True)
    monkeypatch.delenv(links.INSIDE, raising=False)
    refused = subprocess.CompletedProcess([], 1, "", "unshare failed: Operation not permitted\n")
    monkeypatch.setattr(links.subprocess, "run", lambda *args, **kwargs: refused)
    with pytest.raises(SystemExit, match="this machine refuses: unshare failed: Operation not permitted"):
        links.require_namespaces("bench.link_check")


def test_other_systems_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links.platform, "system", lambda: "Darwin")
    with pytest.raises(SystemExit, match="which only Linux has"):
        links.require_namespaces("bench.link_check")
