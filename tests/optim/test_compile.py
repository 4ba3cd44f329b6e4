"""torch.compile: compiled models train with fused optimizers as eager models do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from hdet_kernels.optim import FusedAdamW
from tests.optim.cases import choose


def trained(compiler: str | None, **options: Any) -> list[torch.Tensor]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
    call = net if compiler is None else torch.compile(net, backend=compiler)
    optimizer = FusedAdamW(net.parameters(), lr=0.1, **options)
    for step in range(4):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
        call(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [param.detach() for param in net.parameters()]


@pytest.mark.parametrize("gradients", ["autograd", "fixed"])
@pytest.mark.parametrize("compiler", choose(["aot_eager", "inductor"], "aot_eager"))
def test_a_compiled_model_trains_as_an_eager_one(compiler: str, gradients: str) -> None:
    for compiled, eager in zip(trained(compiler, gradients=gradients), trained(None), strict=True):
        torch.testing.assert_close(compiled, eager, rtol=1e-4, atol=1e-5)


def test_the_optimizer_may_be_inside_a_compiled_training_step() -> None:
    def run(compiled: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        net = nn.Linear(6, 2)
        optimizer = FusedAdamW(net.parameters(), lr=0.1)

        def step(x: torch.Tensor) -> torch.Tensor:
            loss = net(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        call = torch.compile(step, backend="aot_eager") if compiled else step
        for seed in range(3):
            call(torch.randn(4, 6, generator=torch.Generator().manual_seed(seed)))
        return [param.detach() for param in net.parameters()]

    for compiled, eager in zip(run(True), run(False), strict=True):
        torch.testing.assert_close(compiled, eager)


def test_nothing_inside_a_step_is_traced() -> None:
    """Of a compiled function that calls it. Elsewhere a step is called without the guard."""

    class Watching(FusedAdamW):
        def row(self, group: Any) -> dict[str, Any]:
            callbacks.append(torch._C._dynamo.eval_frame.get_eval_frame_callback())
            return super().row(group)

    def step(x: torch.Tensor) -> torch.Tensor:
        x = x + 1
        optimizer.step()
        return x * 2

    callbacks: list[object] = []
    param = nn.Parameter(torch.ones(2))
    optimizer = Watching([param])
    param.grad = torch.ones(2)
    for rate, call in enumerate((torch.compile(step, backend="eager"), step)):
        optimizer.param_groups[0]["lr"] = 0.5**rate
        assert call(torch.ones(1)).item() == 4.0
    assert callbacks == [None, None]
