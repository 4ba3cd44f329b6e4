"""Passes recorded as CUDA graphs equal those that are not recorded, bit for bit."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hdet_kernels as hk
from hdet_kernels.stack.losses import MAX_GRAPHS
from tests.training import loss_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no usable NVIDIA GPU"),
]

REPLICAS = 3


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


@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("gradients", ["shared", "local"])
def test_a_recorded_run_equals_an_eager_one_bit_for_bit(gradients: str, autocast: bool) -> None:
    runs = [Training(cuda_graphs, gradients) for cuda_graphs in (True, False)]
    for step in range(10):
        for run in runs:
            run.step(batch(step), autocast=autocast)
    assert [run.recorded() for run in runs] == [1, 0]
    check_same(*runs)


def test_each_shape_is_recorded_by_itself() -> None:
    runs = [Training(cuda_graphs) for cuda_graphs in (True, False)]
    for step in range(12):
        for run in runs:
            run.step(batch(step, size=6 if step % 2 else 12))
    assert runs[0].recorded() == 2
    check_same(*runs)


@pytest.mark.parametrize("gradients", ["shared", "local"])
def test_gradients_accumulate(gradients: str) -> None:
    runs = [Training(cuda_graphs, gradients) for cuda_graphs in (True, False)]
    for step in range(6):
        for run in runs:
            run.step(batch(step), batch(100 + step), batch(200 + step))
    assert runs[0].recorded() == 1
    check_same(*runs)


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


def test_every_replay_draws_new_random_numbers() -> None:
    stack = hk.ReplicaStack(network(0.5), REPLICAS, cuda_graphs=True)
    x, y = batch(0)
    losses = [stack.backward(loss_of, x, y, same_batch=True) for _ in range(6)]
    values = torch.stack(losses).flatten().tolist()
    assert len(set(values)) == len(values), "different in every replica and every pass"


def test_returned_losses_are_not_overwritten() -> None:
    stack = hk.ReplicaStack(network(), REPLICAS, cuda_graphs=True)
    found = [stack.backward(loss_of, *batch(step)) for step in range(6)]
    assert len({tuple(losses.tolist()) for losses in found}) == 6


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


def test_training_and_evaluation_mode_are_recorded_separately() -> None:
    stack = hk.ReplicaStack(network(0.5), REPLICAS, cuda_graphs=True)
    for _ in range(4):
        stack.backward(loss_of, *batch(0))
    stack.eval()
    assert torch.equal(stack.backward(loss_of, *batch(0)), stack.losses(loss_of, *batch(0)))


def test_losses_computed_one_by_one_are_not_recorded() -> None:
    stack = hk.ReplicaStack(network(), REPLICAS, cuda_graphs=True)

    def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(model(x), y)
        return loss if loss.item() > -1 else 2 * loss

    for step in range(5):
        stack.backward(loss_fn, *batch(step))
    assert not stack._graphed._recorded  # type: ignore[union-attr]


def test_a_loss_that_waits_for_the_device_is_refused() -> None:
    stack = hk.ReplicaStack(network(), REPLICAS, cuda_graphs=True)

    def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        torch.cuda.synchronize()
        return F.mse_loss(model(x), y)

    for step in range(2):
        stack.backward(loss_fn, *batch(step))
    with pytest.raises(RuntimeError, match=r"could not be recorded as a CUDA graph.*without cuda_graphs"):
        stack.backward(loss_fn, *batch(2))


def test_the_number_of_recorded_passes_is_limited(caplog: pytest.LogCaptureFixture) -> None:
    stack = hk.ReplicaStack(network(), REPLICAS, cuda_graphs=True)
    for size in range(1, MAX_GRAPHS + 3):
        for step in range(3):
            stack.backward(loss_of, *batch(step, size=REPLICAS * 2 * size))
    assert len(stack._graphed._recorded) == MAX_GRAPHS  # type: ignore[union-attr]
    assert sum("pad batches to a few shapes" in message for message in caplog.messages) == 1
