"""Configure pytest for the suites: stop in time, record command, machine, versions and copy bandwidth."""

from __future__ import annotations

import gc
import os
import shlex
import signal
import sys
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import hdet_kernels as hk
from bench import copy_bandwidth, measure, peers

ROOT = Path(__file__).parents[1]

# Load of the machine before the run: it affects times on the CPU.
LOAD = os.getloadavg()[0]
START = time.monotonic()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seconds", type=float, default=float("inf"), help="begin no case but the first later than this")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """In a quick run, leave out a case whose parameters all have values that earlier cases of its test had."""
    if not measure.QUICK:
        return
    seen: set[tuple[str, str, str]] = set()
    kept, left_out = [], []
    for item in items:
        skipped = any(mark.args and mark.args[0] for mark in item.iter_markers("skipif"))
        params = item.callspec.params if hasattr(item, "callspec") else {}
        values = {(item.name.split("[")[0], name, str(value)) for name, value in params.items()}
        (kept if skipped or not values or values - seen else left_out).append(item)
        seen |= set() if skipped else values
    config.hook.pytest_deselected(items=left_out)
    items[:] = kept


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Treat SIGTERM and SIGINT as Ctrl-C, also in the background, so that the record is written.

    This is done for every case, since peers install their own handlers.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.default_int_handler)


def pytest_runtest_teardown(item: pytest.Item) -> None:
    limit = item.config.getoption("--seconds")
    if time.monotonic() - START > limit:
        item.session.shouldstop = f"stopped after --seconds={limit:g}; the finished cases are recorded"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    try:
        return (yield)
    except KeyboardInterrupt:
        item.funcargs["benchmark"].has_error = True  # type: ignore[attr-defined]  # half measured: must not be recorded
        raise


@pytest.fixture(autouse=True)
def free_gpu_memory() -> Iterator[None]:
    """Free the GPU memory of a finished case; optimizers and parameters refer to each other in cycles."""
    yield
    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()


def pytest_benchmark_update_machine_info(config: Any, machine_info: dict[str, Any]) -> None:
    for name in ("node", "release", "python_build"):
        machine_info.pop(name, None)
    machine_info["cpu"].pop("flags", None)
    where = "--benchmark-json="
    arguments = [where + Path(a.removeprefix(where)).name if a.startswith(where) else a for a in sys.argv[1:]]
    machine_info |= {
        "command": shlex.join(["python", "-m", "pytest", *arguments]),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "load before": LOAD,
        "backends": {name: state.replace(f"{ROOT}/", "") for name, state in hk.backends().items()},
        "peers": peers.present(),
        "quick": measure.QUICK,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def pytest_benchmark_update_json(config: Any, benchmarks: list[Any], output_json: dict[str, Any]) -> None:
    for entry in output_json["benchmarks"]:
        entry["stats"].pop("data", None)
    output_json.pop("commit_info", None)  # empty where the source tree is a copy without history
    output_json["yardsticks"] = copy_bandwidth.measured
