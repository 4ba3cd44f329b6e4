"""Optimizers that are built, loaded or stepped under another default device or dtype, or in inference mode."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch

from tests.ops.cases import QUICK
from tests.optim.cases import assert_equal, fused_optimizer, give_gradients, parameters, run, with_backends


@contextlib.contextmanager
def default_device(name: str) -> Iterator[None]:
    torch.set_default_device(name)
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


CONTEXTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "meta": lambda: torch.device("meta"),
    "default-meta": lambda: default_device("meta"),
    "float64": lambda: default_dtype(torch.float64),
    "inference": torch.inference_mode,
}


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize(
    ("backend", "name"),
    with_backends(QUICK, ["adamw", "sgd-momentum", "adagrad"], [("cpp-cpu", "adamw"), ("torch-cpu", "sgd-momentum")]),
)
@pytest.mark.parametrize(
    "dtype", [pytest.param(torch.float32, marks=pytest.mark.full, id="fp32"), pytest.param(torch.bfloat16, id="bf16")]
)
def test_the_context_makes_no_difference(context: str, backend: tuple[str, str], name: str, dtype: torch.dtype) -> None:
    where, device = backend
    plain, params = parameters(dtype, device), parameters(dtype, device)
    usual = fused_optimizer(name, plain, backend=where, max_grad_norm=1.0)
    run(usual, plain, range(4))
    give_gradients(params, seed=0)
    with CONTEXTS[context]():
        optimizer = fused_optimizer(name, params, backend=where, max_grad_norm=1.0)
        optimizer.step()
    run(optimizer, params, [1])
    copies = [param.detach().clone().requires_grad_() for param in params]
    again = fused_optimizer(name, copies, backend=where, max_grad_norm=1.0)
    with CONTEXTS[context]():
        again.load_state_dict(optimizer.state_dict())
    for target, own in ((optimizer, params), (again, copies)):
        run(target, own, range(2, 4))
        assert_equal(own, plain)
