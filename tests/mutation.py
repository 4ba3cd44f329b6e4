"""Measure the mutation score: the share of small faults in the code that the tests notice.

cosmic-ray lists the faults (mutants) of the modules in ``TARGETS``: a ``+`` becomes a ``-``, a ``<`` a ``<=``, a number
grows by one. A sample of them is put, one at a time, into a copy of the repository, and the tests named in ``TARGETS``
run on it. A mutant is killed if a test fails or hangs; it has survived if all pass.

    python -m tests.mutation --out tests/mutation.json

A first run without a mutant records how long each test takes and which functions it calls. A mutant then meets only the
tests that call its function, the fastest first. Every run is a fork of this process, which has imported torch.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import hashlib
import importlib
import itertools
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

try:
    from cosmic_ray import mutating, plugins
    from cosmic_ray.ast import ast_nodes, get_ast
except ImportError as error:
    raise SystemExit("cosmic-ray is not installed: pip install 'hdet_kernels[mutation]'") from error

ROOT = Path(__file__).parents[1]
OPTIONS = ("-q", "-m", "not full", "-p", "no:cacheprovider", "-p", "no:xdist", "--hypothesis-seed=0")

# Modules, and the tests that must notice their mutants.
TARGETS: dict[str, tuple[str, ...]] = {
    "hdet_kernels/fanout/*.py": ("tests/fanout", "tests/controller"),
    "hdet_kernels/controller/*.py": ("tests/fanout", "tests/controller"),
    "hdet_kernels/converge/plan.py": tuple(f"tests/converge/test_{name}.py" for name in ("plan", "converger", "merge")),
    "hdet_kernels/ops/chunks.py": ("tests/ops/test_chunks.py", "tests/optim/test_fixed_gradients.py"),
}

# An operator is replaced by one of its own group. Others raise a TypeError wherever they are reached (floats have no
# ``<<``) or change nothing (``is`` for ``==`` of small numbers), and say little about the tests.
GROUPS = ("Add Sub Mul Div FloorDiv Mod Pow", "BitOr BitAnd BitXor", "Eq NotEq Lt LtE Gt GtE", "Is IsNot",
          "USub UAdd Delete", "Invert Not Delete")  # fmt: skip

ANY_FUNCTION = "*"  # called by tests that start processes: what runs there is not recorded
Survey = dict[str, tuple[float, list[str]]]  # for each test: its seconds, and the functions that it calls


@dataclass(frozen=True, order=True)
class Mutant:
    """One fault: a cosmic-ray ``operator``, applied at its ``occurrence`` in ``file``."""

    file: str
    place: tuple[int, int]  # line and column
    operator: str
    occurrence: int
    text: str  # the line without the fault
    function: str | None  # file and first line of the function around it; None for what runs on import


def list_mutants(source: str, file: str) -> list[Mutant]:
    """List the mutants of a file, without those in annotations, in f-strings and in the types of isinstance()."""
    ignored, functions = list[Any](), list[tuple[int, int]]()
    for node in ast.walk(ast.parse(source)):  # outer functions come before those inside them
        ignored += filter(None, (getattr(node, "annotation", None), getattr(node, "returns", None)))
        if isinstance(node, ast.JoinedStr):
            ignored.append(node)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "isinstance":
            ignored.append(node.args[1])
        elif isinstance(node, ast.FunctionDef):
            functions.append((min([node.lineno, *(d.lineno for d in node.decorator_list)]), node.end_lineno or 0))
    spans = [((node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)) for node in ignored]
    lines, nodes, found = source.splitlines(), list(ast_nodes(get_ast(source))), []
    for name in plugins.operator_names():
        kind, *replaced = name.removeprefix("core/").split("_")
        if kind.startswith("Variable") or not any(set(replaced) <= set(group.split()) for group in GROUPS):
            continue  # operators on variables must be given their names
        places = [place for node in nodes for place in plugins.get_operator(name)().mutation_positions(node)]
        for occurrence, (start, stop) in enumerate(places):
            if not any(first <= start and stop <= last for first, last in spans):
                function = next((f"{file}:{first}" for first, last in functions if first <= start[0] <= last), None)
                found.append(Mutant(file, start, name, occurrence, lines[start[0] - 1].strip(), function))
    return found


def draw(source: str, found: list[Mutant], seed: int) -> Iterator[tuple[Mutant, str]]:
    """Yield mutants in random order with the source that has them, one for each place of the code.

    The draw depends on the text of a line, not on where it is: a file that is moved gets the same mutants.
    """
    seen, drawn = Counter[tuple[str, str]](), dict[Any, tuple[str, Mutant]]()
    for mutant in sorted(found, key=lambda mutant: (mutant.place[0], mutant.operator, mutant.occurrence)):
        seen[mutant.operator, mutant.text] += 1
        key = f"{seed}/{mutant.operator}/{mutant.text}/{seen[mutant.operator, mutant.text]}"
        rank = (hashlib.sha256(key.encode()).hexdigest(), mutant)
        place = mutant.place, mutant.operator.split("_")[0]
        drawn[place] = min(rank, drawn.get(place, rank))
    for _, mutant in sorted(drawn.values()):
        code = mutating.mutate_code(source, plugins.get_operator(mutant.operator)(), mutant.occurrence)
        with contextlib.suppress(SyntaxError):  # the * of an argument list is no product
            ast.parse(code)
            yield mutant, code


class Recorder:
    """A pytest plugin that records the time of each test and the functions in ``folder`` that it calls."""

    def __init__(self, folder: Path) -> None:
        self.prefix = f"{folder}/"
        self.survey: Survey = {}
        self.process_starts = {multiprocessing.Process.start.__code__, subprocess.Popen.__init__.__code__}

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        called: set[str] = set()

        def trace(frame: Any, event: str, argument: object) -> None:
            code = frame.f_code
            if code in self.process_starts:
                called.add(ANY_FUNCTION)
            elif code.co_filename.startswith(self.prefix):
                called.add(f"{code.co_filename.removeprefix(self.prefix)}:{code.co_firstlineno}")

        started = time.perf_counter()
        sys.settrace(trace)
        yield
        sys.settrace(None)
        self.survey[item.nodeid] = (time.perf_counter() - started, sorted(called))


class Chosen:
    """A pytest plugin that runs the tests in ``seconds`` only, in that order, each within a time limit."""

    def __init__(self, seconds: dict[str, float]) -> None:
        self.seconds = seconds

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        by_name = {item.nodeid: item for item in items}
        items[:] = [by_name[test] for test in self.seconds if test in by_name]

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        signal.setitimer(signal.ITIMER_REAL, 150 + 10 * self.seconds[item.nodeid])  # then the process ends


def run_pytest(folder: Path, arguments: list[str], plugin: Recorder | Chosen) -> int:
    """Run pytest in a fork that imports the project from ``folder``, and return its exit status."""
    child = os.fork()
    if not child:
        status = 1
        try:
            os.setsid()
            os.chdir(folder)
            os.environ["PYTHONPATH"] = str(folder)
            sys.path[:] = [str(folder), *(entry for entry in sys.path if entry not in ("", str(ROOT)))]
            for name in [name for name in sys.modules if name.split(".")[0] == "tests"]:
                del sys.modules[name]
            fork = multiprocessing.get_context("fork")  # a server would import torch again for each mutant
            multiprocessing.get_context = lambda method=None: fork  # type: ignore[assignment]
            if isinstance(plugin, Chosen):
                signal.alarm(300)  # for the imports; every test then sets its own
                os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            status = int(pytest.main([*arguments, *OPTIONS], plugins=[plugin]))
            if isinstance(plugin, Recorder):
                (folder / "survey.json").write_text(json.dumps(plugin.survey))
        finally:
            sys.stdout.flush()
            os._exit(status)
    _, status = os.waitpid(child, 0)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # the ranks of a test that was ended
    return os.waitstatus_to_exitcode(status)


def choose(mutant: Mutant, survey: Survey, tests: tuple[str, ...]) -> dict[str, float]:
    """Return the tests that call the function of a mutant (all where it is in none), the fastest first."""
    found = sorted(
        (seconds, test)
        for test, (seconds, called) in survey.items()
        if test.startswith(tests) and (mutant.function in (None, *called) or ANY_FUNCTION in called)
    )
    return {test: seconds for seconds, test in found}


def measure(folder: Path, count: int, seed: int) -> dict[str, Any]:
    """Return the score of each module in ``folder``, a copy of the repository, and of all together."""
    modules = {path: tests for pattern, tests in TARGETS.items() for path in sorted(folder.glob(pattern))}
    if status := run_pytest(folder, sorted({test for tests in modules.values() for test in tests}), Recorder(folder)):
        raise SystemExit(f"the tests do not pass without a mutant: pytest ended with status {status}")
    survey: Survey = json.loads((folder / "survey.json").read_text())
    sys.dont_write_bytecode = True  # the compiled form of one mutant could be taken for that of the next
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    files: dict[str, Any] = {}
    for path, tests in modules.items():
        file, source = path.relative_to(folder).as_posix(), path.read_text()
        for compiled in path.parent.glob(f"__pycache__/{path.stem}.*.pyc"):
            compiled.unlink()
        found, survivors = list_mutants(source, file), []
        drawn = list(itertools.islice(draw(source, found, seed), count))
        for mutant, code in drawn:
            seconds = choose(mutant, survey, tests)
            used = sorted({test.split("::")[0] for test in seconds})
            path.write_text(code)
            if not used or run_pytest(folder, ["-x", *used], Chosen(seconds)) == 0:
                becomes = code.splitlines()[mutant.place[0] - 1].strip()
                survivors.append({**asdict(mutant), "becomes": becomes, "tests": len(seconds)})
            path.write_text(source)
        if sampled := len(drawn):
            killed = sampled - len(survivors)
            print(f"{file}: {killed} of {sampled} killed", flush=True)
            files[file] = {"mutants": len(found), "sampled": sampled, "killed": killed, "survivors": survivors}
    totals = {key: sum(entry[key] for entry in files.values()) for key in ("mutants", "sampled", "killed")}
    return {"score": totals["killed"] / totals["sampled"], **totals, "seed": seed, "pytest": OPTIONS, "files": files}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--sample", type=int, default=25, help="mutants drawn for each module (default: 25)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the draw (default: 0)")
    parser.add_argument("--out", type=Path, help="write the scores and the survivors to this file, as JSON")
    options = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1"}  # Triton is among what is imported here
    for name in ("torch._dynamo", "torch.distributed", "hypothesis"):  # once for all forks: they take seconds
        importlib.import_module(name)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place).resolve() / "repository"
        shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(".*", "build", "__pycache__"))
        found = measure(folder, options.sample, options.seed)
    print(f"{found['killed']} of {found['sampled']} mutants killed: {found['score']:.1%}")
    if options.out:
        options.out.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
