"""The semantics of torch.optim that the base class provides: groups, closures, clipping, GradScaler, DDP."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hdet_kernels.optim import FusedAdamW, FusedSGD
from tests.ops.cases import QUICK
from tests.optim.cases import (
    PAIRS,
    QUICK_PAIRS,
    assert_close,
    assert_equal,
    choose_backends,
    fused_optimizer,
    give_gradients,
    parameters,
    run,
    shapes_of,
    torch_optimizer,
    with_backends,
)
from tests.ranks import run_ranks


@pytest.mark.parametrize(("backend", "name"), with_backends(QUICK, PAIRS, QUICK_PAIRS))
class TestAsTorch:
    def test_parameters_without_gradient_are_skipped_as_in_torch(self, backend: tuple[str, str], name: str) -> None:
        where, device = backend
        ours, theirs = parameters(device=device), parameters(device=device)
        fused, torchs = fused_optimizer(name, ours, backend=where), torch_optimizer(name, theirs)
        for step, absent in enumerate([(0,), (), (0, 1, 2, 3, 4, 5), (2, 5)]):
            give_gradients(ours, theirs, seed=step)
            for index in absent:
                ours[index].grad = theirs[index].grad = None
            fused.step()
            torchs.step()
            assert shapes_of(fused.state_dict()["state"]) == shapes_of(torchs.state_dict()["state"])
        assert_close(ours, theirs)
        for mine, other in zip(ours, theirs, strict=True):
            if "step" in torchs.state[other]:
                assert fused.state[mine]["step"].item() == torchs.state[other]["step"].item()

    def test_groups_have_their_own_options_and_can_be_added_later(self, backend: tuple[str, str], name: str) -> None:
        where, device = backend
        ours, theirs = parameters(device=device), parameters(device=device)

        def groups(params: list[nn.Parameter]) -> list[dict[str, Any]]:
            return [{"params": params[:2], "lr": 0.02}, {"params": params[2:4], "weight_decay": 0.3}]

        fused = fused_optimizer(name, groups(ours), backend=where)
        torchs = torch_optimizer(name, groups(theirs))
        for target, params in ((fused, ours), (torchs, theirs)):
            run(target, params[:4], range(2))
            target.add_param_group({"params": params[4:], "lr": 0.5, "maximize": True})
            if isinstance(target, torch.optim.Adagrad):
                # Before torch 2.13 its state is made in the constructor alone, and a later group has none.
                start = target.defaults["initial_accumulator_value"]
                for param in params[4:]:
                    if not target.state[param]:
                        target.state[param] = {"step": torch.tensor(0.0), "sum": torch.full_like(param, start)}
            run(target, params, range(2, 4))
        assert_close(ours, theirs)
        assert len(fused.buckets.params) == len(ours)

    def test_scheduler_closure_and_tensor_learning_rate(self, backend: tuple[str, str], name: str) -> None:
        where, device = backend
        ours, theirs = parameters(device=device), parameters(device=device)
        fused = fused_optimizer(name, ours, backend=where, lr=torch.tensor(0.1, device=device))
        torchs = torch_optimizer(name, theirs)
        for target, params in ((torchs, theirs), (fused, ours)):
            cycles = "momentum" in target.defaults or "betas" in target.defaults
            schedule = torch.optim.lr_scheduler.OneCycleLR(target, 0.1, total_steps=5, cycle_momentum=cycles)
            for seed in range(4):

                def closure(params: list[nn.Parameter] = params, seed: int = seed, target: Any = target) -> float:
                    assert torch.is_grad_enabled()
                    # GradScaler refuses closures. Lightning clips gradients in one unless step() would unscale them.
                    assert not getattr(target, "_step_supports_amp_scaling", False)
                    give_gradients(params, seed=seed)
                    return 7.0 + seed

                assert target.step(closure) == 7.0 + seed
                schedule.step()
        assert fused._step_supports_amp_scaling
        assert_close(ours, theirs)
        assert isinstance(fused.param_groups[0]["lr"], Tensor)

    def test_gradient_clipping_is_clip_grad_norm(self, backend: tuple[str, str], name: str) -> None:
        where, device = backend
        ours, theirs = parameters(device=device), parameters(device=device)
        fused = fused_optimizer(name, ours, backend=where, max_grad_norm=5.0)
        torchs = torch_optimizer(name, theirs)
        for seed, scale in enumerate((1.0, 0.001, 100.0)):
            give_gradients(ours, theirs, seed=seed, scale=scale)
            kept = [param.grad.clone() for param in ours if param.grad is not None]
            torch.nn.utils.clip_grad_norm_(theirs, 5.0)
            torchs.step()
            fused.step()
            assert_equal([param.grad for param in ours if param.grad is not None], kept)
        assert_close(ours, theirs)

    @pytest.mark.parametrize("unscale", [False, True], ids=["scaled", "unscaled-by-user"])
    def test_grad_scaler(self, backend: tuple[str, str], name: str, unscale: bool) -> None:
        where, device = backend
        ours, theirs = parameters(device=device), parameters(device=device)
        for target, params in (
            (fused_optimizer(name, ours, backend=where), ours),
            (torch_optimizer(name, theirs), theirs),
        ):
            scaler = torch.amp.GradScaler(device, init_scale=1024.0)
            for seed in range(4):
                scaler.scale(torch.zeros((), device=device))
                give_gradients(params, seed=seed, scale=1024.0 if seed < 2 else 512.0)
                if seed == 1:  # the scale halves here, and the step must leave no trace
                    assert params[2].grad is not None
                    params[2].grad[-1] = float("inf")
                if unscale:
                    scaler.unscale_(target)
                scaler.step(target)
                scaler.update()
        assert_close(ours, theirs)


def _train_with_ddp(_: int, backend: tuple[str, str], order: str) -> tuple[list[Tensor], list[Tensor]]:
    where, device = backend
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3)).to(device)
    plain = copy.deepcopy(model)
    if order == "ddp-first":
        wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
        optimizer = FusedAdamW(wrapped.parameters(), backend=where)
    else:
        optimizer = FusedAdamW(model.parameters(), backend=where)
        wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    other = torch.optim.AdamW(plain.parameters(), foreach=False)
    for step in range(3):
        x = torch.full((4, 5), 0.1 * (step + 1), device=device)
        for target, net in ((optimizer, wrapped), (other, plain)):
            target.zero_grad(set_to_none=step != 1)
            net(x).square().sum().backward()
            target.step()
    return [p.detach().cpu() for p in model.parameters()], [p.detach().cpu() for p in plain.parameters()]


@pytest.mark.parametrize("backend", choose_backends(QUICK, "torch-cpu", "cpp-cpu"))
@pytest.mark.parametrize("order", ["ddp-first", "optimizer-first"])
def test_distributed_data_parallel(backend: tuple[str, str], order: str) -> None:
    """In a process of its own: freeing DDP after the last reference to its gloo group can deadlock in torch."""
    ((ours, theirs),) = run_ranks(1, _train_with_ddp, backend, order)
    assert_close(ours, theirs)


def test_a_changed_max_grad_norm_applies_at_the_next_step() -> None:
    param = nn.Parameter(torch.zeros(2))
    optimizer = FusedSGD([param], lr=1.0, max_grad_norm=1.0)
    for norm, expected in ((1.0, [-0.6, -0.8]), (5.0, [-3.6, -4.8]), (None, [-6.6, -8.8])):
        optimizer.max_grad_norm = norm
        param.grad = torch.tensor([3.0, 4.0])
        optimizer.step()
        torch.testing.assert_close(param.detach(), torch.tensor(expected))


def test_integer_gradients_are_used_as_numbers() -> None:
    for dtype, width in ((torch.float32, torch.int32), (torch.float64, torch.int64)):
        param = nn.Parameter(torch.ones(3, dtype=dtype))
        param.grad_dtype = None
        param.grad = torch.tensor([1, 2, 3], dtype=width)
        FusedSGD([param], lr=1.0).step()
        assert param.tolist() == [0.0, -1.0, -2.0]


def test_names_of_parameters_are_kept() -> None:
    model = nn.Linear(2, 2)
    optimizer = FusedAdamW(model.named_parameters())
    assert optimizer.param_groups[0]["param_names"] == ["weight", "bias"]


def test_refusals_leave_everything_untouched() -> None:
    params = parameters()
    optimizer = FusedAdamW(params)
    run(optimizer, params, [0])
    before = [tensor.clone() for tensor in (*params, *optimizer.state_flats().values())]
    give_gradients(params, seed=1)
    params[0].grad = torch.ones(3, 5).to_sparse()
    with pytest.raises(RuntimeError, match=r"sparse=False"):
        optimizer.step()
    shared = params[0].detach().view(-1)
    for group, message in (
        ({"params": [nn.Parameter(torch.ones(2, dtype=torch.complex64))]}, "view_as_real"),
        ({"params": [nn.Parameter(torch.ones(2)[::2].expand(3))]}, "contiguous"),
        ({"params": [nn.Parameter(torch.ones(2))], "lr": -1.0}, "lr must be .* got -1.0"),
        ({"params": [nn.Parameter(shared)]}, "tied parameters must be in one group"),
        ({"params": [params[0]]}, "more than one parameter group"),
    ):
        with pytest.raises(ValueError, match=message):
            optimizer.add_param_group(group)
    other = optimizer.state_dict()
    other["state"] = {0: {"exp_avg": torch.ones(7), "exp_avg_sq": torch.ones(7), "step": torch.tensor(1.0)}}
    with pytest.raises(ValueError, match=r"exp_avg.*\(7,\).*\(3, 5\)"):
        optimizer.load_state_dict(other)
    assert len(optimizer.param_groups) == 1
    assert_equal((*params, *optimizer.state_flats().values()), before)
    params[0].grad = None
    optimizer.step()


def test_no_parameters_and_unknown_options_are_refused() -> None:
    with pytest.raises(ValueError, match="empty parameter list"):
        FusedAdamW([])
    with pytest.raises(TypeError, match="fused"):
        FusedAdamW([nn.Parameter(torch.ones(1))], fused=True)  # type: ignore[call-arg]
