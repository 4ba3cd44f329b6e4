"""Arguments of the optimizers are checked before anything is touched."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from hdet_kernels.optim import FusedAdamW, FusedOptimizer
from hdet_kernels.optim.checks import check_finite, check_param, check_ties
from tests.optim.cases import assert_refused


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (FusedAdamW, {"lr": float("nan")}, "lr must be .* got nan"),
        (FusedAdamW, {"lr": "fast"}, "lr must be a number .* got 'fast'"),
        (FusedAdamW, {"lr": torch.ones(2)}, r"one element, got shape \(2,\)"),
        (FusedAdamW, {"max_grad_norm": 0.0}, "max_grad_norm must be a positive number.* got 0.0"),
        (FusedAdamW, {"backend": "metal"}, "unknown backend 'metal'"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_bad_options_are_refused_before_anything_moves(
    make: type[FusedOptimizer], options: dict[str, Any], message: str
) -> None:
    assert_refused(make, options, message)


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
