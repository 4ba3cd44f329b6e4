"""Checks of parameters before they are moved into flat buffers, and which of them are tied."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from hdet_kernels.sharded import is_distributed, part_of
from hdet_kernels.tensors import in_shared_memory, is_dense, one_replica, replicas_of


def check_movable(index: int, param: Tensor) -> None:
    """Raise TypeError or ValueError if parameter ``index`` cannot be moved into a flat buffer."""
    if not isinstance(param, Tensor):
        raise TypeError(f"Buckets expected tensors, parameter {index} is a {type(param).__name__}")
    if is_distributed(param) and any(placement.is_partial() for placement in param.placements):  # type: ignore[attr-defined]
        raise ValueError(
            f"parameter {index} is a DTensor with placements {param.placements}, a sum that is not formed yet: "  # type: ignore[attr-defined]
            "redistribute it to Shard or Replicate placements first"
        )
    param = part_of(param)
    known = type(param) in (Tensor, torch.nn.Parameter) or replicas_of(param) is not None
    if not known or param.layout is not torch.strided:
        raise TypeError(
            f"parameter {index} is a {type(param).__name__} of layout {param.layout}; only dense torch tensors can be "
            "moved into contiguous buckets"
        )
    if param.is_meta:
        raise ValueError(f"parameter {index} is on the meta device and has no values yet: materialise the model first")
    if in_shared_memory(param):
        raise ValueError(
            f"parameter {index} of shape {tuple(param.shape)} is in memory that other processes may share "
            "(share_memory(), torch.from_file), and would be moved out of it: they would not see its updates. Train it "
            "with torch.optim, or build the optimizer on a copy (copy.deepcopy(model)) and send parameters to the "
            "other processes"
        )
    if not is_dense(one_replica(param)):
        raise ValueError(
            f"parameter {index} of shape {tuple(param.shape)} has strides {param.stride()}: gaps or overlaps in memory "
            "cannot be kept in a bucket; make it contiguous first (param.data = param.data.contiguous())"
        )


def common_replicas(params: Sequence[Tensor]) -> int | None:
    """Return how many replicas the parameters stack; None for plain ones.

    Raises:
        ValueError: if they do not have that in common.
    """
    found = [replicas_of(param) for param in params]
    for index, count in enumerate(found):
        if count != found[0]:
            names = ["a plain one" if n is None else f"a stack of {n} replicas" for n in (found[0], count)]
            raise ValueError(
                f"parameter 0 is {names[0]} and parameter {index} {names[1]}; the parameters of one optimizer must be "
                "those of one stack, or all plain: build an optimizer for each"
            )
    return found[0]


def tied_to(params: Sequence[Tensor]) -> list[int]:
    """Return for each parameter the index of the first one with exactly the same memory: its own, if it is not tied.

    Raises:
        ValueError: if two of them share a part of their memory.
    """
    owner = list(range(len(params)))
    filled = [i for i in owner if params[i].numel()]
    filled.sort(key=lambda i: (str(params[i].device), params[i].data_ptr(), i))
    for before, index in itertools.pairwise(filled):
        a, b = params[before], params[index]
        if a.device != b.device or a.data_ptr() + a.numel() * a.element_size() <= b.data_ptr():
            continue
        if (a.data_ptr(), a.shape, a.stride(), a.dtype) != (b.data_ptr(), b.shape, b.stride(), b.dtype):
            raise ValueError(
                f"parameters {before} and {index} share part of their memory; only parameters that are tied as a "
                "whole can be moved into contiguous buckets"
            )
        owner[index] = owner[before]
    return owner
