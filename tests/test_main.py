"""``python -m hdet_kernels``: what it prints and how it exits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import hdet_kernels
from hdet_kernels.__main__ import hidden_by, main
from hdet_kernels.ops.backends import backends
from tests.histories import run


def test_without_a_command_it_prints_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    text = capsys.readouterr().out
    assert "info" in text
    assert "demo" in text


def test_help_of_the_demo_names_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["demo", "--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    for option in ("--replicas", "--steps", "--out", "--seed", "--max-lr"):
        assert option in text


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert (stop.value.code, capsys.readouterr().out) == (0, f"hdet_kernels {hdet_kernels.__version__}\n")


def test_info_names_every_backend_and_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["info"]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    for name, state in backends().items():
        assert f"{name} {state}" in lines[lines.index("backends:") : lines.index("versions:")]
    assert f"hdet_kernels {hdet_kernels.__version__}" in lines
    named = {line.split()[0] for line in lines}
    assert {"python", "torch", "triton", "numpy", "hdet_kernels._native"} <= named


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """A checkout, which is the current folder, and a folder with an installed package. Both have this package."""
    for name in ("checkout", "installed"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "hdet_kernels").symlink_to(Path(hdet_kernels.__file__).parent)
    monkeypatch.chdir(tmp_path / "checkout")
    return tmp_path / "checkout", tmp_path / "installed"


def test_what_the_source_in_the_current_folder_hides(folders: tuple[Path, Path]) -> None:
    checkout, installed = folders
    source = checkout / "hdet_kernels"
    assert hidden_by(source, ["", str(installed)]) == installed / "hdet_kernels"
    assert hidden_by(source, ["", str(checkout)]) is None, "nothing is installed, or as an editable build"
    assert hidden_by(installed / "hdet_kernels", [str(installed), str(checkout)]) is None, "it is imported itself"


@pytest.mark.full
def test_info_in_the_checkout_is_that_of_the_installed_build(folders: tuple[Path, Path]) -> None:
    checkout, installed = folders
    command = [sys.executable, "-m", "hdet_kernels", "info"]
    found = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(installed)}, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    assert f"{checkout / 'hdet_kernels'} is the source; this is the installed build in {installed}" in found.stdout
    assert found.stdout.count("backends:") == 1


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--replicas", "0"], "--replicas must be at least 2, got 0"),
        (["--replicas", "1"], "--replicas must be at least 2, got 1"),
        (["--steps", "39"], "--steps must be at least 40, got 39"),
        (["--max-lr", "0"], "--max-lr must be a positive number, got 0"),
        (["--max-lr", "inf"], "--max-lr must be a positive number, got inf"),
        (["--seed", "-1"], "--seed must lie between 0 and 2**32 - 1, got -1"),
        (["--out", __file__], f"cannot write to --out {__file__}"),
    ],
    ids=" ".join,
)
def test_bad_arguments_of_the_demo(
    arguments: list[str], complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", "--out", str(tmp_path), *arguments]) == 2
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["train"], ["demo", "--replicas", "two"]])
def test_what_the_parser_refuses(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    assert arguments[-1] in capsys.readouterr().err


def test_the_demo_without_the_source_of_the_standard_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("hdet_kernels.demo.tasks.SOURCE", tmp_path)
    assert main(["demo", "--out", str(tmp_path)]) == 2
    assert f"source is not in {tmp_path}" in capsys.readouterr().err


def test_a_history_becomes_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    history, page = tmp_path / "history.jsonl", tmp_path / "page.html"
    history.write_text("".join(json.dumps(record.to_dict()) + "\n" for record in run(3)))
    assert main(["report", str(history)]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'history.html'}: 3 syncs\n"
    assert main(["report", str(history), "-o", str(page)]) == 0
    assert page.read_text() == (tmp_path / "history.html").read_text()
    assert "<title>HDET run: history.jsonl</title>" in page.read_text()


def test_what_is_no_history_has_an_exit_code_of_2_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "other.json").write_text('{"loss": 1}\n')
    (tmp_path / "page.html").write_text(json.dumps(run(1)[0].to_dict()) + "\n")
    for name, complaint in (
        ("missing.jsonl", "there is no file"),
        ("empty.jsonl", "is empty"),
        ("other.json", "line 1 is not the record of a sync"),
        ("page.html", "is the history itself: choose another file"),
    ):
        assert main(["report", str(tmp_path / name), "-o", str(tmp_path / "page.html")]) == 2
        error = capsys.readouterr().err
        assert error.startswith("python -m hdet_kernels report: error: ")
        assert complaint in error
    assert "step" in (tmp_path / "page.html").read_text()
    assert len(list(tmp_path.iterdir())) == 3


def test_a_page_that_cannot_be_written_has_an_exit_code_of_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    history = tmp_path / "history.jsonl"
    history.write_text(json.dumps(run(1)[0].to_dict()) + "\n")
    assert main(["report", str(history), "-o", str(tmp_path / "no" / "page.html")]) == 1
    assert "cannot write" in capsys.readouterr().err
