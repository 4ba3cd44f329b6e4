"""Warm noisy initialisation: replicas that start around one point instead of at it."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from typing import Literal

import torch
from torch import Tensor

from .buckets import unique
from .ensemble import Ensemble, default_ensemble


@torch.no_grad()
def warm_noisy_init_(
    params: Iterable[Tensor],
    nu: float = 0.01,
    seed: int = 0,
    ensemble: Ensemble | None = None,
    *,
    scope: Literal["tensor", "global"] = "tensor",
) -> None:
    """θ ← θ + ε with ε ~ N(0, ν²·‖θ‖²/d), in place, different on every replica.

    ``scope="tensor"`` takes ‖θ‖ and d of each tensor (a tensor of zeros stays zero), ``"global"`` of all of them
    together. The noise is a function of (seed, replica, place of the tensor): the same on any device, and no global
    generator is read or changed. Call it after wrapping the model in DDP, which makes all replicas equal.
    """
    if not 0 <= nu < math.inf:
        raise ValueError(f"nu must be a finite number of at least 0, got {nu}")
    if scope not in ("tensor", "global"):
        raise ValueError(f"scope must be 'tensor' or 'global', got {scope!r}")
    params = unique(params)
    if any(hasattr(param, "device_mesh") for param in params):
        raise TypeError(
            "warm_noisy_init_ got sharded parameters: call it before fully_shard(), on all ranks of a replica"
        )
    # By address: parameters that are tied by sharing their memory get their noise once.
    by_memory = {p.data_ptr(): p for p in reversed(params) if p.is_floating_point() and p.numel()}
    floating = list(reversed(by_memory.values()))
    if not floating:
        raise ValueError("warm_noisy_init_ got no floating-point parameters: pass model.parameters()")
    replica = (default_ensemble() if ensemble is None else ensemble).replica
    rms = [float(torch.linalg.vector_norm(p.detach(), dtype=torch.float64)) / math.sqrt(p.numel()) for p in floating]
    if scope == "global":
        elements = sum(p.numel() for p in floating)
        both = sum(r * r * p.numel() for r, p in zip(rms, floating, strict=True))
        rms = [math.sqrt(both / elements)] * len(floating)
    for place, (param, size) in enumerate(zip(floating, rms, strict=True)):
        key = hashlib.blake2b(f"{seed}/{replica}/{place}".encode(), digest_size=8).digest()
        # Drawn on the CPU, so that a run starts from the same numbers wherever it runs.
        generator = torch.Generator().manual_seed(int.from_bytes(key, "big") >> 1)
        noise = torch.randn(param.shape, generator=generator, dtype=torch.float32).mul_(nu * size)
        param.add_(noise.to(param.device, param.dtype))
