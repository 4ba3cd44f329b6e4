"""Which calls are recorded and which replayed, on a CPU with a stand-in for CUDA graphs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import hdet_kernels as hk
from hdet_kernels.stack.inputs import Batch
from hdet_kernels.stack.losses import EAGER_CALLS, MAX_GRAPHS, GraphedLosses
from tests.stack.cases import R, loss_of


class CountingGraph:
    """Stands in for ``torch.cuda.CUDAGraph``: counts replays, and computes nothing."""

    def __init__(self) -> None:
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1


@contextlib.contextmanager
def nothing(*_: Any, **__: Any) -> Iterator[None]:
    yield


@pytest.fixture
def graphed(monkeypatch: pytest.MonkeyPatch) -> GraphedLosses:
    monkeypatch.setattr(torch.cuda, "CUDAGraph", CountingGraph)
    monkeypatch.setattr(torch.cuda, "graph", nothing)
    monkeypatch.setattr(torch.cuda, "device", nothing)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))
    stack = hk.ReplicaStack(nn.Linear(2, 1), R)
    return GraphedLosses(stack._losses, stack._collector, stack.device)


def test_the_third_call_with_the_same_shapes_is_recorded(graphed: GraphedLosses) -> None:
    for call in range(EAGER_CALLS + 3):
        assert len(graphed._recorded) == (call > EAGER_CALLS)
        x = torch.full((R, 2), float(call))
        losses = graphed.compute(loss_of, Batch((x,), R, False), False, None)
        assert losses.shape == (R,)
    (recorded,) = graphed._recorded.values()
    assert recorded.graph.replays == 3  # type: ignore[attr-defined]
    assert torch.equal(recorded.batch[0], x), "the last batch was copied to where the graph reads it"
    assert all(gradient is not None for gradient in recorded.gradients)


def test_other_arguments_are_other_passes(graphed: GraphedLosses) -> None:
    x = torch.ones(R, 2)
    for batch, same_batch, chunk_size in (
        (x, False, None),
        (x, True, None),
        (x, False, 2),
        (torch.ones(6, 2), False, None),
    ):
        for _ in range(EAGER_CALLS + 1):
            graphed.compute(loss_of, Batch((batch,), R, same_batch), same_batch, chunk_size)
    assert len(graphed._recorded) == 4


def test_batches_that_cannot_be_told_apart_are_not_recorded(graphed: GraphedLosses) -> None:
    def loss_fn(model: nn.Module, x: torch.Tensor, options: set[str]) -> torch.Tensor:
        return loss_of(model, x)

    for _ in range(EAGER_CALLS + 2):
        graphed.compute(loss_fn, Batch((torch.ones(R, 2), {"unhashable"}), R, False), False, None)
        graphed.compute(loss_of, Batch((torch.ones(R, 2, requires_grad=True),), R, False), False, None)
    assert not graphed._recorded


@pytest.mark.full
def test_the_number_of_recorded_passes_is_limited(graphed: GraphedLosses, caplog: pytest.LogCaptureFixture) -> None:
    for size in range(1, MAX_GRAPHS + 3):
        for _ in range(EAGER_CALLS + 1):
            graphed.compute(loss_of, Batch((torch.ones(R * size, 2),), R, False), False, None)
    assert len(graphed._recorded) == MAX_GRAPHS
    assert sum("pad batches to a few shapes" in message for message in caplog.messages) == 1
