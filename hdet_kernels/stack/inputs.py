"""The inputs of a loss function for each replica: its slice of the batch, and its hyperparameters.

:class:`Batch` cuts a batch into one slice per replica. :class:`StackHyper` holds scalars that act in the loss, such as
dropout rates, label smoothing and temperatures.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from hdet_kernels.checks import check_kind, is_real, spell
from hdet_kernels.torch_internals import tree_flatten, tree_unflatten

log = logging.getLogger("hdet_kernels")


class Batch:
    """The arguments of a loss function after the model, in any nesting that ``torch.utils._pytree`` knows.

    Tensors of shape [R·b, …] are cut into R slices [b, …], slice r for replica r. Tensors without dimensions and
    objects that are not tensors go to all replicas.

    ``same`` cuts nothing, and gives the whole batch to every replica. ``leaves`` are the tensors and other objects of
    the batch, without their nesting, ``structure``.
    """

    def __init__(self, batch: tuple[Any, ...], replicas: int, same: bool) -> None:
        self.leaves, self.structure = tree_flatten(batch)
        self._cut = [] if same else [index for index, leaf in enumerate(self.leaves) if _is_cut(leaf)]
        tensors: list[Tensor] = [self.leaves[index] for index in self._cut]
        _check_sizes(tensors, replicas)
        self._stacked = [tensor.unflatten(0, (replicas, tensor.shape[0] // replicas)) for tensor in tensors]

    def copy(self, detach: bool = False) -> Batch:
        """Return a copy whose tensors have memory of their own, and with ``detach`` give no gradients to these."""

        def copied(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            return leaf.detach().clone().requires_grad_(leaf.requires_grad) if detach else leaf.clone()

        batch = copy.copy(self)
        batch.leaves = [copied(leaf) for leaf in self.leaves]
        batch._stacked = [batch.leaves[i].view_as(part) for i, part in zip(self._cut, self._stacked, strict=True)]
        return batch

    def slices(self, rows: slice | int) -> list[Tensor]:
        """Return the slices of the replicas in ``rows``, [k, b, …], or of a single one, [b, …]."""
        return [tensor[rows] for tensor in self._stacked]

    def with_slices(self, slices: Sequence[Tensor]) -> tuple[Any, ...]:
        """Return the arguments for one replica, with ``slices`` in the places of the tensors that are cut."""
        leaves = list(self.leaves)
        for index, part in zip(self._cut, slices, strict=True):
            leaves[index] = part
        whole: tuple[Any, ...] = tree_unflatten(leaves, self.structure)
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


class StackHyper(Mapping[str, Tensor]):
    """A mapping from the name of a hyperparameter to its values, one for each of the R replicas.

    Assign one number for all replicas, or R numbers. Reading gives the tensor [R] (float32, on the stack's device).
    Inside a loss function it gives the value of the replica whose loss is computed, a tensor without dimensions.
    """

    def __init__(self, replicas: int, device: torch.device) -> None:
        self._replicas, self._device = replicas, device
        self._values: dict[str, Tensor] = {}
        # The values of one replica while its loss is computed, else None.
        self._current: dict[str, Tensor] | None = None
        # The names that losses have read, and whether any loss has been computed: to warn about misspelt names.
        self._read: set[str] = set()
        self._any_loss = False

    def __getitem__(self, name: str) -> Tensor:
        values = self._values if self._current is None else self._current
        if not isinstance(name, str) or name not in values:
            raise KeyError(
                f"{spell(name)} is not a hyperparameter of this stack; it has {sorted(values) or 'none'}: assign "
                f"stack.hyper[{spell(name)}] = …, or build the scheduler with Explore({spell(name)}, base=…) and "
                "ensemble=stack.ensemble, before the first loss"
            )
        if self._current is not None:
            self._read.add(name)
        return values[name]

    def __setitem__(self, name: str, values: ArrayLike | Tensor) -> None:
        self.set(name, values)

    def set(self, name: str, values: ArrayLike | Tensor) -> None:
        """Set the values of hyperparameter ``name``, one number or R, without waiting for the device."""
        if self._current is not None:
            raise RuntimeError(f"hyper[{name!r}] was set inside a loss function; set it before the loss is computed")
        if not check_kind("the name of a hyperparameter", name, str, "a text, as in stack.hyper['dropout']"):
            raise ValueError("the name of a hyperparameter must be a text that is not empty, got ''")
        given = self._numbers(name, values)
        if tuple(given.shape) not in ((), (self._replicas,)):
            raise ValueError(
                f"hyper[{name!r}] takes one number or {self._replicas}, one for each replica, got shape "
                f"{tuple(given.shape)}"
            )
        if name not in self._values:
            self._values[name] = torch.empty(self._replicas, device=self._device)
        elif self._any_loss and name not in self._read:
            self._read.add(name)  # warn once
            log.warning("hyper[%r] was given new values, but no loss has read it so far: check the name", name)
        self._values[name].copy_(given, non_blocking=True)

    def _numbers(self, name: str, values: Any) -> Tensor:
        if isinstance(values, Tensor):
            if not is_real(values):
                raise TypeError(f"hyper[{name!r}] takes real numbers, got {spell(values)}")
            if values.device.type != "cpu":  # reading them would wait for the device
                return values.detach()
            # A copy, since the caller may change its own memory before the device has read it.
            numbers = values.detach().to(torch.float32, copy=True)
        else:
            try:
                given = np.array(values)
            except (TypeError, ValueError, RuntimeError) as error:  # lists of different lengths, or of tensors
                raise TypeError(f"hyper[{name!r}] takes numbers, got {spell(values)}") from error
            if given.dtype.kind not in "iuf" or isinstance(values, np.ma.MaskedArray):
                # numpy would read text as a number, and None as NaN
                raise TypeError(f"hyper[{name!r}] takes numbers, got {spell(values)}")
            numbers = torch.from_numpy(given.astype(np.float32))
        if not numbers.isfinite().all():
            raise ValueError(f"hyper[{name!r}] takes finite numbers, got {spell(values)}")
        return numbers.pin_memory() if self._device.type == "cuda" else numbers

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def slices(self, rows: slice) -> list[Tensor]:
        """Return the values of the replicas in ``rows``, one tensor per name, in the order of the names."""
        return [values[rows] for values in self._values.values()]

    @contextlib.contextmanager
    def reading(self, values: Sequence[Tensor]) -> Iterator[None]:
        """Make reads inside the block give ``values``, those of one replica, in the order of the names."""
        self._any_loss = True
        before, self._current = self._current, dict(zip(self._values, values, strict=True))
        try:
            yield
        finally:
            self._current = before

    def __repr__(self) -> str:
        return f"StackHyper({', '.join(self._values)})"
