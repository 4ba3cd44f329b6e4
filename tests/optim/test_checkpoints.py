"""State dicts and copies of the fused optimizers: exchanged with torch.optim, resumed to the bit."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import hdet_kernels as hk
from tests.ops.cases import QUICK
from tests.optim.cases import (
    FUSED,
    PAIRS,
    QUICK_FUSED,
    QUICK_PAIRS,
    assert_close,
    assert_equal,
    fused_optimizer,
    give_gradients,
    parameters,
    run,
    saved_and_loaded,
    shapes_of,
    torch_optimizer,
    with_backends,
)


def twins(backend: tuple[str, str], name: str) -> tuple[Any, list[Any], Any, list[Any]]:
    """Return a fused optimizer and its parameters, then torch's and its own."""
    where, device = backend
    ours, theirs = parameters(device=device), parameters(device=device)
    return fused_optimizer(name, ours, backend=where), ours, torch_optimizer(name, theirs), theirs


@pytest.mark.parametrize(("backend", "name"), with_backends(QUICK, PAIRS, QUICK_PAIRS))
class TestExchangeWithTorch:
    def test_torch_state_continues_in_the_fused_optimizer(self, backend: tuple[str, str], name: str) -> None:
        fused, ours, torchs, theirs = twins(backend, name)
        torchs.param_groups[0]["lr"] = 0.05
        run(torchs, theirs, range(3))
        flats = [flat.data_ptr() for flat in fused.state_flats().values()]
        with torch.no_grad():
            for mine, other in zip(ours, theirs, strict=True):
                mine.copy_(other)
        fused.load_state_dict(saved_and_loaded(torchs.state_dict()))
        assert fused.param_groups[0]["lr"] == 0.05
        assert "foreach" not in fused.param_groups[0]
        assert [flat.data_ptr() for flat in fused.state_flats().values()][: len(flats)] == flats, (
            "state must stay in its buffers"
        )
        run(torchs, theirs, range(3, 6))
        run(fused, ours, range(3, 6))
        assert_close(ours, theirs)

    def test_fused_state_continues_in_torch(self, backend: tuple[str, str], name: str) -> None:
        for steps in (0, 3):
            fused, ours, torchs, theirs = twins(backend, name)
            for target in (fused, torchs):
                target.param_groups[0]["lr"] = 0.05
            run(fused, ours, range(steps))
            run(torchs, theirs, range(steps))
            assert shapes_of(fused.state_dict()["state"]) == shapes_of(torchs.state_dict()["state"])
            other = torch_optimizer(name, theirs)
            other.load_state_dict(saved_and_loaded(fused.state_dict()))
            assert other.param_groups[0]["lr"] == 0.05
            run(fused, ours, range(3, 6))
            run(other, theirs, range(3, 6))
            assert_close(ours, theirs)


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))], ids=["deepcopy", "pickle"]
)
@pytest.mark.parametrize(("backend", "name"), with_backends(QUICK, FUSED, QUICK_FUSED))
def test_a_copy_is_complete_and_independent(
    backend: tuple[str, str], name: str, duplicate: Callable[[Any], Any]
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


State = dict[str, Any]
Change = Callable[[State], object]


def stepped(name: str, **options: Any) -> tuple[list[nn.Parameter], hk.optim.FusedOptimizer]:
    params = parameters()
    optimizer = fused_optimizer(name, params, **options)
    run(optimizer, params, range(2))
    return params, optimizer


def edited(optimizer: torch.optim.Optimizer, change: Change) -> State:
    state = copy.deepcopy(optimizer.state_dict())
    change(state)
    return state


def contents(optimizer: hk.optim.FusedOptimizer) -> tuple[list[Tensor], list[State]]:
    """Return copies of all tensors and of the groups without their parameters."""
    tensors = [*optimizer.buckets.flats, *optimizer.state_flats().values(), *optimizer.step_flats()]
    groups = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    return [tensor.clone() for tensor in tensors], copy.deepcopy(groups)


def assert_refused(optimizer: hk.optim.FusedOptimizer, state: Any, message: str) -> None:
    """Assert that ``state`` is refused with ``message``, and that all tensors and groups are as they were."""
    tensors, groups = contents(optimizer)
    entries = {param: (id(entry), dict(entry)) for param, entry in optimizer.state.items()}
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(state)
    assert_equal(contents(optimizer)[0], tensors)
    assert contents(optimizer)[1] == groups
    assert entries.keys() == optimizer.state.keys()
    for param, (identity, entry) in entries.items():
        assert id(optimizer.state[param]) == identity
        assert all(optimizer.state[param][name] is value for name, value in entry.items())


def put(name: str, value: Any, param: int = 0) -> Change:
    return lambda state: state["state"][param].__setitem__(name, value)


def drop(name: str, param: int = 0) -> Change:
    return lambda state: state["state"][param].pop(name)


def put_group(name: str, value: Any) -> Change:
    return lambda state: state["param_groups"][0].__setitem__(name, value)


#: Beside those of ``tests/bad_input``, by name: the optimizer, what is wrong with its state, and the entry.
WRONG: dict[str, tuple[str, Change, str]] = {
    "later-parameter": ("adam", drop("exp_avg", 2), "parameter 2 of group 0 .* exp_avg"),
    "no-step": ("adamw", drop("step"), "step"),
    "no-maximum": ("adamw-amsgrad", drop("max_exp_avg_sq"), "max_exp_avg_sq"),
    "amsgrad": ("adamw", put_group("amsgrad", True), "max_exp_avg_sq"),
    "no-sum": ("adagrad", drop("sum"), "sum"),
    "no-entry": ("adagrad", lambda state: state["state"].pop(1), "parameter 1 .* step, sum"),
    "lion-empty": ("lion", lambda state: state["state"].update({0: {"step": 1.0}}), "exp_avg"),
    "unknown": ("adamw", put("square_avg", torch.ones(3, 5)), "square_avg"),
    "unknown-number": ("sgd-momentum", put(3, 1.0), "does not know 3"),
    "integers": ("adamw", put("exp_avg", torch.ones(3, 5, dtype=torch.int64)), "exp_avg=torch.int64"),
    "number": ("sgd-momentum", put("momentum_buffer", 0.0), "momentum_buffer"),
    "stacked": ("adamw", put("exp_avg", torch.ones(2, 3, 5)), "stack"),
    "bad-keys": ("adamw", put_group("params", [[]]), "numbers"),
    "flag": ("adamw", put_group("maximize", "yes"), "maximize"),
    "seed": ("adamw", put_group("rounding_seed", -1), "rounding_seed"),
    "replicas": ("adamw", put_group("per_replica", {"lr": "fast"}), "replica"),
    "replicas-list": ("adamw", put_group("per_replica", [1, 2]), "per_replica"),
    **{
        f"step-{step}": ("adamw", put("step", step), "step")
        for step in (7.5, math.inf, 2**60, True, 1j, torch.tensor(-3.0), torch.tensor(0.5), torch.tensor(1j))
    },
    "no-steps": ("adamw", put("step", torch.ones(0)), "step"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_state_with_gaps_or_nonsense_is_refused(case: str) -> None:
    name, change, message = WRONG[case]
    _, optimizer = stepped(name)
    assert_refused(optimizer, edited(optimizer, change), message)


@pytest.mark.parametrize("source", ["sgd-momentum", "adamw", "adagrad", "lion"])
@pytest.mark.parametrize("target", ["sgd-momentum", "adamw", "adagrad", "lion"])
def test_the_state_of_another_rule_is_refused(source: str, target: str) -> None:
    _, optimizer = stepped(target)
    _, other = stepped(source)
    state = other.state_dict()["state"]
    given = {"state": state, "param_groups": optimizer.state_dict()["param_groups"]}
    if source == target:
        optimizer.load_state_dict(given)
    else:
        assert_refused(optimizer, given, "needs|does not know")


def test_messages_have_the_names_of_parameters() -> None:
    model = nn.Linear(2, 2)
    optimizer = hk.FusedAdamW(model.named_parameters())
    give_gradients(model.parameters(), seed=0)
    optimizer.step()
    assert_refused(optimizer, edited(optimizer, drop("exp_avg", 1)), "parameter 1 'bias' of group 0")


@pytest.mark.parametrize("step", [3, 3.0, torch.tensor(3), torch.tensor(3.0), torch.tensor([3.0]), np.float32(3)])
def test_step_counts_of_all_kinds(step: Any) -> None:
    params, optimizer = stepped("adamw")
    optimizer.load_state_dict(edited(optimizer, put("step", step)))
    assert optimizer.state[params[0]]["step"].item() == 3.0


@pytest.mark.parametrize("name", [name for name in FUSED if name != "adagrad"])
def test_parameters_without_state_start_afresh(name: str) -> None:
    _, optimizer = stepped(name)
    fresh = fused_optimizer(name, others := parameters())
    empty = edited(optimizer, lambda state: state["state"].update({0: {}}) or state["state"].pop(1, None))
    fresh.load_state_dict(empty)
    before = [param.detach().clone() for param in others]
    run(fresh, others, [0])
    again = parameters()
    run(fused_optimizer(name, again), again, [0])
    assert_equal(others[:2], again[:2])
    assert any(not torch.equal(param, kept) for param, kept in zip(others, before, strict=True))


def test_momentum_buffers_may_be_missing_or_none() -> None:
    params, optimizer = stepped("sgd-momentum")
    optimizer.load_state_dict(edited(optimizer, put("momentum_buffer", None)))  # as torch 1 saved it
    assert not optimizer.state[params[0]]["momentum_buffer"].any()
    _, optimizer = stepped("sgd-momentum")
    optimizer.load_state_dict(edited(optimizer, lambda state: state["state"].clear()))
    assert not optimizer.state_dict()["state"]


def test_sgd_counts_steps_without_momentum_down() -> None:
    params = parameters(torch.bfloat16)
    optimizer = hk.FusedSGD(params, stochastic_rounding=True)
    run(optimizer, params, range(2))
    assert optimizer.state[params[0]]["step"].item() == -2.0
    optimizer.load_state_dict(optimizer.state_dict())
    assert_refused(optimizer, edited(optimizer, put("step", -1.5)), "step")


def test_hooks_of_the_user_may_complete_a_state() -> None:
    params, optimizer = stepped("adamw")
    state = edited(optimizer, drop("exp_avg_sq"))

    def complete(_: Any, given: State) -> State:
        entries = {"exp_avg_sq": torch.full((3, 5), 2.0), **given["state"][0]}
        return {**given, "state": {**given["state"], 0: entries}}

    optimizer.register_load_state_dict_pre_hook(complete)
    optimizer.load_state_dict(state)
    assert torch.equal(optimizer.state[params[0]]["exp_avg_sq"], torch.full((3, 5), 2.0))


def test_the_state_of_a_stack_is_checked_row_by_row() -> None:
    stack = hk.ReplicaStack(nn.Linear(3, 2), 3, gradients="local")
    optimizer = hk.FusedAdamW(stack.parameters())
    for param in stack.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    shape = (3, 2, 3)
    for change, message in (
        (put("exp_avg", torch.ones(0, 2, 3)), r"shape \(0, 2, 3\)"),
        (put("exp_avg", torch.ones(3, 3, 2)), "another model"),
        (put("step", torch.ones(4)), r"a step of shape \(4,\)"),
        (put("step", torch.tensor([1.0, 2.0, 2.5])), "expected a whole number"),
    ):
        assert_refused(optimizer, edited(optimizer, change), message)
    optimizer.load_state_dict(edited(optimizer, put("exp_avg", torch.full(shape, 5.0))))
    assert torch.equal(optimizer.state[next(stack.parameters())]["exp_avg"], torch.full(shape, 5.0))


@pytest.mark.parametrize("other", [torch.optim.SGD, torch.optim.Adagrad, hk.FusedLion])
def test_another_optimizer_that_has_no_state_yet_is_refused(other: Any) -> None:
    """torch would load it, and raise KeyError at the next step."""
    _, optimizer = stepped("adamw")
    assert_refused(optimizer, other(parameters(), lr=0.1).state_dict(), "another kind of optimizer")


@pytest.mark.parametrize("name", FUSED)
def test_numbers_that_became_text_are_read(name: str) -> None:
    """torch.distributed.checkpoint makes text of the keys of dicts, and may leave entries under both."""
    params, optimizer = stepped(name)
    state = optimizer.state_dict()
    text = {**state, "state": {str(key): entries for key, entries in state["state"].items()}}
    both = {**state, "state": {**{key: {} for key in state["state"]}, **text["state"]}}
    for given in (text, both):
        others = parameters()
        other = fused_optimizer(name, others)
        other.load_state_dict(given)
        assert len(other.state) == len(optimizer.state)
        for param, its in zip(params, others, strict=True):
            assert other.state.get(its, {}).keys() == optimizer.state.get(param, {}).keys()
            assert_equal(other.state.get(its, {}).values(), optimizer.state.get(param, {}).values())
