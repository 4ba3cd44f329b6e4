"""Passes recorded as CUDA graphs: which calls are recorded, and that they equal those that are not, bit for bit.

The first tests run on a CPU, with a stand-in for CUDA graphs.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hdet_kernels as hk
from hdet_kernels.stack.inputs import Batch
from hdet_kernels.stack.losses import EAGER_CALLS, MAX_GRAPHS, GraphedLosses
from tests.stack.cases import loss_of as own_loss
from tests.training import loss_of

REPLICAS = 3


def gpu(test: Any) -> Any:
    """Mark a test that needs a GPU."""
    why = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no usable NVIDIA GPU")
    return pytest.mark.gpu(why(test))


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
    stack = hk.ReplicaStack(nn.Linear(2, 1), REPLICAS)
    return GraphedLosses(stack._losses, stack._collector, stack.device)


def test_the_third_call_with_the_same_shapes_is_recorded(graphed: GraphedLosses) -> None:
    for call in range(EAGER_CALLS + 3):
        assert len(graphed._recorded) == (call > EAGER_CALLS)
        x = torch.full((REPLICAS, 2), float(call))
        losses = graphed.compute(own_loss, Batch((x,), REPLICAS, False), False, None)
        assert losses.shape == (REPLICAS,)
    (recorded,) = graphed._recorded.values()
    assert recorded.graph.replays == 3  # type: ignore[attr-defined]
    assert torch.equal(recorded.batch[0], x), "the last batch was copied to where the graph reads it"
    assert all(gradient is not None for gradient in recorded.gradients)


def test_other_arguments_are_other_passes(graphed: GraphedLosses) -> None:
    x = torch.ones(REPLICAS, 2)
    for batch, same_batch, chunk_size in (
        (x, False, None),
        (x, True, None),
        (x, False, 2),
        (torch.ones(6, 2), False, None),
    ):
        for _ in range(EAGER_CALLS + 1):
            graphed.compute(own_loss, Batch((batch,), REPLICAS, same_batch), same_batch, chunk_size)
    assert len(graphed._recorded) == 4


def test_passes_that_cannot_be_told_apart_or_vectorized_are_not_recorded(graphed: GraphedLosses) -> None:
    def loss_fn(model: nn.Module, x: Tensor, options: set[str]) -> Tensor:
        return own_loss(model, x)

    def waits(model: nn.Module, x: Tensor) -> Tensor:
        return own_loss(model, x) * float(x.sum())  # computed one by one

    for _ in range(EAGER_CALLS + 2):
        graphed.compute(loss_fn, Batch((torch.ones(REPLICAS, 2), {"unhashable"}), REPLICAS, False), False, None)
        graphed.compute(own_loss, Batch((torch.ones(REPLICAS, 2, requires_grad=True),), REPLICAS, False), False, None)
        graphed.compute(waits, Batch((torch.ones(REPLICAS, 2),), REPLICAS, False), False, None)
    assert not graphed._recorded


@pytest.mark.full
def test_the_number_of_recorded_passes_is_limited(graphed: GraphedLosses, caplog: pytest.LogCaptureFixture) -> None:
    for size in range(1, MAX_GRAPHS + 3):
        for _ in range(EAGER_CALLS + 1):
            graphed.compute(own_loss, Batch((torch.ones(REPLICAS * size, 2),), REPLICAS, False), False, None)
    assert len(graphed._recorded) == MAX_GRAPHS
    assert sum("pad batches to a few shapes" in message for message in caplog.messages) == 1


def network(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Linear(6, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Dropout(dropout), nn.LayerNorm(16), nn.Linear(16, 2)
    return nn.Sequential(*layers).cuda()


def batch(step: int, size: int = 12) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(size, 6, generator=generator).cuda(), torch.randn(size, 2, generator=generator).cuda()


class Training:
    def __init__(self, cuda_graphs: bool, gradients: Any = "shared", **options: Any) -> None:
        self.stack = hk.ReplicaStack(network(), REPLICAS, gradients=gradients, cuda_graphs=cuda_graphs)
        self.optimizer = hk.FusedAdamW(self.stack.parameters(), lr=1e-2, max_grad_norm=1.0)
        self.scheduler = hk.HDETOneCycleLR(
            self.optimizer, 1e-2, total_steps=60, sync_every=3, ensemble=self.stack.ensemble, **options
        )
        self.losses: list[Tensor] = []

    def step(self, *batches: tuple[Tensor, Tensor], autocast: bool = False) -> None:
        self.optimizer.zero_grad()
        for each in batches:
            with torch.autocast("cuda", dtype=torch.bfloat16, enabled=autocast):
                losses = self.stack.backward(loss_of, *each)
        self.losses.append(losses)
        self.optimizer.step()
        self.scheduler.step(losses)

    def recorded(self) -> int:
        return 0 if self.stack._graphed is None else len(self.stack._graphed._recorded)


def check_same(graphed: Training, eager: Training) -> None:
    for step, (mine, theirs) in enumerate(zip(graphed.losses, eager.losses, strict=True)):
        _check_equal(mine, theirs, f"the losses of step {step}")
    for kind in ("parameters", "buffers"):
        pairs = zip(getattr(graphed.stack, kind)(), getattr(eager.stack, kind)(), strict=True)
        for number, (mine, theirs) in enumerate(pairs):
            _check_equal(mine, theirs, f"{kind}, tensor {number}")


def _check_equal(mine: Tensor, theirs: Tensor, what: str) -> None:
    torch.testing.assert_close(mine, theirs, rtol=0, atol=0, msg=lambda found: f"{what}: {found}")


@gpu
@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("gradients", ["shared", "local"])
def test_a_recorded_run_equals_an_eager_one_bit_for_bit(gradients: str, autocast: bool) -> None:
    runs = [Training(cuda_graphs, gradients) for cuda_graphs in (True, False)]
    for step in range(10):
        for run in runs:
            run.step(batch(step), autocast=autocast)
    assert [run.recorded() for run in runs] == [1, 0]
    check_same(*runs)


@gpu
def test_each_shape_is_recorded_by_itself() -> None:
    runs = [Training(cuda_graphs) for cuda_graphs in (True, False)]
    for step in range(12):
        for run in runs:
            run.step(batch(step, size=6 if step % 2 else 12))
    assert runs[0].recorded() == 2
    check_same(*runs)


@gpu
@pytest.mark.parametrize("gradients", ["shared", "local"])
def test_gradients_accumulate(gradients: str) -> None:
    runs = [Training(cuda_graphs, gradients) for cuda_graphs in (True, False)]
    for step in range(6):
        for run in runs:
            run.step(batch(step), batch(100 + step), batch(200 + step))
    assert runs[0].recorded() == 1
    check_same(*runs)


@gpu
def test_garbage_with_an_older_graph_does_not_end_a_recording() -> None:
    older = Training(True)
    for step in range(4):
        older.step(batch(step))
    assert older.recorded() == 1
    gc.disable()
    thresholds = gc.get_threshold()
    try:
        older.itself = older  # type: ignore[attr-defined]  # garbage that only the collector finds
        del older
        gc.set_threshold(1, 1, 1)
        gc.enable()
        newer = Training(True)
        for step in range(4):
            newer.step(batch(step))
    finally:
        gc.set_threshold(*thresholds)
        gc.enable()
    assert newer.recorded() == 1


@gpu
def test_parameters_that_move_are_recorded_again() -> None:
    stack = hk.ReplicaStack(network(), REPLICAS, cuda_graphs=True)
    for step in range(4):
        stack.backward(loss_of, *batch(step))
    optimizer = hk.FusedAdamW(stack.parameters())  # moves the parameters into its own buffers
    stack.zero_grad()
    for step in range(4):
        stack.backward(loss_of, *batch(step))
        optimizer.step()
        optimizer.zero_grad()
    found = stack.backward(loss_of, *batch(4))
    assert torch.equal(found, stack.losses(loss_of, *batch(4)))


@gpu
def test_every_replay_draws_new_random_numbers() -> None:
    stack = hk.ReplicaStack(network(0.5), REPLICAS, cuda_graphs=True)
    x, y = batch(0)
    losses = [stack.backward(loss_of, x, y, same_batch=True) for _ in range(6)]
    values = torch.stack(losses).flatten().tolist()
    assert len(set(values)) == len(values), "different in every replica and every pass"


@gpu
def test_returned_losses_are_not_overwritten() -> None:
    stack = hk.ReplicaStack(network(), REPLICAS, cuda_graphs=True)
    found = [stack.backward(loss_of, *batch(step)) for step in range(6)]
    assert len({tuple(losses.tolist()) for losses in found}) == 6


@gpu
def test_explored_scalars_change_between_replays() -> None:
    stack = hk.ReplicaStack(network(), REPLICAS, cuda_graphs=True)

    def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return stack.hyper["scale"] * F.mse_loss(model(x), y)

    for step in range(6):
        stack.hyper["scale"] = [1.0 + step, 2.0, 3.0]
        with torch.no_grad():
            stack.eval()
            expected = stack.losses(loss_fn, *batch(0))
            found = stack.backward(loss_fn, *batch(0))
        assert torch.equal(found, expected), step


@gpu
def test_training_and_evaluation_mode_are_recorded_separately() -> None:
    stack = hk.ReplicaStack(network(0.5), REPLICAS, cuda_graphs=True)
    for _ in range(4):
        stack.backward(loss_of, *batch(0))
    stack.eval()
    assert torch.equal(stack.backward(loss_of, *batch(0)), stack.losses(loss_of, *batch(0)))


@gpu
def test_a_loss_that_waits_for_the_device_is_refused() -> None:
    stack = hk.ReplicaStack(network(), REPLICAS, cuda_graphs=True)

    def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        torch.cuda.synchronize()
        return F.mse_loss(model(x), y)

    for step in range(2):
        stack.backward(loss_fn, *batch(step))
    with pytest.raises(RuntimeError, match=r"could not be recorded as a CUDA graph.*without cuda_graphs"):
        stack.backward(loss_fn, *batch(2))
    assert F.dropout(torch.ones(8, device="cuda")).isfinite().all(), "random numbers can be drawn after it"
