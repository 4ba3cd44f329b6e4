"""Any sequence of operations leaves the schedulers equal to the equations."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hdet_kernels.schedule.guards import MOST_AHEAD
from tests.properties.machines import explore
from tests.properties.reference import GROUPS, Setup
from tests.properties.scheduler_twins import SchedulerTwins

# A skipped first step of torch's optimizer, as under a GradScaler.
pytestmark = pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step:UserWarning")

SEEDS, GROUP = st.integers(0, 1000), st.integers(0, GROUPS - 1)
ORDERS = list(itertools.permutations(("model", "optimizer", "scheduler")))

#: Who the replicas are: one, with our optimizer and with torch's, and stacks.
REPLICAS = {
    "single": {"kind": "single", "replicas": 1, "shared": False},
    "single-torch": {"kind": "single", "replicas": 1, "shared": False, "fused": False},
    "stack-shared": {"kind": "stack"},
    "stack-local": {"kind": "stack", "shared": False},
}


class SchedulerMachine(RuleBasedStateMachine):
    """Operations on a scheduler, in any order."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.options: dict[str, Any] = dict(REPLICAS[name])
        self.saved: Any = None

    @initialize(
        replicas=st.integers(1, 5),
        schedule=st.sampled_from(["one-cycle", "cosine"]),
        spread=st.sampled_from([0.0, 0.3]),
        log_spacing=st.booleans(),
        every=st.sampled_from([1, 3, 7]),
        warmup=st.sampled_from([None, 0, 8]),
        momentum=st.sampled_from([0.0, 0.9]),
    )
    def build(self, replicas: int, **options: Any) -> None:
        given = {"replicas": replicas, **options, **self.options}
        self.twins = SchedulerTwins(Setup(**given))

    @precondition(lambda self: not self.twins.over)
    @rule(seed=SEEDS, records=st.integers(0, 2))
    def train(self, seed: int, records: int) -> None:
        self.twins.train(seed, records=records)

    # torch's optimizers do not see a step that a GradScaler skips. Where many of them alternate with others, the
    # scheduler takes itself for one that is stepped too often, and raises; StepCount says when.
    @precondition(lambda self: not self.twins.over and (self.twins.setup.fused or self.twins.skipped < MOST_AHEAD))
    @rule(seed=SEEDS)
    def skipped_step(self, seed: int) -> None:
        self.twins.train(seed, skipped=True)

    @precondition(lambda self: not self.twins.over)
    @rule(seed=SEEDS, group=GROUP)
    def frozen_step(self, seed: int, group: int) -> None:
        self.twins.train(seed, frozen=group)

    @precondition(lambda self: not self.twins.over)
    @rule(seed=SEEDS, count=st.integers(2, 5))
    def train_on(self, seed: int, count: int) -> None:
        for number in range(count):
            if not self.twins.over:
                self.twins.train(seed + number)

    @rule()
    def converge(self) -> None:
        self.twins.converge()

    @rule()
    def consensus(self) -> None:
        self.twins.consensus()

    @rule(
        edit=st.sampled_from([("weight_decay", 0.0), ("weight_decay", 0.1), ("momentum", 0.5), ("lr", 0.02)]),
        group=GROUP,
    )
    def edit(self, edit: tuple[str, float], group: int) -> None:
        self.twins.edit(*edit, group)

    @rule(group=GROUP)
    def move(self, group: int) -> None:
        self.twins.move(group)

    @precondition(lambda self: self.twins.setup.kind == "single" and not self.twins.over)
    @rule()
    def add_param_group(self) -> None:
        self.twins.add_param_group()

    @precondition(lambda self: not self.twins.reference.edited)
    @rule()
    def save(self) -> None:
        self.saved = self.twins.save()

    @precondition(lambda self: self.saved is not None)
    @rule(order=st.sampled_from(ORDERS))
    def load(self, order: tuple[str, ...]) -> None:
        self.twins.load(self.saved, order)

    @invariant()
    def equal(self) -> None:
        if hasattr(self, "twins"):
            self.twins.check()


@pytest.mark.parametrize("name", REPLICAS)
def test_any_sequence_follows_the_equations(name: str) -> None:
    explore(lambda: SchedulerMachine(name), examples=4, steps=16)


@pytest.mark.full
@pytest.mark.parametrize("name", REPLICAS)
def test_many_sequences_follow_the_equations(name: str) -> None:
    explore(lambda: SchedulerMachine(name), examples=26, steps=50)
