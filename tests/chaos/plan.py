"""All faults, and the plan of a run: which fault in which configuration, rank and step. All from one seed."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence

from tests.chaos import (
    faults_builds,
    faults_calls,
    faults_checkpoints,
    faults_hosts,
    faults_in_backward,
    faults_processes,
    faults_values,
)
from tests.chaos.configurations import CONFIGURATIONS, SYNC, TOTAL
from tests.chaos.faults import Case, Fault

ALL: tuple[Fault, ...] = (
    *faults_values.FAULTS,
    *faults_builds.FAULTS,
    *faults_processes.FAULTS,
    *faults_calls.FAULTS,
    *faults_processes.COLLECTIVES,
    *faults_checkpoints.FAULTS,
    *faults_in_backward.FAULTS,
    *faults_hosts.FAULTS,
)
FAULTS = {fault.name: fault for fault in ALL}


def make_case(fault: str, configuration: str, seed: int, device: str = "cpu") -> Case:
    """Return the case of a seed, the same wherever it is made."""
    kind, where = FAULTS[fault], CONFIGURATIONS[configuration]
    draw = random.Random(f"{fault}/{configuration}/{seed}")
    step = draw.choice(kind.possible_steps)
    if kind.at == "load":
        # The older checkpoint is of another cycle: within one, both would meet the others at the same sync.
        good = draw.randrange(SYNC + 1, TOTAL)
        old = draw.randrange(SYNC * (good // SYNC))
    else:
        good = draw.randrange(step)
        old = draw.randrange(good + 1)
    return Case(
        fault,
        configuration,
        seed,
        victim=draw.randrange(where.ranks),
        row=draw.randrange(where.rows),
        step=step,
        saved=(old, good),
        collectives=0,
        device=device,
        pick=draw.randrange(2**31),
    )


def spelled(text: str, device: str = "cpu") -> Case:
    """Return the case that ``Case.spelled`` spelled."""
    fault, configuration, seed = text.split("/")
    return make_case(fault, configuration, int(seed), device)


def cases(seed: int, faults: Sequence[str] | None = None, device: str = "cpu", *, hosts: bool = True) -> Iterator[Case]:
    """Yield cases without end: every fault in one configuration, then every fault in its next one, and so on.

    Faults between two hosts come once, because they take long; none without ``hosts``. On a GPU there are none
    either, and no sharded replicas: FSDP reduces and scatters, which gloo does not do with CUDA tensors.
    """
    draw = random.Random(seed)
    hosts = hosts and device == "cpu"
    names = list(FAULTS if faults is None else faults)
    names = names if hosts else _without_hosts(names)
    left_out = {"sharded", "hosts"} if device != "cpu" else set()
    on_device = [each for each in CONFIGURATIONS.values() if each.traits.isdisjoint(left_out)]
    places = {}
    for name in names:
        fitting = [each.name for each in on_device if FAULTS[name].fits(each)]
        draw.shuffle(fitting)
        places[name] = itertools.cycle(fitting)
    for number in itertools.count() if names else ():
        draw.shuffle(names)
        for name in names if number == 0 or faults is not None else _without_hosts(names):
            yield make_case(name, next(places[name]), 1000 * seed + number, device)


def _without_hosts(names: Sequence[str]) -> list[str]:
    return [name for name in names if "hosts" not in FAULTS[name].needs]
