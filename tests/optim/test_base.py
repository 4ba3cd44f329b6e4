"""The semantics of torch.optim that the base class provides: groups, closures, clipping, GradScaler, DDP."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from hdet_kernels.optim import FusedAdam, FusedAdamW, FusedLion, FusedMuon, FusedRowWiseAdagrad, FusedSGD
from tests.ops.cases import BACKENDS, QUICK
from tests.optim.cases import (
    DTYPES,
    PAIRS,
    QUICK_PAIRS,
    assert_as_accurate_as_torch,
    assert_close,
    assert_equal,
    choose,
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


@pytest.mark.parametrize("kind", [torch.optim.SGD, FusedSGD, FusedMuon, FusedRowWiseAdagrad])
def test_complex_gradients_of_real_parameters_are_refused_as_in_torch(kind: Any) -> None:
    param = nn.Parameter(torch.ones(3, 2))
    param.grad_dtype = None
    param.grad = torch.full((3, 2), 1 + 1j)
    with pytest.raises(RuntimeError, match=r"(?i)complex"):
        kind([param], lr=1.0).step()
    assert param.eq(1).all()


def test_names_of_parameters_are_kept() -> None:
    model = nn.Linear(2, 2)
    optimizer = FusedAdamW(model.named_parameters())
    assert optimizer.param_groups[0]["param_names"] == ["weight", "bias"]


def test_refusals_leave_everything_untouched() -> None:
    """Of what ``tests/bad_input`` has no row for."""
    params = parameters()
    optimizer = FusedAdamW(params)
    run(optimizer, params, [0])
    before = [tensor.clone() for tensor in (*params, *optimizer.state_flats().values())]
    give_gradients(params, seed=1)
    params[0].grad = torch.ones(3, 5).to_sparse()
    with pytest.raises(RuntimeError, match="sparse=False"):
        optimizer.step()
    with pytest.raises(ValueError, match="tied parameters"):
        optimizer.add_param_group({"params": [nn.Parameter(params[0].detach().view(-1))]})
    assert len(optimizer.param_groups) == 1
    assert_equal((*params, *optimizer.state_flats().values()), before)
    params[0].grad = None
    optimizer.step()


@pytest.mark.parametrize("dtype", choose(DTYPES, "fp32"))
@pytest.mark.parametrize(
    ("backend", "name"), with_backends(QUICK, PAIRS, itertools.product(("torch-cpu", "cpp-cpu"), PAIRS))
)
def test_error_is_at_most_twice_that_of_torch(backend: tuple[str, str], name: str, dtype: str) -> None:
    assert_as_accurate_as_torch(backend, name, DTYPES[dtype])


@pytest.mark.parametrize("backend", choose_backends(BACKENDS, "torch-cpu", "cpp-cpu"))
def test_lion_follows_its_equations(backend: tuple[str, str]) -> None:
    where, device = backend
    lr, (beta1, beta2), decay = 0.01, (0.9, 0.99), 0.1
    params = parameters(torch.float64, device)
    expected = [param.detach().cpu().clone() for param in params]
    moments = [torch.zeros_like(param) for param in expected]
    optimizer = FusedLion(params, lr, (beta1, beta2), decay, backend=where)
    for seed in range(4):
        give_gradients(params, seed=seed)
        for theta, m, param in zip(expected, moments, params, strict=True):
            assert param.grad is not None
            g = param.grad.cpu()
            theta.mul_(1 - lr * decay).sub_(lr * torch.sign(beta1 * m + (1 - beta1) * g))
            m.mul_(beta2).add_((1 - beta2) * g)
        optimizer.step()
    for param, theta, m in zip(params, expected, moments, strict=True):
        torch.testing.assert_close(param.detach().cpu(), theta, rtol=1e-14, atol=1e-14)
        torch.testing.assert_close(optimizer.state[param]["exp_avg"].cpu(), m, rtol=1e-14, atol=1e-14)


def test_momentum_that_a_scheduler_turns_on_and_off() -> None:
    ours, theirs = parameters(), parameters()
    fused, torchs = FusedSGD(ours, 0.1, dampening=0.5), torch.optim.SGD(theirs, 0.1, dampening=0.5, foreach=False)
    for seed, momentum in enumerate((0.0, 0.9, 0.0, 0.8)):
        for target, params in ((fused, ours), (torchs, theirs)):
            target.param_groups[0]["momentum"] = momentum
            run(target, params, [seed])
        assert shapes_of(fused.state_dict()["state"]) == shapes_of(torchs.state_dict()["state"])
    assert_close(ours, theirs)


def test_state_in_8_bits_refuses_amsgrad_from_a_group_a_checkpoint_and_a_state() -> None:
    params = parameters()
    optimizer = FusedAdamW(params, state_dtype="int8")
    run(optimizer, params, [0])
    source = FusedAdamW(parameters(), amsgrad=True)
    run(source, source.param_groups[0]["params"], [0])
    saved = source.state_dict()
    with pytest.raises(ValueError, match="amsgrad=True needs state_dtype"):
        optimizer.load_state_dict(saved)
    saved["param_groups"][0]["amsgrad"] = False
    with pytest.raises(ValueError, match="does not know max_exp_avg_sq"):
        optimizer.load_state_dict(saved)
    coded = optimizer.state_dict()
    coded["state"][0]["exp_avg_sq_scale"] = -coded["state"][0]["exp_avg_sq_scale"]  # as shares of a maximum had
    with pytest.raises(ValueError, match="exp_avg_sq in 8 bits"):
        optimizer.load_state_dict(coded)
    optimizer.param_groups[0]["amsgrad"] = True
    with pytest.raises(ValueError, match="amsgrad=True needs state_dtype"):
        run(optimizer, params, [1])


def test_a_state_dict_with_the_other_kind_of_weight_decay_is_refused() -> None:
    params = parameters()
    with pytest.raises(ValueError, match="decoupled_weight_decay=True"):
        FusedAdam(params).load_state_dict(torch.optim.AdamW(params).state_dict())
    with pytest.raises(ValueError, match="decoupled_weight_decay=False"):
        FusedAdamW(params).load_state_dict(torch.optim.Adam(params).state_dict())


def test_hooks_run_and_the_profiler_sees_the_step() -> None:
    params = parameters()
    optimizer = FusedAdamW(params)
    calls: list[str] = []
    optimizer.register_state_dict_pre_hook(lambda *_: calls.append("save"))
    optimizer.register_load_state_dict_post_hook(lambda *_: calls.append("loaded"))
    optimizer.load_state_dict(optimizer.state_dict())
    assert calls == ["save", "loaded"]
    calls.clear()
    own = [
        optimizer.register_step_pre_hook(lambda *_: calls.append("own before")),
        optimizer.register_step_post_hook(lambda *_: calls.append("own after")),
    ]
    handles = [
        register_optimizer_step_pre_hook(lambda *_: calls.append("before")),
        register_optimizer_step_post_hook(lambda *_: calls.append("after")),
    ]
    try:
        run(optimizer, params, range(1))
    finally:
        for handle in (*handles, *own):
            handle.remove()
    assert sorted(calls[:2]) == ["before", "own before"]
    assert sorted(calls[2:]) == ["after", "own after"]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        run(optimizer, params, range(1, 2))
    assert len(calls) == 4, "the hooks were removed"
    seen = {event.key for event in profile.key_averages()}
    assert "Optimizer.step#FusedAdamW.step" in seen
    assert any(key.startswith("hdet_kernels::") for key in seen), "the operator"
