"""Cut a batch into one slice per replica."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hdet_kernels.torch_internals import tree_flatten, tree_unflatten


class Batch:
    """The arguments of a loss function after the model, in any nesting that ``torch.utils._pytree`` knows.

    Tensors of shape [R·b, …] are cut into R slices [b, …], slice r for replica r. Tensors without dimensions and
    objects that are not tensors go to all replicas.

    Args:
        batch: the arguments.
        replicas: R.
        same: cut nothing, and give the whole batch to every replica.

    Raises:
        TypeError: a tensor or an object that holds tensors cannot be cut.
        ValueError: the tensors differ in dimension 0, or it is not divisible by R.
    """

    def __init__(self, batch: tuple[Any, ...], replicas: int, same: bool) -> None:
        self._leaves, self._spec = tree_flatten(batch)
        self._cut = [] if same else [index for index, leaf in enumerate(self._leaves) if _is_cut(leaf)]
        tensors: list[Tensor] = [self._leaves[index] for index in self._cut]
        _check_sizes(tensors, replicas)
        self._stacked = [tensor.unflatten(0, (replicas, tensor.shape[0] // replicas)) for tensor in tensors]

    def copy(self) -> Batch:
        """Return a copy whose tensors have memory of their own."""
        return self._with_leaves([leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in self._leaves])

    def detached(self) -> Batch:
        """Return a copy whose tensors have memory of their own, and give no gradients to those of this batch."""
        return self._with_leaves(
            [
                leaf.detach().clone().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf
                for leaf in self._leaves
            ]
        )

    def _with_leaves(self, leaves: list[Any]) -> Batch:
        copied = copy.copy(self)
        copied._leaves = leaves
        copied._stacked = [leaves[i].view_as(part) for i, part in zip(self._cut, self._stacked, strict=True)]
        return copied

    def slices(self, rows: slice | int) -> list[Tensor]:
        """Return the slices of the replicas in ``rows``, [k, b, …], or of a single one, [b, …]."""
        return [tensor[rows] for tensor in self._stacked]

    def with_slices(self, slices: Sequence[Tensor]) -> tuple[Any, ...]:
        """Return the arguments for one replica, with ``slices`` in the places of the tensors that are cut."""
        leaves = list(self._leaves)
        for index, part in zip(self._cut, slices, strict=True):
            leaves[index] = part
        whole: tuple[Any, ...] = tree_unflatten(leaves, self._spec)
        return whole


def _is_cut(leaf: Any) -> bool:
    """Return whether ``leaf`` is cut into slices; raise TypeError if it should be and cannot."""
    if isinstance(leaf, Tensor):
        if leaf.is_meta:
            raise ValueError(
                f"a batch holds a tensor of shape {tuple(leaf.shape)} on the meta device, which has no values: pass "
                "one with values, on the device of the stack"
            )
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
    if not isinstance(leaf, torch.nn.Module) and any(isinstance(v, Tensor) and v.dim() for v in _values(leaf)):
        raise TypeError(
            f"a batch holds a {type(leaf).__name__} with tensors in it, which cannot be cut into slices there: pass a "
            "dict or a tuple of them, register the class with torch.utils._pytree, or pass same_batch=True if it goes "
            "to all replicas"
        )
    return False


def _values(leaf: Any) -> Iterator[Any]:
    """Yield the values or attributes of an object that ``torch.utils._pytree`` does not know as a container."""
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
            f"the tensors of a batch must agree in dimension 0, along which they are cut into slices; got shapes "
            f"{shapes}: let loss_fn close over tensors that are not batched, or pass same_batch=True"
        )
    if tensors and tensors[0].shape[0] % replicas:
        raise ValueError(
            f"{replicas} replicas get equal parts of a batch, but its size {tensors[0].shape[0]} is not divisible by "
            f"{replicas} (shapes {shapes}): use a batch size that is, with drop_last=True in the DataLoader, or pass "
            "same_batch=True to give the whole batch to every replica"
        )
