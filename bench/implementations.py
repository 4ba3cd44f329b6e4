"""Build the optimizers that are measured: torch's, ours on each backend, and the peers.

An implementation is named by a string, ``way`` in the records: ``"torch-fused"``, ``"hdet-"`` and a backend, or the
name of a peer in ``peers.py``.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from bench import measure, peers
from hdet_kernels.ops.backends import backends
from hdet_kernels.optim import FusedAdagrad, FusedAdam, FusedAdamW, FusedLion, FusedSGD

# Our backends by device. The pure-torch fallback is left out on GPUs: it takes minutes for 10 000 tensors.
BACKENDS = {"cuda": ("cuda", "triton"), "cpu": ("cpp", "torch")}

# By update rule: torch's class (None if it has none), ours, and the options of both.
RULES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, FusedAdamW, {"lr": 1e-3}),
    "adam": (torch.optim.Adam, FusedAdam, {"lr": 1e-3}),
    "adam-amsgrad": (torch.optim.Adam, FusedAdam, {"lr": 1e-3, "amsgrad": True}),
    "sgd": (torch.optim.SGD, FusedSGD, {"lr": 1e-3}),
    "sgd-momentum": (torch.optim.SGD, FusedSGD, {"lr": 1e-3, "momentum": 0.9}),
    "adagrad": (torch.optim.Adagrad, FusedAdagrad, {"lr": 1e-3}),
    "lion": (None, FusedLion, {"lr": 1e-4}),
}


def why_not(way: str, device: str, rule: str = "adamw", tensors: int = 1) -> str | None:
    """Return why ``way`` cannot be measured on ``device`` with so many ``tensors``, or None if it can."""
    if device == "cuda" and not torch.cuda.is_available():
        return "torch finds no usable NVIDIA GPU"
    if way in peers.PEERS:
        return peers.why_not(way, device, tensors)
    if way.startswith("hdet-"):
        reason = backends()[way.removeprefix("hdet-")]
        return None if reason == "ok" else reason
    if way == "torch-fused":
        theirs, _, common = RULES[rule]
        param = nn.Parameter(torch.ones(1, device=device))
        param.grad = torch.ones_like(param)
        try:
            theirs([param], **common, fused=True).step()
        except RuntimeError:
            return f"torch {torch.__version__} has no fused {rule} for {device}"
    return None


def optimizer(way: str, rule: str, params: list[nn.Parameter], **options: Any) -> Any:
    """Build the optimizer of an implementation. ``options`` apply to our optimizers only; peers know only AdamW."""
    theirs, ours, common = RULES[rule]
    if way in peers.PEERS:
        if rule != "adamw":
            raise ValueError(f"{way} implements adamw only, got rule={rule!r}")
        return peers.PEERS[way].make(params)
    if way.startswith("hdet-"):
        return ours(params, **common, **options, backend=way.removeprefix("hdet-"))
    return theirs(params, **common, **{way.removeprefix("torch-"): True})


def stepper(
    way: str, rule: str, params: list[nn.Parameter], max_grad_norm: float | None, **options: Any
) -> tuple[Any, measure.Call]:
    """Return the optimizer and its step with gradient clipping; our optimizers clip within the step."""
    if way.startswith("hdet-"):
        ours = optimizer(way, rule, params, max_grad_norm=max_grad_norm, **options)
        return ours, ours.step
    theirs = optimizer(way, rule, params)
    if max_grad_norm is None:
        return theirs, theirs.step

    def clip_and_step() -> None:
        torch.nn.utils.clip_grad_norm_(params, max_grad_norm)
        theirs.step()

    return theirs, clip_and_step


def case(device: str, *values: Any, why_not: str | None, on_device: bool = False) -> Any:
    """Return a pytest parameter set named ``gpu-…`` or ``cpu-…``.

    Args:
        device: "cuda" or "cpu", the first parameter.
        values: The other parameters.
        why_not: The reason to skip the case, or None.
        on_device: Whether the device's clock times the case instead of the host's.
    """
    marks = [pytest.mark.skipif(why_not is not None, reason=f"{device}: {why_not}")]
    if on_device:
        marks.append(pytest.mark.benchmark(timer=measure.clock(device)))
    name = "-".join(["gpu" if device == "cuda" else device, *map(str, values)])
    return pytest.param(device, *values, id=name, marks=marks)
