"""A batch cut into one slice for each replica."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree


class Batch:
    """What a loss function gets beside the model, in any nesting that ``torch.utils._pytree`` knows.

    Tensors [R·b, …] are cut into R slices [b, …], slice r for replica r. Tensors without dimensions and whatever is
    not a tensor go to all. ``same``: everything goes to all.
    """

    def __init__(self, batch: tuple[Any, ...], replicas: int, same: bool) -> None:
        self._leaves, self._spec = pytree.tree_flatten(batch)
        self._cut = [] if same else [index for index, leaf in enumerate(self._leaves) if _is_cut(leaf)]
        tensors: list[Tensor] = [self._leaves[index] for index in self._cut]
        _check_sizes(tensors, replicas)
        self._stacked = [tensor.unflatten(0, (replicas, tensor.shape[0] // replicas)) for tensor in tensors]

    def copy(self) -> Batch:
        """The same in memory of its own."""
        made = copy.copy(self)
        made._leaves = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in self._leaves]
        made._stacked = [made._leaves[i].view_as(part) for i, part in zip(self._cut, self._stacked, strict=True)]
        return made

    def rows(self, rows: slice | int) -> list[Tensor]:
        """The slices of some replicas, [k, b, …], or of one, [b, …]."""
        return [tensor[rows] for tensor in self._stacked]

    def with_slices(self, slices: Sequence[Tensor]) -> tuple[Any, ...]:
        """The batch as one replica sees it."""
        leaves = list(self._leaves)
        for index, part in zip(self._cut, slices, strict=True):
            leaves[index] = part
        whole: tuple[Any, ...] = pytree.tree_unflatten(leaves, self._spec)
        return whole


def _is_cut(leaf: Any) -> bool:
    if isinstance(leaf, Tensor):
        if leaf.is_nested or leaf.layout is not torch.strided:
            raise TypeError(
                f"a batch holds a tensor of layout {leaf.layout}{' (nested)' * leaf.is_nested}, which cannot be cut "
                "into slices: make it dense (padded), or pass same_batch=True"
            )
        return leaf.dim() > 0
    if isinstance(leaf, np.ndarray) and leaf.ndim:
        raise TypeError(
            f"a batch holds a numpy array of shape {leaf.shape}; only tensors are cut into slices: pass "
            "torch.as_tensor(array), or same_batch=True if it goes to all replicas"
        )
    if not isinstance(leaf, torch.nn.Module) and any(isinstance(v, Tensor) and v.dim() for v in _inside(leaf)):
        raise TypeError(
            f"a batch holds a {type(leaf).__name__} with tensors in it, which cannot be cut into slices there: pass a "
            "dict or a tuple of them, register the class with torch.utils._pytree, or pass same_batch=True if it goes "
            "to all replicas"
        )
    return False


def _inside(leaf: Any) -> Iterator[Any]:
    """What an object that is not known as a container holds at its surface."""
    if isinstance(leaf, Mapping):
        yield from leaf.values()
    elif dataclasses.is_dataclass(leaf):
        yield from (getattr(leaf, field.name, None) for field in dataclasses.fields(leaf))
    else:
        yield from getattr(leaf, "__dict__", {}).values()


def _check_sizes(tensors: Sequence[Tensor], replicas: int) -> None:
    shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
    if len({tensor.shape[0] for tensor in tensors}) > 1:
        raise ValueError(
            f"the tensors of a batch must agree in dimension 0, along which the replicas share them; got shapes "
            f"{shapes}: let loss_fn close over tensors that are not batched, or pass same_batch=True"
        )
    if tensors and tensors[0].shape[0] % replicas:
        raise ValueError(
            f"{replicas} replicas share a batch in equal parts, and {tensors[0].shape[0]} is not divisible by "
            f"{replicas} (shapes {shapes}): take a batch size that is, with drop_last=True in the DataLoader, or pass "
            "same_batch=True to give all of it to every replica"
        )
