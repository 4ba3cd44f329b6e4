"""Checks of optimizer arguments. Messages state what was given, what is expected and what to do."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hdet_kernels.ops import DTYPES
from hdet_kernels.sharded import part_of


def check_at_least_zero(options: Mapping[str, Any], *names: str) -> None:
    """Raise ValueError unless each named option is a finite number of at least 0."""
    for name in names:
        value = options[name]
        _check_number(name, value)
        if not on_host(value):
            continue
        if not 0 <= _as_float(value) < math.inf:
            raise ValueError(
                f"{name} must be a finite number of at least 0, got {value}; pass for example {name}=0.001"
            )


def check_finite(options: Mapping[str, Any], name: str) -> None:
    """Raise ValueError unless the named option is a finite number."""
    value = options[name]
    _check_number(name, value)
    if on_host(value) and not math.isfinite(_as_float(value)):
        raise ValueError(f"{name} must be a finite number, got {value}; leave it out for 0")


def check_below_one(options: Mapping[str, Any], name: str) -> None:
    """Raise ValueError unless the named decay rate lies in [0, 1); ``betas`` is a pair of decay rates."""
    value = options[name]
    if name == "betas" and not (isinstance(value, tuple | list) and len(value) == 2):
        raise ValueError(
            f"betas must be a pair of numbers in [0, 1), got {value!r}; pass for example betas=(0.9, 0.99)"
        )
    for part in value if name == "betas" else (value,):
        _check_number(name, part)
        if on_host(part) and not 0 <= _as_float(part) < 1:
            raise ValueError(f"{name} must be in [0, 1), got {value!r}; a usual value is 0.9")


def check_flags(options: Mapping[str, Any], *names: str) -> None:
    """Raise ValueError unless each named option is True or False."""
    for name in names:
        if not isinstance(options[name], bool | np.bool_) and not (
            type(options[name]) is int and options[name] in (0, 1)
        ):
            raise ValueError(f"{name} must be True or False, got {options[name]!r}")


def check_seed(value: object) -> None:
    """Raise ValueError unless ``value`` is a seed of stochastic rounding: 32 bits without a sign."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**32:
        raise ValueError(f"rounding_seed must be a whole number from 0 to 2**32 - 1, got {value!r}; the default is 0")


def check_max_grad_norm(value: float | None) -> None:
    """Raise ValueError unless ``value`` is a positive number or None."""
    if value is None:
        return
    number = isinstance(value, Real) and not isinstance(value, bool)
    if not number or not value > 0 or (isinstance(value, int) and _as_float(value) == math.inf):
        raise ValueError(f"max_grad_norm must be a positive number, or None for no clipping, got {value!r}")


def check_params(params: object) -> None:
    """Raise TypeError unless ``params`` is an iterable, as the parameters of an optimizer or of a group must be."""
    if isinstance(params, torch.nn.Module) or not isinstance(params, Iterable):
        given = repr(params) if params is None or isinstance(params, int | float) else f"a {type(params).__name__}"
        raise TypeError(f"parameters must be tensors, or dicts with tensors, got {given}: pass model.parameters()")


def check_param(index: int, param: Tensor) -> None:
    """Raise ValueError unless the kernels support the dtype of a parameter."""
    if param.is_complex():
        raise ValueError(
            f"parameter {index} of shape {tuple(param.shape)} is {param.dtype}; fused optimizers need real numbers: "
            "store it as torch.view_as_real, or optimize it with torch.optim"
        )
    if param.dtype not in DTYPES:
        expected = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        raise ValueError(
            f"parameter {index} of shape {tuple(param.shape)} is {param.dtype}; expected one of {expected}"
        )


def check_ties(groups: Sequence[Mapping[str, Any]]) -> None:
    """Raise ValueError if parameters of different groups share their memory: their hyperparameters would conflict."""
    owner: dict[tuple[torch.device, int], int] = {}
    for number, group in enumerate(groups):
        for index, param in enumerate(group["params"]):
            part = part_of(param)
            if part.numel() and owner.setdefault((part.device, part.data_ptr()), number) != number:
                raise ValueError(
                    f"parameter {index} of group {number} shares its memory with one of group "
                    f"{owner[part.device, part.data_ptr()]}; tied parameters must be in one group"
                )


def _check_number(name: str, value: object) -> None:
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ValueError(f"{name} as a tensor must have one element, got shape {tuple(value.shape)}")
        if value.is_complex() or value.dtype == torch.bool:
            raise ValueError(f"{name} as a tensor must hold a real number, got {value.dtype}")
    elif isinstance(value, bool) or not isinstance(value, Real):
        raise ValueError(f"{name} must be a number or a tensor of one element, got {value!r}")


def _as_float(value: Any) -> float:
    try:
        return float(value)
    except OverflowError:  # a whole number beyond the range of floats
        return math.inf if value > 0 else -math.inf


def on_host(value: float | Tensor) -> bool:
    """Return whether a number can be read without waiting for an accelerator."""
    return not isinstance(value, torch.Tensor) or value.device.type == "cpu"
