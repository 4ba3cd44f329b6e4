"""The ways to make a step: torch's own, each backend of this package and each of its peers, and why one of them is not
to be had here."""

from __future__ import annotations

from typing import Any

import measure
import peers
import pytest
import torch
from torch import nn

from hdet_kernels.ops.backends import backends
from hdet_kernels.optim import FusedAdagrad, FusedAdam, FusedAdamW, FusedLion, FusedSGD

#: Our backends by device. On a GPU the fallback is left out: it takes minutes for 10 000 tensors.
BACKENDS = {"cuda": ("cuda", "triton"), "cpu": ("cpp", "torch")}

#: By rule: torch's class (``None``: it has none), ours, and the options of both.
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
    """Why ``way`` (``"hdet-"`` and a backend, one of torch's, or a peer) cannot be measured on ``device`` with so many
    ``tensors``, if so."""
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
            return f"torch {torch.__version__} has no fused {rule} for it"
    return None


def optimizer(way: str, rule: str, params: list[nn.Parameter], **options: Any) -> Any:
    """``options`` are for our optimizers alone. The peers know no rule but AdamW."""
    theirs, ours, common = RULES[rule]
    if way in peers.PEERS:
        if rule != "adamw":
            raise ValueError(f"{way} is an AdamW, and was asked for {rule}")
        return peers.PEERS[way].make(params)
    if way.startswith("hdet-"):
        return ours(params, **common, **options, backend=way.removeprefix("hdet-"))
    return theirs(params, **common, **{way.removeprefix("torch-"): True})


def stepper(
    way: str, rule: str, params: list[nn.Parameter], max_grad_norm: float | None, **options: Any
) -> tuple[Any, measure.Call]:
    """The optimizer, and a step as the user calls it, clipping included: ours clips within its step."""
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
    """A parametrised case, named ``gpu-…`` or ``cpu-…``; skipped for ``why_not``; timed by the device's own clock if
    ``on_device``, else by the host's."""
    marks = [pytest.mark.skipif(why_not is not None, reason=f"{device}: {why_not}")]
    if on_device:
        marks.append(pytest.mark.benchmark(timer=measure.clock(device)))
    name = "-".join(["gpu" if device == "cuda" else device, *map(str, values)])
    return pytest.param(device, *values, id=name, marks=marks)
