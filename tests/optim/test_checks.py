"""Arguments of the optimizers are checked before anything is touched."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from hdet_kernels.optim import FusedAdamW, FusedOptimizer
from hdet_kernels.optim.options import check_finite, check_param, check_ties
from tests.optim.cases import assert_refused


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (FusedAdamW, {"lr": float("nan")}, "lr must be .* got nan"),
        (FusedAdamW, {"lr": "fast"}, "lr must be a number .* got 'fast'"),
        (FusedAdamW, {"lr": torch.ones(2)}, r"one element, got shape \(2,\)"),
        (FusedAdamW, {"lr": torch.tensor(1j)}, "lr as a tensor must hold a real number, got torch.complex64"),
        (FusedAdamW, {"lr": True}, "lr must be a number .* got True"),
        (FusedAdamW, {"lr": 10**400}, "lr must be a finite number"),
        (FusedAdamW, {"betas": ("a", "b")}, "betas must be a number .* got 'a'"),
        (FusedAdamW, {"betas": (0.9, float("nan"))}, r"betas must be in \[0, 1\), got \(0.9, nan\)"),
        (FusedAdamW, {"weight_decay": float("nan")}, "weight_decay must be a finite number"),
        (FusedAdamW, {"amsgrad": torch.ones(2)}, "amsgrad must be True or False"),
        (FusedAdamW, {"maximize": 2}, "maximize must be True or False, got 2"),
        (FusedAdamW, {"max_grad_norm": 0.0}, "max_grad_norm must be a positive number.* got 0.0"),
        (FusedAdamW, {"max_grad_norm": True}, "max_grad_norm must be a positive number.* got True"),
        (FusedAdamW, {"max_grad_norm": "1"}, "max_grad_norm must be a positive number.* got '1'"),
        (FusedAdamW, {"max_grad_norm": float("nan")}, "max_grad_norm must be a positive number.* got nan"),
        (FusedAdamW, {"max_grad_norm": 10**400}, "max_grad_norm must be a positive number"),
        (FusedAdamW, {"master_weights": 1}, "master_weights must be True, False, .split. or None to choose, got 1"),
        (FusedAdamW, {"stochastic_rounding": 0}, "stochastic_rounding must be True or False, got 0"),
        (FusedAdamW, {"advance_versions": None}, "advance_versions must be True or False, got None"),
        (FusedAdamW, {"backend": ["torch"]}, r"backend must be a name .* got \['torch'\]"),
        (FusedAdamW, {"backend": "metal"}, "unknown backend 'metal'"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_bad_options_are_refused_before_anything_moves(
    make: type[FusedOptimizer], options: dict[str, Any], message: str
) -> None:
    assert_refused(make, options, message)


@pytest.mark.parametrize("params", [None, 3, nn.Linear(2, 2), [{}], [{"params": None}]], ids=str)
def test_parameters_that_are_none(params: Any) -> None:
    with pytest.raises(TypeError, match=r"got (None|3|a Linear): pass model.parameters\(\)"):
        FusedAdamW(params)


@pytest.mark.parametrize(("name", "value"), [("lr", "x"), ("betas", 0.9), ("weight_decay", None), ("amsgrad", "no")])
def test_a_group_that_is_edited_badly_is_refused_at_the_step(name: str, value: Any) -> None:
    param = nn.Parameter(torch.ones(3))
    optimizer = FusedAdamW([param])
    param.grad = torch.ones(3)
    optimizer.param_groups[0][name] = value
    with pytest.raises(ValueError, match=f"{name} must be"):
        optimizer.step()
    assert torch.equal(param, torch.ones(3))


def test_numbers_on_an_accelerator_are_not_read() -> None:
    check_finite({"lr": torch.empty((), device="meta")}, "lr")


def test_unsupported_dtypes_are_named() -> None:
    with pytest.raises(ValueError, match=r"parameter 3 of shape \(2,\) is torch.int64; expected one of float32"):
        check_param(3, torch.ones(2, dtype=torch.int64))
    with pytest.raises(ValueError, match="view_as_real"):
        check_param(0, torch.ones(2, dtype=torch.complex64))


def test_tied_parameters_of_two_groups() -> None:
    first = nn.Parameter(torch.ones(2))
    check_ties([{"params": [first, nn.Parameter(first.data)]}, {"params": [nn.Parameter(torch.ones(2))]}])
    with pytest.raises(ValueError, match="parameter 0 of group 1 shares its memory with one of group 0"):
        check_ties([{"params": [first]}, {"params": [nn.Parameter(first.data)]}])
