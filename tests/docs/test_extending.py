"""The lists of files in docs/extending.md are complete: what exists already is in exactly those files."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bench import suites
from hdet_kernels.controller.protocol import Controller, UndoingController
from hdet_kernels.ensemble import Ensemble, ProcessEnsemble, RowEnsemble, SingleReplica
from tests.docs.pages import ROOT

TEXT = (ROOT / "docs" / "extending.md").read_text()
SOURCES = (".py", ".h", ".cpp", ".cu")


def section(heading: str) -> str:
    found = re.search(rf"^## {heading}\n(.*?)(?=^## |\Z)", TEXT, re.M | re.S)
    assert found is not None, heading
    return found[1]


def files(heading: str) -> set[str]:
    """Return the files of the list under a heading."""
    return set(re.findall(r"^- `([^`]+)`", section(heading), re.M))


def question(text: str) -> list[str]:
    """Return the files of the list after the line that begins with ``text``."""
    found = re.search(rf"^{re.escape(text)}[^\n]*\n\n((?:- .*\n)+)", section("Where to look"), re.M)
    assert found is not None, text
    return re.findall(r"^- `([^`]+)`", found[1], re.M)


def first_column(heading: str) -> set[str]:
    """Return the names in the first column of the tables under a heading, without arguments."""
    cells = re.findall(r"^\| (`[^|]*) \|", section(heading), re.M)
    return {name for cell in cells for name in re.findall(r"`(\w+)[^`]*`", cell)}


def mentions(word: str, *folders: str) -> set[str]:
    """Return the source files that have ``word`` in a name."""
    pattern = re.compile(rf"(?<![a-z]){word}(?![a-z])", re.I)
    found = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in SOURCES]
    return {path.relative_to(ROOT).as_posix() for path in found if pattern.search(_split_words(path))}


def words_of(file: str) -> set[str]:
    """Return the words of a file."""
    return set(re.findall(r"\w+", (ROOT / file).read_text()))


def _split_words(path: Path) -> str:
    """Return the text with FusedLion as Fused_Lion, so that a rule is found in the name of its class."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", path.read_text().replace("AdamW", "Adamw"))


@pytest.mark.parametrize(
    ("listed", "most"),
    [
        (sorted(files("A controller")), 4),
        (sorted(files("An update rule")), 10),
        (question("To change the transport"), 6),
        (question("To follow one sync"), 6),
        (question("What is in a checkpoint"), 2),
        (question("Why a learning rate fell"), 2),
    ],
    ids=["controller", "rule", "transport", "sync", "checkpoint", "fallen-rate"],
)
def test_few_files_are_enough(listed: list[str], most: int) -> None:
    assert 0 < len(listed) <= most
    assert [file for file in listed if "NAME" not in file and not (ROOT / file).exists()] == []


def test_a_sync_goes_through_the_listed_files_only() -> None:
    """Each file of the line of calls names what the next one defines."""
    calls = {
        "hdet_kernels/schedule/schedulers.py": "end_step",
        "hdet_kernels/schedule/cycle.py": "converger.converge",
        "hdet_kernels/converge/converger.py": "exchange_reports",
        "hdet_kernels/converge/transport.py": "all_reduce",
        "hdet_kernels/ensemble/processes.py": "dist.all_reduce",
    }
    assert set(calls) < set(question("To follow one sync"))
    assert [file for file, call in calls.items() if call not in (ROOT / file).read_text()] == []


def test_lion_is_in_the_files_of_an_update_rule_and_in_no_other() -> None:
    listed = {file for file in files("An update rule") if file.startswith(("hdet_kernels/", "csrc/"))}
    assert mentions("lion", "hdet_kernels", "csrc") == listed


@pytest.mark.parametrize("rule", ["sgd", "adam", "adamw", "adagrad", "lion"])
def test_every_rule_is_in_all_files_of_an_update_rule(rule: str) -> None:
    assert set(files("An update rule")) - mentions(rule, "hdet_kernels", "csrc", "tests") == set()


def test_the_hypergradient_is_in_all_files_of_a_controller() -> None:
    listed = {file for file in files("A controller") if "NAME" not in file}
    assert listed - mentions("Hypergradient", "hdet_kernels") == set()
    for file in files("A controller"):
        assert (ROOT / file.replace("NAME", "hypergradient")).exists()


def test_the_methods_of_a_controller_are_all_of_them() -> None:
    methods = {name for kind in (Controller, UndoingController) for name in vars(kind) if not name.startswith("_")}
    assert first_column("A controller") == methods


def test_the_attributes_and_methods_of_an_ensemble_are_all_of_them() -> None:
    members = {name for name in vars(Ensemble) if not name.startswith("_")}
    assert first_column("An ensemble") == members | set(Ensemble.__annotations__)


@pytest.mark.parametrize("kind", [SingleReplica, ProcessEnsemble, RowEnsemble])
def test_an_ensemble_of_the_package_is_in_the_files_of_one(kind: type) -> None:
    name = kind.__module__.split(".")[-1]
    listed = {file.replace("NAME", name) for file in files("An ensemble")}
    assert kind.__module__.replace(".", "/") + ".py" in listed
    assert [file for file in listed if not (ROOT / file).exists()] == []
    assert kind.__name__ in words_of("hdet_kernels/ensemble/__init__.py")


@pytest.mark.parametrize("suite", suites.SUITES)
def test_a_suite_is_in_all_files_of_a_benchmark(suite: str) -> None:
    for file in files("A benchmark"):
        path = ROOT / file.replace("NAME", suite)
        assert path.exists()
        assert "NAME" in file or re.search(rf"\b{suite}\b", path.read_text()), f"{file} does not name {suite}"


def test_every_benchmark_is_a_suite() -> None:
    assert {path.stem.removeprefix("test_") for path in (ROOT / "bench").glob("test_*.py")} == set(suites.SUITES)
