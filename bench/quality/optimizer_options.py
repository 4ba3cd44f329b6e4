"""Compare how training ends with options of the optimizer: state in float32, bf16 and 8 bits, or ways to clip.

    python -m bench.quality.optimizer_options state [--tasks digits ...] [--seeds 8] [--workers 2] [--out FILE]
    python -m bench.quality.optimizer_options clipping --clip 1.0

Each task is trained plainly (one model, OneCycleLR, the learning rate of the task and four times it) by the fused
optimizer of its rule. For one seed all options see the same examples and start from the same parameters, so the
differences of their validation losses to those of the first option are paired. The noise of training is the difference
between runs with that option whose batches come in another order.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import multiprocessing
import platform
import statistics
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.quality.peers import OPTIMIZERS
from bench.quality.results import Spec
from bench.quality.tasks import TASKS, Task
from bench.quality.train import batches_of, param_groups, schedule_of, validation_loss
from bench.records import command_line, provenance
from hdet_kernels.optim import InBackward

#: Options of the optimizer by what is compared, and by name. The first are the reference.
OPTIONS: dict[str, dict[str, dict[str, Any]]] = {
    "state": {"float32": {}, "bf16": {"state_dtype": torch.bfloat16}, "int8": {"state_dtype": "int8"}},
    "clipping": {
        "exact": {},
        "norm of the step before": {"in_backward": InBackward(clip="previous")},
        "each tensor": {"in_backward": InBackward(clip="tensor")},
    },
}
FACTORS = (1.0, 4.0)
ANOTHER_ORDER = ", another order"

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
        compared: What is compared, a key of ``OPTIONS``.
        option: The name of the options; with ``ANOTHER_ORDER`` added, other batches.
        factor: Factor of the task's learning rate.
        seed: Seed of the model and of the order of the examples.
        steps: Number of steps; default: the task's own.
        clip: The norm to which gradients are clipped; default: the task's own.
        device: Where it is trained.
    """

    task: str
    compared: str
    option: str
    factor: float
    seed: int
    steps: int | None
    clip: float | None
    device: str

    def final_loss(self) -> float:
        """Train and return the validation loss."""
        task, device = _task(self.task, self.device), torch.device(self.device)
        another = self.option.endswith(ANOTHER_ORDER)
        options = OPTIONS[self.compared][self.option.removesuffix(ANOTHER_ORDER)]
        steps, lr = self.steps or task.steps, self.factor * task.lr
        torch.manual_seed(self.seed)
        model = task.model().to(device)
        rule = OPTIMIZERS[task.optimizer]
        groups = param_groups(task, model.named_parameters(), Spec(task.name, "plain", lr, self.seed))
        clip = task.clip if self.clip is None else self.clip
        optimizer = rule.replicas(groups, lr=lr, max_grad_norm=clip, **rule.options, **options)
        schedule = schedule_of("onecycle", optimizer, steps, task.warm_up)
        assert schedule is not None
        for batch in batches_of(task, steps, self.seed + 1000 * another, device):
            optimizer.zero_grad()
            task.loss(model, *batch).backward()
            optimizer.step()
            schedule.step()
        return validation_loss(task, model)


@functools.cache
def _task(name: str, device: str) -> Task:
    torch.set_num_threads(1)
    return TASKS[name](torch.device(device))


def compared(arguments: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Return validation losses by task, learning rate and option, with their paired differences to the first."""
    names = list(OPTIONS[arguments.compared])
    names.append(names[0] + ANOTHER_ORDER)
    seeds = range(arguments.seeds)

    def run(task: str, option: str, factor: float, seed: int) -> Run:
        options = arguments.compared, option, factor, seed, arguments.steps, arguments.clip, arguments.device
        return Run(task, *options)

    cases = itertools.product(arguments.tasks, names, FACTORS, seeds)
    runs = [run(*case) for case in cases]
    with ProcessPoolExecutor(arguments.workers, multiprocessing.get_context("spawn")) as pool:
        losses = dict(zip(runs, pool.map(Run.final_loss, runs), strict=True))

    def entries(task: str, factor: float) -> dict[str, Any]:
        found = {option: [losses[run(task, option, factor, seed)] for seed in seeds] for option in names}
        return {
            option: {"mean": statistics.fmean(values), **_paired(values, found[names[0]]), "losses": values}
            for option, values in found.items()
        }

    return {
        task: {f"lr {factor * TASKS[task].lr:g}": entries(task, factor) for factor in FACTORS}
        for task in arguments.tasks
    }


def _paired(values: list[float], reference: list[float]) -> dict[str, float]:
    differences = [value - other for value, other in zip(values, reference, strict=True)]
    error = statistics.stdev(differences) / len(differences) ** 0.5 if len(differences) > 1 else 0.0
    return {"difference": statistics.fmean(differences), "standard error": error}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("compared", choices=list(OPTIONS))
    parser.add_argument("--tasks", nargs="+", default=list(QUICK_TASKS), choices=list(TASKS), metavar="TASK")
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--steps", type=int, help="default: the task's own")
    parser.add_argument("--clip", type=float, help="clip gradients to this norm; default: the task's own")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--workers", type=int, default=2, help="processes of one thread each")
    parser.add_argument("--out", type=Path, help="write a JSON file")
    arguments = parser.parse_args()
    record: dict[str, Any] = {
        **provenance(command_line("bench.quality.optimizer_options", sys.argv[1:])),
        "machine": platform.machine(),
        "tasks": compared(arguments),
    }
    for task, rates in record["tasks"].items():
        for rate, options in rates.items():
            for option, entry in options.items():
                print(
                    f"{task}, {rate}, {option}: {entry['mean']:.4f}, {entry['difference']:+.4f} ± "
                    f"{entry['standard error']:.4f}",
                    flush=True,
                )
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
