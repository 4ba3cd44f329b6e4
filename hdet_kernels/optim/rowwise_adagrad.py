"""Row-wise Adagrad for embedding tables: one number of state a row, and steps that touch only the rows in use."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import accumulate
from typing import Any, Never

import numpy as np
import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from hdet_kernels import ops
from hdet_kernels.buckets import Buckets
from hdet_kernels.ops.chunks import EMPTY_GRADIENT, NO_GRADIENT, MatchedGradients
from hdet_kernels.ops.rowwise import RowGradient, RowWiseArguments, arithmetic, row_gradient, rowwise_adagrad_
from hdet_kernels.optim.base import FusedOptimizer
from hdet_kernels.optim.flat_group import FlatGroup, GradientOf, Part
from hdet_kernels.optim.group_entries import Group
from hdet_kernels.optim.options import InBackward, check_at_least_zero, check_flags, refuse_unknown
from hdet_kernels.sharded import is_distributed
from hdet_kernels.tensors import Slot, replicas_of


class FusedRowWiseAdagrad(FusedOptimizer):
    """Adagrad with one sum for each row of an embedding table, as FBGEMM's ``EXACT_ROWWISE_ADAGRAD``.

    ``s ← s + mean(g²)`` over a row, ``θ ← θ − lr/(1 + (t − 1)·lr_decay)·g/(√s + eps)``. A sparse gradient
    (``nn.Embedding(sparse=True)``) is read as it is: rows that it does not name are neither read nor written, and a row
    that it names several times takes one step with the sum. With a dense gradient every row takes a step.

    ``state[p]`` has ``sum``, one number a row, and ``step``.

    Args:
        params: embedding tables: parameters of at least two dimensions, of which the first are the rows.
        lr: the learning rate.
        lr_decay: its decay.
        weight_decay: added to the gradients of the rows that have one, as an L2 penalty.
        initial_accumulator_value: the sums before the first step.
        eps: added to the root.
        decoupled_weight_decay: multiply the rows that have a gradient by 1 − lr·weight_decay instead.
        maximize: step along the gradient.
        stochastic_rounding: round bf16 tables up or down at random, so that small updates are kept on average.
        backend: one of ``hdet_kernels.backends()``. Default: the fastest for the device.
        in_backward: as for the other optimizers.
    """

    #: Of which it has the name of the state. The arithmetic is that of :mod:`hdet_kernels.ops.rowwise`.
    rule = "adagrad"
    eager_state = True

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-2,
        lr_decay: float = 0,
        weight_decay: float = 0,
        initial_accumulator_value: float = 0,
        eps: float = 1e-8,
        *,
        decoupled_weight_decay: bool = False,
        maximize: bool = False,
        stochastic_rounding: bool = False,
        backend: str | None = None,
        in_backward: bool | InBackward = False,
        **unknown: Never,
    ) -> None:
        refuse_unknown(type(self), unknown, shared=())
        defaults = {
            "lr": lr,
            "lr_decay": lr_decay,
            "eps": eps,
            "weight_decay": weight_decay,
            "initial_accumulator_value": initial_accumulator_value,
            "decoupled_weight_decay": decoupled_weight_decay,
            "maximize": maximize,
        }
        super().__init__(
            params,
            defaults,
            master_weights=False,
            stochastic_rounding=stochastic_rounding,
            backend=backend,
            in_backward=in_backward,
        )

    def check_group(self, group: Mapping[str, Any]) -> None:
        check_flags(group, "decoupled_weight_decay", "maximize")
        check_at_least_zero(group, "lr", "lr_decay", "weight_decay", "eps")
        check_at_least_zero(group, "initial_accumulator_value", at_most=torch.finfo(torch.float32).max)

    def row(self, group: Group) -> dict[str, float | Tensor]:
        return {name: group[name] for name in ("lr", "lr_decay", "weight_decay", "eps", "maximize")}

    def state_shape(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        return shape[:1]

    def initial_state(self, name: str, group: Group) -> float:
        return float(group["initial_accumulator_value"])

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state_dict of this class; raise ValueError, with nothing changed, if it does not fit."""
        super().load_state_dict(_with_flat_sums(state_dict))

    def _check_params(self, group: Group) -> None:
        for index, param in enumerate(group["params"]):
            if replicas_of(param) is not None:
                raise ValueError(
                    f"parameter {index} is a stack of {replicas_of(param)} replicas, and row-wise Adagrad is for plain "
                    "embedding tables: use FusedAdagrad in a stack"
                )
            if is_distributed(param):
                raise ValueError(
                    f"parameter {index} of shape {tuple(param.shape)} is a DTensor, and row-wise Adagrad is for whole "
                    "tables: leave the table out of fully_shard (ignored_params=), or train it with FusedAdagrad"
                )
            if param.dim() < 2 or not param.is_contiguous():
                raise ValueError(
                    f"parameter {index} has shape {tuple(param.shape)} and strides {param.stride()}; row-wise Adagrad "
                    "needs contiguous tables of at least two dimensions: give other parameters to FusedAdagrad"
                )
        super()._check_params(group)

    def _make_buckets(self) -> Buckets:
        buckets = super()._make_buckets()
        if len({id(slot) for slot in buckets.slots}) < len(buckets.params):
            raise ValueError("two parameters share their memory: pass one of them, and use it in both places")
        return buckets

    def _make_flat_group(self, *arguments: Any, shares_state: bool) -> FlatGroup:
        return RowWiseGroup(lambda number: self.param_groups[number], *arguments, shares_state=shares_state)


class RowWiseGroup(FlatGroup):
    """A flat buffer of embedding tables, which are stepped one by one, with one number of state for each row.

    ``group_of`` returns a parameter group by its number; the other arguments are those of :class:`FlatGroup`.
    """

    def __init__(self, group_of: Callable[[int], Group], *arguments: Any, shares_state: bool) -> None:
        self._group_of = group_of
        # Those of the step that is being taken, by slot.
        self._gradients: dict[int, RowGradient] = {}
        super().__init__("adagrad", *arguments, shares_state=shares_state)

    def _lay_out(self, shares_state: bool) -> None:
        super()._lay_out(shares_state)
        *starts, self._row_count = accumulate((slot.shape[0] for slot in self.slots), initial=0)
        self._row_slots = [
            Slot(slot.flat, start, slot.shape[0], slot.shape[:1], (1,))
            for slot, start in zip(self.slots, starts, strict=True)
        ]

    @torch.inference_mode(False)  # a buffer made in inference mode could not be written outside of it
    def state_buffer(self, name: str) -> Tensor:
        flat = self.states[name]
        if flat is None:
            dtype, device = arithmetic(self.flat.dtype), self.flat.device
            flat = self.states[name] = torch.zeros(self._row_count, dtype=dtype, device=device)
        return flat

    def view(self, flat: Tensor, index: int) -> Tensor:
        return self._row_slots[index].view(flat)

    def state_shape(self, name: str, index: int) -> tuple[int, ...]:
        return self._row_slots[index].shape

    def gradients(self, part: Part, gradient_of: GradientOf) -> MatchedGradients:
        """Return the gradients of a part, sparse or dense. No kernel reads them by their addresses."""
        grads = list(map(gradient_of, part.params))
        for index, param, grad in zip(part.slots, part.params, grads, strict=True):
            if grad is not None:
                self._gradients[index] = row_gradient(_checked(index, param, grad.detach()), param.dtype)
        there = [NO_GRADIENT if grad is None else EMPTY_GRADIENT for grad in grads]
        table = np.array([there, [0] * len(there)], dtype=np.int64).T
        return MatchedGradients(grads, table, any=any(there), complete=all(there))

    def norm(self, part: Part, grads: MatchedGradients) -> Tensor:
        raise ValueError(
            "row-wise Adagrad does not clip, got max_grad_norm: leave it at None, and clip by clip_grad_norm_"
        )

    def clip_each(self, part: Part, grads: MatchedGradients, limit: float) -> None:
        self.norm(part, grads)

    def step(self, part: Part, grads: MatchedGradients, scalars: ops.Scalars) -> None:
        """Update the rows of a part that have a gradient."""
        scalars, sums = scalars.on(self.flat.device), self.state_buffer("sum")
        for index in part.slots:
            if (gradient := self._gradients.pop(index, None)) is None:
                continue
            given = RowWiseArguments(
                self.params[index][0].detach().flatten(1),
                self.view(sums, index),
                self.steps[index : index + 1],
                self.table.tensor,
                self.groups[index],
                *gradient,
                scalars.grad_scale,
                scalars.found_inf,
                self._group_of(self.groups[index])["decoupled_weight_decay"],
                self.options.stochastic_rounding,
            )
            rowwise_adagrad_(given, backend=self.options.backend)


def _with_flat_sums(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return a state_dict with sums [rows]: other libraries keep them as a column."""
    state = state_dict.get("state") if isinstance(state_dict, dict) else None
    if not isinstance(state, Mapping):
        return state_dict  # the checks refuse it
    flat = {
        key: {**entry, "sum": entry["sum"].reshape(-1)}
        if isinstance(entry, Mapping) and isinstance(entry.get("sum"), Tensor)
        else entry
        for key, entry in state.items()
    }
    return {**state_dict, "state": flat}


def _checked(index: int, param: Tensor, grad: Tensor) -> Tensor:
    """Return the gradient; raise RuntimeError if it does not fit its table."""
    if grad.shape != param.shape or grad.device != param.device:
        raise RuntimeError(
            f"the gradient of parameter {index} is {tuple(grad.shape)} on {grad.device}; its parameter is "
            f"{tuple(param.shape)} on {param.device}"
        )
    if grad.is_complex():
        raise RuntimeError(f"the gradient of parameter {index} is {grad.dtype}; its parameter is {param.dtype}")
    if grad.is_sparse and grad.sparse_dim() != 1:
        raise RuntimeError(
            f"the gradient of parameter {index} has {grad.sparse_dim()} sparse dimensions, expected one, the rows, as "
            "nn.Embedding(sparse=True) gives it"
        )
    if not grad.is_sparse and grad.layout is not torch.strided:
        raise RuntimeError(f"the gradient of parameter {index} has layout {grad.layout}; expected a dense or COO one")
    return grad
