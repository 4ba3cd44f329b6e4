"""FusedAdagrad against torch.optim."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn

from hdet_kernels.optim import FusedAdagrad, FusedOptimizer
from tests.ops.cases import QUICK
from tests.optim.cases import DTYPES, assert_as_accurate_as_torch, assert_refused, choose, with_backends

NAMES = ("adagrad",)


@pytest.mark.parametrize("dtype", choose(DTYPES, "fp32"))
@pytest.mark.parametrize(
    ("backend", "name"), with_backends(QUICK, NAMES, itertools.product(("torch-cpu", "cpp-cpu"), NAMES))
)
def test_error_is_at_most_twice_that_of_torch(backend: tuple[str, str], name: str, dtype: str) -> None:
    assert_as_accurate_as_torch(backend, name, DTYPES[dtype])


def test_the_accumulator_has_its_initial_value_before_the_first_step() -> None:
    param = nn.Parameter(torch.ones(3))
    optimizer = FusedAdagrad([param], initial_accumulator_value=0.25)
    assert optimizer.state[param]["sum"].tolist() == [0.25] * 3
    assert optimizer.state[param]["step"].item() == 0


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (FusedAdagrad, {"lr_decay": -1}, "lr_decay must be"),
        (FusedAdagrad, {"initial_accumulator_value": -1}, "initial_accumulator_value must be"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_bad_options_are_refused_before_anything_moves(
    make: type[FusedOptimizer], options: dict[str, Any], message: str
) -> None:
    assert_refused(make, options, message)
