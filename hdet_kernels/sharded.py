"""Parameters that several processes hold together: the part of a DTensor in this process, and sums over the mesh.

``torch.distributed.tensor`` is not imported here. Before someone else imports it, no tensor is distributed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from operator import is_
from typing import Any

import torch
from torch import Tensor

from hdet_kernels.torch_internals import ShardRecord, distribution, fsdp_groups, local_part, set_local_part

#: Dimensions of device meshes along which a parameter is divided, as pairs of a mesh and the number of a dimension.
#: None for a tensor that is not distributed; empty for one that every process has in full.
Divided = tuple[tuple[Any, int], ...] | None


def is_distributed(tensor: object) -> bool:
    """Return whether ``tensor`` is a DTensor."""
    api = sys.modules.get("torch.distributed.tensor")
    return api is not None and isinstance(tensor, api.DTensor)


def part_of(tensor: Tensor) -> Tensor:
    """Return this process's part of a distributed tensor, the object itself; any other tensor unchanged."""
    return local_part(tensor) if is_distributed(tensor) else tensor


def is_offloaded(param: Tensor) -> bool:
    """Return whether FSDP keeps a parameter on the CPU, and computes with it elsewhere."""
    return is_distributed(param) and part_of(param).device.type != param.device_mesh.device_type  # type: ignore[attr-defined]


def parts_of(tensors: Sequence[Tensor]) -> Callable[[Sequence[Tensor]], Iterable[Tensor]]:
    """Return a function that returns the parts of tensors of the kinds of these: DTensors or not, or both."""
    count = sum(map(is_distributed, tensors))
    if count == 0:
        return _unchanged
    return partial(map, local_part if count == len(tensors) else part_of)


def _unchanged(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    return tensors


def divided_along(param: Tensor) -> Divided:
    """Return the dimensions of its mesh along which the processes hold different parts of ``param``."""
    if not is_distributed(param):
        return None
    mesh, placements = param.device_mesh, param.placements  # type: ignore[attr-defined]
    return tuple(
        (mesh, dimension)
        for dimension, placement in enumerate(placements)
        if not placement.is_replicate() and mesh.size(dimension) > 1
    )


def distributed_like(param: Tensor, part: Tensor) -> Tensor:
    """Return ``part`` as this process's part of a tensor distributed like ``param``; unchanged if ``param`` is not."""
    if not is_distributed(param):
        return part
    api = sys.modules["torch.distributed.tensor"]
    with torch.no_grad():
        if part.device.type != param.device_mesh.device_type:  # type: ignore[attr-defined]
            # Offloaded to the CPU by FSDP. ``from_local`` would copy the part to the device of the mesh.
            offloaded = torch.empty_like(param, dtype=part.dtype)
            set_local_part(offloaded, part)
            return offloaded
        made: Tensor = api.DTensor.from_local(
            part,
            param.device_mesh,  # type: ignore[attr-defined]
            param.placements,  # type: ignore[attr-defined]
            run_check=False,
            shape=param.shape,
            stride=param.stride(),
        )
    return made


def part_like(param: Tensor, value: Tensor) -> Tensor:
    """Return this process's part of ``value``, which has the shape of the whole parameter, divided as ``param`` is.

    A distributed value may be divided in another way over the same mesh: its processes then redistribute it.
    """
    if not is_distributed(param):
        return value
    mesh, placements = param.device_mesh, param.placements  # type: ignore[attr-defined]
    if not is_distributed(value):
        api = sys.modules["torch.distributed.tensor"]
        # Every process has the whole value and takes its part: nothing is sent.
        value = api.distribute_tensor(value.to(param.device), mesh, placements, src_data_rank=None)
    elif value.placements != placements:  # type: ignore[attr-defined]
        value = value.redistribute(mesh, placements)  # type: ignore[attr-defined]
    part = part_of(value.detach())
    return part.wait() if hasattr(part, "wait") else part


def why_unlike(param: Tensor, value: Tensor) -> str | None:
    """Return why :func:`part_like` cannot read ``value`` for ``param``; None if it can."""
    if not is_distributed(value):
        return None
    if not is_distributed(param):
        return "is distributed, and its parameter is not: load it with torch.distributed.checkpoint, or in full"
    if value.device_mesh != param.device_mesh:  # type: ignore[attr-defined]
        return (
            f"is distributed over {value.device_mesh}, its parameter over "  # type: ignore[attr-defined]
            f"{param.device_mesh}: load it with torch.distributed.checkpoint"  # type: ignore[attr-defined]
        )
    return None


def gradient_parts(params: Sequence[Tensor], grads: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Return this process's part of the gradient of each distributed parameter, None where there is none."""
    # The usual case takes no Python statement for each tensor: FSDP's gradients have the very specs of the parameters.
    try:
        parts: list[Tensor | None] = list(map(local_part, grads))
        if all(map(is_, map(distribution, grads), map(distribution, params))) and set(map(type, parts)) == {Tensor}:
            return parts
    except AttributeError:  # one of them is None
        pass
    return [None if grad is None else part_like(param, grad) for param, grad in zip(params, grads, strict=True)]


@torch.no_grad()
def norm_over_meshes(norms: Iterable[tuple[Tensor, Divided]]) -> Tensor:
    """Return the norm of everything that the processes hold together, with one collective for each mesh.

    Given are norms of parts that this process has, and along which dimensions the whole is divided. Of what several
    processes have alike, each counts its own once. The result is on the device of the first norm.
    """
    sums: dict[tuple[Divided, torch.device], Tensor] = {}
    for norm, divided in norms:
        key = divided, norm.device
        sums[key] = sums[key] + norm.square() if key in sums else norm.square()
    device = next(iter(sums))[1]
    totals = []
    for (divided, _), total in sums.items():
        for mesh, dimension in divided or ():
            if total.device.type != mesh.device_type:  # parameters that FSDP offloads are on the CPU
                total = total.to(mesh.device_type)
            torch.distributed.all_reduce(total, group=mesh.get_group(dimension))
        totals.append(total.to(device))
    return torch.stack(totals).sum(dim=0).sqrt()


def gathered_shards(params: Sequence[Tensor]) -> dict[int, ShardRecord]:
    """Return FSDP's record of each parameter that it shards, by the ``id`` of the parameter.

    FSDP2 (``fully_shard``) keeps the shard of a parameter as a DTensor, and a second tensor over the same memory: flat,
    and padded to the length of the largest shard. That one is sent when the parameter is gathered, so both must move
    together.
    """
    wanted = set(map(id, params))
    return {
        id(record.param): record
        for records, _ in _groups_of(params)
        for record in records
        if id(record.param) in wanted
    }


def drop_gathered(params: Sequence[Tensor]) -> None:
    """Have FSDP gather parameters anew at the next forward pass, because their shards were written.

    A forward pass without a backward pass leaves the parameters of the root module gathered, and the next one would
    use these: after an evaluation, the values from before an average.
    """
    for _, reshard in _groups_of(params):
        reshard()


def _groups_of(params: Sequence[Tensor]) -> list[tuple[list[ShardRecord], Callable[[], None]]]:
    """Return FSDP's groups that have one of ``params``."""
    wanted = {id(param) for param in params if is_distributed(param)}
    groups = fsdp_groups() if wanted else []
    return [group for group in groups if any(id(record.param) in wanted for record in group[0])]
