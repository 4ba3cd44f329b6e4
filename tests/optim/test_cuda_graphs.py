"""A whole training step captured once in a CUDA graph and replayed while the schedule changes the learning rate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hdet_kernels as hk
from hdet_kernels.optim import FusedAdamW, FusedLion, FusedMuon, FusedSGD, InBackward
from tests.ops.cases import available

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]

BACKENDS = [available("cuda", "cuda"), available("triton", "cuda")]
WARM_UP, STEPS = 3, 12


class Training:
    """A model, its optimizer and scheduler, and a static batch."""

    def __init__(self, make: Callable[..., Any], schedule: Callable[[Any], Any], **options: Any) -> None:
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(16, 33), nn.GELU(), nn.Linear(33, 7)).cuda()
        self.optimizer = make(self.net.parameters(), **options)
        self.scheduler = schedule(self.optimizer)
        self.x = torch.zeros(8, 16, device="cuda")
        # CUDA graphs need a stream of their own; eager steps use it too.
        self.stream = torch.cuda.Stream()
        self.stream.wait_stream(torch.cuda.current_stream())
        self.losses: list[float] = []
        self.rates: list[float] = []

    def body(self) -> Tensor:
        loss = self.net(self.x).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def after(self, loss: Tensor) -> None:
        if isinstance(self.scheduler, hk.HDETOneCycleLR):
            self.scheduler.step(loss)
        else:
            self.scheduler.step()
        self.losses.append(loss.item())
        self.rates.append(float(self.optimizer.param_groups[0]["lr"]))

    def load(self, step: int) -> None:
        self.x.copy_(torch.randn(8, 16, generator=torch.Generator().manual_seed(step)))

    def eager(self, steps: range) -> Training:
        with torch.cuda.stream(self.stream):
            for step in steps:
                self.load(step)
                self.after(self.body())
        self.stream.synchronize()
        return self

    def replayed(self, steps: range) -> Training:
        graph = torch.cuda.CUDAGraph()
        kept = [tensor.detach().clone() for tensor in self.tensors()]
        with torch.cuda.stream(self.stream):
            self.optimizer.write_hyperparameters()
        with torch.cuda.graph(graph, stream=self.stream):
            loss = self.body()
        for tensor, old in zip(self.tensors(), kept, strict=True):
            assert torch.equal(tensor, old), "capturing must not run the step"
        with torch.cuda.stream(self.stream):
            for step in steps:
                self.load(step)
                graph.replay()
                self.after(loss)
        self.stream.synchronize()
        return self

    def tensors(self) -> list[Tensor]:
        states = [value for entries in self.optimizer.state.values() for value in entries.values()]
        return [*self.net.parameters(), *(state for state in states if isinstance(state, Tensor))]


def one_cycle(optimizer: Any) -> Any:
    return hk.HDETOneCycleLR(optimizer, 0.05, total_steps=40, sync_every=20, cycle_momentum=False)


def decay(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)


CASES: dict[str, tuple[Callable[..., Any], Callable[[Any], Any], dict[str, Any]]] = {
    "adamw-onecycle": (FusedAdamW, one_cycle, {"lr": 0.01}),
    "adamw-onecycle-clipped": (FusedAdamW, one_cycle, {"lr": 0.01, "max_grad_norm": 0.1}),
    "adamw-bf16-state": (FusedAdamW, one_cycle, {"lr": 0.01, "state_dtype": torch.bfloat16}),
    "lion-tensor-lr": (FusedLion, decay, {"lr": "tensor"}),
    "muon-onecycle-clipped": (FusedMuon, one_cycle, {"lr": 0.01, "max_grad_norm": 0.1, "normuon": True}),
    "muon-tensor-lr": (FusedMuon, decay, {"lr": "tensor", "adamw_lr": "tensor"}),
    "sgd-tensor-lr": (FusedSGD, decay, {"lr": "tensor", "momentum": 0.9}),
}


@pytest.mark.parametrize("gradients", ["autograd", "fixed"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_replays_equal_eager_steps(backend: tuple[str, str], case: str, gradients: str) -> None:
    make, schedule, options = CASES[case]

    def training() -> Training:
        given = options | {"backend": backend[0], "gradients": gradients}
        given |= {name: torch.tensor(0.01, device="cuda") for name, value in given.items() if value == "tensor"}
        return Training(make, schedule, **given).eager(range(WARM_UP))

    plain, captured = training(), training()
    plain.eager(range(WARM_UP, STEPS))
    captured.replayed(range(WARM_UP, STEPS))
    assert len(set(plain.rates)) == STEPS, "the schedule moves at every step"
    assert captured.rates == plain.rates
    assert captured.losses == plain.losses
    for mine, other in zip(captured.tensors(), plain.tensors(), strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("backend", BACKENDS)
def test_eager_steps_continue_after_replays(backend: tuple[str, str]) -> None:
    options = {"lr": 0.01, "backend": backend[0]}
    plain = Training(FusedAdamW, one_cycle, **options).eager(range(STEPS + 3))
    mixed = Training(FusedAdamW, one_cycle, **options).eager(range(WARM_UP)).replayed(range(WARM_UP, STEPS))
    mixed.eager(range(STEPS, STEPS + 3))
    assert mixed.losses == plain.losses
    for mine, other in zip(mixed.tensors(), plain.tensors(), strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("clip", [None, "previous"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_steps_in_the_backward_pass_are_captured_with_it(backend: tuple[str, str], clip: Any) -> None:
    def training() -> Training:
        norm = None if clip is None else 0.1
        settings = InBackward(clip=clip, chunk_bytes=300)
        options = {"lr": 0.01, "backend": backend[0], "max_grad_norm": norm, "in_backward": settings}
        return Training(FusedAdamW, one_cycle, **options).eager(range(WARM_UP))

    eager, captured = training().eager(range(WARM_UP, STEPS)), training().replayed(range(WARM_UP, STEPS))
    assert captured.losses == eager.losses
    for mine, other in zip(captured.tensors(), eager.tensors(), strict=True):
        assert torch.equal(mine, other)


def test_capturing_after_a_hyperparameter_changed_is_refused() -> None:
    training = Training(FusedAdamW, decay, lr=0.01).eager(range(WARM_UP))
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match=r"write_hyperparameters\(\) before the capture"), torch.cuda.graph(graph):
        training.body()


@pytest.mark.parametrize(
    "options", [{}, {"gradients": "fixed"}, {"max_grad_norm": 1.0}], ids=["plain", "fixed", "clip"]
)
@pytest.mark.parametrize("amp", [False, True], ids=["fp32", "amp"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_no_step_waits_for_the_device(backend: tuple[str, str], amp: bool, options: dict[str, Any]) -> None:
    training = Training(FusedAdamW, one_cycle, lr=0.01, backend=backend[0], **options)
    scaler = torch.amp.GradScaler("cuda", enabled=amp)

    def step() -> None:
        loss = training.net(training.x).square().mean()
        scaler.scale(loss).backward()
        scaler.step(training.optimizer)
        scaler.update()
        training.optimizer.zero_grad()
        training.scheduler.step(loss)

    for _ in range(3):
        step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(5):
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_versions_advance_at_the_capture() -> None:
    """Versions live on the host: a capture advances them once, and a replay not at all, as with torch.optim."""
    params = [nn.Parameter(torch.ones(3, device="cuda")) for _ in range(2)]
    optimizer = FusedAdamW(params)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    graph = torch.cuda.CUDAGraph()
    version = params[0]._version
    with torch.cuda.graph(graph):
        optimizer.step()
    assert params[0]._version == version + 1
    graph.replay()
    assert params[0]._version == version + 1
