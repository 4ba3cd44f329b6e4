"""Command line of the quality suite."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest

from bench.quality import __main__ as quality
from bench.quality import designs, observations
from bench.quality.peers import packages
from bench.quality.sizes import SIZES
from tests.bench.quality.made_up_zoo import run, zoo
from tests.bench.quality.scripted_runs import scripted


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
    arguments += ["--constants", "/elsewhere/c.json"]
    assert quality._command(arguments) == "python -m bench.quality run --size ci"


def test_selection_of_the_zoo(tmp_path: Path) -> None:
    constants = tmp_path / "constants.json"
    constants.write_text(json.dumps({"digits": {"slack": 0.9}}))
    given = {"seeds": None, "tasks": ["digits"], "parts": ["grid", "starts"], "start_seeds": 2, "best_seeds": None}
    size = quality.selected(Namespace(size="zoo", constants=constants, **given))
    assert (size.tasks, size.parts) == (("digits",), ("starts",))
    assert (size.seeds_of("digits", 0.1), size.seeds_of("digits", 1.0)) == (2, 5)
    assert size.options == {"digits": {"slack": 0.9}}
    assert quality.selected(Namespace(size="ci", constants=constants, **given)).options == {}


def test_runs_that_failed_or_had_other_constants_are_run_again(capsys: pytest.CaptureFixture[str]) -> None:
    good = run("start", "digits", "hdet", 1.0, 0, 1.0, options={"slack": 0.9})
    plain = run("start", "digits", "plain", 1.0, 0, 1.0)
    others = [{**good, "options": {}}, {**good, "error": "raised"}]
    size = replace(SIZES["zoo"], options={"digits": {"slack": 0.9}})
    before = zoo([plain, good, *others])
    assert quality._kept(before, size) == [plain, good]
    assert "2 runs that failed or had other constants" in capsys.readouterr().err
    assert quality._kept(before, SIZES["ci"]) == [plain, good, others[0]]


def test_observations_are_replayed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    observations.write(tmp_path / "seen.npz", {"census": scripted()}, "made up")
    monkeypatch.setattr(sys, "argv", ["", "replay", "--observations", str(tmp_path / "seen.npz"), "--trust", "0"])
    quality.main()
    assert capsys.readouterr().out.startswith("| start | mode |")


def test_designs_are_replayed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    observations.write(tmp_path / "seen.npz", {"census": scripted()}, "made up")
    paths = ["--observations", str(tmp_path / "seen.npz"), "--out", str(tmp_path / "designs.json")]
    monkeypatch.setattr(sys, "argv", ["", "replay", "--designs", *paths])
    quality.main()
    assert {one.design for one in designs.read(tmp_path / "designs.json")} == set(designs.TRIED)
