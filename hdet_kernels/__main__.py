"""Command line of the package: ``python -m hdet_kernels info | demo | bench | report``."""

from __future__ import annotations

import argparse
import importlib
import platform
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata, util
from importlib.machinery import PathFinder
from pathlib import Path

import torch

from hdet_kernels import __version__


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv`` (default: that of the process) and return the exit code."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    if arguments.command is None:
        parser.print_help()
        return 0
    return int(arguments.run(arguments))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m hdet_kernels",
        description="Hyperparameter-Divergent Ensemble Training: limit the damage of a wrong learning rate.",
    )
    parser.add_argument("--version", action="version", version=f"hdet_kernels {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")

    info = commands.add_parser(
        "info",
        help="list the available backends, GPUs and versions",
        description="List the backends that can run here, the reasons why others cannot, GPUs and versions.",
    )
    info.set_defaults(run=_info)

    demo = commands.add_parser(
        "demo",
        help="train with and without HDET on this machine, in a minute or two",
        description=(
            "Train a small language model twice from a learning rate that is about ten times too high: with torch's "
            "OneCycleLR under plain data parallel, and with HDET. Both runs have the same data, seeds and steps. A "
            "table is printed; plots (these need matplotlib), a table of syncs and all numbers as JSON are written to "
            "--out."
        ),
    )
    demo.add_argument("--replicas", type=int, default=4, metavar="N", help="processes, at least 2 (default: 4)")
    demo.add_argument("--steps", type=int, metavar="S", help="steps of each run (default: 400)")
    demo.add_argument(
        "--out", type=Path, default=Path("demo-out"), metavar="DIR", help="folder of the results (default: demo-out)"
    )
    demo.add_argument(
        "--seed", type=int, default=0, metavar="S", help="seed of initial model and data order (default: 0)"
    )
    demo.add_argument("--max-lr", type=float, metavar="X", help="peak of both runs (default: ten times a good one)")
    demo.set_defaults(run=_demo)

    bench = commands.add_parser(
        "bench",
        help="measure speed and memory beside torch and the peers that are installed",
        description=(
            "Run suites of benchmarks on the GPU if there is one, else on the CPU. Each suite writes its results as "
            "JSON to --out, followed by a report with tables and plots (these need matplotlib). The command needs the "
            "source tree and hdet_kernels[test]. The exit code is 1 if a suite failed."
        ),
    )
    bench.add_argument(
        "--suite", nargs="+", action="extend", default=[], metavar="NAME", help="suites to run (default: all)"
    )
    bench.add_argument(
        "--out", type=Path, default=Path("bench-out"), metavar="DIR", help="folder for the results (default: bench-out)"
    )
    bench.add_argument("--list", action="store_true", help="only list the suites")
    bench.add_argument(
        "--seconds", type=float, metavar="S", help="begin no case of a suite after this time, but the first"
    )
    bench.add_argument("--quick", action="store_true", help="few and short rounds, to check that everything runs")
    bench.set_defaults(run=_bench)

    report = commands.add_parser(
        "report",
        help="write the history of a run as one HTML page",
        description=(
            "Read the history of a run and write it as one HTML page with tables and charts (these need matplotlib). "
            "The page needs no other file and no network. The history is the file that history_file= of a scheduler "
            "writes, or a JSON list of its records."
        ),
    )
    report.add_argument("history", type=Path, metavar="HISTORY", help="the history: lines of JSON, or a JSON list")
    page = "the page to write (default: HISTORY with .html in the place of its ending)"
    report.add_argument("-o", "--out", type=Path, metavar="PAGE", help=page)
    report.set_defaults(run=_report)
    return parser


def _demo(arguments: argparse.Namespace) -> int:
    from torch.multiprocessing.spawn import ProcessException

    from hdet_kernels.demo.command import run_demo
    from hdet_kernels.demo.training import checked_options

    try:
        given = ("replicas", "steps", "out", "seed", "max_lr")
        options = checked_options(**{name: getattr(arguments, name) for name in given})
    except ValueError as error:
        return _failed("demo", error)
    try:
        run_demo(options)
    except ProcessException as error:
        print(file=sys.stderr)
        return _failed("demo", error, 1)
    except OSError as error:
        print(file=sys.stderr)
        return _failed("demo", f"cannot write the results: {error}", 1)
    except KeyboardInterrupt:
        print("\ninterrupted; all replicas have ended", file=sys.stderr)
        return 130
    return 0


def _report(arguments: argparse.Namespace) -> int:
    from hdet_kernels.history_page import read_history, write_page

    history: Path = arguments.history
    out: Path = arguments.out or history.with_suffix(".html")
    try:
        records = read_history(history)
        if out.exists() and out.samefile(history):
            raise ValueError(f"--out {out} is the history itself: choose another file")
        write_page(records, out, f"HDET run: {history.name}")
    except (ValueError, ImportError) as error:
        return _failed("report", error)
    except OSError as error:
        return _failed("report", f"cannot write {out}: {error}", 1)
    print(f"{out}: {len(records)} syncs")
    return 0


def _bench(arguments: argparse.Namespace) -> int:
    folder = Path(__file__).parents[1] / "bench"
    if not (folder / "command.py").exists():
        return _failed(
            "bench",
            f"the benchmarks are not part of the installed package: {folder} does not exist. Get the source tree of "
            "hdet_kernels and run `make bench` in it",
        )
    missing = [name for name in ("pytest", "pytest_benchmark") if util.find_spec(name) is None]
    if missing:
        return _failed("bench", f"{' and '.join(missing)} not installed: pip install 'hdet_kernels[test]'")
    sys.path.insert(0, str(folder.parent))
    command = importlib.import_module("bench.command")

    if arguments.list:
        print(command.listing())
        return 0
    try:
        code: int = command.run(arguments.suite, arguments.out, arguments.quick, arguments.seconds)
    except ValueError as error:
        return _failed("bench", error)
    except OSError as error:
        return _failed("bench", f"cannot write to --out {arguments.out}: {error}")
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    return code


def _failed(command: str, message: object, code: int = 2) -> int:
    """Print an error of a command, and return its exit code."""
    print(f"python -m hdet_kernels {command}: error: {message}", file=sys.stderr)
    return code


def _info(_: argparse.Namespace) -> int:
    from hdet_kernels.ops.backends import backends
    from hdet_kernels.ops.operators import why_not

    source = Path(__file__).parent
    if not sys.flags.safe_path and (installed := hidden_by(source, sys.path)) is not None:
        print(f"{source} is the source; this is the installed build in {installed}:", flush=True)
        return subprocess.run([sys.executable, "-P", "-m", "hdet_kernels", "info"], check=False).returncode
    missing = why_not()
    sections = {
        "backends": backends(),
        "versions": _versions(),
        "compiled extension": {"hdet_kernels._native": missing or "ok"},
        "GPUs": _gpus(),
    }
    for title, entries in sections.items():
        print(f"{title}:")
        width = max(len(name) for name in entries)
        for name, value in entries.items():
            print(f"  {name:<{width}}  {value}")
    return 0


def hidden_by(source: Path, path: Sequence[str]) -> Path | None:
    """Return the folder of an installed package that ``source``, in the current folder, hides on ``path``, if any."""
    if source.parent.resolve() != Path.cwd():
        return None
    others = [entry for entry in path if Path(entry or ".").resolve() != Path.cwd()]
    spec = PathFinder.find_spec(source.name, others)
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


def _versions() -> dict[str, str]:
    cuda = f"CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
    return {
        "hdet_kernels": __version__,
        "python": f"{platform.python_version()} ({platform.system()} {platform.machine()})",
        "torch": f"{torch.__version__} (built {'for ' if torch.version.cuda else ''}{cuda})",
        "triton": _version_of("triton"),
        "numpy": _version_of("numpy"),
        "matplotlib": _version_of("matplotlib"),
    }


def _version_of(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "installed, version unknown" if util.find_spec(package) else "not installed"


def _gpus() -> dict[str, str]:
    count = torch.cuda.device_count()
    if not count:
        return {"none": "torch finds no usable GPU"}
    found = {}
    for index in range(count):
        properties = torch.cuda.get_device_properties(index)
        memory = f"{properties.total_memory / 2**30:.0f} GiB"
        found[str(index)] = f"{properties.name}, {memory}, compute capability {properties.major}.{properties.minor}"
    return found


if __name__ == "__main__":
    sys.exit(main())
