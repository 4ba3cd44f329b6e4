"""List the runs of the suite. A part is a list of jobs; all parts but the grid need the grid's best learning rate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from .peers import peers_for
from .pool import Job
from .scalars import SCALARS
from .sizes import POWERS, Size
from .spec import Spec
from .sweep import SWEEPS
from .tasks import TASKS

# Learning rates at the start, as factors of the best one of plain training.
STARTS = (1 / 30, 1 / 10, 1 / 3, 1.0, 3.0, 10.0, 30.0)

# Long runs: their length in usual lengths, their starts, and further learning rates of plain runs, as factors of the
# best one for the usual length.
LONGER = 3
LONG_STARTS = (1 / 10, 1.0, 10.0, 30.0)
LONG_GRID = (1 / 4, 1 / 2, 2.0)

# Learning rates of the finer grid, in octaves from the best of the grid.
NEAR = (-0.5, 0.0, 0.5)

# Factors of the best learning rate at which the parameter groups start, by task.
MIXED = {
    "ratings": {"embedding": 0.1, "transformer": 10.0, "dense": 1.0, "no-decay": 1.0},
    "language": {"embedding": 0.1, "transformer": 10.0, "dense": 1.0, "no-decay": 1.0},
}

# The paper's configurations in its order, and ours: title, method, factor of the learning rate.
PAPER = (
    ("Baseline-Low", "plain", 8 / 9),
    ("Baseline-High", "plain", 10 / 9),
    ("Warm-Init", "warm init", 1.0),
    ("HDET without auto-LR", "paper, no auto-LR", 1.0),
    ("HDET without warm init", "paper, no warm init", 1.0),
    ("full HDET", "paper", 1.0),
    ("ours", "hdet, warm init", 1.0),
)


def grid_jobs(size: Size) -> list[Job]:
    """Return plain runs at every learning rate of the grid, with three seeds at most."""
    return [
        _job("grid", Spec(task, "plain", TASKS[task].lr * 2.0**power, seed))
        for seed in range(min(size.seeds, 3))
        for power in size.powers
        for task in size.tasks
    ]


def near_jobs(size: Size, best: dict[str, float]) -> list[Job]:
    """Return plain runs at learning rates half an octave apart around the best one."""
    return [
        _job("near", Spec(task, "plain", best[task] * 2.0**octaves, seed))
        for seed in range(size.near_seeds)
        for octaves in NEAR
        for task in size.tasks
        if task in best and seed < size.seeds_near(task)
    ]


def jobs_after(size: Size, best: dict[str, float]) -> list[Job]:
    """Return the jobs of the finer grid and of all parts, the most important first."""
    return near_jobs(size, best) + [job for part in size.parts for job in PARTS[part](size, best)]


def _starts(size: Size, best: dict[str, float]) -> list[Job]:
    """Return runs from all starts, a seed after the other: a time limit leaves complete seeds."""
    jobs = []
    for seed in range(max(size.seeds_of(task, 1.0) for task in size.tasks) if size.tasks else 0):
        for factor in STARTS:
            for task in size.tasks:
                if seed < size.seeds_of(task, factor):
                    jobs += _from_start(size, task, best[task], factor, seed)
    return jobs


def _none(size: Size, best: dict[str, float]) -> list[Job]:
    """Return runs without a learning rate, with a probe and without."""
    return [
        _job("none", Spec(task, "scout", None, seed, probe=probe, options=_options(size, task)))
        for seed in range(size.start_seeds)
        for probe in (True, False)
        for task in size.tasks
    ]


def _seeds(size: Size, best: dict[str, float]) -> list[Job]:
    """Return jobs for more seeds, each with plain training at the best learning rate, which all are compared with."""
    jobs = []
    for task, seeds in size.more_seeds.items():
        for seed in range(size.start_seeds, max(seeds.values())):
            for factor, count in seeds.items():
                if seed < count:
                    jobs += _from_start(size, task, best[task], factor, seed)
                elif factor == 1.0:
                    jobs.append(_job("start", Spec(task, "plain", best[task], seed), factor=1.0))
    return jobs


def _from_start(size: Size, task: str, best: float, factor: float, seed: int) -> list[Job]:
    hdet = Spec(task, "hdet", best * factor, seed, options=_options(size, task))
    specs = [hdet, Spec(task, "plain", best * factor, seed)]
    if seed < size.training_seeds:
        specs.append(replace(hdet, probe=False))
    return [_job("start", spec, factor=factor) for spec in specs]


def _options(size: Size, task: str) -> dict[str, Any]:
    """Return the constants of the controller that were fitted without the task's family; none: the defaults."""
    return dict(size.options.get(task, {}))


def _paper(size: Size, best: dict[str, float]) -> list[Job]:
    return [
        _job("paper", Spec(task, method, best[task] * factor, seed, factors=_groups(task)), configuration=name)
        for seed in range(size.seeds)
        for name, method, factor in PAPER
        for task in ("ratings", "language")
    ]


def _mixed(size: Size, best: dict[str, float]) -> list[Job]:
    return [
        _job("mixed", Spec(task, method, best[task], seed, factors=factors))
        for seed in range(size.seeds)
        for task, factors in MIXED.items()
        for method in ("hdet", "plain")
    ]


def _peers(size: Size, best: dict[str, float]) -> list[Job]:
    """Return runs of other methods: once a seed where the result does not depend on the start, else from all starts.

    Local SGD and DiLoCo do not look for a learning rate and have the best one.
    """
    seeds = range(min(size.seeds, 2))
    peers = {task: peers_for(TASKS[task].optimizer) for task in size.tasks}
    jobs = [
        _job("peer", Spec(task, method, best[task], seed), factor=1.0)
        for seed in seeds
        for task, found in peers.items()
        for method in (*(name for name, peer in found.items() if not peer.from_lr), "local SGD", "DiLoCo")
    ]
    for seed in seeds:
        for task, found in peers.items():  # a time limit leaves tasks with all starts
            for factor in STARTS:
                moving = {"PBT": "peer", "hypergradient": "peer", **dict.fromkeys(SWEEPS, "sweep")}
                moving |= {name: "peer" for name, peer in found.items() if peer.from_lr}
                jobs += [
                    _job(kind, Spec(task, method, best[task] * factor, seed), factor=factor)
                    for method, kind in moving.items()
                ]
    return jobs


def _schedules(size: Size, best: dict[str, float]) -> list[Job]:
    """Return runs with cosine and constant schedules: a plain grid, and HDET and plain runs from three starts."""
    jobs = []
    for seed in range(min(size.seeds, 3)):
        for schedule in ("cosine", "constant"):
            for task in size.tasks:
                for factor in (0.1, 1.0, 10.0):
                    for method in ("hdet", "plain"):
                        spec = Spec(task, method, best[task] * factor, seed, schedule=schedule)
                        jobs.append(_job("schedule", spec, factor=factor))
                for power in POWERS[::2]:
                    spec = Spec(task, "plain", TASKS[task].lr * 2.0**power, seed, schedule=schedule)
                    jobs.append(_job("schedule", spec))
    return jobs


def _long(size: Size, best: dict[str, float]) -> list[Job]:
    """Return longer runs: HDET and plain ones from several starts, and plain ones around the usual best."""
    jobs = []
    for seed in range(min(size.seeds, 3)):
        for task in size.tasks:
            steps = LONGER * TASKS[task].steps
            starts = [(method, factor) for factor in LONG_STARTS for method in ("hdet", "plain")]
            jobs += [
                _job("long", Spec(task, method, best[task] * factor, seed, steps=steps), factor=factor)
                for method, factor in (*starts, *(("plain", factor) for factor in LONG_GRID))
            ]
    return jobs


def _scalars(size: Size, best: dict[str, float]) -> list[Job]:
    jobs: list[Job] = []
    for name in size.scalars:
        scalar = SCALARS[name]
        common = {"kind": "scalar", "task": scalar.task, "name": name}
        jobs += [{**common, "value": v, "seed": 0, "explores": False} for v in scalar.grid]
        jobs += [
            {**common, "value": v, "seed": seed, "explores": True} for seed in range(size.seeds) for v in scalar.starts
        ]
    return jobs


# Functions that return the jobs of each part.
PARTS: dict[str, Callable[[Size, dict[str, float]], list[Job]]] = {
    "starts": _starts,
    "none": _none,
    "paper": _paper,
    "mixed": _mixed,
    "peers": _peers,
    "schedules": _schedules,
    "long": _long,
    "scalars": _scalars,
    "seeds": _seeds,
}


def _groups(task: str) -> dict[str, float]:
    return dict.fromkeys(MIXED[task], 1.0)


def _job(kind: str, spec: Spec, **more: object) -> Job:
    return {"kind": kind, "task": spec.task, "spec": spec.record(), **more}
