"""Merge the replicas' results, and format them as a table, a sentence and JSON."""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hdet_kernels import report
from hdet_kernels.demo.options import Options
from hdet_kernels.demo.training import RUNS, ReplicaRun, RunName

TITLES: dict[RunName, str] = {"plain": "plain OneCycleLR", "hdet": "HDET"}


@dataclass(frozen=True)
class Run:
    """One run over all replicas.

    Args:
        losses: Mean training loss of the replicas, [steps].
        rates: Learning rate of every replica, [replicas, steps].
        base: Learning rate before the fan-out, [steps].
        held_out: Loss of the averaged model on held-out data.
        seconds: Time of the training steps.
        gradient_bytes: Bytes that DDP all-reduced.
        history: The syncs, as dicts.
    """

    losses: NDArray[np.float64]
    rates: NDArray[np.float64]
    base: NDArray[np.float64]
    held_out: float
    seconds: float
    gradient_bytes: int
    history: list[dict[str, Any]]

    @property
    def last_losses(self) -> float:
        """Return the mean training loss of the last 10 % of the steps."""
        return float(self.losses[-max(len(self.losses) // 10, 1) :].mean())

    @property
    def peak(self) -> float:
        """Return the base learning rate at the peak of the schedule: before it, HDET may have lowered a higher one."""
        return float(self.base[max(len(self.base) * 3 // 10 - 1, 0) :].max())

    def numbers(self) -> dict[str, Any]:
        """Return the numbers of the table by name."""
        totals = report.summary(self.history)
        return {
            "held_out_loss": self.held_out,
            "training_loss_last_tenth": self.last_losses,
            "peak_base_lr": self.peak,
            "seconds": self.seconds,
            "syncs": totals["syncs"],
            "collectives": totals["collectives"],
            "bytes": totals["bytes"],
            "converge_seconds": totals["seconds"],
            "converge_share": totals["seconds"] / self.seconds,
            "gradient_bytes": self.gradient_bytes,
        }


def gathered(replicas: Sequence[Sequence[ReplicaRun]]) -> dict[RunName, Run]:
    """Merge one list of runs for each replica into one :class:`Run` over all replicas, by name."""
    return {name: _one_run([runs[index] for runs in replicas]) for index, name in enumerate(RUNS)}


def _one_run(replicas: Sequence[ReplicaRun]) -> Run:
    first = replicas[0]  # base, held-out loss and history are the same on all
    return Run(
        losses=np.mean([replica.losses for replica in replicas], axis=0),
        rates=np.array([replica.rates for replica in replicas]),
        base=np.array(first.base),
        held_out=first.held_out,
        seconds=max(replica.seconds for replica in replicas),
        gradient_bytes=first.gradient_bytes,
        history=first.history,
    )


def comparison(runs: dict[RunName, Run], options: Options) -> str:
    """Return the table that the demo prints."""
    numbers = {name: run.numbers() for name, run in runs.items()}

    def row(label: str, key: str, style: str) -> list[str]:
        return [label, *(format(numbers[name][key], style) for name in RUNS)]

    def cost(label: str, key: str, form: Any) -> list[str]:
        return [label, *(form(numbers[name][key]) if numbers[name]["syncs"] else "-" for name in RUNS)]

    rows = [
        row("held-out loss of the averaged model", "held_out_loss", ".4f"),
        row("training loss, mean of the last 10 %", "training_loss_last_tenth", ".4f"),
        ["peak learning rate: given", *(f"{options.max_lr:.2e}" for _ in RUNS)],
        row("peak learning rate: used (base)", "peak_base_lr", ".2e"),
        row("wall time of the run, s", "seconds", ".1f"),
        cost("converge: seconds", "converge_seconds", lambda s: f"{s:.2f}"),
        cost("converge: share of the wall time", "converge_share", lambda share: f"{100 * share:.1f} %"),
        cost("converge: collectives", "collectives", str),
        cost("converge: sent by a replica", "bytes", report.format_bytes),
        ["gradients, all-reduced by DDP", *(report.format_bytes(numbers[n]["gradient_bytes"]) for n in RUNS)],
    ]
    return report.format_table(["", *(TITLES[name] for name in RUNS)], rows, left=1)


def verdict(runs: dict[RunName, Run]) -> str:
    """Summarise the table in one sentence."""
    plain, hdet = runs["plain"].held_out, runs["hdet"].held_out
    factor = runs["hdet"].base[-1] / runs["plain"].base[-1]  # the peak may have been lowered before it was reached
    found = f"HDET changed the peak learning rate by a factor of {factor:.2g}"
    if not (math.isfinite(plain) and math.isfinite(hdet)):
        return f"{found}; a held-out loss is not finite: try a lower --max-lr."
    return f"{found} and ended {abs(plain - hdet):.3f} {'below' if hdet <= plain else 'ABOVE'} the plain held-out loss."


def write_json(runs: dict[RunName, Run], options: Options, backend: str, path: Path) -> None:
    """Write options and results of all steps to ``path``."""
    content = {
        "options": {
            "replicas": options.replicas,
            "steps": options.steps,
            "task": options.task,
            "seed": options.seed,
            "max_lr": options.max_lr,
            "process_group": backend,
            "python": platform.python_version(),
            "torch": torch.__version__,
        },
        "runs": {
            name: {
                **run.numbers(),
                "losses": run.losses.tolist(),
                "base_lr": run.base.tolist(),
                "replica_lr": run.rates.tolist(),
                "history": run.history,
            }
            for name, run in runs.items()
        },
    }
    path.write_text(json.dumps(_without_nan(content), indent=1) + "\n", encoding="utf-8")


def _without_nan(value: Any) -> Any:
    """Replace NaN and infinity, which JSON lacks, by None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _without_nan(entry) for key, entry in value.items()}
    return [_without_nan(entry) for entry in value] if isinstance(value, list) else value
