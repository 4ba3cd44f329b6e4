"""Sizes of the suite (which tasks, parts and seeds are run), and the list of runs of each part as jobs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from bench.quality.peers import peers_for
from bench.quality.results import Job, Spec
from bench.quality.scalars import SCALARS
from bench.quality.search import search_jobs
from bench.quality.sweep import SWEEPS
from bench.quality.tasks import TASKS

# Learning rates of the grid, as powers of two times the task's ``lr``.
POWERS = range(-5, 5)
# Learning rates at the start, as factors of the best one of plain training.
STARTS = (1 / 30, 1 / 10, 1 / 3, 1.0, 3.0, 10.0, 30.0)
# Trusts beside the default whose runs are compared with it, and their learning rates at the start.
TRUSTS = (5.0, 10.0)
TRUST_STARTS = (3.0, 1.0, 10.0, 1 / 3, 1 / 10)
# The most seeds of tasks whose runs take most of a GPU.
COSTLY = {"large language": 2, "large llama": 2}


@dataclass(frozen=True)
class Size:
    """A selection of the suite: tasks, seeds, parts and scalars.

    Args:
        tasks: Names of the tasks.
        seeds: Number of seeds of most parts; the grid has three at most.
        parts: Parts beside the grid, in their order.
        scalars: Scalars of the part "scalars".
        start_seeds: Number of seeds from each start.
        best_seeds: Number of seeds at the best learning rate, where it is more than that.
        training_seeds: At most so many of these seeds are run without a probe too.
        probe: Whether HDET is run with a probe.
        starts: Learning rates at the start, as factors of the best one.
        powers: Learning rates of the grid, as powers of two times the task's ``lr``; none: that is the best.
        near_seeds: Number of seeds of the finer grid near the best.
        leave_out: Whether HDET runs take constants that were fitted without the family of their task.
        options: These constants, by task.
    """

    tasks: tuple[str, ...]
    seeds: int
    parts: tuple[str, ...]
    scalars: tuple[str, ...]
    start_seeds: int
    best_seeds: int = 0
    training_seeds: int = 3
    probe: bool = True
    starts: tuple[float, ...] = STARTS
    powers: range = POWERS
    near_seeds: int = 0
    leave_out: bool = False
    options: dict[str, dict[str, Any]] = field(default_factory=dict)

    def seeds_of(self, task: str, start: float) -> int:
        """Return the number of seeds of a task from a start."""
        seeds = max(self.start_seeds, self.best_seeds) if start == 1.0 else self.start_seeds
        return min(seeds, COSTLY.get(task, seeds))

    def seeds_near(self, task: str) -> int:
        """Return the number of seeds of a task on the finer grid."""
        return min(self.near_seeds, COSTLY.get(task, self.near_seeds))


SIZES = {
    "ci": Size(("digits",), 3, ("starts", "peers", "scalars"), ("dropout", "label smoothing", "weight_decay"), 10),
    "full": Size(
        ("ratings", "language", "images"),
        5,
        ("starts", "paper", "scalars", "peers"),
        ("temperature",),
        start_seeds=10,
    ),
    "zoo": Size(
        # Long runs first: at the end of a seed no worker waits for one.
        tuple(sorted((name for name in TASKS if name != "few digits"), key=lambda name: -TASKS[name].steps)),
        3,
        ("near", "starts", "none", "peers"),
        (),
        start_seeds=3,
        best_seeds=5,
        training_seeds=20,
        powers=range(0),  # each task's lr is the best of an earlier grid
        near_seeds=10,
        leave_out=True,
    ),
}

# Learning rates of the finer grid, in octaves from the best of the grid.
NEAR = (-0.5, 0.0, 0.5)
# Parameter groups that the paper's configurations explore apart.
GROUPS = ("embedding", "transformer", "dense", "no-decay")
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


def jobs_after(size: Size, best: dict[str, float]) -> list[Job]:
    """Return the jobs of all parts after the grid, in the order of the parts."""
    return [job for part in size.parts for job in PARTS[part](size, best)]


def _near(size: Size, best: dict[str, float]) -> list[Job]:
    """Return plain runs at learning rates half an octave apart around the best one."""
    return [
        _job("near", Spec(task, "plain", best[task] * 2.0**octaves, seed))
        for seed in range(size.near_seeds)
        for octaves in NEAR
        for task in size.tasks
        if task in best and seed < size.seeds_near(task)
    ]


def _starts(size: Size, best: dict[str, float]) -> list[Job]:
    """Return runs from all starts, a seed after the other: a time limit leaves complete seeds."""
    jobs = []
    for seed in range(max(size.seeds_of(task, 1.0) for task in size.tasks) if size.tasks else 0):
        for factor in size.starts:
            for task in size.tasks:
                if seed < size.seeds_of(task, factor):
                    jobs += _from_start(size, task, best[task], factor, seed)
    return jobs


def _trust(size: Size, best: dict[str, float]) -> list[Job]:
    """Return runs without a probe at other trusts than the default."""
    return [
        _job(
            "trust",
            Spec(task, "hdet", best[task] * factor, seed, probe=False, options=_options(size, task) | {"trust": trust}),
            factor=factor,
        )
        for seed in range(size.start_seeds)
        for factor in TRUST_STARTS
        for trust in TRUSTS
        for task in size.tasks
    ]


def _none(size: Size, best: dict[str, float]) -> list[Job]:
    """Return runs without a learning rate, with a probe and without."""
    return [
        _job("none", Spec(task, "scout", None, seed, probe=probe, options=_options(size, task)))
        for seed in range(size.start_seeds)
        for probe in (True, False)[not size.probe :]
        for task in size.tasks
    ]


def _from_start(size: Size, task: str, best: float, factor: float, seed: int) -> list[Job]:
    hdet = Spec(task, "hdet", best * factor, seed, options=_options(size, task))
    specs = [hdet] if size.probe else []
    specs.append(Spec(task, "plain", best * factor, seed))
    if seed < size.training_seeds:
        specs.append(replace(hdet, probe=False))
    return [_job("start", spec, factor=factor) for spec in specs]


def _options(size: Size, task: str) -> dict[str, Any]:
    """Return the constants of the controller that were fitted without the task's family; none: the defaults."""
    return dict(size.options.get(task, {}))


def _paper(size: Size, best: dict[str, float]) -> list[Job]:
    return [
        _job(
            "paper",
            Spec(task, method, best[task] * factor, seed, factors=dict.fromkeys(GROUPS, 1.0)),
            configuration=name,
        )
        for seed in range(size.seeds)
        for name, method, factor in PAPER
        for task in ("ratings", "language")
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


def _search(size: Size, best: dict[str, float]) -> list[Job]:
    return search_jobs(size.tasks, size.start_seeds)


# Functions that return the jobs of each part.
PARTS: dict[str, Callable[[Size, dict[str, float]], list[Job]]] = {
    "near": _near,
    "starts": _starts,
    "trust": _trust,
    "none": _none,
    "search": _search,
    "paper": _paper,
    "peers": _peers,
    "scalars": _scalars,
}


def _job(kind: str, spec: Spec, **more: object) -> Job:
    return {"kind": kind, "task": spec.task, "spec": spec.record(), **more}
