"""``gradients="fixed"``: permanent gradients in one flat buffer."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hdet_kernels.ops.chunks import ChunkTable
from hdet_kernels.optim import FusedAdamW, FusedSGD
from hdet_kernels.optim.watch import ITEMS_PER_STEP
from tests.ops.cases import BACKENDS
from tests.optim.cases import FUSED, QUICK_FUSED, fused_optimizer, give_gradients, parameters, with_backends
from tests.ranks import run_ranks


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))


def batch(seed: int) -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))


def train(net: nn.Module, optimizer: torch.optim.Optimizer, seeds: range, clear: Any = None) -> None:
    for seed in seeds:
        net(batch(seed)).square().mean().backward()
        optimizer.step()
        (clear or optimizer.zero_grad)()


def equal(first: nn.Module, second: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


def pair(**options: Any) -> tuple[nn.Sequential, FusedAdamW, nn.Sequential, FusedAdamW]:
    """Return the same model twice, each with its optimizer: gradients of autograd, and fixed ones."""
    plain, fixed = model(), model()
    return (
        plain,
        FusedAdamW(plain.parameters(), lr=0.1, **options),
        fixed,
        FusedAdamW(fixed.parameters(), lr=0.1, gradients="fixed", **options),
    )


@pytest.mark.parametrize(("backend", "name"), with_backends(BACKENDS, FUSED, [*QUICK_FUSED, ("triton-cpu", "adamw")]))
def test_the_step_is_the_same_as_with_gradients_of_autograd(backend: tuple[str, str], name: str) -> None:
    where, device = backend
    ours, plain = parameters(device=device), parameters(device=device)
    fixed = fused_optimizer(name, ours, backend=where, gradients="fixed")
    usual = fused_optimizer(name, plain, backend=where)
    for seed in range(3):
        give_gradients(plain, seed=seed)
        for mine, other in zip(ours, plain, strict=True):
            assert mine.grad is not None
            assert other.grad is not None
            mine.grad.copy_(other.grad)
        fixed.step()
        usual.step()
    for mine, other in zip(ours, plain, strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_stay_where_they_are(set_to_none: bool) -> None:
    plain, usual, net, optimizer = pair()
    addresses = [param.grad.data_ptr() for param in net.parameters() if param.grad is not None]
    flat = optimizer._fixed[0].flat
    assert len(addresses) == 4
    assert all(flat.data_ptr() <= a < flat.data_ptr() + flat.nbytes for a in addresses)
    train(plain, usual, range(3))
    train(net, optimizer, range(3), lambda: optimizer.zero_grad(set_to_none=set_to_none))
    assert [param.grad.data_ptr() for param in net.parameters() if param.grad is not None] == addresses
    assert not flat.any()
    assert equal(plain, net)


def test_no_address_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    params = [nn.Parameter(torch.ones(2)) for _ in range(4 * ITEMS_PER_STEP)]
    optimizer = FusedSGD(params, lr=1.0, gradients="fixed")

    def refuse(*_: object) -> None:
        raise AssertionError("addresses are collected")

    monkeypatch.setattr(ChunkTable, "match", refuse)
    for param in params:
        assert param.grad is not None
        param.grad.fill_(1.0)
    optimizer.step()
    assert all((param == 0).all() for param in params)


def test_gradients_accumulate() -> None:
    plain, usual, net, optimizer = pair()
    for each in (plain, net):
        each(batch(0)).square().mean().backward()
    train(plain, usual, range(1, 2))
    train(net, optimizer, range(1, 2))
    assert equal(plain, net)


def test_gradients_that_the_model_cleared_or_replaced_are_noticed(caplog: pytest.LogCaptureFixture) -> None:
    plain, usual, net, optimizer = pair()
    train(plain, usual, range(4))
    with caplog.at_level(logging.WARNING, "hdet_kernels"):
        train(net, optimizer, range(4), net.zero_grad)
    assert equal(plain, net)
    assert len([r for r in caplog.records if "Use optimizer.zero_grad()" in r.getMessage()]) == 1
    assert all(param.grad is not None for param in net.parameters()) is False, "the last clearing is the model's"
    optimizer.step()
    flat = optimizer._fixed[0].flat
    assert not flat.any(), "a gradient of None becomes zeros"
    assert all(param.grad is not None for param in net.parameters())


def test_frozen_parameters_are_left_alone() -> None:
    net = model()
    for param in net[0].parameters():
        param.requires_grad_(False)
    kept = [param.detach().clone() for param in net[0].parameters()]
    optimizer = FusedAdamW(net.parameters(), lr=0.1, weight_decay=0.5, gradients="fixed")
    train(net, optimizer, range(2))
    assert all(torch.equal(a, b) for a, b in zip(net[0].parameters(), kept, strict=True))
    assert all(param.grad is None for param in net[0].parameters())
    for param in net.parameters():
        param.requires_grad_(not param.requires_grad)
    others = [param.detach().clone() for param in net[2].parameters()]
    train(net, optimizer, range(2, 4))
    assert all(torch.equal(a, b) for a, b in zip(net[2].parameters(), others, strict=True)), "frozen later"
    assert not any(torch.equal(a, b) for a, b in zip(net[0].parameters(), kept, strict=True)), "unfrozen later"


def drop_gradient(param: nn.Parameter) -> None:
    param.grad = None


def freeze(param: nn.Parameter) -> None:
    param.requires_grad_(False)


def move(param: nn.Parameter) -> None:
    param.data = param.data.clone()


def move_gradient(param: nn.Parameter) -> None:
    assert param.grad is not None
    param.grad.data = param.grad.data.clone()


@pytest.mark.parametrize("change", [drop_gradient, freeze, move, move_gradient])
def test_changing_a_part_of_the_model_is_an_error_within_a_round(change: Callable[[nn.Parameter], None]) -> None:
    params = [nn.Parameter(torch.ones(2)) for _ in range(3 * ITEMS_PER_STEP)]
    optimizer = FusedSGD(params, lr=1.0, gradients="fixed")
    optimizer.step()
    change(params[-1])
    with pytest.raises(RuntimeError, match=r"1 of 12 parameters .*\(2,\).*attach_gradients\(\)"):  # noqa: PT012
        for _ in range(3):
            optimizer.step()
    optimizer.attach_gradients()
    torch.stack(params).sum().backward()
    for _ in range(4):
        optimizer.step()
        optimizer.zero_grad()
    moves = [param.requires_grad for param in params]
    assert [param.detach().tolist() for param in params] == [[1.0 - moved] * 2 for moved in moves]
    assert [param.grad is not None and not param.grad.any() for param in params] == moves


def convert_and_back(net: nn.Module) -> None:
    net.double().float()


def move_parameters(net: nn.Module) -> None:
    for param in net.parameters():
        move(param)


@pytest.mark.parametrize("change", [convert_and_back, move_parameters])
def test_replacing_the_memory_of_the_whole_model_is_repaired(change: Callable[[nn.Module], None]) -> None:
    plain, usual, net, optimizer = pair()
    train(plain, usual, range(3))
    train(net, optimizer, range(1))
    change(net)
    train(net, optimizer, range(1, 3))
    assert equal(plain, net)
    assert all(param.grad is not None and not param.grad.any() for param in net.parameters())


def test_zero_grad_clears_gradients_wherever_they_are() -> None:
    param = nn.Parameter(torch.ones(1))
    optimizer = FusedSGD([param], lr=1.0, gradients="fixed")
    param.grad = None
    (100 * param).sum().backward()
    optimizer.zero_grad()
    param.sum().backward()
    optimizer.step()
    assert param.item() == 0.0
    late = nn.Parameter(torch.ones(1))
    late.grad = torch.full((1,), 100.0)
    optimizer.param_groups[0]["params"].append(late)
    optimizer.zero_grad()
    late.sum().backward()
    optimizer.step()
    assert late.item() == 0.0


def test_another_tensor_on_the_memory_of_a_gradient_keeps_it() -> None:
    param = nn.Parameter(torch.ones(2))
    optimizer = FusedSGD([param], lr=1.0, gradients="fixed")
    param.sum().backward()
    assert param.grad is not None
    param.grad = param.grad.detach()
    optimizer.step()
    assert torch.equal(param.detach(), torch.zeros(2))


def test_unfreezing_a_part_of_a_frozen_model_is_an_error() -> None:
    params = [nn.Parameter(torch.ones(1), requires_grad=False) for _ in range(3 * ITEMS_PER_STEP)]
    optimizer = FusedSGD(params, lr=1.0, gradients="fixed")
    params[-1].requires_grad_(True)
    with pytest.raises(RuntimeError, match="1 of 12 parameters"):  # noqa: PT012
        for _ in range(3):
            params[-1].sum().backward()
            optimizer.step()


def test_loading_a_state_dict_is_complete_even_if_a_part_was_frozen() -> None:
    net = model()
    optimizer = FusedAdamW(net.parameters(), lr=0.1, gradients="fixed")
    train(net, optimizer, range(2))
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0]["lr"] = 0.5
    net[0].requires_grad_(False)
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["lr"] == 0.5
    with pytest.raises(RuntimeError, match="2 of 4 parameters"):
        optimizer.step()


def test_frozen_parameters_do_not_hide_changes_to_the_others() -> None:
    layers = nn.ModuleList([nn.Linear(1, 1) for _ in range(9)])
    layers[:8].requires_grad_(False)
    weight = layers[8].weight
    with torch.no_grad():
        weight.fill_(1.0)
    optimizer = FusedSGD(layers.parameters(), lr=1.0, gradients="fixed")
    seen = []
    for step in range(6):
        layers.zero_grad()
        (weight * (1.0 if step % 2 == 0 else -1.0)).sum().backward()
        optimizer.step()
        seen.append(weight.item())
    assert seen == [0.0, 1.0, 0.0, 1.0, 0.0, 1.0]


def test_attaching_keeps_the_gradients_of_tied_parameters() -> None:
    for frozen in (True, False):
        first = nn.Parameter(torch.ones(2))
        second = nn.Parameter(first.data)
        optimizer = FusedSGD([first, second], lr=1.0, gradients="fixed")
        if frozen:
            second.requires_grad_(False)
        else:
            second.grad = None
        first.sum().backward()
        if not frozen:
            second.sum().backward()
        optimizer.attach_gradients()
        optimizer.step()
        assert torch.equal(first.detach(), torch.full((2,), 0.0 if frozen else -1.0))


def test_gradients_of_another_dtype_are_refused_before_anything_moves() -> None:
    first, second = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    second.grad_dtype = torch.bfloat16
    address = first.data_ptr()
    with pytest.raises(ValueError, match=r"parameter 1 .*bfloat16 \(grad_dtype\).*leave"):
        FusedSGD([first, second], gradients="fixed")
    assert (first.data_ptr(), first.grad) == (address, None)


def test_tied_parameters_and_sparse_gradients_are_summed() -> None:
    table = nn.Embedding(5, 3, sparse=True)
    head = nn.Parameter(table.weight.data)
    start = table.weight.detach().clone()
    optimizer = FusedSGD([table.weight, head], lr=1.0, gradients="fixed")
    (table(torch.tensor([1, 1, 4])).sum() + head.sum()).backward()
    optimizer.step()
    expected = torch.ones(5, 3)
    expected[1] += 2
    expected[4] += 1
    torch.testing.assert_close(table.weight.detach(), start - expected)
    assert head.data_ptr() == table.weight.data_ptr()


def test_copies_and_later_groups_have_their_own_gradients() -> None:
    net = model()
    optimizer = FusedAdamW(net[0].parameters(), lr=0.1, gradients="fixed")
    net(batch(0)).square().mean().backward()
    optimizer.add_param_group({"params": list(net[2].parameters())})
    reference = model()
    usual = FusedAdamW(reference.parameters(), lr=0.1)
    train(reference, usual, range(1))
    optimizer.step()
    optimizer.zero_grad()
    assert equal(net, reference), "gradients that existed when the group was added are kept"
    twin, other = copy.deepcopy((net, optimizer))
    train(twin, other, range(1, 2))
    assert equal(net, reference)
    train(net, optimizer, range(1, 2))
    assert equal(net, twin)


def _train_with_ddp(rank: int) -> dict[str, list[Tensor]]:
    found = {}
    for gradients in ("fixed", "autograd"):
        net = model()
        optimizer = FusedAdamW(net.parameters(), lr=0.1, gradients=gradients)  # type: ignore[arg-type]
        wrapped = nn.parallel.DistributedDataParallel(net)
        for step in range(3):
            wrapped(batch(2 * step + rank)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        found[gradients] = [param.detach() for param in net.parameters()]
    return found


def test_distributed_data_parallel() -> None:
    first, second = run_ranks(2, _train_with_ddp)
    for a, b, usual in zip(first["fixed"], second["fixed"], first["autograd"], strict=True):
        assert torch.equal(a, b)
        torch.testing.assert_close(a, usual)
