"""Command line of the quality suite."""

from __future__ import annotations

import sys

import pytest

from bench.quality import __main__ as quality
from bench.quality.peers import packages


def test_help_names_the_options(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["python -m bench.quality", "run", "--help"])
    with pytest.raises(SystemExit) as stop:
        quality.main()
    assert stop.value.code == 0
    assert "--size" in capsys.readouterr().out


def test_peers_are_fetched_beside_data(monkeypatch: pytest.MonkeyPatch) -> None:
    fetched: list[object] = []
    monkeypatch.setattr(quality, "fetch_packages", fetched.extend)
    monkeypatch.setattr(quality, "fetch", fetched.append)
    monkeypatch.setattr(sys, "argv", ["python -m bench.quality", "fetch", "peers", "flights"])
    quality.main()
    assert fetched == [*packages(), ["flights"]]


def test_recorded_command_has_no_paths() -> None:
    arguments = ["run", "--out", "/somewhere/x.json", "--size", "ci", "--after", "/elsewhere/y.json"]
    assert quality._command(arguments) == "python -m bench.quality run --size ci"
