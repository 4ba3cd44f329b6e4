"""The list of suites."""

from __future__ import annotations

from bench import suites


def test_every_benchmark_file_is_a_suite() -> None:
    files = {path.stem.removeprefix("test_") for path in suites.HERE.glob("test_*.py")}
    assert files == set(suites.SUITES)


def test_command_selects_the_cases_of_a_device() -> None:
    assert suites.command("reduce", "cuda")[-3:] == ["bench/test_reduce.py", "-k", "gpu"]
    assert suites.command("reduce", "cpu")[-2:] == ["-k", "cpu"]
    assert suites.command("converge", "cuda")[-1] == "bench/test_converge.py"
