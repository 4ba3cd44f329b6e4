"""The suites: every ``bench/test_*.py`` by its name, and what it measures. ``bench/README.md`` has this table."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Suite:
    """``by_device``: its cases are named ``gpu-…`` and ``cpu-…``; the others are of the host alone."""

    what: str
    by_device: bool = True


SUITES: dict[str, Suite] = {
    "optim_step": Suite("`optimizer.step()` beside torch's and other peers, and as a share of the copy bandwidth"),
    "host_time": Suite("how long the call takes, by number of tensors and by where the gradients are"),
    "end_to_end": Suite("whole training steps of four models with HDET on beside plain torch: time, memory, profile"),
    "stack_step": Suite("one step of R stacked replicas, and their initial noise"),
    "stack_training": Suite("a whole training step of 8 stacked replicas, beside a plain model and 8 processes"),
    "reduce": Suite("norm and finite check of all gradients"),
    "pack": Suite("tensors into one staging buffer and back, and the mean of stacked replicas"),
    "noise": Suite("normal noise added to all tensors"),
    "wire": Suite("the parts of a compressed average"),
    "scaling": Suite("a step against the number of parameters and against the number of tensors, with fitted slopes"),
    "memory": Suite("peak bytes a parameter of every precision beside torch's"),
    "overlap": Suite("what a sync adds to the training steps around it, waited for and behind them"),
    "cpp_step": Suite("the `cpp` backend beside torch's own steps on the CPU, in turns", by_device=False),
    "scheduler_step": Suite("`scheduler.step()` beside torch's", by_device=False),
    "converge": Suite("the average of two gloo ranks in every way beside one AllReduce per tensor", by_device=False),
}


def path(name: str) -> Path:
    return HERE / f"test_{name}.py"


def command(name: str, device: str) -> list[str]:
    """The arguments of ``python`` that run a suite on a device, from the folder above this one."""
    arguments = ["-m", "pytest", "-q", "-s", "--benchmark-only", "--benchmark-columns=median"]
    arguments.append(path(name).relative_to(HERE.parent).as_posix())
    if SUITES[name].by_device:
        arguments += ["-k", "gpu" if device == "cuda" else "cpu"]
    return arguments
