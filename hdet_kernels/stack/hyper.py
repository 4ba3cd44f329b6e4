"""Hyperparameters of a stack that act in the loss, such as dropout rates, label smoothing and temperatures."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from hdet_kernels.checks import check_kind, spell

log = logging.getLogger("hdet_kernels")


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
        if name not in values:
            raise KeyError(
                f"{name!r} is not a hyperparameter of this stack; it has {sorted(values) or 'none'}: assign "
                f"stack.hyper[{name!r}] = …, or build the scheduler with Explore({name!r}, base=…) and "
                "ensemble=stack.ensemble, before the first loss"
            )
        if self._current is not None:
            self._read.add(name)
        return values[name]

    def __setitem__(self, name: str, values: ArrayLike | Tensor) -> None:
        self.set(name, values)

    def set(self, name: str, values: ArrayLike | Tensor) -> None:
        """Set the values of hyperparameter ``name``, without waiting for the device.

        Args:
            name: any name; the loss function reads it as ``stack.hyper[name]``.
            values: one number, or R numbers.
        """
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
            if values.is_meta or values.is_complex() or values.dtype is torch.bool:
                raise TypeError(f"hyper[{name!r}] takes real numbers, got {spell(values)}")
            if values.device.type != "cpu":  # reading them would wait for the device
                return values.detach()
            # A copy, since the caller may change its own memory before the device has read it.
            numbers = values.detach().to(torch.float32, copy=True)
        else:
            try:
                given = np.array(values)
            except (TypeError, ValueError) as error:  # lists of different lengths
                raise TypeError(f"hyper[{name!r}] takes numbers, got {spell(values)}") from error
            if given.dtype.kind not in "iuf":  # numpy would read text as a number, and None as NaN
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
