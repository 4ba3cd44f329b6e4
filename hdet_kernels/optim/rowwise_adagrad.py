"""Row-wise Adagrad for embedding tables: one number of state a row, and steps that touch only the rows in use."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from hdet_kernels.buckets import Buckets
from hdet_kernels.ops.backends import resolve
from hdet_kernels.ops.rowwise import arithmetic, row_gradient, rowwise_adagrad_
from hdet_kernels.ops.table import HyperTable
from hdet_kernels.optim.group_entries import ROUNDING_SEED, Group
from hdet_kernels.optim.loading import check_keys, loaded_through, unwrap_tensors, wrap_tensors
from hdet_kernels.optim.options import (
    check_at_least_zero,
    check_flags,
    check_own_entries,
    check_param,
    check_params,
    check_seed,
)
from hdet_kernels.optim.watch import ParameterWatch
from hdet_kernels.sharded import is_distributed
from hdet_kernels.tensors import own_storage, replicas_of


class FusedRowWiseAdagrad(Optimizer):
    """Adagrad with one sum for each row of an embedding table, as FBGEMM's ``EXACT_ROWWISE_ADAGRAD``.

    ``s ← s + mean(g²)`` over a row, ``θ ← θ − lr/(1 + (t − 1)·lr_decay)·g/(√s + eps)``. A sparse gradient
    (``nn.Embedding(sparse=True)``) is read as it is: rows that it does not name are neither read nor written, and a row
    that it names several times takes one step with the sum. With a dense gradient every row takes a step.

    Tables are parts of flat buffers (:attr:`buckets`), so that a scheduler averages them in place. ``state[p]`` has
    ``sum``, one number a row, and ``step``.

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
    """

    #: Makes torch's GradScaler set ``grad_scale`` and ``found_inf`` instead of unscaling and waiting for the device.
    _step_supports_amp_scaling = True

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
    ) -> None:
        defaults = {
            "lr": lr,
            "lr_decay": lr_decay,
            "eps": eps,
            "weight_decay": weight_decay,
            "initial_accumulator_value": initial_accumulator_value,
            "decoupled_weight_decay": decoupled_weight_decay,
            "maximize": maximize,
        }
        check_flags({"stochastic_rounding": stochastic_rounding}, "stochastic_rounding")
        if stochastic_rounding:
            defaults[ROUNDING_SEED] = 0  # the same on every rank: replicas under DDP must stay equal
        self.stochastic_rounding, self.backend = stochastic_rounding, backend
        check_params(params)
        _check_group(defaults)
        super().__init__(params, defaults)
        self._build()

    @torch.no_grad()
    def step(  # type: ignore[override]  # torch overloads it
        self, closure: Callable[[], float] | None = None
    ) -> float | None:
        """Update the rows that have a gradient, and return the loss that ``closure`` returned, if it is given."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._watch.regrouped(self.param_groups, lists_only=False):
            for group in self.param_groups:
                self._check_params(group)
            self._build()
        if self._watch.moved():
            self.rehome()
        self.write_hyperparameters()
        present = [(index, param, param.grad) for index, param in enumerate(self._params) if param.grad is not None]
        # Everything that can fail comes first: a step happens for all tables or for none.
        gradients = [row_gradient(_checked(index, param, grad), param.dtype) for index, param, grad in present]
        scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        for (index, param, _), gradient in zip(present, gradients, strict=True):
            rowwise_adagrad_(
                param.detach().flatten(1),
                self._sums[index],
                self._steps[index],
                self._tables[param.device].tensor,
                self._groups[index],
                gradient,
                grad_scale=None if scale is None else scale.to(param.device, non_blocking=True),
                found_inf=None if found_inf is None else found_inf.to(param.device, non_blocking=True),
                decoupled=self.param_groups[self._groups[index]]["decoupled_weight_decay"],
                stochastic_rounding=self.stochastic_rounding,
                backend=self.backend,
            )
        increment_version([param for _, param, _ in present if not param.is_inference()])
        return loss

    def write_hyperparameters(self) -> None:
        """Bring the hyperparameters of ``param_groups`` to the device. :meth:`step` does this itself."""
        for group in self.param_groups:
            _check_group(group)
        rows = [
            {name: group[name] for name in ("lr", "lr_decay", "weight_decay", "eps", "maximize")}
            | {"seed": group.get(ROUNDING_SEED, 0)}
            for group in self.param_groups
        ]
        for table in self._tables.values():
            table.write(rows)

    def rehome(self) -> None:
        """Bring tables that were moved back into the flat buffers. :meth:`step` does this itself.

        Before the first step the optimizer follows its tables to another device or dtype (``model.to()``) instead.

        Raises:
            RuntimeError: if a table changed its device or dtype after the first step, or its shape.
        """
        if self.buckets.converted() and not any(bool(steps.any()) for steps in self.step_flats()):
            for group in self.param_groups:
                self._check_params(group)
            self.state.clear()  # what is there before the first step has the values that every new state has
            self._build()
        else:
            self.buckets.rehome()
        self._watch.remember_addresses()

    def state_flats(self) -> dict[str, Tensor]:
        """Return the sums of all tables, one flat buffer for each device and dtype, by name."""
        return {f"{number}/sum": flat for number, flat in enumerate(self._flat_sums)}

    def step_flats(self) -> list[Tensor]:
        """Return the step counts of all tables, one tensor for each device."""
        return list(self._flat_steps.values())

    def all_state_flats(self) -> dict[str, Tensor]:
        """Return every flat buffer of the state: the sums and the step counts."""
        return self.state_flats() | {f"{number}/step": flat for number, flat in enumerate(self.step_flats())}

    def add_param_group(self, param_group: Group) -> None:
        if isinstance(param_group, dict):  # torch refuses other types
            check_params(param_group.get("params"))
        super().add_param_group(param_group)
        try:
            _check_group(self.param_groups[-1])
            self._check_params(self.param_groups[-1])
            if hasattr(self, "buckets"):
                self._build()
        except Exception:
            self.param_groups.pop()
            raise

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state_dict of this class; raise ValueError, with nothing changed, if it does not fit."""
        # Wrapped, because torch would cast the sums to the dtype of the table.
        with loaded_through(self, state_dict, lambda given: wrap_tensors(self._checked_state(given))):
            super().load_state_dict(state_dict)

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"stochastic_rounding": self.stochastic_rounding, "backend": self.backend}

    def __setstate__(self, state: dict[str, Any]) -> None:
        built = hasattr(self, "buckets")
        if built:
            self.rehome()
        super().__setstate__(state | {"state": unwrap_tensors(state["state"])})
        if built:
            self._adopt_state()
        else:
            self._build()

    def _check_params(self, group: Group) -> None:
        for index, param in enumerate(group["params"]):
            check_param(index, param)
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
            if self.stochastic_rounding and param.dtype == torch.float16:
                raise ValueError(f"parameter {index} is torch.float16, and stochastic rounding is for bfloat16")
            resolve(param.device, self.backend)

    @torch.inference_mode(False)  # buffers made in inference mode could not be written outside of it
    @torch.no_grad()
    def _build(self) -> None:
        """Move all tables, with the state they have, into flat buffers."""
        self.buckets = Buckets(param for group in self.param_groups for param in group["params"])
        if len({id(slot) for slot in self.buckets.slots}) < len(self.buckets.params):
            raise ValueError("two parameters share their memory: pass one of them, and use it in both places")
        number_of = {id(p): number for number, group in enumerate(self.param_groups) for p in group["params"]}
        self._params = self.buckets.params
        self._groups = [number_of[id(param)] for param in self._params]
        self._watch = ParameterWatch(self.param_groups, self._params)
        self._tables = {param.device: HyperTable(len(self.param_groups), param.device) for param in self._params}
        self._lay_out_state()

    def _lay_out_state(self) -> None:
        """Make the flat buffers of the sums, one for each device and dtype, and of the step counts."""
        kinds = list(dict.fromkeys((param.device, arithmetic(param.dtype)) for param in self._params))
        members = {kind: [p for p in self._params if (p.device, arithmetic(p.dtype)) == kind] for kind in kinds}
        self._flat_sums = [
            torch.zeros(sum(map(len, members[device, dtype])), dtype=dtype, device=device) for device, dtype in kinds
        ]
        by_device = {device: [p for p in self._params if p.device == device] for device in self._tables}
        self._flat_steps = {device: torch.zeros(len(own), device=device) for device, own in by_device.items()}
        sums = {
            id(param): part
            for flat, kind in zip(self._flat_sums, kinds, strict=True)
            for param, part in zip(members[kind], flat.split([len(param) for param in members[kind]]), strict=True)
        }
        counts = {
            id(param): self._flat_steps[device][index : index + 1]
            for device, own in by_device.items()
            for index, param in enumerate(own)
        }
        self._sums = [sums[id(param)] for param in self._params]
        self._steps = [counts[id(param)] for param in self._params]
        self._adopt_state()

    @torch.no_grad()
    def _adopt_state(self) -> None:
        """Copy the contents of :attr:`state` into the flat buffers, and make its entries parts of these."""
        for param, total, count, number in zip(self._params, self._sums, self._steps, self._groups, strict=True):
            given = self.state.get(param) or {}
            if given:
                total.copy_(given["sum"])
                count.copy_(torch.as_tensor(given["step"]).reshape(1))
            else:
                total.fill_(float(self.param_groups[number]["initial_accumulator_value"]))
            self.state[param] = {"step": own_storage(count[0]), "sum": own_storage(total)}

    def _checked_state(self, given: dict[str, Any]) -> dict[str, Any]:
        """Return the state_dict; raise ValueError if this optimizer cannot continue from it."""
        try:
            keys = [key for group in given["param_groups"] for key in group["params"]]
            state: Mapping[Any, Any] = given["state"]
        except (KeyError, TypeError) as error:
            raise ValueError("the state_dict must have state and param_groups, as state_dict() returns them") from error
        check_keys(state, given["param_groups"])
        params = [param for group in self.param_groups for param in group["params"]]
        for index, (key, param) in enumerate(zip(keys, params, strict=False)):
            entry = state.get(key)
            if not isinstance(entry, Mapping) or set(entry) != {"step", "sum"}:
                found = sorted(entry) if isinstance(entry, Mapping) else entry
                raise ValueError(f"the state of parameter {index} must have step and sum, got {found}")
            if not isinstance(entry["sum"], Tensor) or entry["sum"].numel() != len(param):
                kind = tuple(entry["sum"].shape) if isinstance(entry["sum"], Tensor) else entry["sum"]
                raise ValueError(f"the sum of parameter {index} must have {len(param)} numbers, one a row, got {kind}")
        # Other libraries keep the sums as a column.
        flat = {
            key: {**entry, "sum": entry["sum"].reshape(-1)} if isinstance(entry, Mapping) and "sum" in entry else entry
            for key, entry in state.items()
        }
        return given | {"state": flat}


def _check_group(group: Mapping[str, Any]) -> None:
    check_own_entries(group)
    check_flags(group, "decoupled_weight_decay", "maximize")
    check_at_least_zero(group, "lr", "lr_decay", "weight_decay", "initial_accumulator_value", "eps")
    check_seed(group.get(ROUNDING_SEED, 0))


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
