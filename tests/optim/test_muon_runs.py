"""FusedMuon in stacks, under HDET, on two ranks, and beside torch.optim.Muon on a small task."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hdet_kernels as hk
from hdet_kernels.optim import muon
from hdet_kernels.optim.muon import ROW_SQUARES
from hdet_kernels.stack import StackedParameter
from tests.ops.cases import QUICK
from tests.optim.cases import assert_equal, choose_backends
from tests.optim.muon_cases import LR, MIXED, give, parameters
from tests.ranks import run_ranks


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "separate"])
@pytest.mark.parametrize("backend", choose_backends(QUICK, "torch-cpu", "cpp-cpu"))
def test_replicas_of_a_stack_step_as_if_alone(
    backend: tuple[str, str], shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one gradient for all, the update is orthogonalised once; each replica has its own rate and decay."""
    where, device = backend
    count = 3
    rates, decays, adamw = (0.01, 0.02, 0.03), (0.1, 0.2, 0.3), (1e-3, 2e-3, 3e-3)
    shapes, missing = MIXED, 3
    start = [param.detach() for param in parameters(shapes, device=device)]
    stack = [StackedParameter(torch.stack([each] * count), shares_gradient=shared) for each in start]
    options: dict[str, Any] = {"max_grad_norm": 1.0, "normuon": True, "backend": where}
    optimizer = hk.FusedMuon(stack, **options)
    optimizer.param_groups[0]["per_replica"] = {"lr": rates, "weight_decay": decays}
    optimizer.param_groups[1]["per_replica"] = {"lr": adamw}
    alone = [[nn.Parameter(each.clone()) for each in start] for _ in range(count)]
    singles = [
        hk.FusedMuon(params, rate, decay, adamw_lr=other, **options)
        for params, rate, decay, other in zip(alone, rates, decays, adamw, strict=True)
    ]
    orthogonalised: list[int] = []
    original = muon.orthogonalise_

    def counting(x: Tensor, *arguments: Any, **named: Any) -> None:
        orthogonalised.append(len(x))
        original(x, *arguments, **named)

    for step in range(3):
        for replica, (params, single) in enumerate(zip(alone, singles, strict=True)):
            give(params, step if shared else step + 10 * replica)
            if step == 1:
                params[missing].grad = None
            single.step()
        for index, param in enumerate(stack):
            each = [params[index].grad for params in alone]
            if each[0] is not None:
                param.grad = each[0].expand_as(param) if shared else torch.stack(each)
            else:
                param.grad = None
        with monkeypatch.context() as patch:
            patch.setattr(muon, "orthogonalise_", counting)
            optimizer.step()
    matrices = sum(len(shape) == 2 for shape in shapes)
    assert sum(orthogonalised) == 3 * matrices * (1 if shared else count)
    assert len(orthogonalised) == 3 * 3, "three shapes, each at once"
    for index, param in enumerate(stack):
        own = [params[index].detach() for params in alone]
        if device == "cpu" or shared:
            assert_equal(param.detach().unbind(), own)
            continue
        # cuBLAS chooses its kernels by the number of matrices, which are rounded to bfloat16 after every product.
        for got, expected, rate in zip(param.detach().unbind(), own, rates, strict=True):
            torch.testing.assert_close(got, expected, rtol=0, atol=0.03 * rate)


def test_both_learning_rates_are_explored_apart() -> None:
    """OneCycleLR cycles the momentum of the matrices as with torch.optim.Muon, and betas stay."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    stack = hk.ReplicaStack(net, replicas=4)
    optimizer = hk.FusedMuon(stack.parameters(), lr=0.01, adamw_lr=0.01)
    scheduler = hk.HDETOneCycleLR(
        optimizer, [0.01, 0.01], total_steps=20, sync_every=5, ensemble=stack.ensemble, auto_lr=False, seed=3
    )
    inputs, targets = torch.randn(16, 6), torch.randn(16, 3)
    momenta = set()
    for _ in range(20):
        losses = stack.backward(lambda model, x, y: (model(x) - y).square().mean(), inputs, targets)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step(losses)
        momenta.add(optimizer.param_groups[0]["momentum"])
    orders = set()
    for record in scheduler.history:
        assert set(record.values) == {"lr/0", "lr/1"}
        assert all(len(set(values)) == 4 for values in record.values.values())
        orders.add(tuple(tuple(sorted(range(4), key=values.__getitem__)) for values in record.values.values()))
    assert any(matrices != rest for matrices, rest in orders), "each has permutations of its own"
    assert len(momenta) > 10
    assert optimizer.param_groups[1]["adamw_betas"] == (0.9, 0.999)
    assert optimizer.shares_state


def _two_ranks(rank: int) -> dict[str, Any]:
    """Train with gradients of this rank, through two syncs, and return what the ranks compare."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = hk.FusedMuon(net.parameters(), lr=0.01, adamw_lr=0.001, normuon=True)
    scheduler = hk.HDETOneCycleLR(
        optimizer, [0.01, 0.001], total_steps=16, sync_every=4, auto_lr=False, gradients="local"
    )
    generator = torch.Generator().manual_seed(rank)
    apart = False
    for step in range(8):
        loss = (net(torch.randn(16, 6, generator=generator)) - 1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step(loss)
        apart = apart or (step % 4 == 1 and not scheduler.in_sync)
    rates = [group["lr"] for group in optimizer.param_groups]
    flats = {name: flat.clone() for name, flat in optimizer.all_state_flats().items()}
    return {"params": [p.detach().clone() for p in net.parameters()], "state": flats, "apart": apart, "rates": rates}


@pytest.mark.full
def test_two_ranks_average_parameters_and_state_of_both_parts() -> None:
    first, second = run_ranks(2, _two_ranks)
    assert_equal(first["params"], second["params"])
    assert first["state"].keys() == {
        "0/momentum_buffer",
        f"0/{ROW_SQUARES}",
        "0/step",
        "1/exp_avg",
        "1/exp_avg_sq",
        "1/step",
    }
    assert_equal(first["state"].values(), second["state"].values())
    assert all(bool(flat.any()) for flat in first["state"].values())
    assert first["apart"]
    assert all(mine != other for mine, other in zip(first["rates"], second["rates"], strict=True))


def _in_zero(rank: int) -> list[list[Tensor]]:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # the import takes seconds

    found = []
    for wrap in (lambda params: hk.FusedMuon(params), lambda params: ZeroRedundancyOptimizer(params, hk.FusedMuon)):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 4), nn.Linear(4, 3))
        matrices, others = ([p for p in net.parameters() if (p.dim() == 2) is kind] for kind in (True, False))
        groups = [{"params": matrices, "use_muon": True, "lr": LR}, {"params": others, "use_muon": False, "lr": 0.003}]
        optimizer = wrap(groups)
        for _ in range(3):
            for param in net.parameters():
                param.grad = torch.randn(param.shape)
            optimizer.step()
        found.append([param.detach().clone() for param in net.parameters()])
    return found


@pytest.mark.full
def test_zero_redundancy_runs_it_with_groups_that_say_what_trains_them() -> None:
    for alone, ours in run_ranks(2, _in_zero):
        for mine, expected in zip(ours, alone, strict=True):
            torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-6)


def final_loss(make: Any) -> float:
    """Train a small classifier of 16 noisy directions and return its loss on all data."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(256, 16, generator=generator)
    targets = (inputs @ torch.randn(16, 8, generator=generator)).tanh().argmax(1)
    net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 8))
    with torch.no_grad():
        for param in net.parameters():
            param.copy_(0.2 * torch.randn(param.shape, generator=generator))
    optimizers = make(net)
    for step in range(40):
        batch = slice(64 * (step % 4), 64 * (step % 4) + 64)
        loss = nn.functional.cross_entropy(net(inputs[batch]), targets[batch])
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
    return nn.functional.cross_entropy(net(inputs), targets).item()


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # on CPUs without products of bfloat16
def test_it_learns_as_torch_does() -> None:
    def by_torch(net: nn.Module) -> list[torch.optim.Optimizer]:
        matrices = [param for param in net.parameters() if param.dim() == 2]
        rest = [param for param in net.parameters() if param.dim() != 2]
        return [torch.optim.Muon(matrices, LR), torch.optim.AdamW(rest, 0.01)]

    theirs = final_loss(by_torch)
    ours = final_loss(lambda net: [hk.FusedMuon(net.parameters(), LR, adamw_lr=0.01)])
    normed = final_loss(lambda net: [hk.FusedMuon(net.parameters(), LR, adamw_lr=0.01, normuon=True)])
    assert theirs < 1.0, "the task is being learned, from 2.1 on"
    assert ours <= 1.03 * theirs + 0.005
    assert normed <= 1.5 * theirs + 0.01
