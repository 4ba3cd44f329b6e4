"""Compare how training ends with optimizer state in float32, bf16 and 8 bits.

    python -m bench.quality.state_precision [--tasks digits ...] [--seeds 8] [--workers 2] [--out FILE]

Each task is trained plainly (one model, OneCycleLR, the learning rate of the task and four times it) by the fused
optimizer of its rule. For one seed all precisions see the same examples and start from the same parameters, so the
differences of their validation losses to those of float32 are paired. The noise of training is the difference between
float32 runs whose batches come in another order.
"""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
import platform
import statistics
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.quality.peers import OPTIMIZERS
from bench.quality.results import Spec
from bench.quality.tasks import TASKS, Task
from bench.quality.train import batches_of, param_groups, schedule_of, validation_loss
from bench.records import provenance

#: dtype of the state, by name. The first is the reference.
STATES: dict[str, Any] = {"float32": torch.float32, "bf16": torch.bfloat16, "int8": "int8"}
FACTORS = (1.0, 4.0)
ANOTHER_ORDER = "float32, another order"

#: Tasks that are trained in seconds, of every rule that has state.
QUICK_TASKS = (
    "flights",
    "diamonds",
    "census",
    "wide census",
    "noisy census",
    "factorised ratings",
    "weather",
    "credit",
    "digits",
    "small batches",
)


@dataclass(frozen=True)
class Run:
    """One training run.

    Args:
        task: Name of the task.
        state: One of ``STATES``, or ``ANOTHER_ORDER``.
        factor: Factor of the task's learning rate.
        seed: Seed of the model and of the order of the examples.
        steps: Number of steps; default: the task's own.
    """

    task: str
    state: str
    factor: float
    seed: int
    steps: int | None

    def final_loss(self) -> float:
        """Train and return the validation loss."""
        task = _task(self.task)
        another = self.state == ANOTHER_ORDER
        steps, lr = self.steps or task.steps, self.factor * task.lr
        torch.manual_seed(self.seed)
        model = task.model()
        rule = OPTIMIZERS[task.optimizer]
        groups = param_groups(task, model.named_parameters(), Spec(task.name, "plain", lr, self.seed))
        state_dtype = torch.float32 if another else STATES[self.state]
        optimizer = rule.replicas(groups, lr=lr, state_dtype=state_dtype, max_grad_norm=task.clip, **rule.options)
        schedule = schedule_of("onecycle", optimizer, steps, task.warm_up)
        assert schedule is not None
        for batch in batches_of(task, steps, self.seed + 1000 * another, torch.device("cpu")):
            optimizer.zero_grad()
            task.loss(model, *batch).backward()
            optimizer.step()
            schedule.step()
        return validation_loss(task, model)


@functools.cache
def _task(name: str) -> Task:
    torch.set_num_threads(1)
    return TASKS[name](torch.device("cpu"))


def compared(tasks: Sequence[str], seeds: int, steps: int | None, workers: int) -> dict[str, dict[str, Any]]:
    """Return validation losses by task, learning rate and state, with their paired differences to float32."""
    runs = [
        Run(task, state, factor, seed, steps)
        for task in tasks
        for factor in FACTORS
        for state in (*STATES, ANOTHER_ORDER)
        for seed in range(seeds)
    ]
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        losses = dict(zip(runs, pool.map(Run.final_loss, runs), strict=True))

    def entries(task: str, factor: float) -> dict[str, Any]:
        found = {
            state: [losses[Run(task, state, factor, seed, steps)] for seed in range(seeds)]
            for state in (*STATES, ANOTHER_ORDER)
        }
        reference = found["float32"]
        return {
            state: {"mean": statistics.fmean(values), **_paired(values, reference), "losses": values}
            for state, values in found.items()
        }

    return {task: {f"lr {factor * _task(task).lr:g}": entries(task, factor) for factor in FACTORS} for task in tasks}


def _paired(values: list[float], reference: list[float]) -> dict[str, float]:
    differences = [value - other for value, other in zip(values, reference, strict=True)]
    error = statistics.stdev(differences) / len(differences) ** 0.5 if len(differences) > 1 else 0.0
    return {"difference": statistics.fmean(differences), "standard error": error}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", default=list(QUICK_TASKS), choices=list(TASKS), metavar="TASK")
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--steps", type=int, help="default: the task's own")
    parser.add_argument("--workers", type=int, default=2, help="processes of one thread each")
    parser.add_argument("--out", type=Path, help="write a JSON file")
    arguments = parser.parse_args()
    tasks = " ".join(f'"{name}"' for name in arguments.tasks)
    steps = "" if arguments.steps is None else f" --steps {arguments.steps}"
    record: dict[str, Any] = {
        **provenance(f"python -m bench.quality.state_precision --tasks {tasks}{steps} --seeds {arguments.seeds}"),
        "machine": platform.machine(),
        "tasks": compared(arguments.tasks, arguments.seeds, arguments.steps, arguments.workers),
    }
    for task, rates in record["tasks"].items():
        for rate, states in rates.items():
            for state, entry in states.items():
                print(
                    f"{task}, {rate}, {state}: {entry['mean']:.4f}, "
                    f"{entry['difference']:+.4f} ± {entry['standard error']:.4f} of float32's",
                    flush=True,
                )
    if arguments.out is not None:
        record["command"] += f" --out {arguments.out.name}"
        arguments.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
