"""``python -m hdet_kernels bench``: runs suites, and writes what they measured, a report and plots into a folder.

Each suite is a process of its own, so that one that fails or fills the memory leaves the others alone.
"""

from __future__ import annotations

import datetime
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import records
import run_report
import torch
from outcome import Outcome, read_ends
from suites import HERE, SUITES, command

#: Exit codes of pytest.
CUT, NOTHING_COLLECTED = 2, 5


def chosen(names: Sequence[str]) -> list[str]:
    unknown = [name for name in names if name not in SUITES]
    if unknown:
        raise ValueError(f"there is no suite {', '.join(unknown)}; the suites are {', '.join(SUITES)}")
    return [name for name in SUITES if name in names] if names else list(SUITES)


def listing() -> str:
    width = max(map(len, SUITES))
    return "\n".join(f"{name:<{width}}  {suite.what}" for name, suite in SUITES.items())


def run(names: Sequence[str], out: Path, quick: bool, seconds: float | None = None) -> int:
    """Runs the suites, all by default, on the GPU if there is one, else on the CPU, each for about ``seconds`` at most;
    1 if one of them failed."""
    selected = chosen(names)
    if seconds is not None and not seconds >= 0:
        raise ValueError(f"--seconds must be a number of seconds, at least 0, got {seconds}")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    out = out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    outcomes = []
    for number, name in enumerate(selected, 1):
        print(f"[{number}/{len(selected)}] {name}: {SUITES[name].what}", flush=True)
        outcomes.append(one(name, device, out, quick, seconds))
        print(f"{name}: {outcomes[-1].line}, {outcomes[-1].seconds:.0f} s\n", flush=True)
        if outcomes[-1].interrupted:
            break
    recorded = [path for name in selected if (path := out / f"{name}.json").exists()]
    today = datetime.date.today()
    text = run_report.text(records.entries(recorded), outcomes, device, today, run_report.plots(recorded, out))
    (out / "REPORT.md").write_text(text)
    print(f"{out / 'REPORT.md'} has the tables; {', '.join(path.name for path in recorded) or 'nothing was measured'}")
    return 1 if any(outcome.failed or outcome.interrupted for outcome in outcomes) else 0


def one(name: str, device: str, out: Path, quick: bool, seconds: float | None = None) -> Outcome:
    """Runs one suite in a process of its own; its record is written if any case was measured."""
    record, ends = out / f"{name}.json", out / f".{name}.xml"
    record.unlink(missing_ok=True)  # of an earlier run
    arguments = [*command(name, device), f"--benchmark-json={record}"]
    arguments += [f"--seconds={seconds:g}"] if seconds is not None else []
    if quick:
        arguments += ["--benchmark-max-time=0.05", "--benchmark-min-rounds=3"]
    # Of a pytest around this one: in a worker of pytest-xdist, benchmarks are switched off.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    own = {"PYTEST_ADDOPTS": f"--junit-xml={ends} -p no:cacheprovider", "HDET_BENCH_QUICK": "1" if quick else "0"}
    start = time.perf_counter()
    interrupted = False
    with subprocess.Popen([sys.executable, *arguments], cwd=HERE.parent, env=environment | own) as process:
        try:
            code = process.wait()
        except KeyboardInterrupt:  # the suite has heard it too, and writes what it has
            interrupted, code = True, process.wait()
    outcome = Outcome(name, time.perf_counter() - start, cut=code == CUT, interrupted=interrupted)
    if ends.exists():
        read_ends(ends, outcome)
        ends.unlink()
    if outcome.interrupted:  # pytest counts the case that was running
        outcome.passed = len(records.entries([record])) if record.exists() else 0
    if code not in (0, CUT, NOTHING_COLLECTED) and not outcome.failed:
        outcome.failed[name] = f"pytest ended with code {code}; what it printed stands above"
    return outcome
