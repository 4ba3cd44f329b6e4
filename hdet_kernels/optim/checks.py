"""Checks of optimizer arguments: every message says what was given, what is expected and what to do."""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from hdet_kernels.ops import DTYPES
from hdet_kernels.tensors import replicas_of


def check_at_least_zero(options: Mapping[str, Any], *names: str) -> None:
    for name in names:
        value = options[name]
        _check_number(name, value)
        if not _on_host(value):
            continue
        if not 0 <= float(value) < math.inf:
            raise ValueError(
                f"{name} must be a finite number of at least 0, got {value}; pass for example {name}=0.001"
            )


def check_finite(options: Mapping[str, Any], name: str) -> None:
    value = options[name]
    _check_number(name, value)
    if _on_host(value) and not math.isfinite(float(value)):
        raise ValueError(f"{name} must be a finite number, got {value}; leave it out for 0")


def check_below_one(options: Mapping[str, Any], name: str) -> None:
    """For decay rates: a number in [0, 1), or a pair of them."""
    value = options[name]
    if name == "betas" and not (isinstance(value, tuple | list) and len(value) == 2):
        raise ValueError(
            f"betas must be a pair of numbers in [0, 1), got {value!r}; pass for example betas=(0.9, 0.99)"
        )
    for part in value if name == "betas" else (value,):
        _check_number(name, part)
        if _on_host(part) and not 0 <= float(part) < 1:
            raise ValueError(f"{name} must be in [0, 1), got {value!r}; a usual value is 0.9")


def check_flags(options: Mapping[str, Any], *names: str) -> None:
    for name in names:
        if options[name] not in (True, False):
            raise ValueError(f"{name} must be True or False, got {options[name]!r}")


def check_seed(value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**32:
        raise ValueError(f"rounding_seed must be a whole number from 0 to 2**32 - 1, got {value!r}; the default is 0")


def check_max_grad_norm(value: float | None) -> None:
    if value is not None and not (isinstance(value, int | float) and value > 0):
        raise ValueError(f"max_grad_norm must be a positive number, or None for no clipping, got {value!r}")


def check_param(index: int, param: Tensor) -> None:
    if param.is_complex():
        raise ValueError(
            f"parameter {index} of shape {tuple(param.shape)} is {param.dtype}; fused optimizers work on real numbers: "
            "keep it as torch.view_as_real, or give it to torch.optim"
        )
    if param.dtype not in DTYPES:
        expected = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        raise ValueError(
            f"parameter {index} of shape {tuple(param.shape)} is {param.dtype}; expected one of {expected}"
        )


def check_shapes(state: Mapping[Any, Any]) -> None:
    for param, entries in state.items():
        if not isinstance(param, Tensor):
            continue
        # Replicas of a stack may share their state.
        fitting = (param.shape, param.shape[1:]) if replicas_of(param) else (param.shape,)
        for name, value in entries.items():
            if name != "step" and isinstance(value, Tensor) and value.shape not in fitting:
                stacked = value.shape[1:] == param.shape
                raise ValueError(
                    f"the loaded state {name!r} has shape {tuple(value.shape)}, its parameter {tuple(param.shape)}; "
                    + (
                        "the state_dict is of a stack whose replicas have their own moments: load it into a stack"
                        if stacked
                        else "the state_dict is of another model, or its parameters are in another order"
                    )
                )


def _check_number(name: str, value: object) -> None:
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ValueError(f"{name} as a tensor must have one element, got shape {tuple(value.shape)}")
    elif isinstance(value, bool) or not isinstance(value, Real):
        raise ValueError(f"{name} must be a number or a tensor of one element, got {value!r}")


def _on_host(value: float | Tensor) -> bool:
    """A tensor on an accelerator is not read: its value may change at any time, and reading waits for the device."""
    return not isinstance(value, torch.Tensor) or value.device.type == "cpu"
