"""Compare how training ends with optimizer state in float32, bf16 and 8 bits.

    python -m bench.quality.state_precision [--tasks digits] [--steps 2000] [--seeds 10] [--out FILE]

Each task is trained plainly (one model, OneCycleLR, the learning rate of the task and four times it) by the fused
optimizer of its rule. For one seed all precisions see the same examples and start from the same parameters, so the
differences of their validation losses to those of float32 are paired. The noise of training is the difference between
float32 runs whose batches come in another order.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
from pathlib import Path
from typing import Any

import torch

from bench.provenance import provenance
from bench.quality.optimizers import OPTIMIZERS
from bench.quality.spec import Spec
from bench.quality.tasks import TASKS, Task
from bench.quality.train import batches_of, param_groups, schedule_of, validation_loss

#: dtype of the state, by name. The first is the reference.
STATES: dict[str, Any] = {"float32": torch.float32, "bf16": torch.bfloat16, "int8": "int8"}
FACTORS = (1.0, 4.0)


def final_loss(task: Task, state_dtype: Any, lr: float, seed: int, *, steps: int, order: int = 0) -> float:
    """Train and return the validation loss.

    Args:
        task: The task.
        state_dtype: The dtype of the optimizer's state.
        lr: The peak learning rate.
        seed: Seed of the model and, with ``order``, of the order of the examples.
        steps: Number of steps.
        order: Another number gives another order of the examples.
    """
    torch.manual_seed(seed)
    model = task.model()
    rule = OPTIMIZERS[task.optimizer]
    groups = param_groups(task, model.named_parameters(), Spec(task.name, "plain", lr, seed))
    optimizer = rule.replicas(groups, lr=lr, state_dtype=state_dtype, **rule.options)
    schedule = schedule_of("onecycle", optimizer, steps)
    assert schedule is not None
    for batch in batches_of(task, steps, seed + 1000 * order, torch.device("cpu")):
        optimizer.zero_grad()
        task.loss(model, *batch).backward()
        optimizer.step()
        schedule.step()
    return validation_loss(task, model)


def compared(task: Task, seeds: int, *, steps: int) -> dict[str, Any]:
    """Return validation losses by learning rate and state, with their paired differences to float32."""
    found: dict[str, Any] = {}
    for factor in FACTORS:
        lr = factor * task.lr
        losses = {
            name: [final_loss(task, dtype, lr, seed, steps=steps) for seed in range(seeds)]
            for name, dtype in STATES.items()
        }
        reference = losses["float32"]
        losses["float32, another order"] = [
            final_loss(task, torch.float32, lr, seed, steps=steps, order=1) for seed in range(seeds)
        ]
        found[f"lr {lr:g}"] = {
            name: {"mean": statistics.fmean(values), **_paired(values, reference), "losses": values}
            for name, values in losses.items()
        }
    return found


def _paired(values: list[float], reference: list[float]) -> dict[str, float]:
    differences = [value - other for value, other in zip(values, reference, strict=True)]
    error = statistics.stdev(differences) / len(differences) ** 0.5 if len(differences) > 1 else 0.0
    return {"difference": statistics.fmean(differences), "standard error": error}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", default=["digits"], choices=list(TASKS), metavar="TASK")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=2000, help="more than the task's own: second moments settle")
    parser.add_argument("--out", type=Path, help="write a JSON file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    tasks = " ".join(f'"{name}"' for name in arguments.tasks)
    settings = f"--tasks {tasks} --steps {arguments.steps} --seeds {arguments.seeds}"
    record: dict[str, Any] = {
        **provenance(f"python -m bench.quality.state_precision {settings}"),
        "machine": platform.machine(),
        "tasks": {},
    }
    for name in arguments.tasks:
        record["tasks"][name] = compared(TASKS[name](torch.device("cpu")), arguments.seeds, steps=arguments.steps)
        for rate, states in record["tasks"][name].items():
            for state, entry in states.items():
                print(
                    f"{name}, {rate}, {state}: {entry['mean']:.4f}, "
                    f"{entry['difference']:+.4f} ± {entry['standard error']:.4f} of float32's",
                    flush=True,
                )
    if arguments.out is not None:
        record["command"] += f" --out {arguments.out.name}"
        arguments.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
