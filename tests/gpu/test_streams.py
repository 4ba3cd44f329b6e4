"""Steps and syncs on several streams, with delays on the device that let the host run far ahead.

``torch.cuda._sleep`` keeps a stream busy. A missing order between streams, or memory of the host that is written again
before the device has read it, then changes the result. The expected one comes from the same work with a synchronised
device after every call.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hdet_kernels as hk
from tests.ops.cases import available
from tests.optim.cases import fused_optimizer
from tests.ranks import run_ranks
from tests.stack.trainer import data
from tests.training import Trainer, loss_of, network

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]

BACKENDS = [available("cuda", "cuda"), available("triton", "cuda")]

# Cycles: some tens of milliseconds, and some milliseconds.
LONG, SHORT = 100_000_000, 5_000_000

STEPS = 8


def parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(size, generator=generator).cuda()) for size in (100_003, 257, 1)]


def gradient(param: Tensor, step: int) -> Tensor:
    """Return a gradient that is computed on the current stream."""
    return (torch.arange(param.numel(), device="cuda") * (step + 3) % 17 - 8).float() / 8


@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 1.0}], ids=["plain", "clipped"])
@pytest.mark.parametrize("fresh", [True, False], ids=["new-gradients", "kept-gradients"])
@pytest.mark.parametrize("name", ["adamw", "sgd-momentum", "lion"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_of_a_slow_side_stream(
    backend: tuple[str, str], name: str, fresh: bool, options: dict[str, Any]
) -> None:
    """Gradients appear late on one stream; the step waits for them on another."""
    expected = parameters()
    optimizer = fused_optimizer(name, expected, backend=backend[0], **options)
    for step in range(STEPS):
        for param in expected:
            param.grad = gradient(param, step)
        optimizer.step()
        torch.cuda.synchronize()

    params = parameters()
    optimizer = fused_optimizer(name, params, backend=backend[0], **options)
    side, main = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    if not fresh:
        for param in params:
            param.grad = torch.full_like(param, float("nan"))
        torch.cuda.synchronize()
    for step in range(STEPS):
        with torch.cuda.stream(side):
            torch.cuda._sleep(SHORT)
            for param in params:
                made = gradient(param, step)
                if fresh:
                    made.record_stream(main)
                    param.grad = made
                else:
                    assert param.grad is not None
                    param.grad.copy_(made)
            ready = side.record_event()
        with torch.cuda.stream(main):
            main.wait_event(ready)
            optimizer.step()
            done = main.record_event()
        side.wait_event(done)
    torch.cuda.synchronize()
    for mine, other in zip(params, expected, strict=True):
        assert torch.equal(mine, other)


RATES = [2.0**-power for power in range(1, 21)]


@pytest.fixture
def sleeping() -> Iterator[Callable[[], None]]:
    """Put the current stream to sleep: the host goes on while the device waits."""
    yield lambda: torch.cuda._sleep(LONG)
    torch.cuda.synchronize()


@pytest.mark.parametrize("gradients", ["autograd", "fixed"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_step_has_the_learning_rate_of_its_call(
    backend: tuple[str, str], gradients: str, sleeping: Callable[[], None]
) -> None:
    """Learning rates are written while the device sleeps: θ = −Σ 2⁻ᵏ exactly, if each is used once."""
    param = nn.Parameter(torch.zeros(1000, device="cuda"))
    optimizer = hk.FusedSGD([param], lr=1.0, gradients=gradients, backend=backend[0])  # type: ignore[arg-type]
    if param.grad is None:
        param.grad = torch.empty_like(param)
    param.grad.fill_(1.0)
    sleeping()
    for number, rate in enumerate(RATES):
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
        if number == len(RATES) // 2:
            sleeping()
    assert torch.equal(param.detach().cpu(), torch.full((1000,), -sum(RATES)))


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_replay_has_the_learning_rate_of_its_write(
    backend: tuple[str, str], sleeping: Callable[[], None]
) -> None:
    param = nn.Parameter(torch.zeros(1000, device="cuda"))
    param.grad = torch.ones_like(param)
    optimizer = hk.FusedSGD([param], lr=0.0, backend=backend[0])
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            optimizer.step()
        optimizer.write_hyperparameters()
    with torch.cuda.graph(graph, stream=stream):
        optimizer.step()
    with torch.cuda.stream(stream):
        sleeping()
        for rate in RATES:
            optimizer.param_groups[0]["lr"] = rate
            optimizer.write_hyperparameters()
            graph.replay()
    stream.synchronize()
    assert torch.equal(param.detach().cpu(), torch.full((1000,), -sum(RATES)))


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_step_has_the_overflow_flag_of_its_call(backend: tuple[str, str], sleeping: Callable[[], None]) -> None:
    """Every other step is skipped by a flag that the device computes late."""
    param = nn.Parameter(torch.zeros(1000, device="cuda"))
    param.grad = torch.ones_like(param)
    optimizer: Any = hk.FusedSGD([param], lr=1.0, backend=backend[0])
    sleeping()
    for number, rate in enumerate(RATES):
        optimizer.param_groups[0]["lr"] = rate
        optimizer.grad_scale, optimizer.found_inf = None, torch.full((1,), float(number % 2), device="cuda")
        optimizer.step()
        del optimizer.grad_scale, optimizer.found_inf
    assert torch.equal(param.detach().cpu(), torch.full((1000,), -sum(RATES[::2])))


def trained_stack(gradients: Any, before: Callable[[], None]) -> list[Tensor]:
    """Train a stack over three syncs; ``before`` is called before each pass and each sync."""
    stack = hk.ReplicaStack(network().cuda(), 4, gradients=gradients)
    optimizer = hk.FusedAdamW(stack.parameters(), lr=0.01, max_grad_norm=1.0)
    scheduler = hk.HDETOneCycleLR(optimizer, 0.01, total_steps=24, sync_every=4, ensemble=stack.ensemble)
    for step in range(12):
        batch = [part.cuda() for part in data(step)]
        before()
        losses = stack.backward(loss_of, *batch)
        optimizer.step()
        optimizer.zero_grad()
        before()
        scheduler.step(losses)
    torch.cuda.synchronize()
    return [param.detach().clone() for param in stack.parameters()]


def _effect_of_sleeps(rank: int, gradients: str) -> list[float]:
    """Return the largest difference of each parameter."""
    with torch.cuda.stream(torch.cuda.Stream()):
        expected = trained_stack(gradients, torch.cuda.synchronize)
        found = trained_stack(gradients, lambda: torch.cuda._sleep(SHORT))
    return [float((mine - other).abs().max()) for mine, other in zip(found, expected, strict=True)]


@pytest.mark.parametrize("gradients", ["shared", "local"])
def test_a_stack_on_a_slow_stream(gradients: str) -> None:
    """In a process of its own: cuBLAS gives the same bits only while a process uses one stream at a time."""
    (differences,) = run_ranks(1, _effect_of_sleeps, gradients)
    assert not any(differences), differences


#: Options of averaging over processes.
AVERAGES: dict[str, dict[str, Any]] = {
    "plain": {},
    "small buckets": {"bucket_bytes": 64},
    "torch's optimizer": {"make_optimizer": torch.optim.AdamW, "bucket_bytes": 256},
    "int8": {"compress": "int8"},
    "overlapped": {"overlap_steps": 2},
    "outer": {"outer": hk.Outer(lr=0.7, momentum=0.9)},
}


def _delayed(rank: int) -> list[tuple[Tensor, Tensor]]:
    """Return the parameters of each case, without and with delays: the ranks sleep for different times."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"

    def trained(options: dict[str, Any], before: Callable[[Any], None]) -> Tensor:
        given = {"make_optimizer": hk.FusedAdamW, "auto_lr": False, **options}
        trainer = Trainer(rank, device="cuda", ddp=False, **given)
        for _ in range(12):
            before(trainer)
            trainer.train(1, before_step=before)
        torch.cuda.synchronize()
        return trainer.parameters().cpu()

    found = []
    for options in AVERAGES.values():
        plain = trained(options, lambda _: torch.cuda.synchronize())
        with torch.cuda.stream(torch.cuda.Stream()):
            late = trained(options, lambda _: torch.cuda._sleep((rank + 1) * SHORT))
        found.append((plain, late))
    return found


def test_averages_over_processes_on_slow_streams() -> None:
    for rank, found in enumerate(run_ranks(2, _delayed)):
        for name, (plain, late) in zip(AVERAGES, found, strict=True):
            assert torch.equal(plain, late), f"rank {rank}, {name}"
