"""state_dict of a stack, and plain copies of its module."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import nn

import hdet_kernels as hk
from tests.stack.cases import MixedModel, R, loss_of, mixed_model, number_rows


def test_a_replica_is_a_plain_module() -> None:
    stack = number_rows(hk.ReplicaStack(mixed_model(), R))
    for r in (0, 2, -1):
        made = stack.replica(r)
        assert type(made) is MixedModel
        assert made.outer.weight is made.inner.weight, "still tied"
        named = dict(made.named_parameters())
        for name, parameter in stack.named_parameters():
            assert torch.equal(named[name], parameter[r])
            assert named[name].data_ptr() != parameter[r].data_ptr()
        assert torch.equal(made.norm.running_mean, dict(stack.named_buffers())["norm.running_mean"][r])
    with pytest.raises(IndexError, match="replicas 0 to 2, got 3"):
        stack.replica(3)


@pytest.mark.filterwarnings("ignore:.*weight_norm.*")
def test_a_module_with_computed_tensors_as_attributes_is_copied() -> None:
    module = nn.utils.weight_norm(nn.Linear(4, 2))
    assert not module.weight.is_leaf
    stack = number_rows(hk.ReplicaStack(module, R))
    x = torch.randn(R, 4)
    losses = stack.losses(loss_of, x)
    for r in range(R):
        torch.testing.assert_close(losses[r], loss_of(stack.replica(r), x[r : r + 1]).detach())


def test_the_mean_of_equal_replicas_equals_each_of_them() -> None:
    module = mixed_model()
    made = hk.ReplicaStack(module, 7).module().state_dict()
    assert all(torch.equal(value, made[name]) for name, value in module.state_dict().items())


@pytest.mark.parametrize(("where", "value"), [("inner.bias", torch.nan), ("norm.running_var", torch.inf)])
def test_the_mean_leaves_out_non_finite_replicas(where: str, value: float) -> None:
    module = mixed_model()
    stack = number_rows(hk.ReplicaStack(module, R))
    tensors = {**dict(stack.named_parameters()), **dict(stack.named_buffers())}
    with torch.no_grad():
        tensors[where][1, 2] = value
        tensors["norm.num_batches_tracked"].copy_(torch.tensor([4, 5, 6]))
    made = stack.module()
    torch.testing.assert_close(made.inner.weight, module.inner.weight + 1, msg="(0 + 2) / 2")
    torch.testing.assert_close(made.norm.running_mean, module.norm.running_mean + 1)
    assert made.norm.num_batches_tracked == 4, "integers have no mean"
    assert torch.equal(made.mask.isinf(), module.mask.isinf())
    with torch.no_grad():
        tensors[where][:, 2] = value
    with pytest.raises(RuntimeError, match="no replica is finite"):
        stack.module()


def test_state_survives_saving_and_loading() -> None:
    stack = number_rows(hk.ReplicaStack(mixed_model(), R))
    state = stack.state_dict()
    assert state.keys() == mixed_model().state_dict().keys()
    assert state["inner.weight"].shape == (R, 4, 4)
    assert state["frozen.weight"].shape == (4, 4), "frozen: one for all replicas"
    assert state["norm.num_batches_tracked"].shape == (R,)
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    other = hk.ReplicaStack(MixedModel(), R)
    addresses = [p.data_ptr() for p in other.parameters()]
    result = other.load_state_dict(torch.load(file, weights_only=True))
    assert (result.missing_keys, result.unexpected_keys) == ([], [])
    assert all(torch.equal(value, state[name]) for name, value in other.state_dict().items())
    assert addresses == [p.data_ptr() for p in other.parameters()], "in place"


def test_entries_renamed_by_a_state_dict_hook_have_rows() -> None:
    """The entries hold the rows of the replicas, not the tensors of the template."""

    def renamed(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> dict[str, Any]:
        return {f"inner.{name}": value for name, value in state.items()}

    module = nn.Linear(3, 2)
    module._register_state_dict_hook(renamed)
    stack = hk.ReplicaStack(module, 2)
    with torch.no_grad():
        for parameter in stack.parameters():
            parameter.normal_()
    saved = copy.deepcopy(stack.state_dict())
    for name, parameter in stack.named_parameters():
        assert torch.equal(saved[f"inner.{name}"], parameter)
    again = hk.ReplicaStack(module, 2)
    again.load_state_dict(saved)
    assert all(map(torch.equal, again.parameters(), stack.parameters()))


def test_the_state_of_a_plain_module_goes_to_all_rows() -> None:
    plain = mixed_model()
    stack = number_rows(hk.ReplicaStack(MixedModel(), R))
    stack.load_state_dict(plain.state_dict())
    for r in range(R):
        assert all(torch.equal(v, plain.state_dict()[n]) for n, v in stack.replica(r).state_dict().items())


def test_states_that_do_not_fit_change_nothing() -> None:
    stack = hk.ReplicaStack(mixed_model(), R)
    before = copy.deepcopy(stack.state_dict())
    good = hk.ReplicaStack(MixedModel(), R).state_dict()
    missing = {name: value for name, value in good.items() if name != "inner.bias"}
    cases: list[tuple[dict[str, Any], str]] = [
        (missing, "missing: inner.bias"),
        ({**good, "more": torch.zeros(1)}, "unexpected: more"),
        ({**good, "inner.bias": torch.zeros(2, 4)}, r"inner.bias is \(2, 4\), expected \(3, 4\) or \(4,\)"),
        ({**good, "frozen.bias": torch.zeros(3, 4)}, r"frozen.bias is \(3, 4\), expected \(4,\)"),
        ({**good, "inner.bias": None}, "inner.bias is NoneType"),
    ]
    for state, message in cases:
        with pytest.raises(RuntimeError, match=message):
            stack.load_state_dict(state)
        assert all(torch.equal(value, before[name]) for name, value in stack.state_dict().items())
    result = stack.load_state_dict({**missing, "more": torch.zeros(1)}, strict=False)
    assert (result.missing_keys, result.unexpected_keys) == (["inner.bias"], ["more"])
    assert torch.equal(stack.state_dict()["inner.weight"], good["inner.weight"])


def test_extra_state_belongs_to_the_module() -> None:
    class Counting(nn.Linear):
        count = 3

        def get_extra_state(self) -> Any:
            return self.count

        def set_extra_state(self, state: Any) -> None:
            self.count = state

    state = hk.ReplicaStack(nn.Sequential(Counting(1, 1)), R).state_dict()
    assert state["0._extra_state"] == 3
    module = nn.Sequential(Counting(1, 1))
    hk.ReplicaStack(module, R).load_state_dict({**state, "0._extra_state": 8})
    assert module[0].count == 8


def test_buffers_may_be_non_finite_where_those_of_the_module_are() -> None:
    """The mean is that of the other replicas; they number the rows."""
    module = mixed_model()
    stack = number_rows(hk.ReplicaStack(module, R))
    with torch.no_grad():
        dict(stack.named_buffers())["mask"][1, 2, 0] = torch.inf
        dict(stack.named_buffers())["norm.running_mean"][2, 0] = torch.nan
    torch.testing.assert_close(stack.module().inner.weight, module.inner.weight)
