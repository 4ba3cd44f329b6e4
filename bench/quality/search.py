"""Searches for a learning rate that nothing is known of, each at several costs: what certainty costs.

A search may take a share of the steps of the run that follows. It chooses a learning rate, and two plain runs show what
that is worth: one of the task's own length (the choice alone), and one of the steps that the search leaves.

- ``scout``: HDET's, ``max_lr=None``, by training losses.
- ``successive halving``, ``Bayesian sweep``: as in ``sweep.py``, on the whole batch and by validation loss, around
  :data:`MIDDLE`.
- ``lr_find``: Lightning's range test. The learning rate climbs exponentially, and the one where the loss falls most
  steeply is taken.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

import hdet_kernels as hk
from bench.quality.peers import plain_optimizer
from bench.quality.results import Job, Record, Spec
from bench.quality.sweep import SWEEPS
from bench.quality.tasks import Task
from bench.quality.train import batches_of, train
from hdet_kernels.schedule.arguments import can_divide
from hdet_kernels.schedule.scout.rounds import make_plan

METHODS = ("scout", "successive halving", "Bayesian sweep", "lr_find")
# Steps of a search over those of the run that follows.
SHARES = (0.15, 0.3, 0.5, 1.0)
# The sweeps look from 1/256 to 64 times this learning rate: between 8e-5 and 1.3.
MIDDLE = 0.02
# Lightning's defaults: the range, the smoothing, by how much the loss may rise, and steps that do not count.
LOWEST, HIGHEST, SMOOTHING, RISE, SKIP_FIRST, SKIP_LAST = 1e-8, 1.0, 0.98, 4.0, 10, 1


def search_jobs(tasks: Sequence[str], seeds: int) -> list[Job]:
    """Return a search by every method at every share."""
    return [
        {"kind": "search", "task": task, "spec": Spec(task, method, None, seed, options={"share": share}).record()}
        for seed in range(seeds)
        for share in SHARES
        for method in METHODS
        for task in tasks
    ]


def chosen_jobs(records: Sequence[Record]) -> list[Job]:
    """Return the two plain runs after every search among the records."""
    return [
        {
            "kind": "chosen",
            "task": record["task"],
            "by": record["method"],
            "share": record["options"]["share"],
            "spec": Spec(record["task"], "plain", record["chosen"], record["seed"], steps=steps).record(),
        }
        for record in records
        if record["kind"] == "search" and "chosen" in record
        for steps in (None, record["left"])
    ]


def train_search(task: Task, spec: Spec, device: torch.device) -> Record:
    """Search, and return the learning rate that was chosen and the steps that are left for the run."""
    settings, workable = hk.ScoutSettings(share=spec.options["share"]), partial(can_divide, task.warm_up)
    plan = make_plan(spec.steps or task.steps, task.replicas, settings, teams=True, workable=workable)
    if spec.method == "scout":
        found = train(task, replace(spec, probe=False), device, until=plan.steps)["chosen"]
    elif spec.method == "lr_find":
        found = _range_test(task, spec.seed, plan.steps, device)
    else:
        found = MIDDLE * SWEEPS[spec.method](partial(_trial, task, spec, device), plan.steps)
    return {**spec.record(), "chosen": found, "left": plan.run}


def _trial(task: Task, spec: Spec, device: torch.device, factor: float, steps: int) -> float:
    steps = next(count for count in range(max(steps, 2), steps + 100) if can_divide(task.warm_up, count))
    return float(train(task, Spec(spec.task, "plain", MIDDLE * factor, spec.seed, steps=steps), device)["val"])


def _range_test(task: Task, seed: int, steps: int, device: torch.device) -> float:
    """Return the learning rate that Lightning's ``lr_find`` suggests after a test of so many steps."""
    torch.manual_seed(seed)
    model = task.model().to(device)
    rates = LOWEST * (HIGHEST / LOWEST) ** (np.arange(1, steps + 1) / steps)
    optimizer = plain_optimizer(task.optimizer, [{"params": list(model.parameters()), "lr": rates[0]}], rates[0])
    losses: list[torch.Tensor] = []
    for rate, batch in zip(rates.tolist(), batches_of(task, steps, seed, device), strict=True):
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.zero_grad()
        loss = task.loss(model, *batch)
        loss.backward()
        if task.clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), task.clip)
        optimizer.step()
        losses.append(loss.detach())
    return suggestion(rates, torch.stack(losses).double().cpu().numpy())


def suggestion(rates: NDArray[np.float64], losses: NDArray[np.float64]) -> float:
    """Return the learning rate of a range test at which the smoothed loss falls most steeply, as Lightning does.

    Steeply in the logarithm of the learning rate: newer versions divide by its difference, which chooses among the very
    lowest by noise.

    Args:
        rates: learning rate of every step.
        losses: training loss of every step. What follows a rise to four times the lowest loss is left out.
    """
    mean, smoothed, lowest = 0.0, list[float](), math.inf
    for step, loss in enumerate(losses.tolist()):
        mean = SMOOTHING * mean + (1 - SMOOTHING) * loss
        smoothed.append(mean / (1 - SMOOTHING ** (step + 1)))
        if step > 0 and smoothed[-1] > RISE * lowest:
            break
        lowest = min(lowest, smoothed[-1])
    seen, tried = np.array(smoothed)[SKIP_FIRST:-SKIP_LAST], rates[: len(smoothed)][SKIP_FIRST:-SKIP_LAST]
    finite = np.isfinite(seen)
    if finite.sum() < 2:
        return float(rates[0])
    return float(tried[finite][np.gradient(seen[finite]).argmin()])
