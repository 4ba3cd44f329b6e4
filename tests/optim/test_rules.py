"""The rules against torch.optim and their equations, the options that they refuse, and torch's hooks around a step."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from hdet_kernels.optim import FusedAdagrad, FusedAdam, FusedAdamW, FusedLion, FusedOptimizer, FusedSGD
from tests.ops.cases import BACKENDS, QUICK
from tests.optim.cases import (
    DTYPES,
    PAIRS,
    assert_as_accurate_as_torch,
    assert_close,
    assert_refused,
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


@pytest.mark.parametrize("name", PAIRS)
def test_the_stated_state_is_that_of_torch(name: str) -> None:
    params = parameters()[:1]
    ours, theirs = fused_optimizer(name, parameters()), torch_optimizer(name, params)
    group = ours.param_groups[0]
    assert ours.eager_state is bool(theirs.state[params[0]])
    for state, value in theirs.state[params[0]].items():
        assert state == "step" or torch.all(value == ours.initial_state(state, group))
    run(theirs, params, [0])
    expected = {state: tuple(value.shape) for state, value in theirs.state[params[0]].items() if value is not None}
    stated = {state: ours.state_shape(state, tuple(params[0].shape)) for state in ours.state_names(group)}
    assert stated | ({"step": ()} if ours.shows_step_of(group) else {}) == expected


def test_a_rule_without_its_row_is_refused() -> None:
    class Nameless(FusedOptimizer):
        rule = "sgd"

    with pytest.raises(NotImplementedError):
        Nameless([nn.Parameter(torch.ones(2))], {"lr": 1.0})


def test_momentum_that_a_scheduler_turns_on_and_off() -> None:
    ours, theirs = parameters(), parameters()
    fused, torchs = FusedSGD(ours, 0.1, dampening=0.5), torch.optim.SGD(theirs, 0.1, dampening=0.5, foreach=False)
    for seed, momentum in enumerate((0.0, 0.9, 0.0, 0.8)):
        for target, params in ((fused, ours), (torchs, theirs)):
            target.param_groups[0]["momentum"] = momentum
            run(target, params, [seed])
        assert shapes_of(fused.state_dict()["state"]) == shapes_of(torchs.state_dict()["state"])
    assert_close(ours, theirs)


def test_a_momentum_on_an_accelerator_is_not_read() -> None:
    """Groups are checked again when one changed, also while a CUDA graph is captured."""
    optimizer = FusedSGD([torch.nn.Parameter(torch.ones(1))], momentum=0.9, nesterov=True)
    optimizer.check_group({**optimizer.defaults, "momentum": torch.empty((), device="meta")})


@pytest.mark.parametrize("make", [FusedAdam, FusedAdamW])
def test_only_amsgrad_has_a_maximum_of_the_second_moment(make: type[FusedOptimizer]) -> None:
    for amsgrad in (False, True):
        params = parameters()
        optimizer = make(params, amsgrad=amsgrad)
        run(optimizer, params, [0])
        assert ("max_exp_avg_sq" in optimizer.state[params[0]]) == amsgrad


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
    with pytest.raises(ValueError, match=r"decoupled_weight_decay=True.*FusedAdamW"):
        FusedAdam(params).load_state_dict(torch.optim.AdamW(params).state_dict())
    with pytest.raises(ValueError, match=r"decoupled_weight_decay=False.*load it into FusedAdam$"):
        FusedAdamW(params).load_state_dict(torch.optim.Adam(params).state_dict())


def test_the_accumulator_has_its_initial_value_before_the_first_step() -> None:
    param = nn.Parameter(torch.ones(3))
    optimizer = FusedAdagrad([param], initial_accumulator_value=0.25)
    assert optimizer.state[param]["sum"].tolist() == [0.25] * 3
    assert optimizer.state[param]["step"].item() == 0


REFUSED: list[tuple[type[FusedOptimizer], dict[str, Any], str]] = [
    (FusedSGD, {"nesterov": True}, "nesterov"),
    (FusedSGD, {"momentum": -0.9}, "momentum"),
    (FusedSGD, {"dampening": float("nan")}, "dampening"),
    (FusedSGD, {"maximize": "false"}, "maximize"),
    (FusedAdamW, {"lr": -1.0}, "lr"),
    (FusedAdamW, {"betas": (0.9, 1.0)}, "betas"),
    (FusedAdamW, {"betas": 0.9}, "betas"),
    (FusedAdamW, {"eps": -1e-8}, "eps"),
    (FusedAdamW, {"weight_decay": -0.1}, "weight_decay"),
    (FusedAdam, {"amsgrad": "no"}, "amsgrad"),
    (FusedAdamW, {"amsgrad": True, "state_dtype": "int8"}, "amsgrad=True needs state_dtype"),
    (FusedAdagrad, {"lr_decay": -1}, "lr_decay"),
    (FusedAdagrad, {"initial_accumulator_value": -1}, "initial_accumulator_value"),
    (FusedLion, {"betas": (-0.1, 0.9)}, "betas"),
]


@pytest.mark.parametrize(("make", "options", "message"), REFUSED)
def test_bad_options_are_refused_before_anything_moves(
    make: type[FusedOptimizer], options: dict[str, Any], message: str
) -> None:
    assert_refused(make, options, message)


def test_hooks_of_an_optimizer_run() -> None:
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


def test_global_hooks_run_and_the_profiler_sees_the_step() -> None:
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
    seen = {event.key for event in profile.key_averages()}
    assert "Optimizer.step#FusedAdamW.step" in seen
    assert any(key.startswith("hdet_kernels::") for key in seen), "the operator"
