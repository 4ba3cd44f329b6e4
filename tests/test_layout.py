"""The layout of the package: imports without circles, folders that keep apart, private names of torch in one file."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "hdet_kernels"
FILES = sorted(PACKAGE.rglob("*.py"))

#: Folder or module: what it must not import, directly or through others.
APART = {
    "tensors": ("buckets", "ops", "optim", "stack", "converge", "schedule", "fanout", "controller"),
    "ops": ("buckets", "optim", "stack", "converge", "schedule", "fanout", "controller", "ensemble"),
    "optim": ("stack", "converge", "schedule", "fanout", "controller", "ensemble"),
    "controller": ("ops", "optim", "stack", "converge", "schedule", "fanout", "ensemble", "buckets", "tensors"),
    "converge": ("schedule", "fanout", "controller", "stack"),
    "fanout": ("converge", "schedule", "stack"),
    "stack": ("schedule", "fanout", "controller"),
    "scout": ("schedule", "fanout", "controller"),
    "ensemble": ("ops", "optim", "stack", "converge", "schedule", "fanout", "controller"),
}


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in FILES}


@cache
def imports_of(name: str) -> frozenset[str]:
    """Return the modules of the package that a module imports, wherever in its text."""
    found = set()
    for node in ast.walk(ast.parse(MODULES[name].read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name in MODULES}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "hdet_kernels":
            assert node.level == 0, f"{name} has a relative import; the package imports by full names"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.add(inner if inner in MODULES else str(node.module))
    return frozenset(found - {name})


def is_face(name: str) -> bool:
    """Return whether a module only hands on names: a package's ``__init__``."""
    return MODULES[name].name == "__init__.py"


def reached_from(name: str) -> set[str]:
    reached: set[str] = set()
    waiting = [name]
    while waiting:
        for other in imports_of(waiting.pop()):
            if other not in reached:
                reached.add(other)
                waiting.append(other)
    return reached


@pytest.mark.parametrize("name", [name for name in MODULES if not is_face(name)])
def test_no_module_imports_itself_through_others(name: str) -> None:
    assert name not in reached_from(name)


@pytest.mark.parametrize("part", APART)
def test_parts_that_stay_apart(part: str) -> None:
    own = [name for name in MODULES if name == f"hdet_kernels.{part}" or name.startswith(f"hdet_kernels.{part}.")]
    reached = set().union(*(reached_from(name) for name in own))
    others = {name.split(".")[1] for name in reached if "." in name}
    assert not others.intersection(APART[part])


def test_nothing_inside_ops_imports_its_face() -> None:
    inside = [name for name in MODULES if name.startswith("hdet_kernels.ops.")]
    assert not [name for name in inside if "hdet_kernels.ops" in imports_of(name)]


def test_tests_share_no_code_through_test_files() -> None:
    for path in (ROOT / "tests").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tests."):
                imported = [str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)]
                assert not [name for name in imported if name.split(".")[-1].startswith("test_")], path


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_docstrings_say_what_a_thing_is_or_does(path: Path) -> None:
    """A docstring that opens with "What …" makes the reader guess the subject."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node) or ""
            assert not text.startswith("What "), text.splitlines()[0]
    assert ast.get_docstring(ast.parse(path.read_text())), "a module says in its first paragraph what it is"
