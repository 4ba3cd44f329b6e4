"""FusedMuon in torch's ZeroRedundancyOptimizer, on two ranks: as it is alone, or refused before anything is changed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import hdet_kernels as hk
from hdet_kernels.optim.zero_redundancy import check_groups_of_zero
from tests.ranks import run_ranks

LR, ADAMW_LR = 0.02, 0.003


def network(*, bias: bool = True) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4, bias=bias), nn.Linear(4, 4, bias=bias), nn.Linear(4, 3, bias=bias))


def groups(module: nn.Module, **of_matrices: Any) -> list[dict[str, Any]]:
    """The parameters in two groups, of which the second has a learning rate and the first has ``of_matrices``."""
    matrices, others = ([p for p in module.parameters() if (p.dim() == 2) is kind] for kind in (True, False))
    return [
        {"params": matrices, "use_muon": True, **of_matrices},
        {"params": others, "use_muon": False, "lr": ADAMW_LR},
    ]


def trained(module: nn.Module, optimizer: Any) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        for param in module.parameters():
            param.grad = torch.randn(param.shape, generator=generator)
        optimizer.step()
    return [param.detach().clone() for param in module.parameters()]


def _in_zero(rank: int) -> dict[str, Any]:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    found: dict[str, Any] = {}
    bare, ours = network(), network()
    alone = trained(bare, hk.FusedMuon(groups(bare, lr=LR)))
    found["groups"] = trained(ours, ZeroRedundancyOptimizer(groups(ours, lr=LR), hk.FusedMuon)), alone
    bare, ours = network(bias=False), network(bias=False)
    alone = trained(bare, hk.FusedMuon(bare.parameters(), lr=LR))
    found["matrices"] = trained(ours, ZeroRedundancyOptimizer(ours.parameters(), hk.FusedMuon, lr=LR)), alone
    module = network()
    addresses = [param.data_ptr() for param in module.parameters()]
    for name, params in {"mixed": list(module.parameters()), "shared lr": groups(module)}.items():
        try:
            ZeroRedundancyOptimizer(params, hk.FusedMuon, lr=LR)
        except ValueError as error:
            found[name] = str(error)
    found["in place"] = [param.data_ptr() for param in module.parameters()] == addresses
    return found


def test_muon_runs_in_zero_redundancy_with_groups_that_say_what_trains_them_and_refuses_others() -> None:
    for found in run_ranks(2, _in_zero):
        for name in ("groups", "matrices"):
            ours, alone = found[name]
            for mine, expected in zip(ours, alone, strict=True):
                torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-6)
        assert "would divide group 0, which has no use_muon: give it two groups" in found["mixed"]
        assert "passes lr=0.02 on to all groups, and group 1, which AdamW trains" in found["shared lr"]
        assert found["in place"], "no parameter was moved"


def test_without_such_an_optimizer_nothing_is_checked() -> None:
    check_groups_of_zero()
