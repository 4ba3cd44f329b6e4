"""Fused optimizers on stacked parameters with per-replica hyperparameters, against separate plain optimizers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hdet_kernels as hk
from hdet_kernels.ops.chunks import ChunkTable
from hdet_kernels.optim import FusedOptimizer
from hdet_kernels.optim.loading import fit_state
from hdet_kernels.stack import StackedParameter
from tests.ops.cases import available
from tests.optim.cases import choose, fused_optimizer, parameters, with_backends

BACKENDS = [available(*pair) for pair in (("torch", "cpu"), ("cpp", "cpu"), ("cuda", "cuda"), ("triton", "cuda"))]
#: Pairs of a backend and an optimizer that ``make test`` runs.
QUICK_CASES = [
    ("torch-cpu", "sgd"),
    ("cpp-cpu", "sgd-momentum-decay"),
    ("torch-cpu", "adam"),
    ("cpp-cpu", "adamw"),
    ("torch-cpu", "adamw-betas"),
    ("cpp-cpu", "adamw-clip"),
    ("cpp-cpu", "adagrad"),
    ("torch-cpu", "lion"),
]
SHAPES = ((3, 5), (1,), (2, 3, 4), (), (0,), (70, 40))
REPLICAS = 3

#: The learning rate of each replica.
OWN_RATES = {"lr": (0.01, 0.02, 0.04)}

#: The class, its options, and further options that differ by replica.
OPTIMIZERS: dict[str, tuple[Callable[..., Any], dict[str, Any], dict[str, tuple[float, ...]]]] = {
    "sgd": (hk.FusedSGD, {"weight_decay": 0.1}, {"weight_decay": (0.1, 0.2, 0.3)}),
    "sgd-momentum": (hk.FusedSGD, {"momentum": 0.9, "nesterov": True}, {}),
    "sgd-momentum-decay": (hk.FusedSGD, {"momentum": 0.9, "weight_decay": 0.1}, {}),
    "adam": (hk.FusedAdam, {"amsgrad": True}, {"eps": (1e-8, 1e-6, 1e-4)}),
    "adam-decay": (hk.FusedAdam, {"weight_decay": 0.1}, {}),
    "adamw": (hk.FusedAdamW, {}, {"weight_decay": (0.01, 0.1, 0.5)}),
    "adamw-betas": (hk.FusedAdamW, {}, {"betas[1]": (0.9, 0.99, 0.999)}),
    "adamw-clip": (hk.FusedAdamW, {"max_grad_norm": 0.5}, {}),
    "adagrad": (hk.FusedAdagrad, {"initial_accumulator_value": 0.1, "lr_decay": 0.1}, {}),
    "lion": (hk.FusedLion, {"weight_decay": 0.1, "maximize": True}, {"weight_decay": (0.1, 0.2, 0.3)}),
}
#: Cases in which replicas with a shared gradient have separate moments all the same.
SEPARATE = {"sgd-momentum-decay", "adam-decay", "adamw-betas"}


def plain_params(device: str = "cpu", dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(device, dtype)) for shape in SHAPES]


def stacked_params(shares_gradient: bool, device: str = "cpu", dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [
        StackedParameter(p.detach().expand(REPLICAS, *p.shape).clone(), shares_gradient)
        for p in plain_params(device, dtype)
    ]


def give_gradients(params: list[Tensor], singles: list[list[nn.Parameter]], step: int, *, shared: bool) -> None:
    """Give the stack and its replicas one by one the same gradients; the second parameter has none at step 1."""
    generator = torch.Generator().manual_seed(100 + step)
    for index, param in enumerate(params):
        rows = 1 if shared else REPLICAS
        drawn = torch.randn(rows, *param.shape[1:], generator=generator).to(param.device, param.dtype)
        grad = None if (step, index) == (1, 1) else drawn.expand_as(param)
        param.grad = grad if shared or grad is None else grad.clone()
        for row, single in enumerate(singles):
            single[index].grad = None if grad is None else grad[row].clone()


def of_replica(options: dict[str, Any], own: dict[str, tuple[float, ...]], row: int) -> dict[str, Any]:
    mine = dict(options)
    for key, values in own.items():
        if key == "betas[1]":
            mine["betas"] = (0.9, values[row])
        else:
            mine[key] = values[row]
    return mine


def pair(name: str, shared: bool, device: str, backend: str | None, **more: Any) -> tuple[Any, list[Any], Any, Any]:
    """Return the optimizer of a stack, those of R plain replicas, and the parameters of both."""
    make, options, own = OPTIMIZERS[name]
    own = {**OWN_RATES, **own}
    dtype = more.pop("dtype", torch.float32)
    params = stacked_params(shared, device, dtype)
    singles = [plain_params(device, dtype) for _ in range(REPLICAS)]
    optimizer = make(params, backend=backend, **options, **more)
    optimizer.param_groups[0]["per_replica"] = own
    others = [make(s, backend=backend, **of_replica(options, own, r), **more) for r, s in enumerate(singles)]
    return optimizer, others, params, singles


def check_equal(params: list[Tensor], singles: list[list[nn.Parameter]]) -> None:
    for index, param in enumerate(params):
        for row, single in enumerate(singles):
            torch.testing.assert_close(param[row], single[index], rtol=2e-6, atol=1e-7, msg=f"{index}, row {row}")


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "local"])
@pytest.mark.parametrize(("backend", "name"), with_backends(BACKENDS, OPTIMIZERS, QUICK_CASES))
def test_a_stack_steps_like_its_replicas_one_by_one(backend: tuple[str, str], name: str, shared: bool) -> None:
    optimizer, others, params, singles = pair(name, shared, backend[1], backend[0])
    for step in range(4):
        give_gradients(params, singles, step, shared=shared)
        for each in (optimizer, *others):
            each.step()
    check_equal(params, singles)
    moments = [state.shape == p.shape for p in params for state in tensors_of(optimizer.state[p])]
    assert all(moments) if not shared or name in SEPARATE else not any(moments)


def tensors_of(state: dict[str, Any]) -> list[Tensor]:
    return [value for key, value in state.items() if key != "step"]


@pytest.mark.parametrize(
    "options",
    [{"stochastic_rounding": True, "state_dtype": torch.bfloat16}, {"master_weights": True}, {"master_weights": False}],
    ids=["stochastic", "master", "rounded"],
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_stack_of_bfloat16_steps_like_its_replicas(backend: tuple[str, str], options: dict[str, Any]) -> None:
    optimizer, others, params, singles = pair("adamw", True, backend[1], backend[0], dtype=torch.bfloat16, **options)
    for step in range(3):
        give_gradients(params, singles, step, shared=True)
        for each in (optimizer, *others):
            each.step()
    for index, param in enumerate(params):
        for row, single in enumerate(singles):
            # Equal to the bit, except where the last bits of the float32 arithmetic decide between two neighbours.
            differs = (param[row] != single[index]).float().mean() if param.numel() else torch.zeros(())
            assert differs <= 0.01
            torch.testing.assert_close(param[row], single[index], rtol=2**-7, atol=1e-3)


def test_moments_are_separated_when_weight_decay_begins_to_act_on_them() -> None:
    """Every replica then starts with a copy of the shared moments."""
    optimizer, others, params, singles = pair("adam", True, "cpu", None)
    groups = [each.param_groups[0] for each in (optimizer, *others)]
    for step in range(6):
        if step == 3:
            assert optimizer.state[params[0]]["exp_avg"].shape == params[0].shape[1:]
            for group in groups:
                group["weight_decay"] = 0.1
        give_gradients(params, singles, step, shared=True)
        for each in (optimizer, *others):
            each.step()
    check_equal(params, singles)
    state = optimizer.state[params[0]]
    assert state["exp_avg"].shape == params[0].shape
    assert state["step"].tolist() == [6.0] * REPLICAS
    for row, single in enumerate(singles):
        for key in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"):
            torch.testing.assert_close(state[key][row], others[row].state[single[0]][key], rtol=2e-6, atol=1e-8)


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "local"])
@pytest.mark.parametrize(
    "name", choose(["sgd-momentum", "adam-decay", "adamw", "adagrad", "lion"], "adam-decay", "adamw")
)
def test_resuming_from_a_checkpoint_is_exact(name: str, shared: bool) -> None:
    optimizer, _, params, singles = pair(name, shared, "cpu", None)
    for step in range(2):
        give_gradients(params, singles, step, shared=shared)
        optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    resumed, _, again, _ = pair(name, shared, "cpu", None)
    with torch.no_grad():
        for mine, theirs in zip(again, params, strict=True):
            mine.copy_(theirs)
    resumed.load_state_dict(saved)
    for step in (2, 3):
        for each, own in ((optimizer, params), (resumed, again)):
            give_gradients(own, [], step, shared=shared)
            each.step()
    assert all(map(torch.equal, again, params))


@pytest.mark.parametrize("how", ["loaded", "added"])
def test_moments_are_separated_for_all_parameters_or_none(how: str) -> None:
    """Parameters of another dtype, in another buffer, have no state yet when the moments are separated."""

    def params() -> tuple[list[Tensor], list[Tensor]]:
        found = stacked_params(True), stacked_params(True, dtype=torch.float64)
        for param in (*found[0], *found[1]):
            param.data += torch.arange(REPLICAS).view(-1, *[1] * (param.dim() - 1))
        return found

    def train(optimizer: Any, some: list[Tensor], steps: range) -> None:
        for step in steps:
            give_gradients(some, [], step, shared=True)
            optimizer.step()

    def whole(singles: list[Tensor], doubles: list[Tensor]) -> Any:
        return hk.FusedAdam([{"params": singles}, {"params": doubles}], lr=0.01, weight_decay=0.1)

    expected = params()
    optimizer = whole(*expected)
    train(optimizer, expected[0], range(2))
    singles, doubles = params()
    if how == "loaded":
        for param, value in zip(singles, expected[0], strict=True):
            param.data.copy_(value)
        resumed = whole(singles, doubles)
        resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    else:
        resumed = hk.FusedAdam(singles, lr=0.01, weight_decay=0.1)
        train(resumed, singles, range(2))
        resumed.add_param_group({"params": doubles})
    train(optimizer, [*expected[0], *expected[1]], range(2, 5))
    train(resumed, [*singles, *doubles], range(2, 5))
    for param, value in zip((*singles, *doubles), (*expected[0], *expected[1]), strict=True):
        assert torch.equal(param, value)


def test_a_stack_loads_the_state_of_plain_training() -> None:
    plain = plain_params()
    before = torch.optim.AdamW(plain, lr=0.01)
    for param in plain:
        param.grad = torch.ones_like(param)
    before.step()
    for shared in (True, False):
        params = stacked_params(shared)
        optimizer = hk.FusedAdamW(params, lr=0.01)
        optimizer.load_state_dict(copy.deepcopy(before.state_dict()))
        for param, single in zip(params, plain, strict=True):
            moment = optimizer.state[param]["exp_avg_sq"]
            torch.testing.assert_close(
                moment.expand_as(param), before.state[single]["exp_avg_sq"].expand_as(param), rtol=0, atol=0
            )
            assert (optimizer.state[param]["step"] == 1).all()


def test_plain_training_loads_shared_moments() -> None:
    optimizer, _, params, singles = pair("adamw", True, "cpu", None)
    give_gradients(params, singles, 0, shared=True)
    optimizer.step()
    plain = plain_params()
    alone = torch.optim.AdamW(plain)
    alone.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    ours = hk.FusedAdamW(plain_params())
    ours.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert "per_replica" not in ours.param_groups[0]
    for param, single in zip(params, plain, strict=True):
        assert torch.equal(alone.state[single]["exp_avg"], optimizer.state[param]["exp_avg"])


def test_found_inf_skips_all_replicas() -> None:
    optimizer, _, params, singles = pair("adamw", False, "cpu", None)
    give_gradients(params, singles, 0, shared=False)
    optimizer.step()
    before = [param.detach().clone() for param in params]
    optimizer.found_inf, optimizer.grad_scale = torch.ones(1), torch.ones(1)
    optimizer.step()
    assert all(map(torch.equal, params, before))
    assert optimizer.state[params[0]]["step"].tolist() == [1.0] * REPLICAS


def test_every_replica_with_its_own_gradient_is_clipped_by_its_own_norm() -> None:
    params = [StackedParameter(torch.zeros(2, 4), shares_gradient=False)]
    optimizer = hk.FusedSGD(params, lr=1.0, max_grad_norm=1.0)
    params[0].grad = torch.tensor([[3.0, 4.0, 0.0, 0.0], [0.3, 0.4, 0.0, 0.0]])
    optimizer.step()
    torch.testing.assert_close(params[0].detach(), torch.tensor([[-0.6, -0.8, 0, 0], [-0.3, -0.4, 0, 0]]))


@pytest.mark.parametrize("gradients", ["shared", "local"])
def test_channels_last_gradients_are_matched_without_a_python_loop(
    gradients: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4, 1)).to(memory_format=torch.channels_last)
    stack = hk.ReplicaStack(module, REPLICAS, gradients=gradients)
    optimizer = hk.FusedAdamW(stack.parameters())
    stack.backward(lambda model, x: model(x).square().mean(), torch.randn(2 * REPLICAS, 3, 3, 3))
    monkeypatch.setattr(ChunkTable, "_match_one_by_one", lambda *_: pytest.fail("one by one"))
    optimizer.step()


def test_different_gradients_in_a_stack_that_shares_one_are_refused() -> None:
    params = stacked_params(True)
    optimizer = hk.FusedAdamW(params)
    for param in params:
        param.grad = torch.ones_like(param)
    before = [param.detach().clone() for param in params]
    with pytest.raises(RuntimeError, match=r'stack shares one: build it with ReplicaStack\(…, gradients="local"\)'):
        optimizer.step()
    assert all(map(torch.equal, params, before))


def test_values_for_another_number_of_replicas_are_refused() -> None:
    params = stacked_params(True)
    optimizer = hk.FusedAdamW(params)
    optimizer.param_groups[0]["per_replica"] = {"lr": (0.1, 0.2)}
    for param in params:
        param.grad = torch.ones(param.shape[1:]).expand_as(param)
    with pytest.raises(ValueError, match=r"2 values of 'lr' in 'per_replica', .* a stack of 3 replicas"):
        optimizer.step()


def test_state_of_another_number_of_replicas_becomes_their_mean() -> None:
    param = StackedParameter(torch.zeros(3, 2))
    given = {"step": torch.tensor([3.0, 5.0]), "exp_avg": torch.tensor([[1.0, 2.0], [3.0, 6.0]])}
    fitted = fit_state(given, param)
    assert fitted["exp_avg"].tolist() == [2.0, 4.0]
    assert fitted["step"].item() == 5.0
    kept = {"step": torch.ones(3), "exp_avg": torch.ones(3, 2)}
    assert all(fit_state(kept, param)[name] is value for name, value in kept.items())


@pytest.mark.parametrize("name", ["adamw", "sgd-momentum", "adagrad", "lion"])
def test_replicas_can_have_states_of_their_own_for_a_while(name: str) -> None:
    """Separated and shared again, the state is that of the first replica, and the next steps are those of sharing."""

    def trained(steps: int, *, apart: bool) -> tuple[list[StackedParameter], FusedOptimizer]:
        params = [StackedParameter(param.detach().repeat(3, *[1] * param.dim())) for param in parameters()]
        optimizer = fused_optimizer(name, params, weight_decay=0.0)
        for step in range(steps):
            generator = torch.Generator().manual_seed(step)
            for param in params:
                param.grad = torch.randn(param.shape[1:], generator=generator).expand_as(param)
            if apart and step == 1:
                optimizer.separate_state()
                optimizer.separate_state()  # nothing more
                assert not optimizer.shares_state
                optimizer.share_state()
            optimizer.step()
        return params, optimizer

    (ours, optimizer), (expected, other) = trained(3, apart=True), trained(3, apart=False)
    assert optimizer.shares_state
    assert other.shares_state
    for mine, theirs in zip(ours, expected, strict=True):
        assert torch.equal(mine, theirs)


def test_plain_parameters_have_no_state_to_share() -> None:
    optimizer = fused_optimizer("adamw", parameters())
    optimizer.separate_state()
    optimizer.share_state()
    assert not optimizer.shares_state
