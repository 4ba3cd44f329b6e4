"""The converger of an optimizer: its flat buffers where it has some, state that has a mean, and step counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hdet_kernels as hk
from hdet_kernels.converge import AverageRequest, Report, converger_of
from hdet_kernels.converge.of_optimizer import StepCounts, averaged_state, without_mean
from hdet_kernels.ensemble import ProcessEnsemble, SingleReplica
from hdet_kernels.optim import FusedAdamW
from tests.ranks import Cases


def test_a_fused_optimizer_is_averaged_in_its_buffers() -> None:
    optimizer = hk.FusedAdamW(nn.Linear(3, 2).parameters())
    assert converger_of(optimizer, SingleReplica()).tensors.buckets is optimizer.buckets


def test_parameters_state_and_counts_of_a_stack_become_the_mean() -> None:
    stack = hk.ReplicaStack(nn.Linear(2, 1), 2, gradients="local")
    optimizer = hk.FusedAdamW(stack.parameters())
    for param in stack.parameters():
        param.grad = torch.arange(param.numel(), dtype=torch.float32).reshape(param.shape)
    optimizer.step()
    before = [p.detach().clone() for p in stack.parameters()]
    state = {name: flat.clone() for name, flat in optimizer.state_flats().items()}
    converger = converger_of(optimizer, stack.ensemble, model=stack, backup=False)
    outcome = converger.converge(Report(1), AverageRequest(average_state=True))
    assert outcome.state
    for now, then in zip(stack.parameters(), before, strict=True):
        torch.testing.assert_close(now.detach(), then.mean(0, keepdim=True).expand_as(then))
    for name, flat in optimizer.state_flats().items():
        torch.testing.assert_close(flat, state[name].mean(0, keepdim=True).expand_as(flat))


class Coded(torch.optim.SGD):
    """An optimizer with state of integer codes, as that of 8-bit optimizers."""

    def code(self, param: Tensor) -> None:
        self.state[param]["codes"] = torch.zeros(3, dtype=torch.uint8)


def _coded(rank: int, codes: list[int], request: dict[str, Any]) -> str:
    """What an average of an optimizer with integer codes raises, on the rank whose first code is the given one."""
    param = nn.Parameter(torch.full((2, 3), float(rank)))
    optimizer = Coded([param], lr=0.1)
    optimizer.code(param)
    optimizer.state[param]["codes"][0] = codes[rank]
    try:
        converger_of(optimizer, ProcessEnsemble()).converge(Report(1), AverageRequest(**request))
    except TypeError as error:
        assert param.eq(rank).all(), "nothing was averaged"
        return str(error)
    assert param.eq(0.5).all()
    return ""


CODED: dict[str, tuple[list[int], dict[str, Any], bool]] = {
    "equal": ([1, 1], {}, False),
    "equal, local gradients": ([1, 1], {"known_shared": False}, False),
    "apart": ([1, 2], {}, True),
    "apart, shared gradients": ([1, 2], {"known_shared": True}, True),
    "apart, asked for": ([1, 2], {"average_state": True}, True),
    "apart, not asked for": ([1, 2], {"average_state": False}, False),
}
_CODED = Cases(2, _coded, {name: case[:2] for name, case in CODED.items()})


@pytest.mark.parametrize("name", CODED)
def test_state_without_a_mean_raises_where_replicas_differ_in_it(name: str) -> None:
    for message in _CODED[name]:
        assert message.startswith("the state 'codes' of parameter 0 (Coded)") is CODED[name][2]
        assert bool(message) is CODED[name][2]


def test_an_argument_of_the_version_before_is_named() -> None:
    with pytest.warns(DeprecationWarning, match="needs_state"):
        converger_of(torch.optim.SGD([nn.Parameter(torch.ones(2))]), SingleReplica(), needs_state=False)


def test_an_unknown_option_raises() -> None:
    with pytest.raises(TypeError, match="compression"):
        converger_of(torch.optim.SGD([nn.Parameter(torch.ones(2))]), SingleReplica(), compression="bf16")


def stepped(make: Any, *, skip: int | None = None, **options: Any) -> torch.optim.Optimizer:
    """An optimizer of three parameters, one of them tied, after a step; parameter ``skip`` had no gradient."""
    first, second = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))
    optimizer: torch.optim.Optimizer = make([{"params": [first]}, {"params": [second]}], lr=0.1, **options)
    for index, param in enumerate((first, second)):
        param.grad = None if index == skip else torch.ones_like(param)
    optimizer.step()
    return optimizer


def test_state_of_torchs_optimizers_is_named_by_parameter() -> None:
    optimizer = stepped(torch.optim.AdamW)
    found = averaged_state(optimizer)
    assert list(found) == ["0/exp_avg", "0/exp_avg_sq", "1/exp_avg", "1/exp_avg_sq"], "no step counts"
    assert found["1/exp_avg"] is optimizer.state[optimizer.param_groups[1]["params"][0]]["exp_avg"]
    assert list(averaged_state(stepped(torch.optim.AdamW, skip=0))) == ["1/exp_avg", "1/exp_avg_sq"]
    assert averaged_state(stepped(torch.optim.SGD)) == {}
    assert list(averaged_state(stepped(torch.optim.SGD, momentum=0.9))) == ["0/momentum_buffer", "1/momentum_buffer"]


def test_fused_optimizers_give_flat_state() -> None:
    optimizer = stepped(FusedAdamW)
    found = averaged_state(optimizer)
    assert found
    assert all(isinstance(tensor, Tensor) and tensor.dim() == 1 for tensor in found.values())
    assert without_mean(optimizer) is None


@pytest.mark.parametrize(
    ("state", "found"),
    [
        ({"codes": torch.ones(2, dtype=torch.int8)}, "'codes' of parameter 1 (SGD) is Tensor of torch.int8,"),
        ({"history": [torch.ones(2)]}, "'history' of parameter 1 (SGD) is list of tensors,"),
        ({"deep": {"blocks": [torch.ones(2)]}}, "'deep' of parameter 1 (SGD) is dict of tensors,"),
        ({"step": torch.tensor(1), "moment": torch.ones(2), "note": [1, 2], "empty": []}, None),
    ],
    ids=["codes", "list", "nested", "fine"],
)
def test_state_without_a_mean_is_named(state: dict[str, Any], found: str | None) -> None:
    optimizer = stepped(torch.optim.SGD)
    optimizer.state[optimizer.param_groups[1]["params"][0]] = state
    coded = without_mean(optimizer)
    if found is None:
        assert coded is None
    else:
        assert coded is not None
        assert coded.why.startswith(f"the state {found} which has no mean")
        assert "hk.Averaging(state=False)" in coded.why


@pytest.mark.parametrize("make", [torch.optim.AdamW, FusedAdamW], ids=["torch", "fused"])
def test_step_counts_are_read_as_a_copy_and_written(make: Any) -> None:
    optimizer = stepped(make)
    counts = StepCounts(optimizer)
    read = counts.read()
    assert (read.dtype, read.device.type) == (torch.float32, "cpu")
    assert set(read.tolist()) == {1.0}
    read.fill_(7.0)
    assert set(counts.read().tolist()) == {1.0}
    counts.write(read)
    assert set(counts.read().tolist()) == {7.0}
    param = optimizer.param_groups[0]["params"][0]
    assert float(optimizer.state[param]["step"]) == 7.0


def test_counts_that_are_numbers_stay_numbers() -> None:
    optimizer = stepped(torch.optim.SGD)
    params = [group["params"][0] for group in optimizer.param_groups]
    optimizer.state[params[1]] = {"step": 3}
    counts = StepCounts(optimizer)
    assert counts.read().tolist() == [3.0]
    counts.write(torch.tensor([5.0]))
    assert optimizer.state[params[1]] == {"step": 5}
    assert type(optimizer.state[params[1]]["step"]) is int


def test_an_optimizer_without_counts() -> None:
    counts = StepCounts(stepped(torch.optim.SGD))
    assert counts.read().numel() == 0
    counts.write(torch.zeros(0))
