"""The base class of the fused optimizers: torch.optim's semantics over flat parameters and flat state."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from operator import is_, itemgetter
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from hdet_kernels import ops
from hdet_kernels.buckets import Buckets
from hdet_kernels.fanout.explore import PER_REPLICA
from hdet_kernels.ops.backends import resolve
from hdet_kernels.ops.chunks import MatchedGradients
from hdet_kernels.optim.checks import check_max_grad_norm, check_param, check_seed, check_shapes
from hdet_kernels.optim.fixed import FixedGradients
from hdet_kernels.optim.flat_group import homes_of
from hdet_kernels.optim.hooks import hook_step, light_hooks
from hdet_kernels.optim.options import Options
from hdet_kernels.optim.per_replica import drop_foreign, replica_groups, shares_moments, taken_over
from hdet_kernels.optim.precision import in_its_precision, unwrapped
from hdet_kernels.optim.state_views import ShownState
from hdet_kernels.stack.parameter import StackedParameter
from hdet_kernels.tensors import share_gradients

Closure = Callable[[], float]
Group = dict[str, Any]

log = logging.getLogger("hdet_kernels")

#: Options of torch.optim that say how a step is computed, not what: dropped from the groups of a loaded state_dict.
_HOW = ("foreach", "fused", "capturable", "differentiable")

#: The name in ``param_groups`` of the seed of stochastic rounding: with it, a resumed run rounds as the whole one.
_SEED = "rounding_seed"

_NO_SCALARS = ops.Scalars()


class FusedOptimizer(Optimizer):
    """A subclass names its rule and says how a parameter group becomes a row of the hyperparameter table.

    Parameters move into :attr:`buckets` when the optimizer is built, and ``state[p]`` holds views of flat buffers.
    Hyperparameters are read from ``param_groups`` at every step, so anything that writes there (schedulers) works.
    """

    rule: ClassVar[str]
    #: Whether torch.optim shows a ``step`` in ``state[p]``. Step counts exist for every rule.
    shows_step: ClassVar[bool] = True
    #: Whether ``state[p]`` exists before the first step.
    eager_state: ClassVar[bool] = False

    #: torch's GradScaler then sets ``grad_scale`` and ``found_inf`` instead of unscaling and waiting for the device.
    _step_supports_amp_scaling = True

    #: Whether it was said that fixed gradients were replaced.
    _warned = False

    def __init__(
        self, params: ParamsT, defaults: dict[str, Any], *, max_grad_norm: float | None, options: Options
    ) -> None:
        self.max_grad_norm = max_grad_norm
        self.options = options
        self.check_group(defaults)
        if options.stochastic_rounding:
            # The same on every rank, or replicas under DDP would drift apart.
            defaults[_SEED] = 0
        super().__init__(params, defaults)
        self._build()

    @property
    def max_grad_norm(self) -> float | None:
        """Gradients are scaled down to this global norm, as by ``clip_grad_norm_``; ``None``: they are not clipped."""
        return self._max_grad_norm

    @max_grad_norm.setter
    def max_grad_norm(self, value: float | None) -> None:
        check_max_grad_norm(value)
        self._max_grad_norm = value
        self._seen_rows: list[Any] | None = None

    def _patch_step_function(self) -> None:
        hook_step(type(self))
        super()._patch_step_function()

    def check_group(self, group: Mapping[str, Any]) -> None:
        """Raise ``ValueError`` if an option of ``group`` is out of range."""
        raise NotImplementedError

    def row(self, group: Group) -> dict[str, float | Tensor]:
        """The hyperparameters of ``group`` by the columns of the table."""
        raise NotImplementedError

    def state_names(self, group: Group) -> tuple[str, ...]:
        """The state buffers that parameters of ``group`` have."""
        return ops.STATES[self.rule]

    def initial_state(self, name: str, group: Group) -> float:
        """What the state ``name`` is filled with before the first step."""
        return 0.0

    def state_flats(self) -> dict[str, Tensor]:
        """The flat buffers of all floating state (moments; no step counts), laid out like ``buckets.flats`` and named
        by the number of the flat buffer and the state. What all replicas of a stack share is not among them: it
        follows from their common gradient, and is no replica's own."""
        return {
            f"{number}/{name}": flat
            for number, home in enumerate(self._homes)
            for name, flat in home.states.items()
            if flat is not None and (home.replicas == 1 or not home.shares_state)
        }

    def step_flats(self) -> list[Tensor]:
        """The step counts of all parameters, one tensor for each flat buffer of state."""
        return [home.steps for home in self._homes]

    @light_hooks
    @torch._disable_dynamo  # type: ignore[attr-defined]
    def step(self, closure: Closure | None = None) -> float | None:
        """One step for every parameter that has a gradient. ``closure`` re-evaluates the loss and returns it."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # Whatever can fail comes first: a step happens for all parameters or for none.
        self._look_at_members()
        self._return_home()
        self.write_hyperparameters()
        grads = self._gradients()
        for home, present in zip(self._homes, grads, strict=True):
            if home.unpublished:
                self._shown.publish(home, present)
        norm = self._norm(grads) if self._max_grad_norm is not None else None
        scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        scalars = _NO_SCALARS if scale is norm is found_inf is None else ops.Scalars(scale, norm, found_inf)
        for home, present in zip(self._homes, grads, strict=True):
            if present.any:
                home.step(present, scalars)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch.optim's; with ``gradients="fixed"`` one fill, whatever ``set_to_none`` says."""
        if not self._fixed:
            return super().zero_grad(set_to_none)
        self._look_at_members()
        for fixed in self._fixed:
            if fixed.disturbed():
                fixed.attach()
            fixed.flat.zero_()
        return None

    def write_hyperparameters(self) -> None:
        """Bring what is in ``param_groups`` to the device. :meth:`step` does it by itself; call it before a replay of a
        CUDA graph that has captured the step, if a hyperparameter changed (the schedulers of this package do)."""
        if self._seen_rows is None or any(PER_REPLICA in group for group in self.param_groups):
            self._write_all()
            return
        seen = [self._read(group) for group in self.param_groups]
        if not _only_numbers_changed(seen, self._seen_rows):
            self._write_all()
        elif seen != self._seen_rows:  # what a schedule does at every step
            self._write_rows([self._whole_row(group) for group in self.param_groups])
            self._seen_rows = seen

    def _write_all(self) -> None:
        """Whatever may have changed: numbers, tensors, the values of each replica."""
        for group in self.param_groups:
            _freeze_betas(group)
        seen = [(*self._read(group), *group.get(PER_REPLICA, {}).items()) for group in self.param_groups]
        # The value of a tensor can change in its place: then the rows are written every time.
        changing = any(isinstance(value, Tensor) for row in seen for value in _flattened(row))
        if not changing and seen == self._seen_rows:
            return
        for group in self.param_groups:
            check_seed(group.get(_SEED, 0))
        by_group = [replica_groups(group, self.buckets.replicas) for group in self.param_groups]
        rows = [self._whole_row(group) for group in chain.from_iterable(zip(*by_group, strict=True))]
        if self._homes[0].shares_state and not shares_moments(self.rule, rows, len(self.param_groups)):
            for home in self._homes:
                home.part_state()
            self._shown.adopt()
        self._write_rows(rows)
        self._seen_rows = None if changing else seen

    def _whole_row(self, group: Group) -> dict[str, float | Tensor]:
        row = self.row(group)
        row["max_grad_norm"] = self._max_grad_norm or 0.0
        row["seed"] = group.get(_SEED, 0)
        return row

    def _write_rows(self, rows: list[dict[str, float | Tensor]]) -> None:
        for table in {id(home.table): home.table for home in self._homes}.values():
            table.write(rows)
        self._shown.rename()

    def attach_gradients(self) -> None:
        """With ``gradients="fixed"``: bring the permanent gradients in line with the parameters after ``requires_grad``
        or ``grad`` of some of them was changed. MatchedGradients in other tensors are copied; ``None`` becomes zeros."""
        self.buckets.rehome()
        for fixed in self._fixed:
            fixed.attach()

    def state_dict(self) -> dict[str, Any]:
        self._look_at_members()
        if self._shown.replaced():
            self._shown.adopt()
        return super().state_dict()

    def add_param_group(self, param_group: Group) -> None:
        super().add_param_group(param_group)
        try:
            group = self.param_groups[-1]
            _freeze_betas(group)
            self.check_group(group)
            self._check_params(group)
            if hasattr(self, "_homes"):
                self._build()
        except Exception:
            self.param_groups.pop()
            raise

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        # torch casts loaded state to the dtype of its parameter, and a float32 moment would lose half of its digits.
        handle = self.register_load_state_dict_pre_hook(in_its_precision)
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_max_grad_norm": self._max_grad_norm, "options": self.options}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Called by ``load_state_dict``, ``pickle`` and ``deepcopy``."""
        state = state | {"state": unwrapped(state["state"])}
        defaults = state.get("defaults") or self.defaults
        for group in state["param_groups"]:
            for name in _HOW:
                group.pop(name, None)
            drop_foreign(group)
            for name, value in defaults.items():
                if name not in _HOW:
                    group.setdefault(name, value)
            _freeze_betas(group)
            self.check_group(group)
            check_seed(group.get(_SEED, 0))
        for param, entries in state["state"].items():
            if isinstance(param, StackedParameter):
                state["state"][param] = taken_over(entries, param)
        check_shapes(state["state"])
        built = hasattr(self, "_homes")
        if built:
            self._look_at_members()
            self.buckets.rehome()
        super().__setstate__(state)
        if built:
            self._shown.adopt()
            self._seen_rows = None
        else:
            self._build()

    def _check_params(self, group: Group) -> None:
        for index, param in enumerate(group["params"]):
            check_param(index, param)
            self.options.check_param(index, param)
        for device in {param.device for param in group["params"]}:
            resolve(device, self.options.backend)

    def _check_ties(self) -> None:
        owner: dict[tuple[torch.device, int], int] = {}
        for number, group in enumerate(self.param_groups):
            for index, param in enumerate(group["params"]):
                if param.numel() and owner.setdefault((param.device, param.data_ptr()), number) != number:
                    raise ValueError(
                        f"parameter {index} of group {number} shares its memory with one of group "
                        f"{owner[param.device, param.data_ptr()]}; tied parameters must be in one group"
                    )

    def _build(self) -> None:
        """Move all parameters into buckets, and the state that they have along with them."""
        self._check_ties()
        group_of = {id(param): number for number, group in enumerate(self.param_groups) for param in group["params"]}
        self.buckets = Buckets(param for group in self.param_groups for param in group["params"])
        self.buckets.keep_masters(self.options.has_master)
        groups = [group_of[id(param)] for param in self.buckets.params]
        shares_state = share_gradients(self.buckets.params)
        self._homes = homes_of(
            self.rule, self.buckets, groups, len(self.param_groups), self.options, shares_state=shares_state
        )
        self._addresses = list(map(Tensor.data_ptr, self.buckets.params))
        self._lists = [(group["params"], len(group["params"])) for group in self.param_groups]
        self._members = [param for members, _ in self._lists for param in members]
        self._read = itemgetter(*(name for name in self.defaults if name not in _HOW))
        self._fixed: list[FixedGradients] = []
        self._seen_rows = None
        self._shown = ShownState(self, self._homes)
        self._shown.adopt()
        if self.options.gradients == "fixed":
            self._fixed = [FixedGradients(home) for home in self._homes]

    def _return_home(self) -> None:
        """Notice parameters that were moved (at the price of a pointer each) and state that was cleared or replaced
        since the last step. A single entry of ``state[p]`` is to be changed in place; it is a view."""
        if self._fixed:
            disturbed = [fixed for fixed in self._fixed if fixed.disturbed()]
            if disturbed:
                self._settle_gradients(disturbed)
        elif list(map(Tensor.data_ptr, self.buckets.params)) != self._addresses:
            self.buckets.rehome()
            self._addresses = list(map(Tensor.data_ptr, self.buckets.params))
        if self._shown.disturbed():
            self._shown.adopt()

    def _look_at_members(self) -> None:
        """Notice parameters that were added, removed or replaced in ``param_groups`` by hand. With fixed gradients,
        which are to cost nothing for each tensor, only lists that were replaced or have another length."""
        lists = [group["params"] for group in self.param_groups]
        as_before = len(lists) == len(self._lists) and all(
            members is known and len(members) == count
            for members, (known, count) in zip(lists, self._lists, strict=True)
        )
        if as_before and (self._fixed or all(map(is_, chain.from_iterable(lists), self._members))):
            return
        for group in self.param_groups:
            self._check_params(group)
        self._build()

    def _settle_gradients(self, disturbed: list[FixedGradients]) -> None:
        for fixed in disturbed:
            fixed.check_whole()
        self.buckets.rehome()
        replaced = [fixed.attach() for fixed in disturbed]
        if any(replaced) and not self._warned:
            self._warned = True
            log.warning(
                'gradients="fixed", but gradients were replaced by new tensors; they were copied back. Use '
                "optimizer.zero_grad() instead of model.zero_grad(), and DistributedDataParallel without "
                "gradient_as_bucket_view"
            )

    def _gradients(self) -> list[MatchedGradients]:
        if self._fixed:
            return [fixed.gradients() for fixed in self._fixed]
        grads = [home.gradients() for home in self._homes]
        # A parameter that was transposed in its place keeps its address; the layout of its gradient tells.
        if any(present.copied for present in grads) and self.buckets.rehome():
            grads = [home.gradients() for home in self._homes]
        return grads

    def _norm(self, grads: list[MatchedGradients]) -> Tensor | None:
        """The norm of all gradients as they are stored, on the device of the first of them; that of each replica where
        they have their own state."""
        norms = [home.norm(present) for home, present in zip(self._homes, grads, strict=True) if present.any]
        if len(norms) < 2:
            return norms[0] if norms else None
        gathered = torch.stack([norm.to(norms[0].device, non_blocking=True) for norm in norms])
        return torch.linalg.vector_norm(gathered, dim=0)


def _only_numbers_changed(seen: list[tuple[Any, ...]], before: list[tuple[Any, ...]]) -> bool:
    """Whether all hyperparameters are the objects that they were, or floats in the place of floats."""
    if len(seen) != len(before):
        return False
    for row, earlier in zip(seen, before, strict=True):
        if len(row) != len(earlier):
            return False
        for now, then in zip(row, earlier, strict=True):
            if now is then or (type(now) is float and type(then) is float):
                continue
            if not (type(now) is tuple and type(then) is tuple and len(now) == len(then)):
                return False
            if not all(type(value) is float for value in now + then):
                return False
    return True


def _flattened(row: Iterable[Any]) -> Iterator[Any]:
    for value in row:
        if isinstance(value, tuple):
            yield from _flattened(value)
        else:
            yield value


def _freeze_betas(group: Group) -> None:
    """A list could change in its place, unseen."""
    if isinstance(group.get("betas"), list):
        group["betas"] = tuple(group["betas"])
