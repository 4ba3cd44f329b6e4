"""The base class of the fused optimizers: torch.optim's semantics over flat parameters and flat state."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from hdet_kernels import ops
from hdet_kernels.buckets import Buckets
from hdet_kernels.ops.backends import resolve
from hdet_kernels.ops.chunks import MatchedGradients
from hdet_kernels.ops.step import NO_SCALARS
from hdet_kernels.optim.checks import check_max_grad_norm, check_param, check_params, check_ties
from hdet_kernels.optim.fixed_gradients import FixedGradients
from hdet_kernels.optim.flat_group import FlatGroup, flat_groups_of, total_norm
from hdet_kernels.optim.flat_state import FlatState
from hdet_kernels.optim.group_entries import Group
from hdet_kernels.optim.hyperparameters import ROUNDING_SEED, HyperparameterWriter, freeze_betas
from hdet_kernels.optim.loading import complete_groups, loaded_through, prepare_state_dict
from hdet_kernels.optim.options import Options
from hdet_kernels.optim.parameter_watch import ParameterWatch
from hdet_kernels.optim.per_replica import fit_state
from hdet_kernels.optim.precision import unwrap_tensors
from hdet_kernels.optim.rule_contract import RuleContract
from hdet_kernels.optim.state_views import StateViews, saved_state
from hdet_kernels.tensors import replicas_of, share_gradients

Closure = Callable[[], float]

log = logging.getLogger("hdet_kernels")


class FusedOptimizer(RuleContract, FlatState, Optimizer):
    """Base class of the fused optimizers.

    Building one moves the parameters into :attr:`buckets`; ``state[p]`` holds parts of flat buffers. Hyperparameters
    are read from ``param_groups`` at every step, so that any learning rate scheduler works.

    A subclass names its :attr:`rule`, checks the options of a group and maps a group to a row of the hyperparameter
    table: see :class:`.rule_contract.RuleContract`.
    """

    #: Makes torch's GradScaler set ``grad_scale`` and ``found_inf`` instead of unscaling and waiting for the device.
    #: False while a closure runs: GradScaler refuses closures, so gradients are unscaled there and may be clipped.
    _step_supports_amp_scaling = True

    #: Whether the warning about replaced fixed gradients was logged.
    _warned = False

    #: Whether options without effect were looked for.
    _told = False

    def __init__(
        self, params: ParamsT, defaults: dict[str, Any], *, max_grad_norm: float | None, options: Options
    ) -> None:
        self.max_grad_norm = max_grad_norm
        self.options = options
        self.check_group(defaults)
        if options.rounds_stochastically:
            # The same on every rank: with different seeds, replicas under DDP would drift apart.
            defaults[ROUNDING_SEED] = 0
        check_params(params)
        super().__init__(params, defaults)
        self._build()

    @property
    def max_grad_norm(self) -> float | None:
        """The global norm down to which gradients are scaled, as by ``clip_grad_norm_``; ``None`` for no clipping."""
        return self._max_grad_norm

    @max_grad_norm.setter
    def max_grad_norm(self, value: float | None) -> None:
        check_max_grad_norm(value)
        self._max_grad_norm = value
        if hasattr(self, "_hyperparameters"):
            self._hyperparameters.invalidate()

    def step(  # type: ignore[override]  # torch overloads it
        self, closure: Closure | None = None
    ) -> float | None:
        """Update every parameter that has a gradient.

        Args:
            closure: re-evaluates the model and returns the loss.

        Returns:
            The loss that ``closure`` returned, or None.
        """
        if torch.compiler.is_dynamo_compiling():
            return torch.compiler.disable(self._step)(closure)
        return self._step(closure)

    def _step(self, closure: Closure | None) -> float | None:
        loss = None
        if closure is not None:
            loss = self._run(closure)
        # Everything that can fail comes first: a step happens for all parameters or for none.
        self._notice_regrouped_parameters()
        self._notice_moved_parameters()
        if self._state_views.spot_check_fails():
            self._state_views.adopt()
        self.write_hyperparameters()
        grads = self._gradients()
        for flat, present in zip(self._flat_groups, grads, strict=True):
            if flat.slots_without_entry:
                self._tell_options_without_effect()
                self._state_views.add_first_entries(flat, present)
        norm = total_norm(self._flat_groups, grads) if self._max_grad_norm is not None else None
        scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        scalars = NO_SCALARS if scale is norm is found_inf is None else ops.Scalars(scale, norm, found_inf)
        for flat, present in zip(self._flat_groups, grads, strict=True):
            if present.any:
                flat.step(present, scalars)
                if self.options.advance_versions:
                    flat.advance_versions(present)
        return loss

    def _tell_options_without_effect(self) -> None:
        # At the first step: until then the model may still be converted.
        if not self._told:
            self._told = True
            if (message := self.options.without_effect({flat.flat.dtype for flat in self._flat_groups})) is not None:
                log.warning(message)

    def _run(self, closure: Closure) -> float:
        before, self._step_supports_amp_scaling = self._step_supports_amp_scaling, False
        try:
            with torch.enable_grad():
                return closure()
        finally:
            self._step_supports_amp_scaling = before

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients as torch.optim does; with ``gradients="fixed"`` always by filling them with zeros."""
        if not self._fixed:
            return super().zero_grad(set_to_none)
        self._notice_regrouped_parameters()
        for fixed in self._fixed:
            if fixed.spot_check_fails():
                fixed.attach()
            fixed.flat.zero_()
        return None

    def write_hyperparameters(self) -> None:
        """Bring the hyperparameters of ``param_groups`` to the device.

        :meth:`step` does this itself. Before replaying a CUDA graph that captured the step, call it if a
        hyperparameter changed; the schedulers of this package do.
        """
        self._hyperparameters.write()

    def attach_gradients(self) -> None:
        """With ``gradients="fixed"``, renew the permanent gradients after ``requires_grad`` or ``grad`` of some
        parameters was changed. Gradients in other tensors are copied; ``None`` becomes zeros."""
        self.rehome()
        for fixed in self._fixed:
            fixed.attach()

    def rehome(self) -> None:
        """Bring parameters that were moved back into the flat buffers. :meth:`step` does this itself.

        Before the first step the optimizer follows its parameters to another device or dtype instead (``model.to()``,
        Accelerate's ``prepare``): it is built anew, with other buffers.

        Raises:
            RuntimeError: if a parameter changed its device or dtype after the first step, or its shape.
        """
        if not self._follow_conversion():
            self.buckets.rehome()
        self._watch.remember_addresses()

    def _follow_conversion(self) -> bool:
        """Build anew if the model was moved to another device or dtype before the first step; tell whether it was."""
        if not self.buckets.converted() or any(bool(steps.any()) for steps in self.step_flats()):
            return False
        for group in self.param_groups:
            self._check_params(group)
        self.state.clear()  # what is there before the first step has the values that every new state has
        self._build()
        return True

    def state_dict(self) -> dict[str, Any]:
        self._notice_regrouped_parameters()
        if self._state_views.any_replaced():
            self._state_views.adopt()
        return saved_state(super().state_dict())

    def add_param_group(self, param_group: Group) -> None:
        if isinstance(param_group, dict):  # torch refuses other types
            check_params(param_group.get("params"))
        super().add_param_group(param_group)
        try:
            group = self.param_groups[-1]
            freeze_betas(group)
            self.check_group(group)
            self._check_params(group)
            if hasattr(self, "_flat_groups"):
                self._build()
        except Exception:
            self.param_groups.pop()
            raise

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state_dict of this class or of its namesake in torch.optim.

        Raises:
            ValueError: with nothing changed, if an entry is missing, unknown, or has another shape or kind of value.
        """
        with loaded_through(self, state_dict, lambda given: prepare_state_dict(self, given)):
            super().load_state_dict(state_dict)

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_max_grad_norm": self._max_grad_norm, "options": self.options}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over groups and state from ``load_state_dict``, ``pickle`` or ``deepcopy``."""
        state = state | {"state": unwrap_tensors(state["state"])}
        complete_groups(state["param_groups"], state.get("defaults") or self.defaults)
        for param, entries in state["state"].items():
            if replicas_of(param) is not None:
                state["state"][param] = fit_state(entries, param)
        built = hasattr(self, "_flat_groups")
        if built:
            self._notice_regrouped_parameters()
            self.rehome()
        super().__setstate__(state)
        if built:
            self._state_views.adopt()
            self._hyperparameters.invalidate()
        else:
            self._build()

    def _check_params(self, group: Group) -> None:
        for index, param in enumerate(group["params"]):
            check_param(index, param)
            self.options.check_param(index, param)
        for device in {param.device for param in group["params"]}:
            resolve(device, self.options.backend)

    @torch.inference_mode(False)  # buffers made in inference mode could not be written outside of it
    def _build(self) -> None:
        """Move all parameters, with the state they have, into flat buffers."""
        check_ties(self.param_groups)
        group_of = {id(param): number for number, group in enumerate(self.param_groups) for param in group["params"]}
        self.buckets = self._make_buckets()
        self.buckets.keep_masters(self.options.has_master, split=self.options.splits_masters)
        groups = [group_of[id(param)] for param in self.buckets.params]
        shares_state = share_gradients(self.buckets.params)
        self._flat_groups = flat_groups_of(
            self._make_flat_group,
            self.buckets,
            groups,
            len(self.param_groups),
            self.options,
            shares_state=shares_state,
        )
        self._watch = ParameterWatch(self.param_groups, self.buckets.params)
        self._fixed: list[FixedGradients] = []
        self._state_views = StateViews(self, self._flat_groups)
        self._state_views.adopt()
        self._hyperparameters = HyperparameterWriter(self, self._flat_groups, self._state_views, self.buckets.replicas)
        if self.options.gradients == "fixed":
            self._fixed = [FixedGradients(flat) for flat in self._flat_groups]

    def _make_buckets(self) -> Buckets:
        return Buckets(param for group in self.param_groups for param in group["params"])

    def _make_flat_group(self, *arguments: Any, shares_state: bool) -> FlatGroup:
        return FlatGroup(self.rule, *arguments, shares_state=shares_state)

    def _notice_regrouped_parameters(self) -> None:
        """Build anew if parameters were added, removed or replaced in ``param_groups`` by hand.

        Fixed gradients are to cost nothing for each tensor: with them, only lists that were replaced or changed their
        length are noticed.
        """
        if self._watch.regrouped(self.param_groups, lists_only=bool(self._fixed)):
            for group in self.param_groups:
                self._check_params(group)
            self._build()

    def _notice_moved_parameters(self) -> None:
        """Bring parameters that were moved since the last step back into their buckets."""
        if self._fixed:
            changed = [fixed for fixed in self._fixed if fixed.spot_check_fails()]
            if changed and not self._follow_conversion():
                self._reattach_gradients(changed)
        elif self._watch.moved():
            self.rehome()

    def _reattach_gradients(self, changed: list[FixedGradients]) -> None:
        for fixed in changed:
            fixed.check_not_partial()
        self.buckets.rehome()
        replaced = [fixed.attach() for fixed in changed]
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
        grads = [flat.gradients() for flat in self._flat_groups]
        for present in grads:
            # A parameter transposed in place keeps its address. Its gradient then has another layout and is copied.
            if present.copied:
                return [flat.gradients() for flat in self._flat_groups] if self.buckets.rehome() else grads
        return grads
