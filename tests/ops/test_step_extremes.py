"""The step on gradients at the limits of float32: NaN, infinities, signed zeros, and squares that overflow."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops.cases import BACKENDS, FP32, RULES, make_case, make_table

SPECIAL = (math.nan, math.inf, -math.inf, -0.0, 0.0, 1.0, -1.0)
# The square overflows from 1.9e19 on; multiplied by 1 − β₂ = 0.001 first, only from 5.9e20 on.
HUGE = (1e18, 1e19, -1.8e19, 3e19, -1e20, 5e20, 1e21, -1e25, 3e38)


def stepped(name: str, values: tuple[float, ...], backend: tuple[str, str]) -> tuple[Tensor, ...]:
    """Return the parameter and the states after a step with these gradients, from zero states."""
    (where, device), (rule, row) = backend, RULES[name]
    case = make_case(rule, (len(values),), FP32, device, optional=name.endswith(("momentum", "nesterov", "amsgrad")))
    span = case.span(0)
    case.param[span] = 1.0
    for state in case.states:
        if state is not None:
            state[span] = 0.0
    case.grads = [torch.tensor(values, device=device)]
    case.step(make_table(device, row), where)
    return tuple(flat[span].cpu() for flat in (case.param, *case.states) if flat is not None)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["sgd-nesterov", "adam", "adamw-amsgrad", "adagrad", "lion"])
def test_all_backends_agree_on_nan_infinity_and_overflow(name: str, backend: tuple[str, str]) -> None:
    expected = stepped(name, SPECIAL + HUGE, ("torch", "cpu"))
    for got, want in zip(stepped(name, SPECIAL + HUGE, backend), expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-6, atol=0, equal_nan=True)


def test_lion_makes_nan_of_a_nan_gradient() -> None:
    """torch's sign(NaN) is 0: the parameter would stand still for ever, and the loss would not show it."""
    param, moment = stepped("lion", SPECIAL, ("torch", "cpu"))
    assert param.isnan().tolist() == [True] + [False] * (len(SPECIAL) - 1)
    assert moment.isnan().tolist() == [True] + [False] * (len(SPECIAL) - 1)
    assert moment[1:3].isinf().all()


@pytest.mark.parametrize(
    ("name", "optimizer"),
    [("adam", torch.optim.Adam), ("adamw", torch.optim.AdamW), ("adagrad", torch.optim.Adagrad)],
    ids=["adam", "adamw", "adagrad"],
)
def test_second_moments_overflow_where_those_of_torch_do(name: str, optimizer: Any) -> None:
    row = dict(RULES[name][1])
    if name != "adagrad":
        row["betas"] = (row.pop("beta1"), row.pop("beta2"))
    param = torch.nn.Parameter(torch.ones(len(HUGE)))
    plain = optimizer([param], **row)
    param.grad = torch.tensor(HUGE)
    plain.step()
    known = plain.state[param]
    moments = [known["sum"]] if name == "adagrad" else [known["exp_avg"], known["exp_avg_sq"]]
    for got, want in zip(stepped(name, HUGE, ("torch", "cpu")), (param.detach(), *moments), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-6, atol=0, equal_nan=True)
