"""What every recorded benchmark says of itself: the command, the GPU, the versions; and no more than its statistics."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Any

import torch

import hdet_kernels as hk


def pytest_benchmark_update_machine_info(config: Any, machine_info: dict[str, Any]) -> None:
    for name in ("node", "release", "python_build"):
        machine_info.pop(name, None)
    machine_info["cpu"].pop("flags", None)
    where = "--benchmark-json="
    arguments = [where + Path(a.removeprefix(where)).name if a.startswith(where) else a for a in sys.argv[1:]]
    machine_info |= {
        "command": shlex.join(["python", "-m", "pytest", *arguments]),
        "torch": torch.__version__,
        "backends": hk.backends(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def pytest_benchmark_update_json(config: Any, benchmarks: list[Any], output_json: dict[str, Any]) -> None:
    for entry in output_json["benchmarks"]:
        entry["stats"].pop("data", None)
    output_json.pop("commit_info", None)  # of a copy without history it says nothing
