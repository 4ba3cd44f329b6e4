"""The parameter of several replicas: what optimizers and stacks both know of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class StackedParameter(torch.nn.Parameter):
    """One parameter of R replicas, [R, *shape]; row r belongs to replica r. The rows may lie at any distance from each
    other in memory.

    shares_gradient: ``grad`` holds one gradient for all rows, an expanded view of [*shape] whose stride in dimension 0
    is 0; otherwise one for each row.
    """

    shares_gradient: bool

    def __new__(cls, data: Tensor, shares_gradient: bool = True, requires_grad: bool = True) -> StackedParameter:
        if data.dim() == 0:
            raise ValueError("a stacked parameter has shape [R, *shape], got a tensor without dimensions")
        made: StackedParameter = super().__new__(cls, data, requires_grad)
        made.shares_gradient = shares_gradient
        return made

    @property
    def replicas(self) -> int:
        """R, the number of rows."""
        return self.shape[0]

    def __deepcopy__(self, memo: dict[int, Any]) -> StackedParameter:
        if id(self) not in memo:
            memo[id(self)] = type(self)(self.data.clone(), self.shares_gradient, self.requires_grad)
        copied: StackedParameter = memo[id(self)]
        return copied

    def __reduce_ex__(self, proto: Any) -> tuple[Any, ...]:
        return type(self), (self.data, self.shares_gradient, self.requires_grad)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Stacked{super().__repr__()}"
