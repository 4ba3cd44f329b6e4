"""FusedSGD against torch.optim."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from hdet_kernels.optim import FusedOptimizer, FusedSGD
from tests.ops.cases import QUICK
from tests.optim.cases import (
    DTYPES,
    assert_as_accurate_as_torch,
    assert_close,
    assert_refused,
    choose,
    parameters,
    run,
    shapes_of,
    with_backends,
)

NAMES = ("sgd", "sgd-momentum", "sgd-nesterov")


@pytest.mark.parametrize("dtype", choose(DTYPES, "fp32"))
@pytest.mark.parametrize(
    ("backend", "name"), with_backends(QUICK, NAMES, itertools.product(("torch-cpu", "cpp-cpu"), NAMES))
)
def test_error_is_at_most_twice_that_of_torch(backend: tuple[str, str], name: str, dtype: str) -> None:
    assert_as_accurate_as_torch(backend, name, DTYPES[dtype])


def test_momentum_that_a_scheduler_turns_on_and_off() -> None:
    ours, theirs = parameters(), parameters()
    fused, torchs = FusedSGD(ours, 0.1, dampening=0.5), torch.optim.SGD(theirs, 0.1, dampening=0.5, foreach=False)
    for seed, momentum in enumerate((0.0, 0.9, 0.0, 0.8)):
        for target, params in ((fused, ours), (torchs, theirs)):
            target.param_groups[0]["momentum"] = momentum
            run(target, params, [seed])
        assert shapes_of(fused.state_dict()["state"]) == shapes_of(torchs.state_dict()["state"])
    assert_close(ours, theirs)


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (FusedSGD, {"nesterov": True}, "nesterov=True needs momentum above 0"),
        (FusedSGD, {"momentum": -0.9}, "momentum must be"),
        (FusedSGD, {"dampening": float("nan")}, "dampening must be a finite number, got nan"),
        (FusedSGD, {"maximize": "false"}, "maximize must be True or False, got 'false'"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_bad_options_are_refused_before_anything_moves(
    make: type[FusedOptimizer], options: dict[str, Any], message: str
) -> None:
    assert_refused(make, options, message)


def test_a_momentum_on_an_accelerator_is_not_read() -> None:
    """Groups are checked again when one changed, also while a CUDA graph is captured."""
    optimizer = FusedSGD([torch.nn.Parameter(torch.ones(1))], momentum=0.9, nesterov=True)
    optimizer.check_group({**optimizer.defaults, "momentum": torch.empty((), device="meta")})
