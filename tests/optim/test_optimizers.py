"""The fused optimizers against torch.optim: results, semantics and checkpoints."""

from __future__ import annotations

import copy
import functools
import io
import pickle
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hdet_kernels.optim import FusedAdagrad, FusedAdam, FusedAdamW, FusedLion, FusedOptimizer, FusedSGD
from tests.ops.cases import BACKENDS, QUICK, available
from tests.optim.cases import (
    FUSED,
    PAIRS,
    fused_optimizer,
    give_gradients,
    parameters,
    run,
    torch_optimizer,
)


def assert_equal(first: Iterable[Tensor], second: Iterable[Tensor]) -> None:
    for a, b in zip(first, second, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def assert_close(first: Iterable[Tensor], second: Iterable[Tensor]) -> None:
    """Equal up to the rounding of a few operations."""
    for a, b in zip(first, second, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=["fp32", "fp64", "bf16"])
@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("backend", QUICK)
def test_error_is_at_most_twice_that_of_torch(backend: tuple[str, str], name: str, dtype: torch.dtype) -> None:
    where, device = backend
    ours, theirs = parameters(dtype, device), parameters(dtype)
    truth = [nn.Parameter(param.detach().double().clone()) for param in theirs]
    run(fused_optimizer(name, ours, backend=where), ours, range(5))
    run(torch_optimizer(name, theirs), theirs, range(5))
    run(torch_optimizer(name, truth), truth, range(5))
    for mine, plain, exact in zip(ours, theirs, truth, strict=True):
        if exact.numel() == 0:
            continue
        error = (mine.detach().cpu().double() - exact).abs().max()
        rounding = torch.finfo(dtype).eps * exact.abs().max()
        # In float64 there is no better truth than torch itself: a few roundings of the result.
        allowed = 8 * rounding if dtype == torch.float64 else 2 * (plain.double() - exact).abs().max() + rounding
        assert error <= allowed, f"shape {tuple(exact.shape)}: error {error:.3g}, allowed {allowed:.3g}"


@pytest.mark.parametrize("backend", BACKENDS)
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


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("backend", QUICK)
class TestCheckpoints:
    def test_state_of_torch_continues_here(self, backend: tuple[str, str], name: str) -> None:
        where, device = backend
        ours, theirs = parameters(device=device), parameters(device=device)
        torchs = torch_optimizer(name, theirs, lr=0.05)
        run(torchs, theirs, range(3))
        fused = fused_optimizer(name, ours, backend=where)
        flats = [flat.data_ptr() for flat in fused.state_flats().values()]
        with torch.no_grad():
            for mine, other in zip(ours, theirs, strict=True):
                mine.copy_(other)
        fused.load_state_dict(_through_a_file(torchs.state_dict()))
        assert fused.param_groups[0]["lr"] == 0.05
        assert "foreach" not in fused.param_groups[0]
        assert [flat.data_ptr() for flat in fused.state_flats().values()][: len(flats)] == flats, (
            "state must stay in its buffers"
        )
        run(torchs, theirs, range(3, 6))
        run(fused, ours, range(3, 6))
        assert_close(ours, theirs)

    def test_state_of_here_continues_in_torch(self, backend: tuple[str, str], name: str) -> None:
        where, device = backend
        ours, theirs = parameters(device=device), parameters(device=device)
        fused, torchs = fused_optimizer(name, ours, backend=where), torch_optimizer(name, theirs)
        for target in (fused, torchs):
            target.param_groups[0]["lr"] = 0.05
        run(fused, ours, range(3))
        run(torchs, theirs, range(3))
        assert _shape_of(fused.state_dict()["state"]) == _shape_of(torchs.state_dict()["state"])
        other = torch_optimizer(name, theirs)
        other.load_state_dict(_through_a_file(fused.state_dict()))
        assert other.param_groups[0]["lr"] == 0.05
        run(fused, ours, range(3, 6))
        run(other, theirs, range(3, 6))
        assert_close(ours, theirs)

    def test_before_the_first_step(self, backend: tuple[str, str], name: str) -> None:
        where, device = backend
        ours, theirs = parameters(device=device), parameters(device=device)
        fused, torchs = fused_optimizer(name, ours, backend=where), torch_optimizer(name, theirs)
        assert _shape_of(fused.state_dict()["state"]) == _shape_of(torchs.state_dict()["state"])
        torchs.load_state_dict(_through_a_file(fused.state_dict()))
        run(torchs, theirs, range(2))
        run(fused, ours, range(2))
        assert_close(ours, theirs)


def _through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def _shape_of(state: dict[int, dict[str, Tensor]]) -> dict[int, dict[str, tuple[int, ...]]]:
    return {index: {name: tuple(value.shape) for name, value in entry.items()} for index, entry in state.items()}


@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize("backend", QUICK)
class TestCopies:
    def test_resuming_from_a_state_dict_is_exact(self, backend: tuple[str, str], name: str) -> None:
        where, device = backend
        straight, resumed = parameters(device=device), parameters(device=device)
        run(fused_optimizer(name, straight, backend=where), straight, range(4))
        first = fused_optimizer(name, resumed, backend=where)
        run(first, resumed, range(2))
        second = fused_optimizer(name, resumed, backend=where)
        second.load_state_dict(_through_a_file(first.state_dict()))
        run(second, resumed, range(2, 4))
        assert_equal(straight, resumed)

    def test_loading_its_own_state_changes_nothing(self, backend: tuple[str, str], name: str) -> None:
        where, device = backend
        params = parameters(device=device)
        optimizer = fused_optimizer(name, params, backend=where)
        run(optimizer, params, range(2))
        before = [flat.clone() for flat in optimizer.state_flats().values()]
        optimizer.load_state_dict(optimizer.state_dict())
        assert_equal(list(optimizer.state_flats().values()), before)

    @pytest.mark.parametrize(
        "duplicate",
        [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))],
        ids=["deepcopy", "pickle"],
    )
    def test_a_copy_is_complete_and_apart(
        self, backend: tuple[str, str], name: str, duplicate: Callable[[Any], Any]
    ) -> None:
        where, device = backend
        params = parameters(device=device)
        optimizer = fused_optimizer(name, params, backend=where, max_grad_norm=1.0)
        run(optimizer, params, range(2))
        other_params, other = duplicate((params, optimizer))
        kept = [param.detach().clone() for param in params]
        run(other, other_params, range(2, 4))
        assert_equal(params, kept)
        assert other.max_grad_norm == 1.0
        assert other.options.backend == where
        run(optimizer, params, range(2, 4))
        assert_equal(params, other_params)


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("backend", QUICK)
class TestSemantics:
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
            assert _shape_of(fused.state_dict()["state"]) == _shape_of(torchs.state_dict()["state"])
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

                def closure(params: list[nn.Parameter] = params, seed: int = seed) -> float:
                    assert torch.is_grad_enabled()
                    give_gradients(params, seed=seed)
                    return 7.0 + seed

                assert target.step(closure) == 7.0 + seed
                schedule.step()
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


@pytest.mark.parametrize("backend", BACKENDS)
class TestHomes:
    def test_state_is_made_of_views_of_flat_buffers(self, backend: tuple[str, str]) -> None:
        where, device = backend
        params = parameters(device=device)
        optimizer = FusedAdamW(params, amsgrad=True, backend=where)
        run(optimizer, params, [0])
        flats = list(optimizer.state_flats().values())
        assert len(flats) == 3
        optimizer.state[params[0]]["exp_avg"].fill_(123.0)
        assert (flats[0] == 123.0).sum() == params[0].numel()
        assert optimizer.state[params[-1]]["exp_avg"].stride() == params[-1].stride()

    def test_emptied_state_starts_again(self, backend: tuple[str, str]) -> None:
        where, device = backend
        ours, fresh = parameters(device=device), parameters(device=device)
        optimizer = FusedAdamW(ours, backend=where)
        run(optimizer, ours, range(2))
        optimizer.state.clear()
        with torch.no_grad():
            for mine, other in zip(ours, fresh, strict=True):
                mine.copy_(other)
        run(optimizer, ours, [5])
        run(FusedAdamW(fresh, backend=where), fresh, [5])
        assert_equal(ours, fresh)

    def test_a_parameter_that_moved_away_is_brought_back(self, backend: tuple[str, str]) -> None:
        where, device = backend
        ours, theirs = parameters(device=device), parameters(device=device)
        fused, other = FusedAdamW(ours, backend=where), FusedAdamW(theirs, backend=where)
        run(fused, ours, [0])
        run(other, theirs, [0])
        with torch.no_grad():
            ours[0].data = ours[0].data.clone() + 1
            theirs[0].add_(1)
        run(fused, ours, [1])
        run(other, theirs, [1])
        assert_equal(ours, theirs)
        ours[2].data = ours[2].data.double()
        before = [param.detach().clone() for param in ours]
        with pytest.raises(RuntimeError, match=r"float64.*before building the optimizer"):
            run(fused, ours, [2])
        assert_equal(ours, before)

    def test_a_parameter_that_was_transposed_in_its_place(self, backend: tuple[str, str]) -> None:
        where, device = backend
        start = torch.arange(9.0, device=device).view(3, 3)
        ours, theirs = nn.Parameter(start.clone()), nn.Parameter(start.t().clone())
        optimizer = FusedSGD([ours], lr=0.5, backend=where)
        ours.data = ours.data.t()
        for param in (ours, theirs):
            param.grad = torch.empty_like(param).copy_(torch.arange(9.0).view(3, 3) + 1)
        optimizer.step()
        torch.optim.SGD([theirs], lr=0.5).step()
        assert_equal([ours], [theirs])

    def test_mixed_dtypes_have_a_home_each(self, backend: tuple[str, str]) -> None:
        where, device = backend
        params = [*parameters(torch.float32, device), *parameters(torch.float64, device, seed=1)]
        theirs = copy.deepcopy(params)
        fused = FusedAdam(params, max_grad_norm=1.0, backend=where)
        torchs = torch.optim.Adam(theirs, foreach=False)
        give_gradients(params, theirs, seed=0)
        torch.nn.utils.clip_grad_norm_(theirs, 1.0)
        fused.step()
        torchs.step()
        assert len(fused.buckets.flats) == 2
        assert_close(params, theirs)

    def test_gradients_of_another_layout(self, backend: tuple[str, str]) -> None:
        where, device = backend
        ours, theirs = parameters(device=device), parameters(device=device)
        give_gradients(ours, theirs, seed=0)
        assert ours[-1].grad is not None
        ours[-1].grad = ours[-1].grad.contiguous()
        ours[2].grad = ours[2].grad[:1].expand(4097)
        theirs[2].grad = ours[2].grad.clone()
        FusedAdamW(ours, backend=where).step()
        FusedAdamW(theirs, backend=where).step()
        assert_equal(ours, theirs)

    def test_tied_parameters(self, backend: tuple[str, str]) -> None:
        where, device = backend
        once, twice = parameters(device=device)[:1], parameters(device=device)[:1]
        alias = nn.Parameter(twice[0].data)
        fused = FusedAdamW([twice[0], alias], backend=where)
        give_gradients(once, seed=0)
        assert once[0].grad is not None
        twice[0].grad, alias.grad = once[0].grad * 0.25, once[0].grad * 0.75
        FusedAdamW(once, backend=where).step()
        fused.step()
        assert_close(once, twice)
        assert alias.data_ptr() == twice[0].data_ptr()
        assert fused.state[alias]["exp_avg"].data_ptr() == fused.state[twice[0]]["exp_avg"].data_ptr()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("order", ["ddp-first", "optimizer-first"])
def test_distributed_data_parallel(backend: tuple[str, str], order: str) -> None:
    where, device = backend
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
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
        assert_close(model.parameters(), plain.parameters())
    finally:
        torch.distributed.destroy_process_group()


def test_momentum_that_a_scheduler_turns_on_and_off() -> None:
    ours, theirs = parameters(), parameters()
    fused, torchs = FusedSGD(ours, 0.1, dampening=0.5), torch.optim.SGD(theirs, 0.1, dampening=0.5, foreach=False)
    for seed, momentum in enumerate((0.0, 0.9, 0.0, 0.8)):
        for target, params in ((fused, ours), (torchs, theirs)):
            target.param_groups[0]["momentum"] = momentum
            run(target, params, [seed])
        assert _shape_of(fused.state_dict()["state"]) == _shape_of(torchs.state_dict()["state"])
    assert_close(ours, theirs)


def test_hooks_run() -> None:
    params = parameters()
    optimizer = FusedAdamW(params)
    seen: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    optimizer.register_state_dict_pre_hook(lambda *_: seen.append("save"))
    optimizer.register_load_state_dict_post_hook(lambda *_: seen.append("loaded"))
    run(optimizer, params, [0])
    optimizer.load_state_dict(optimizer.state_dict())
    assert seen == ["before", "after", "save", "loaded"]


def test_hooks_of_all_optimizers_run_and_the_profiler_sees_the_step() -> None:
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    params = parameters()
    optimizer = FusedAdamW(params)
    calls: list[str] = []
    handles = [
        register_optimizer_step_pre_hook(lambda *_: calls.append("before")),
        register_optimizer_step_post_hook(lambda *_: calls.append("after")),
    ]
    try:
        run(optimizer, params, range(1))
    finally:
        for handle in handles:
            handle.remove()
    assert calls == ["before", "after"]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        run(optimizer, params, range(1, 2))
    assert calls == ["before", "after"]
    assert "Optimizer.step#FusedAdamW.step" in {event.key for event in profile.key_averages()}


def test_a_step_that_is_overridden_runs_hooks_once() -> None:
    class Counting(FusedAdamW):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    params = parameters()
    run(FusedAdamW(params), params, range(1))
    optimizer = Counting(params)
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    run(optimizer, params, range(1))
    assert calls == ["before"]


def test_a_step_that_copied_the_marks_of_another_has_hooks_too() -> None:
    class Wrapped(FusedAdamW):
        @functools.wraps(FusedAdamW.step)
        def step(self, *args: Any, **kwargs: Any) -> Any:
            return super().step(*args, **kwargs)

    params = parameters()
    optimizer = Wrapped(params)
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    run(optimizer, params, range(2))
    assert calls == ["before", "before"]


@pytest.mark.parametrize("gradients", ["autograd", "fixed"])
def test_a_parameter_that_changes_its_group_by_hand_changes_its_options(gradients: Any) -> None:
    params = [nn.Parameter(torch.ones(1)) for _ in range(3)]
    optimizer = FusedSGD(
        [{"params": params[:2], "lr": 0.1}, {"params": params[2:], "lr": 0.5}], lr=1.0, gradients=gradients
    )
    groups = optimizer.param_groups
    groups[1]["params"].insert(0, groups[0]["params"].pop())
    torch.cat(list(params)).sum().backward()
    optimizer.step()
    torch.testing.assert_close(torch.cat(list(params)).detach(), torch.tensor([0.9, 0.5, 0.5]))
    state = optimizer.state_dict()
    del groups[1]
    assert len(optimizer.state_dict()["param_groups"]) == 1
    with pytest.raises(ValueError, match="different number of parameter groups"):
        optimizer.load_state_dict(state)


def test_gradients_of_whole_numbers_are_numbers() -> None:
    for dtype, width in ((torch.float32, torch.int32), (torch.float64, torch.int64)):
        param = nn.Parameter(torch.ones(3, dtype=dtype))
        param.grad_dtype = None
        param.grad = torch.tensor([1, 2, 3], dtype=width)
        FusedSGD([param], lr=1.0).step()
        assert param.tolist() == [0.0, -1.0, -2.0]


@pytest.mark.parametrize("seed", [-1, 2**32, 1.5, "x", None])
def test_a_seed_that_is_none_is_refused(seed: Any) -> None:
    param = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer = FusedSGD([param], stochastic_rounding=True)
    optimizer.param_groups[0]["rounding_seed"] = seed
    param.grad = torch.ones_like(param)
    with pytest.raises(ValueError, match=r"rounding_seed must be a whole number from 0 .* got"):
        optimizer.step()
    assert torch.equal(param.detach(), torch.ones_like(param))


def test_a_state_that_is_given_before_the_first_step_counts() -> None:
    first, second = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    optimizer = FusedAdamW([first, second])
    assert optimizer.state[second] == {}  # looked at, as torch's defaultdict allows
    first.grad = torch.ones(1)
    optimizer.step()
    optimizer.state[second] = {"step": torch.tensor(7.0), "exp_avg": torch.ones(1), "exp_avg_sq": torch.ones(1)}
    second.grad = torch.ones(1)
    optimizer.step()
    assert optimizer.state[second]["step"].item() == 8.0
    assert optimizer.state[first]["step"].item() == 2.0


def many(count: int) -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(4)) for _ in range(count)]


@pytest.mark.parametrize("backend", [available("torch", "cpu"), available("cpp", "cpu")])
def test_gradients_of_several_dtypes_among_many(backend: tuple[str, str]) -> None:
    params = many(1300)
    for param in params[600:]:
        param.grad_dtype = torch.bfloat16
    optimizer = FusedSGD(params, lr=1.0, backend=backend[0])
    for steps in range(1, 4):
        torch.stack([param.sum() for param in params]).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert all(torch.equal(param.detach(), torch.full((4,), -float(steps))) for param in params)


def test_one_moved_parameter_among_many_is_noticed_at_the_next_step() -> None:
    params = many(1500)
    optimizer = FusedSGD(params, lr=1.0)
    for steps in range(1, 4):
        params[10].data = params[10].data.clone()
        for param in params:
            param.grad = torch.ones(4)
        optimizer.step()
        assert all(torch.equal(param.detach(), torch.full((4,), -float(steps))) for param in params)


def test_a_parameter_that_shrank_in_its_place_is_refused() -> None:
    param, other = nn.Parameter(torch.ones(8)), nn.Parameter(torch.ones(2))
    optimizer = FusedSGD([param, other], lr=1.0)
    flat = optimizer.buckets.flats[0].clone()
    param.data = param.data[:2]
    param.sum().backward()
    with pytest.raises(RuntimeError, match=r"\(2,\).*\(8,\)"):
        optimizer.step()
    assert torch.equal(optimizer.buckets.flats[0], flat)


def test_parameters_exchanged_in_the_groups_are_the_ones_that_train() -> None:
    kept, old, new = (nn.Parameter(torch.ones(2)) for _ in range(3))
    optimizer = FusedSGD([{"params": [kept]}, {"params": [old], "lr": 0.5}], lr=1.0, momentum=0.9)
    run(optimizer, [kept, old], range(2))
    momentum = optimizer.state[kept]["momentum_buffer"].clone()
    optimizer.param_groups[1]["params"][0] = new
    new.grad = torch.ones(2)
    before = old.detach().clone()
    kept.grad = torch.zeros(2)
    optimizer.step()
    assert torch.equal(new.detach(), torch.full((2,), 0.5))
    assert torch.equal(old.detach(), before)
    assert torch.equal(optimizer.state[kept]["momentum_buffer"], momentum * 0.9)
    del optimizer.param_groups[0]
    optimizer.step()
    assert torch.equal(new.detach(), torch.full((2,), 0.5 - 0.5 * 1.9))


def test_an_entry_of_the_state_that_is_replaced_starts_again() -> None:
    param = nn.Parameter(torch.zeros(2))
    optimizer = FusedSGD([param], lr=1.0, momentum=0.5)
    for _ in range(2):
        param.grad = torch.ones(2)
        optimizer.step()
    optimizer.state[param] = {}
    assert optimizer.state_dict()["state"] == {0: {}}
    optimizer.step()
    assert torch.equal(optimizer.state[param]["momentum_buffer"], torch.ones(2))
    assert list(optimizer.state_dict()["state"][0]) == ["momentum_buffer"]


def test_hyperparameters_that_change_in_their_place_are_seen() -> None:
    param = nn.Parameter(torch.zeros(2))
    optimizer = FusedAdamW([param], lr=0.5, betas=[0.9, 0.99], weight_decay=0.0)  # type: ignore[arg-type]
    assert isinstance(optimizer.param_groups[0]["betas"], tuple)
    rate = torch.tensor(0.5)
    for expected in (-0.5, -1.0, -3.0):
        param.grad = torch.ones(2)
        optimizer.step()
        torch.testing.assert_close(param.detach(), torch.full((2,), expected))
        optimizer.param_groups[0]["lr"] = rate  # of the same value, then of another
        rate.fill_(0.5 if expected > -1.0 else 2.0)


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


def test_adam_with_decoupled_decay_is_not_loaded_into_the_wrong_class() -> None:
    params = parameters()
    with pytest.raises(ValueError, match=r"decoupled_weight_decay=True.*FusedAdamW"):
        FusedAdam(params).load_state_dict(torch.optim.AdamW(params).state_dict())
    with pytest.raises(ValueError, match=r"decoupled_weight_decay=False.*load it into FusedAdam$"):
        FusedAdamW(params).load_state_dict(torch.optim.Adam(params).state_dict())


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (FusedAdamW, {"lr": -1.0}, "lr must be .* got -1.0"),
        (FusedAdamW, {"lr": float("nan")}, "lr must be .* got nan"),
        (FusedAdamW, {"lr": "fast"}, "lr must be a number .* got 'fast'"),
        (FusedAdamW, {"lr": torch.ones(2)}, r"one element, got shape \(2,\)"),
        (FusedAdamW, {"betas": (0.9, 1.0)}, r"betas must be in \[0, 1\), got \(0.9, 1.0\)"),
        (FusedAdamW, {"betas": 0.9}, "pair of numbers"),
        (FusedAdamW, {"eps": -1e-8}, "eps must be"),
        (FusedAdamW, {"weight_decay": -0.1}, "weight_decay must be"),
        (FusedAdamW, {"max_grad_norm": 0.0}, "max_grad_norm must be a positive number.* got 0.0"),
        (FusedAdamW, {"backend": "metal"}, "unknown backend 'metal'"),
        (FusedSGD, {"nesterov": True}, "nesterov=True needs momentum above 0"),
        (FusedSGD, {"momentum": -0.9}, "momentum must be"),
        (FusedSGD, {"dampening": float("nan")}, "dampening must be a finite number, got nan"),
        (FusedSGD, {"maximize": "false"}, "maximize must be True or False, got 'false'"),
        (FusedAdam, {"amsgrad": "no"}, "amsgrad must be True or False, got 'no'"),
        (FusedAdagrad, {"lr_decay": -1}, "lr_decay must be"),
        (FusedAdagrad, {"initial_accumulator_value": -1}, "initial_accumulator_value must be"),
        (FusedLion, {"betas": (-0.1, 0.9)}, "betas must be in"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_bad_options_are_refused_before_anything_moves(
    make: type[FusedOptimizer], options: dict[str, Any], message: str
) -> None:
    param = nn.Parameter(torch.ones(3))
    home = param.data_ptr()
    with pytest.raises(ValueError, match=message):
        make([param], **options)
    assert param.data_ptr() == home


def test_no_parameters_and_unknown_options_are_refused() -> None:
    with pytest.raises(ValueError, match="empty parameter list"):
        FusedAdamW([])
    with pytest.raises(TypeError, match="fused"):
        FusedAdamW([nn.Parameter(torch.ones(1))], fused=True)  # type: ignore[call-arg]
