"""List the suites: every ``bench/test_<suite>.py`` with a description, and what became of one in a run.

``bench/README.md`` has the same table.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Suite:
    """A suite. With ``by_device`` its cases are named ``gpu-…`` and ``cpu-…``; otherwise they run on the CPU."""

    what: str
    by_device: bool = True


@dataclass
class Outcome:
    """Result of one suite: measured cases, reasons of skipped and failed ones.

    ``cut``: the suite ended before all cases had begun. ``interrupted``: it was ended by Ctrl-C.
    """

    name: str
    seconds: float = 0.0
    cut: bool = False
    interrupted: bool = False
    passed: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    failed: dict[str, str] = field(default_factory=dict)

    @property
    def line(self) -> str:
        """Summarise the counts in a few words."""
        end = ", then stopped" if self.cut else ""
        if self.failed:
            return f"{len(self.failed)} failed, {self.passed} measured{end}"
        if not self.passed and not self.cut:
            return f"skipped: {'; '.join(self.skipped) or 'no case for this device'}"
        return f"{self.passed} measured, {self.skipped.total()} skipped{end}"


SUITES: dict[str, Suite] = {
    "optim_step": Suite("`optimizer.step()` beside torch and other peers, as a share of the copy bandwidth"),
    "host_time": Suite("time until `step()` returns, by the number of tensors and the addresses of the gradients"),
    "end_to_end": Suite("whole training steps of four models, HDET beside plain torch: time, memory, profile"),
    "in_backward": Suite("whole training steps with the optimizer in the backward pass, beside `step()`: time, memory"),
    "stack_step": Suite("one optimizer step of R stacked replicas"),
    "stack_training": Suite("a whole training step of 8 stacked replicas, beside a plain model and 8 processes"),
    "muon": Suite("a step of Muon beside torch.optim.Muon and other packages, and of 8 stacked replicas"),
    "rowwise": Suite("a training step of embedding tables with row-wise Adagrad, beside torch and FBGEMM"),
    "reduce": Suite("norm of all gradients"),
    "pack": Suite("tensors into one staging buffer and back, and the mean of stacked replicas"),
    "wire": Suite("encoding, merging and decoding of a compressed average"),
    "scaling": Suite("step time against the number of parameters and of tensors, with fitted slopes"),
    "memory": Suite("peak memory in bytes a parameter, for every precision, beside torch"),
    "overlap": Suite("time that a sync adds to training, waited for and behind the next steps"),
    "cpp_step": Suite("the `cpp` backend beside torch's optimizers on the CPU, in turns", by_device=False),
    "sharded_step": Suite("a step under `fully_shard` beside torch's optimizers on the CPU, in turns", by_device=False),
    "scheduler_step": Suite("`scheduler.step()` beside torch", by_device=False),
    "converge": Suite("the average of two gloo ranks beside one all-reduce per tensor", by_device=False),
}


def path(name: str) -> Path:
    return HERE / f"test_{name}.py"


def command(name: str, device: str) -> list[str]:
    """Return the arguments of ``python`` that run a suite on a device, from the repository root."""
    arguments = ["-m", "pytest", "-q", "-s", "--benchmark-only", "--benchmark-columns=median"]
    arguments.append(path(name).relative_to(HERE.parent).as_posix())
    if SUITES[name].by_device:
        arguments += ["-k", "gpu" if device == "cuda" else "cpu"]
    return arguments
