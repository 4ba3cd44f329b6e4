"""Cases that the optimizer tests share: every fused optimizer beside torch's own, gradients for both, comparisons."""

from __future__ import annotations

import io
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hdet_kernels.optim import FusedAdagrad, FusedAdam, FusedAdamW, FusedLion, FusedOptimizer, FusedSGD

Maker = Callable[..., torch.optim.Optimizer]


#: By the name of a case: torch.optim's class, the fused class, and the options of both.
PAIRS: dict[str, tuple[Maker, type[FusedOptimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, FusedSGD, {"lr": 0.1}),
    "sgd-momentum": (torch.optim.SGD, FusedSGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.2, "weight_decay": 0.1}),
    "sgd-nesterov": (torch.optim.SGD, FusedSGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "maximize": True}),
    "adam": (torch.optim.Adam, FusedAdam, {"lr": 0.01, "weight_decay": 0.1}),
    "adam-amsgrad": (torch.optim.Adam, FusedAdam, {"lr": 0.01, "amsgrad": True, "maximize": True}),
    "adamw": (torch.optim.AdamW, FusedAdamW, {"lr": 0.01, "weight_decay": 0.1}),
    "adamw-amsgrad": (torch.optim.AdamW, FusedAdamW, {"lr": 0.01, "amsgrad": True, "betas": (0.8, 0.95)}),
    "adagrad": (
        torch.optim.Adagrad,
        FusedAdagrad,
        {"lr": 0.1, "lr_decay": 0.1, "initial_accumulator_value": 0.2, "weight_decay": 0.01},
    ),
}


FUSED = {name: (ours, options) for name, (_, ours, options) in PAIRS.items()} | {
    "lion": (FusedLion, {"lr": 0.01, "weight_decay": 0.1}),
}


#: Pairs of a backend and a case that ``make test`` runs: every rule and both CPU backends, not all combinations.
QUICK_PAIRS = (
    ("torch-cpu", "sgd-momentum"),
    ("cpp-cpu", "adam-amsgrad"),
    ("torch-cpu", "adamw"),
    ("cpp-cpu", "adagrad"),
)
QUICK_FUSED = (*QUICK_PAIRS, ("cpp-cpu", "lion"))


DTYPES = {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.bfloat16}


SHAPES = ((3, 5), (), (4097,), (0, 3), (1,))


def choose(values: Iterable[Any], *quick: str) -> list[Any]:
    """Return the values as test parameters; ``make test`` runs those in ``quick``, ``make test-full`` the others."""
    return [pytest.param(value, marks=() if value in quick else pytest.mark.full) for value in values]


def choose_backends(backends: Sequence[Any], *quick: str) -> list[Any]:
    """Return backends of ``tests.ops.cases``; ``make test`` runs those with the ids in ``quick``."""
    return [
        pytest.param(*each.values, id=each.id, marks=[*each.marks, *([] if each.id in quick else [pytest.mark.full])])
        for each in backends
    ]


def with_backends(backends: Sequence[Any], values: Sequence[str], quick: Iterable[tuple[str, str]]) -> list[Any]:
    """Return each pair of a backend (of ``tests.ops.cases``) and a value as the parameters of a test.

    ``make test`` runs the pairs (id of the backend, value) in ``quick``, ``make test-full`` the others.
    """
    chosen = set(quick)
    return [
        pytest.param(
            *backend.values,
            value,
            id=f"{backend.id}-{value}",
            marks=[*backend.marks, *([] if (backend.id, value) in chosen else [pytest.mark.full])],
        )
        for backend, value in itertools.product(backends, values)
    ]


def parameters(dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 0) -> list[nn.Parameter]:
    """Return parameters of all kinds of shapes, one of them channels-last."""
    generator = torch.Generator().manual_seed(seed)
    params = [nn.Parameter(torch.randn(shape, generator=generator).to(device, dtype)) for shape in SHAPES]
    pixels = torch.randn(2, 3, 4, 5, generator=generator).to(memory_format=torch.channels_last)
    return [*params, nn.Parameter(pixels.to(device, dtype))]


def many_parameters(count: int) -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(4)) for _ in range(count)]


def give_gradients(*models: Iterable[Tensor], seed: int, scale: float = 1.0) -> None:
    """Give the same gradients to every list of parameters, whatever their dtype and device."""
    for params in models:
        generator = torch.Generator().manual_seed(seed)
        for param in params:
            value = (torch.randn(param.shape, generator=generator) * scale).to(torch.bfloat16)
            param.grad = torch.empty_like(param).copy_(value)


def run(optimizer: torch.optim.Optimizer, params: list[nn.Parameter], seeds: Iterable[int]) -> None:
    """Take one step with the gradients of each seed."""
    for seed in seeds:
        give_gradients(params, seed=seed)
        optimizer.step()


def torch_optimizer(name: str, params: Iterable[Any], **changes: Any) -> torch.optim.Optimizer:
    make, _, options = PAIRS[name]
    return make(params, foreach=False, **(options | changes))


def fused_optimizer(name: str, params: Iterable[Any], **changes: Any) -> FusedOptimizer:
    make, options = FUSED[name]
    return make(params, **(options | changes))


def assert_equal(first: Iterable[Tensor], second: Iterable[Tensor]) -> None:
    for a, b in zip(first, second, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def assert_close(first: Iterable[Tensor], second: Iterable[Tensor]) -> None:
    """Assert equality up to the rounding of a few operations."""
    for a, b in zip(first, second, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def assert_as_accurate_as_torch(
    backend: tuple[str, str], name: str, dtype: torch.dtype, **changes: Any
) -> FusedOptimizer:
    """Assert that five steps have at most twice the error of torch.optim's, both against float64.

    Returns the fused optimizer, which has ``changes`` to its options.
    """
    where, device = backend
    ours, theirs = parameters(dtype, device), parameters(dtype)
    truth = [nn.Parameter(param.detach().double().clone()) for param in theirs]
    optimizer = fused_optimizer(name, ours, backend=where, **changes)
    run(optimizer, ours, range(5))
    run(torch_optimizer(name, theirs), theirs, range(5))
    run(torch_optimizer(name, truth), truth, range(5))
    for mine, plain, exact in zip(ours, theirs, truth, strict=True):
        if exact.numel() == 0:
            continue
        error = (mine.detach().cpu().double() - exact).abs().max()
        rounding = torch.finfo(dtype).eps * exact.abs().max()
        # In float64 there is no better truth than torch itself: a few roundings of the result.
        allowed = 8 * rounding if dtype == torch.float64 else 2 * (plain.double() - exact).abs().max() + rounding
        assert error <= allowed, f"shape {tuple(exact.shape)}: error {error:.3g}, allowed {allowed:.3g}"
    return optimizer


def saved_and_loaded(state: dict[str, Any]) -> dict[str, Any]:
    """Return a state_dict after a trip through a file, read with ``weights_only=True``."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)  # type: ignore[no-any-return]


def shapes_of(state: dict[int, dict[str, Tensor]]) -> dict[int, dict[str, tuple[int, ...]]]:
    return {index: {name: tuple(value.shape) for name, value in entry.items()} for index, entry in state.items()}
