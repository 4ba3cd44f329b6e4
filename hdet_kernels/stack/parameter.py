"""The parameter of several replicas. Stacks create it and optimizers recognise it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hdet_kernels.checks import check_flag, check_kind
from hdet_kernels.tensors import compact


class StackedParameter(torch.nn.Parameter):
    """A parameter of R replicas, of shape [R, *shape].

    Row r belongs to replica r. The rows may lie at any distance from each other in memory.

    Attributes:
        shares_gradient: whether ``grad`` holds one gradient for all rows, as an expanded view of [*shape] with stride 0
            in dimension 0. Otherwise it holds one gradient for each row.
    """

    shares_gradient: bool

    def __new__(cls, data: Tensor, shares_gradient: bool = True, requires_grad: bool = True) -> StackedParameter:
        check_kind("data", data, Tensor, "a tensor [R, *shape]")
        shares_gradient = check_flag("shares_gradient", shares_gradient)
        requires_grad = check_flag("requires_grad", requires_grad)
        if data.dim() == 0:
            raise ValueError("a stacked parameter has shape [R, *shape], got a tensor without dimensions")
        created: StackedParameter = super().__new__(cls, data, requires_grad)
        created.shares_gradient = shares_gradient
        return created

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
        # Rows that lie between those of other parameters would be pickled with all of them.
        return type(self), (compact(self.data), self.shares_gradient, self.requires_grad)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Stacked{super().__repr__()}"
