"""Check the layout of the package: no circles, folders that keep apart, private names of torch in one file."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import hdet_kernels as hk

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "hdet_kernels"

#: Folder or module: what it must not import, directly or through others.
APART = {
    "tensors": ("buckets", "ops", "optim", "stack", "converge", "schedule", "fanout", "controller"),
    "ops": ("buckets", "optim", "stack", "converge", "schedule", "fanout", "controller", "ensemble"),
    "optim": ("stack", "converge", "schedule", "fanout", "controller", "ensemble"),
    "controller": ("ops", "optim", "stack", "converge", "schedule", "fanout", "ensemble", "buckets", "tensors"),
    "converge": ("schedule", "fanout", "controller", "stack"),
    "fanout": ("converge", "schedule", "stack"),
    "stack": ("schedule", "fanout", "controller"),
    "ensemble": ("ops", "optim", "stack", "converge", "schedule", "fanout", "controller"),
    "ops.torch": ("ops.triton", "ops.compiled"),
    "ops.triton": ("ops.compiled",),
    "schedule.scout": ("schedule.schedulers",),
    "demo": ("integrations",),
    "integrations": ("demo",),
}

#: Private names of other libraries, and where they may stand: ``os._exit``, the fields of a named tuple, and what the
#: frameworks of the integrations have no public name for. The last one is an attribute of our own optimizers.
PRIVATE_OF_OTHERS = {
    "_exit": "demo",
    "_fields": "integrations",
    "_is_accelerate_prepared": "integrations",
    "_model_averaging_period": "integrations",
    "_schedulers": "integrations",
    "_step_supports_amp_scaling": "integrations",
}


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


@cache
def tree_of(name: str) -> ast.Module:
    return ast.parse(MODULES[name].read_text())


@cache
def imports_of(name: str) -> frozenset[str]:
    """Return the modules of the package that a module imports, wherever in its text."""
    found = set()
    for node in ast.walk(tree_of(name)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name in MODULES}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "hdet_kernels":
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.add(inner if inner in MODULES else str(node.module))
    return frozenset(found - {name})


@cache
def reached_from(name: str) -> frozenset[str]:
    reached: set[str] = set()
    waiting = [name]
    while waiting:
        new = imports_of(waiting.pop()) - reached
        reached |= new
        waiting += new
    return frozenset(reached)


def inside(part: str) -> list[str]:
    """Return the modules of a folder, or the one of a file, by its dotted path."""
    return [name for name in MODULES if f"{name}.".startswith(f"hdet_kernels.{part}.")]


def test_no_module_imports_itself_through_others() -> None:
    """The ``__init__`` of a folder may: it hands on the names of modules that import each other by full names."""
    modules = [name for name, path in MODULES.items() if path.name != "__init__.py"]
    assert not [name for name in modules if name in reached_from(name)]


def test_one_person_can_hold_it() -> None:
    assert len(hk.__all__) <= 34
    assert len(MODULES) <= 160


def test_the_package_imports_by_full_names() -> None:
    nodes = [(name, node) for name in MODULES for node in ast.walk(tree_of(name))]
    assert not [name for name, node in nodes if isinstance(node, ast.ImportFrom) and node.level]


@pytest.mark.parametrize("part", APART)
def test_parts_that_stay_apart(part: str) -> None:
    assert inside(part)
    reached = set().union(*(reached_from(name) for name in inside(part)))
    assert not [name for other in APART[part] for name in inside(other) if name in reached]


def test_nothing_inside_ops_imports_its_face() -> None:
    assert not [name for name in inside("ops") if "hdet_kernels.ops" in imports_of(name)]


def is_private(name: str) -> bool:
    return re.fullmatch(r"_[a-zA-Z]\w*", name) is not None


def names_defined(tree: ast.Module) -> Iterator[str]:
    """Yield every name that a file defines: functions, classes, variables, attributes of ``self``, slots."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and isinstance(node.value, ast.Name):
            if node.value.id in ("self", "cls"):
                yield node.attr
        elif isinstance(node, ast.Assign) and "__slots__" in [getattr(target, "id", "") for target in node.targets]:
            yield from (part.value for part in ast.walk(node.value) if isinstance(part, ast.Constant))


def names_used(tree: ast.Module) -> tuple[set[str], set[str]]:
    """Return the names that a file reads from its own objects, and those from all others: modules, strings, imports."""
    own, others = set[str](), set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            whose = node.value.func if isinstance(node.value, ast.Call) else node.value
            (own if getattr(whose, "id", "") in ("self", "cls", "super") else others).add(node.attr)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] != "hdet_kernels":
            others |= {*(node.module or "").split("."), *(alias.name for alias in node.names)}
        elif isinstance(node, ast.Import):
            others |= {part for alias in node.names for part in alias.name.split(".")}
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "").endswith(("attr", "getter")):
            named = {str(part.value) for part in node.args if isinstance(part, ast.Constant)}
            own, others = (own | named, others) if getattr(node.args[0], "id", "") == "self" else (own, others | named)
        elif isinstance(node, ast.Constant) and re.fullmatch(r"torch\.[\w.]+", str(node.value)):
            others |= set(node.value.split("."))  # a key of sys.modules, or the path of a type
    return own, others


def test_private_names_of_torch_stand_in_one_file() -> None:
    """A private name is our own if the package defines it, and that of another object if the same file does."""
    defined = {module: set(names_defined(tree_of(module))) for module in MODULES}
    anywhere = set().union(*defined.values())
    for module, path in MODULES.items():
        place = path.relative_to(PACKAGE)
        own, others = names_used(tree_of(module))
        foreign = {name for name in (own - anywhere) | (others - defined[module]) if is_private(name)}
        left = [name for name in foreign if place.parts[0] != PRIVATE_OF_OTHERS.get(name)]
        assert str(place) == "torch_internals.py" or not left, f"{place} uses {left}: see torch_internals.py"


def test_tests_share_no_code_through_test_files() -> None:
    names = r"(?:\([^)]*|[^(\n]*)"  # after "import": on one line, or in parentheses
    wrong = re.compile(
        rf"^ *(from|import) tests\.[\w.]*\btest_|^ *from tests[\w.]* import {names}\btest_", re.MULTILINE
    )
    assert not [path for path in (ROOT / "tests").rglob("*.py") if wrong.search(path.read_text())]


def test_docstrings_say_what_a_thing_is_or_does() -> None:
    """A docstring that opens with "What …" makes the reader guess the subject."""
    for name in MODULES:
        assert ast.get_docstring(tree_of(name)), f"{name} must say in its first paragraph what it is"
        for node in ast.walk(tree_of(name)):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                assert not (ast.get_docstring(node) or "").startswith("What "), f"{name}, line {node.body[0].lineno}"
