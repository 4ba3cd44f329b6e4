"""What every recorded benchmark says of itself: the command, the GPU, the versions, the yardsticks of its run; and no
more than its statistics."""

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

import measure
import peers
import pytest
import torch
import yardstick

import hdet_kernels as hk

ROOT = Path(__file__).parents[1]

#: Processes that ran here in the minute before: on a busy machine a time on the CPU is that of the others too.
LOAD = os.getloadavg()[0]
START = time.monotonic()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seconds", type=float, default=float("inf"), help="begin no case but the first later than this")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """A run that is told to stop stops as by Ctrl-C, also where that is ignored, as in the background: what was
    measured until then is written. For every case anew: peers have handlers of their own."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.default_int_handler)


def pytest_runtest_teardown(item: pytest.Item) -> None:
    limit = item.config.getoption("--seconds")
    if time.monotonic() - START > limit:
        item.session.shouldstop = f"the {limit:g} seconds are over: what was measured is recorded"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    try:
        return (yield)
    except KeyboardInterrupt:
        item.funcargs["benchmark"].has_error = True  # type: ignore[attr-defined]  # half measured: not to be recorded
        raise


@pytest.fixture(autouse=True)
def memory_is_free_again() -> Iterator[None]:
    """An optimizer and its parameters refer to each other, and the next case may need their memory."""
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
    output_json.pop("commit_info", None)  # of a copy without history it says nothing
    output_json["yardsticks"] = yardstick.measured
