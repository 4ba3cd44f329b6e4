"""Run benchmark suites (``python -m hdet_kernels bench``) and write records, a report and plots into a folder.

Each suite runs in its own process, so that a failure or a full memory does not affect the others."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from xml.etree import ElementTree

import torch

from bench import records
from bench.suites import HERE, SUITES, Outcome, command


def read_ends(path: Path, outcome: Outcome) -> None:
    """Add the result of every case in pytest's JUnit file to ``outcome``."""
    for case in ElementTree.parse(path).iter("testcase"):
        skipped = case.find("skipped")
        wrong = case.find("failure") if case.find("failure") is not None else case.find("error")
        if wrong is not None:
            outcome.failed[f"{case.get('name')}"] = " ".join(wrong.get("message", "").split())[:300]
        elif skipped is not None:
            outcome.skipped[skipped.get("message", "")] += 1
        else:
            outcome.passed += 1


# Exit codes of pytest.
CUT, NOTHING_COLLECTED = 2, 5


def chosen(names: Sequence[str]) -> list[str]:
    """Return the named suites in their usual order; all if ``names`` is empty."""
    unknown = [name for name in names if name not in SUITES]
    if unknown:
        raise ValueError(f"--suite: unknown {', '.join(unknown)}; choose from {', '.join(SUITES)}")
    return [name for name in SUITES if name in names] if names else list(SUITES)


def listing() -> str:
    """Return one line for each suite: its name and what it measures."""
    width = max(map(len, SUITES))
    return "\n".join(f"{name:<{width}}  {suite.what}" for name, suite in SUITES.items())


def run(names: Sequence[str], out: Path, quick: bool, seconds: float | None = None) -> int:
    """Run suites on the GPU if there is one, else on the CPU.

    Args:
        names: The suites; all if empty.
        out: Folder of the results.
        quick: Run few and short rounds.
        seconds: Begin no case but the first of a suite after this time.

    Returns:
        The exit code: 1 if a suite failed or was interrupted, else 0.
    """
    selected = chosen(names)
    if seconds is not None and not seconds >= 0:
        raise ValueError(f"--seconds must be at least 0, got {seconds}")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    out = out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    outcomes = []
    # A quick run on the CPU, whose times mean nothing, has two suites at a time.
    with ThreadPoolExecutor(2) as pool:
        each = pool.map if quick and device == "cpu" else map  # a thread would not see Ctrl-C
        for outcome in each(lambda name: one(name, device, out, quick, seconds), selected):
            outcomes.append(outcome)
            if outcome.interrupted:
                break
    recorded = [path for name in selected if (path := out / f"{name}.json").exists()]
    try:
        from bench import run_report  # which needs pandas, Jinja2 and matplotlib

        tables = str(run_report.write(recorded, outcomes, device, out))
    except ImportError as error:
        tables = f"none ({error}: pip install 'hdet_kernels[docs]')"
    print(f"tables: {tables}; records: {', '.join(path.name for path in recorded) or 'none'}")
    return 1 if any(outcome.failed or outcome.interrupted for outcome in outcomes) else 0


def one(name: str, device: str, out: Path, quick: bool, seconds: float | None = None) -> Outcome:
    """Run one suite in its own process. Its record is written if any case was measured."""
    print(f"{name}: {SUITES[name].what}", flush=True)
    record, ends = out / f"{name}.json", out / f".{name}.xml"
    record.unlink(missing_ok=True)  # of an earlier run
    arguments = [*command(name, device), f"--benchmark-json={record}"]
    arguments += [f"--seconds={seconds:g}"] if seconds is not None else []
    if quick:
        arguments += ["--benchmark-max-time=0.02", "--benchmark-min-rounds=2"]
    # Settings of an outer pytest must not apply: a worker of pytest-xdist switches benchmarks off.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    own = {"PYTEST_ADDOPTS": f"--junit-xml={ends} -p no:cacheprovider", "HDET_BENCH_QUICK": "1" if quick else "0"}
    start = time.perf_counter()
    interrupted = False
    with subprocess.Popen([sys.executable, *arguments], cwd=HERE.parent, env=environment | own) as process:
        try:
            code = process.wait()
        except KeyboardInterrupt:  # the suite gets the signal too, and writes its record
            interrupted, code = True, process.wait()
    outcome = Outcome(name, time.perf_counter() - start, cut=code == CUT, interrupted=interrupted)
    if ends.exists():
        read_ends(ends, outcome)
        ends.unlink()
    if outcome.interrupted:  # pytest also counts the interrupted case
        outcome.passed = len(records.entries([record])) if record.exists() else 0
    if code not in (0, CUT, NOTHING_COLLECTED) and not outcome.failed:
        outcome.failed[name] = f"pytest ended with exit code {code}; see its output above"
    print(f"{name}: {outcome.line}, {outcome.seconds:.0f} s\n", flush=True)
    return outcome
