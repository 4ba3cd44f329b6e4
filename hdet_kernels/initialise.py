"""Warm noisy initialisation: replicas start around one point instead of exactly at it."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from typing import Literal

import torch
from torch import Tensor

from hdet_kernels.checks import check_choice, check_number, check_whole
from hdet_kernels.ensemble import Ensemble, check_ensemble, settled_ensemble
from hdet_kernels.tensors import has_overlap, unique, wide_dtype


@torch.no_grad()
def warm_noisy_init_(
    params: Iterable[Tensor],
    nu: float = 0.01,
    seed: int = 0,
    ensemble: Ensemble | None = None,
    *,
    scope: Literal["tensor", "global"] = "tensor",
) -> None:
    """Add Gaussian noise to the parameters in place, different on every replica: θ ← θ + ε, ε ~ N(0, ν²·‖θ‖²/d).

    The noise of a tensor is drawn on the CPU from a generator of its own, seeded by the seed, the replica and the
    position of the tensor: generators of other devices would give other numbers. So it is the same on any device,
    except for the last bits of ‖θ‖. No global random generator is read or changed. Call this after wrapping the model
    in DDP, which makes all replicas equal.

    Args:
        params: the parameters. Where this process holds several replicas (``ensemble.rows``) they are [rows, …], and
            every row gets the same noise as in a process of its own.
        nu: ν, the size of the noise relative to the parameters.
        seed: the seed of the noise.
        ensemble: who the replicas are. Default: the default process group, or a single replica without one.
        scope: ``"tensor"`` takes ‖θ‖ and d of each tensor (a tensor of zeros stays zero), ``"global"`` of all tensors
            together.

    Raises:
        ValueError, TypeError: before anything is changed, for parameters or options that do not fit.
    """
    nu = check_number("nu", nu, at_least=0)
    seed = check_whole("seed", seed)
    if ensemble is not None:
        check_ensemble("ensemble", ensemble, ("replica", "rows"))
    check_choice("scope", scope, ("tensor", "global"))
    params = unique(params)
    for index, param in enumerate(params):
        if param.is_meta:
            raise ValueError(
                f"parameter {index} is on the meta device and has no values yet: materialise the model first"
            )
    if any(hasattr(param, "device_mesh") for param in params):
        raise TypeError(
            "warm_noisy_init_ got sharded parameters: call it before fully_shard(), on all ranks of a replica"
        )
    # Identified by address: parameters that are tied by sharing their memory get noise once.
    by_memory = {p.data_ptr(): p for p in reversed(params) if p.is_floating_point() and p.numel()}
    floating = list(reversed(by_memory.values()))
    if not floating:
        raise ValueError("warm_noisy_init_ got no floating-point parameters: pass model.parameters()")
    ensemble = settled_ensemble("warm_noisy_init_") if ensemble is None else ensemble
    for row, tensors in enumerate(_replicas(floating, ensemble.rows)):
        sizes = _rms(tensors, together=scope == "global")
        for position, (tensor, size) in enumerate(zip(tensors, sizes, strict=True)):
            generator = torch.Generator().manual_seed(_seed(seed, ensemble.replica + row, position))
            dtype = torch.float64 if tensor.dtype == torch.float64 else torch.float32
            noise = torch.randn(tensor.shape, generator=generator, dtype=dtype).mul_(nu * size)
            tensor.add_(noise.to(tensor.device))  # the sum is rounded once to the dtype of the tensor


def _replicas(params: Sequence[Tensor], rows: int) -> list[list[Tensor]]:
    """Return the parameters of each replica that this process holds."""
    if rows == 1:
        return [list(params)]
    for param in params:
        if param.shape[:1] != (rows,) or has_overlap(param):
            raise ValueError(
                f"{rows} replicas are the rows of tensors [{rows}, …] without overlaps in memory, got shape "
                f"{tuple(param.shape)} with strides {param.stride()}: pass the parameters of all replicas, stacked"
            )
    return [[param.detach()[row] for param in params] for row in range(rows)]


def _seed(seed: int, replica: int, position: int) -> int:
    """Return the seed of the tensor at ``position``.

    torch's generator of the CPU takes 32 bits. Up to 4096 replicas of up to 2²⁰ tensors have different ones.
    """
    digest = hashlib.blake2b(str(seed).encode(), digest_size=4).digest()
    return (int.from_bytes(digest, "big") ^ (replica << 20) ^ position) % 2**32


def _rms(tensors: Sequence[Tensor], *, together: bool) -> list[float]:
    """Return ‖θ‖/√d for each tensor, or that of all tensors ``together``."""
    # In the order of elements, not of memory, so that strides do not change the last bits.
    norms = [torch.linalg.vector_norm(t.contiguous(), dtype=wide_dtype(t.device)).item() for t in tensors]
    counts = [tensor.numel() for tensor in tensors]
    if together:
        norms, counts = [math.hypot(*norms)] * len(tensors), [sum(counts)] * len(tensors)
    return [norm / math.sqrt(count) for norm, count in zip(norms, counts, strict=True)]
