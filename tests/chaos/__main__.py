"""Inject faults and print what they broke: ``python -m tests.chaos [--faults 500] [--seed 0] [--minutes 10]``."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from bench.records import provenance
from tests.chaos.configurations import CONFIGURATIONS
from tests.chaos.plan import FAULTS, cases, spelled
from tests.chaos.runner import Verdict, run_all
from tests.chaos.two_hosts import missing


def options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--faults", type=int, default=500, help="number of faults")
    parser.add_argument("--seed", type=int, default=0, help="decides everything: kinds, configurations, ranks, steps")
    parser.add_argument("--minutes", type=float, default=10.0, help="begin no fault after this time")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="of the tensors; they travel by gloo")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="groups of processes at a time")
    parser.add_argument("--kind", action="append", help="only this kind of fault; may be repeated")
    parser.add_argument("--repeat", action="append", help="only this case, as a violation prints it; may be repeated")
    parser.add_argument("--times", action="store_true", help="print the seconds of every case")
    parser.add_argument("--json", type=Path, help="write the record to this file")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return the exit code."""
    given = options(arguments)
    if given.repeat:
        planned = [spelled(text, given.device) for text in given.repeat]
    else:
        if reason := missing():
            print(f"skipped: the faults between two hosts: {reason}")
        planned = list(itertools.islice(cases(given.seed, given.kind, given.device, hosts=not reason), given.faults))
    start = time.monotonic()
    verdicts = run_all(planned, jobs=given.jobs, seconds=60 * given.minutes, each=_time if given.times else _progress)
    seconds = time.monotonic() - start
    print()
    print(table(verdicts))
    record = summary(verdicts, seconds, given)
    for text in record["violations"]:
        print(f"\n{text['case']}")
        print("\n".join(f"  {line}" for line in text["violations"]))
        print(f"  python -m tests.chaos --device {given.device} --repeat '{text['case']}'")
    print(
        f"\n{record['faults']} faults of {record['kinds']} kinds in {record['configurations']} configurations, "
        f"{seconds:.0f} s, seed {given.seed}: {len(record['violations'])} violations"
    )
    if given.json is not None:
        given.json.write_text(json.dumps(record, indent=1) + "\n")
    return 1 if record["violations"] or len(verdicts) < len(planned) else 0


def _progress(verdict: Verdict) -> None:
    print("F" if verdict.violations else ".", end="", flush=True)


def _time(verdict: Verdict) -> None:
    print(
        f"{verdict.seconds:6.2f} s  {'broken' if verdict.violations else 'kept  '}  {verdict.case.spelled}", flush=True
    )


def table(verdicts: Sequence[Verdict]) -> str:
    """Return a table of the kinds: how each must end, how often it ran, and how often it did so."""
    runs, broken = Counter(v.case.fault for v in verdicts), Counter(v.case.fault for v in verdicts if v.violations)
    width = max((len(name) for name in runs), default=4)
    lines = [f"{'kind':{width}}  expected   runs  as expected", "-" * (width + 30)]
    lines += [f"{n:{width}}  {FAULTS[n].expect:9}  {runs[n]:4}  {runs[n] - broken[n]:11}" for n in FAULTS if n in runs]
    return "\n".join(lines)


def _command(arguments: Sequence[str], record: Path | None) -> str:
    """Return the command line, with the record by its name alone."""
    words = [record.name if record is not None and word == str(record) else word for word in arguments]
    return " ".join(["python -m tests.chaos", *words])


def summary(verdicts: Sequence[Verdict], seconds: float, given: argparse.Namespace) -> dict[str, Any]:
    """Return the record of a run."""
    gpu = torch.cuda.get_device_name() if given.device == "cuda" else None
    runs, broken = Counter(v.case.fault for v in verdicts), Counter(v.case.fault for v in verdicts if v.violations)
    return {
        **provenance(_command(sys.argv[1:], given.json)),
        "machine": ", ".join(filter(None, [platform.machine(), platform.system(), gpu])),
        "cores": os.cpu_count(),
        "seed": given.seed,
        "seconds": round(seconds, 1),
        "faults": len(verdicts),
        "kinds": len(runs),
        "configurations": len({v.case.configuration for v in verdicts}),
        "by configuration": {name: sum(v.case.configuration == name for v in verdicts) for name in CONFIGURATIONS},
        "by kind": {n: {"expected": FAULTS[n].expect, "runs": runs[n], "broken": broken[n]} for n in FAULTS if runs[n]},
        "violations": [{"case": v.case.spelled, "violations": list(v.violations)} for v in verdicts if v.violations],
    }


if __name__ == "__main__":
    sys.exit(main())
