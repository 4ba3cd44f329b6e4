"""FusedAdam and FusedAdamW against torch.optim."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from hdet_kernels.optim import FusedAdam, FusedAdamW, FusedOptimizer
from tests.ops.cases import QUICK
from tests.optim.cases import (
    DTYPES,
    assert_as_accurate_as_torch,
    assert_refused,
    choose,
    parameters,
    run,
    with_backends,
)

NAMES = ("adam", "adam-amsgrad", "adamw", "adamw-amsgrad")


@pytest.mark.parametrize("dtype", choose(DTYPES, "fp32"))
@pytest.mark.parametrize(
    ("backend", "name"), with_backends(QUICK, NAMES, itertools.product(("torch-cpu", "cpp-cpu"), NAMES))
)
def test_error_is_at_most_twice_that_of_torch(backend: tuple[str, str], name: str, dtype: str) -> None:
    assert_as_accurate_as_torch(backend, name, DTYPES[dtype])


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


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (FusedAdamW, {"lr": -1.0}, "lr must be .* got -1.0"),
        (FusedAdamW, {"betas": (0.9, 1.0)}, r"betas must be in \[0, 1\), got \(0.9, 1.0\)"),
        (FusedAdamW, {"betas": 0.9}, "pair of numbers"),
        (FusedAdamW, {"eps": -1e-8}, "eps must be"),
        (FusedAdamW, {"weight_decay": -0.1}, "weight_decay must be"),
        (FusedAdam, {"amsgrad": "no"}, "amsgrad must be True or False, got 'no'"),
        (FusedAdamW, {"amsgrad": True, "state_dtype": "int8"}, "amsgrad=True needs state_dtype"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_bad_options_are_refused_before_anything_moves(
    make: type[FusedOptimizer], options: dict[str, Any], message: str
) -> None:
    assert_refused(make, options, message)
