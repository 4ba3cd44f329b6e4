"""``python -m hdet_kernels``: what it prints and how it exits."""

from __future__ import annotations

from pathlib import Path

import pytest

import hdet_kernels
from hdet_kernels.__main__ import main
from hdet_kernels.demo.tasks import DigitsTask
from hdet_kernels.ops.backends import backends


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
    for option in ("--replicas", "--steps", "--task", "--out", "--seed", "--max-lr"):
        assert option in text


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert (stop.value.code, capsys.readouterr().out) == (0, f"hdet_kernels {hdet_kernels.__version__}\n")


def test_info_names_every_backend_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info"]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    for name, state in backends().items():
        assert f"{name} {state}" in lines[lines.index("backends:") : lines.index("versions:")]
    assert f"hdet_kernels {hdet_kernels.__version__}" in lines
    named = {line.split()[0] for line in lines}
    assert {"python", "torch", "triton", "numpy", "hdet_kernels._native"} <= named


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


@pytest.mark.parametrize("arguments", [["train"], ["demo", "--task", "poetry"], ["demo", "--replicas", "two"]])
def test_what_the_parser_refuses(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    assert arguments[-1] in capsys.readouterr().err


def test_digits_without_scikit_learn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert DigitsTask.missing() is not None
    assert main(["demo", "--task", "digits", "--out", str(tmp_path)]) == 2
    assert "pip install scikit-learn" in capsys.readouterr().err
