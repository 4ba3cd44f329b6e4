"""Warm noisy initialisation: replicas start around one point instead of exactly at it."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Literal

import torch
from torch import Tensor

from hdet_kernels.checks import check_choice, check_number, check_whole
from hdet_kernels.ensemble import Ensemble, check_ensemble, settled_ensemble
from hdet_kernels.ops.backends import resolve
from hdet_kernels.ops.chunks import ChunkTable
from hdet_kernels.ops.noise import add_noise_
from hdet_kernels.tensors import Slot, has_overlap, unique, wide_dtype


@torch.no_grad()
def warm_noisy_init_(
    params: Iterable[Tensor],
    nu: float = 0.01,
    seed: int = 0,
    ensemble: Ensemble | None = None,
    *,
    scope: Literal["tensor", "global"] = "tensor",
    backend: str | None = None,
) -> None:
    """Add Gaussian noise to the parameters in place, different on every replica: θ ← θ + ε, ε ~ N(0, ν²·‖θ‖²/d).

    The noise is a function of the seed, the replica, the position of the tensor and the position of the element. It is
    the same with any backend and on any device, except for the last bits of ‖θ‖. No global random generator is read or
    changed. Call this after wrapping the model in DDP, which makes all replicas equal.

    Args:
        params: the parameters. Where this process holds several replicas (``ensemble.rows``) they are [rows, …], and
            every row gets the same noise as in a process of its own.
        nu: ν, the size of the noise relative to the parameters.
        seed: the seed of the noise.
        ensemble: who the replicas are. Default: the default process group, or a single replica without one.
        scope: ``"tensor"`` takes ‖θ‖ and d of each tensor (a tensor of zeros stays zero), ``"global"`` of all tensors
            together.
        backend: one of ``hdet_kernels.backends()``. Default: the fastest for the device.

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
    by_memory = {p.data_ptr(): p.detach() for p in reversed(params) if p.is_floating_point() and p.numel()}
    floating = list(reversed(by_memory.values()))
    if not floating:
        raise ValueError("warm_noisy_init_ got no floating-point parameters: pass model.parameters()")
    for device in {param.device for param in floating}:
        resolve(device, backend)  # raises if the backend does not work on the device
    ensemble = settled_ensemble("warm_noisy_init_") if ensemble is None else ensemble
    tensors: list[Tensor] = []
    keys: list[int] = []
    for row, replica in enumerate(_replicas(floating, ensemble.rows)):
        tensors += replica
        keys += [_key(seed, ensemble.replica + row, position) for position in range(len(replica))]
    # In the order of elements, not of memory, so that the noise does not depend on strides.
    ordered = [tensor.contiguous() for tensor in tensors]
    scales = [nu * size for size in _rms(ordered, len(ordered) // ensemble.rows if scope == "global" else 1)]
    _add(ordered, keys, scales, backend)
    for tensor, noisy in zip(tensors, ordered, strict=True):
        if noisy is not tensor:
            tensor.copy_(noisy)


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
    return [[param[row] for param in params] for row in range(rows)]


def _key(seed: int, replica: int, position: int) -> int:
    """Return the 64-bit key of the noise of the tensor at ``position``."""
    digest = hashlib.blake2b(f"{seed}/{replica}/{position}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)


def _rms(tensors: Sequence[Tensor], together: int) -> list[float]:
    """Return ‖θ‖/√d for each tensor, where ``together`` consecutive tensors count as one."""
    norms = [torch.linalg.vector_norm(tensor, dtype=wide_dtype(tensor.device)) for tensor in tensors]
    # Read for a whole device at once: the host waits once for each device, not for each tensor.
    devices = {norm.device for norm in norms}
    read = {device: iter(torch.stack([n for n in norms if n.device == device]).tolist()) for device in devices}
    values = [next(read[norm.device]) for norm in norms]
    found: list[float] = []
    for first in range(0, len(tensors), together):
        group = slice(first, first + together)
        elements = sum(tensor.numel() for tensor in tensors[group])
        found += [math.hypot(*values[group]) / math.sqrt(elements)] * together
    return found


def _add(tensors: Sequence[Tensor], keys: Sequence[int], scales: Sequence[float], backend: str | None) -> None:
    """Add to each tensor the noise of its key times its scale, in one launch for each device and arithmetic dtype."""
    kinds: dict[tuple[torch.device, bool], list[int]] = {}
    for index, tensor in enumerate(tensors):
        kinds.setdefault((tensor.device, tensor.dtype == torch.float64), []).append(index)
    for (device, wide), members in kinds.items():
        flats = [tensors[index].view(-1) for index in members]
        sizes = [flat.numel() for flat in flats]
        starts = itertools.accumulate(sizes, initial=0)
        slots = [Slot(0, start, size, (size,), (1,)) for start, size in zip(starts, sizes, strict=False)]
        table = ChunkTable(slots, [0] * len(slots), device, torch.float64 if wide else torch.float32)
        own_keys = torch.tensor([keys[index] for index in members], dtype=torch.int64, device=device)
        own_scales = torch.tensor([scales[index] for index in members], dtype=wide_dtype(device), device=device)
        add_noise_(table, table.match(flats), own_keys, own_scales, backend=backend)
