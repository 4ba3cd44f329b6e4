"""Any sequence of operations leaves the fused optimizers equal to torch's own."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.properties.machines import explore
from tests.properties.optimizer_pairs import PAIRS
from tests.properties.optimizer_twins import PRECISIONS, OptimizerTwins

SEEDS = st.integers(0, 1000)
INDICES = st.integers(0, 7)
PRESENT = st.one_of(st.just(255), st.integers(0, 255))  # mostly all parameters have a gradient


class OptimizerMachine(RuleBasedStateMachine):
    """Operations on an optimizer, in any order."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.saved: dict[str, Any] | None = None

    @initialize(
        precision=st.sampled_from(list(PRECISIONS)),
        gradients=st.sampled_from(["autograd", "fixed"]),
        max_grad_norm=st.sampled_from([None, 1.0]),
        backend=st.sampled_from(["cpp", "torch"]),
    )
    def build(self, precision: str, gradients: str, max_grad_norm: float | None, backend: str) -> None:
        self.twins = OptimizerTwins(self.name, precision, gradients, max_grad_norm, backend)

    @rule(seed=SEEDS, present=PRESENT, scale=st.sampled_from([0.01, 1.0, 10.0]))
    def step(self, seed: int, present: int, scale: float) -> None:
        self.twins.step(seed, present, scale)

    @rule(seed=SEEDS, present=PRESENT, overflows=st.booleans())
    def scaled_step(self, seed: int, present: int, overflows: bool) -> None:
        self.twins.scaled_step(seed, present, overflows)

    @rule(data=st.data(), group=INDICES)
    def edit(self, data: st.DataObject, group: int) -> None:
        key = data.draw(st.sampled_from(sorted(PAIRS[self.name].edits)))
        self.twins.edit(key, data.draw(st.sampled_from(PAIRS[self.name].edits[key])), group)

    @precondition(lambda self: len(self.twins.groups) < 3)
    @rule(lr=st.sampled_from([0.0, 0.03]))
    def add_param_group(self, lr: float) -> None:
        self.twins.add_param_group(lr)

    @rule(index=INDICES)
    def freeze(self, index: int) -> None:
        self.twins.freeze(index)

    @rule(index=INDICES, transposed=st.booleans())
    def move(self, index: int, transposed: bool) -> None:
        self.twins.move(index, transposed=transposed)

    @rule(index=INDICES, factor=st.sampled_from([0.5, -1.0, 1.25]))
    def write(self, index: int, factor: float) -> None:
        self.twins.write(index, factor)

    @rule(index=INDICES, factor=st.sampled_from([0.0, 0.5]))
    def write_state(self, index: int, factor: float) -> None:
        self.twins.write_state(index, factor)

    @rule()
    def save(self) -> None:
        self.saved = self.twins.save()

    @precondition(lambda self: self.saved is not None)
    @rule(model_first=st.booleans())
    def load(self, model_first: bool) -> None:
        assert self.saved is not None
        self.twins.load(self.saved, model_first=model_first)

    @rule()
    def exchange(self) -> None:
        self.twins.exchange()

    @rule()
    def deepcopy(self) -> None:
        self.twins.deepcopy()

    @invariant()
    def equal(self) -> None:
        if hasattr(self, "twins"):
            self.twins.check()


@pytest.mark.parametrize("name", PAIRS)
def test_any_sequence_equals_torch(name: str) -> None:
    explore(lambda: OptimizerMachine(name), examples=3, steps=15)


@pytest.mark.full
@pytest.mark.parametrize("name", PAIRS)
def test_many_sequences_equal_torch(name: str) -> None:
    explore(lambda: OptimizerMachine(name), examples=60, steps=50)
