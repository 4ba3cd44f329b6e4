"""The base class of the fused optimizers: torch.optim's semantics over flat parameters and flat state."""

from __future__ import annotations

import contextlib
import logging
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import chain
from operator import is_, itemgetter
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT
from torch.utils.hooks import RemovableHandle

from hdet_kernels import ops
from hdet_kernels.buckets import Buckets
from hdet_kernels.checks import check_callable
from hdet_kernels.ops.backends import resolve
from hdet_kernels.ops.chunks import MatchedGradients
from hdet_kernels.ops.step import NO_SCALARS
from hdet_kernels.optim.coded_state import scale_name
from hdet_kernels.optim.flat_group import GRAD, FlatGroup, GradientOf, Part, flat_groups_of, joint_norm, norms_of
from hdet_kernels.optim.group_entries import (
    IMPLEMENTATION_OPTIONS,
    PER_REPLICA,
    ROUNDING_SEED,
    Group,
    make_plain,
    replica_groups,
    shares_moments,
)
from hdet_kernels.optim.in_backward import BackwardSteps, SettingsBefore, take_over, was_changed
from hdet_kernels.optim.loading import complete_groups, fit_state, loaded_through, prepare_state_dict, unwrap_tensors
from hdet_kernels.optim.options import (
    Options,
    check_alike,
    check_own_entries,
    check_param,
    check_params,
    check_seed,
    check_ties,
    checked_max_grad_norm,
    refuse_unknown,
)
from hdet_kernels.optim.state_views import StateViews, saved_state
from hdet_kernels.optim.watch import FixedGradients, ParameterWatch
from hdet_kernels.sharded import Divided
from hdet_kernels.tensors import replicas_of, share_gradients
from hdet_kernels.torch_internals import times_written

Closure = Callable[[], float]

#: Parameters with their gradients, None where there is none.
Pairs = Iterable[tuple[Tensor, Tensor | None]]
Look = Callable[[Pairs], None]

#: The name in the first saved group of the norm of the last gradients, by which ``clip="previous"`` clips the next.
PREVIOUS_NORM = "previous_grad_norm"

log = logging.getLogger("hdet_kernels")


class FusedOptimizer(Optimizer):
    """Base class of the fused optimizers.

    Building one moves the parameters into :attr:`buckets`; ``state[p]`` holds parts of flat buffers. Hyperparameters
    are read from ``param_groups`` at every step, so that any learning rate scheduler works.

    A subclass sets :attr:`rule` and defines :meth:`check_group` and :meth:`row`. What else its rule decides has values
    that most rules of torch.optim need.

    Args:
        params: parameters or groups.
        defaults: the options of the groups.
        max_grad_norm: the global norm down to which gradients are scaled; None for no clipping.
        options: the fields of :class:`.options.Options`.
    """

    rule: ClassVar[str]
    #: Whether torch.optim shows a ``step`` in ``state[p]``. Step counts exist for every rule.
    shows_step: ClassVar[bool] = True
    #: Whether ``state[p]`` exists before the first step.
    eager_state: ClassVar[bool] = False
    #: Whether ``state[p]`` may lack its buffers, as that of torch's SGD before the first step with momentum.
    optional_state: ClassVar[bool] = False

    #: Makes torch's GradScaler set ``grad_scale`` and ``found_inf`` instead of unscaling and waiting for the device.
    #: False while a closure runs: GradScaler refuses closures, so gradients are unscaled there and may be clipped.
    _step_supports_amp_scaling = True

    #: Tells whether the backward pass of now accumulates gradients, which ``in_backward`` is to leave alone: a trainer
    #: sets it. In a loop of one's own, :meth:`accumulate` says so.
    accumulates: Callable[[], bool] | None = None

    #: The steps in the backward pass, with ``in_backward``.
    _early: BackwardSteps | None = None

    #: Of its clipping by the norm before: the norms of the parts of this step, and the norm of the last one.
    _norms: list[tuple[Part, Tensor, Divided]]
    _previous_norm: Tensor | None

    #: Whether the warning about replaced fixed gradients was logged.
    _warned = False

    #: Whether options without effect were looked for.
    _told = False

    def __init__(
        self, params: ParamsT, defaults: dict[str, Any], *, max_grad_norm: float | None = None, **options: Any
    ) -> None:
        refuse_unknown(type(self), options)
        self.options = Options(**options)
        self.max_grad_norm = max_grad_norm
        self._given = options
        self._watchers: OrderedDict[int, tuple[Callable[[], None], Look]] = OrderedDict()
        make_plain(defaults)
        self.check_group(defaults)
        check_alike(defaults)
        if self.options.rounds_stochastically:
            # The same on every rank: with different seeds, replicas under DDP would drift apart.
            defaults[ROUNDING_SEED] = 0
        check_params(params)
        super().__init__(params, defaults)
        self._build()

    def check_group(self, group: Mapping[str, Any]) -> None:
        """Raise ``ValueError`` if an option of ``group`` is out of range."""
        raise NotImplementedError

    def row(self, group: Group) -> dict[str, float | Tensor]:
        """Return the hyperparameters of ``group`` by the columns of the hyperparameter table."""
        raise NotImplementedError

    def state_names(self, group: Group) -> tuple[str, ...]:
        """Return the names of the state buffers that parameters of ``group`` have."""
        return ops.STATES[self.rule]

    def known_states(self, group: Group) -> tuple[str, ...]:
        """Return the names of the state buffers that a loaded state of ``group`` may have."""
        return ops.STATES[self.rule]

    def state_shape(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the state ``name`` of a parameter of ``shape``."""
        return shape

    def shows_step_of(self, group: Group) -> bool:
        """Return whether torch.optim shows a ``step`` in the state of parameters of ``group``."""
        return self.shows_step

    def initial_state(self, name: str, group: Group) -> float:
        """Return the value of the state ``name`` before the first step."""
        return 0.0

    @property
    def shared_options(self) -> dict[str, Any]:
        """The options that all groups of this optimizer have in common, as they were given."""
        return {**self._given, "max_grad_norm": self._max_grad_norm}

    @property
    def max_grad_norm(self) -> float | None:
        """The global norm down to which gradients are scaled, as by ``clip_grad_norm_``; ``None`` for no clipping."""
        return self._max_grad_norm

    @max_grad_norm.setter
    def max_grad_norm(self, value: float | None) -> None:
        value = checked_max_grad_norm(value)
        if self.options.early is not None:
            self.options.early.check_max_grad_norm(value)
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
            check_callable(
                "closure", closure, "closure()", takes=0, remedy="it evaluates the model and returns the loss"
            )
            loss = self._run(closure)
        if self._early is not None:
            self._refuse_scaler()
            if self._early.begun:
                if self._watch.regrouped(self.param_groups, lists_only=True):
                    self._refuse_in_mid_step("another list of parameters in param_groups")
                self._notice_moved_parameters()
            self._early.check_untouched()
        self.begin_step()
        if (early := self._early) is None:
            self.step_parts([(flat, part) for flat in self._flat_groups for part in flat.parts], GRAD)
            return loss
        self.step_parts(early.parts_left(), early.gradient_left)
        self._remember_norm()
        early.end_step(self)
        return loss

    def _refuse_in_mid_step(self, what: str) -> None:
        """Raise RuntimeError if some parameters have taken a step that others have not."""
        if self._early is not None and (stepped := self._early.stepped):
            raise RuntimeError(
                f"{what} between backward() and step(), when in_backward has stepped {stepped} of "
                f"{len(self.buckets.params)} parameters: wait for step(). After a backward pass that raised, load a "
                "checkpoint, or call zero_grad() to go on with the parameters as they are"
            )

    def note_settings(self) -> SettingsBefore:
        """Note the hyperparameters; return a function that tells later what was changed in them since."""
        return self._hyperparameters.note()

    def _refuse_scaler(self) -> None:
        if getattr(self, "grad_scale", None) is not None or getattr(self, "found_inf", None) is not None:
            raise RuntimeError(
                "a GradScaler decides after the backward pass whether to step, and in_backward has begun by then: "
                "train in bfloat16 without a GradScaler, or build the optimizer without in_backward"
            )

    def begin_step(self) -> None:
        """Do what comes before the first parameters of a step: notice what was changed, and write hyperparameters.

        :meth:`step` calls it. With ``in_backward`` it is called once in a step, by what comes first.
        """
        if self._early is not None:
            if self._early.begun:
                return
            for begin, _ in self._watchers.values():
                begin()
        # Everything that can fail comes first: a step happens for all parameters or for none.
        self._notice_regrouped_parameters()
        self._notice_moved_parameters()
        if self._state_views.spot_check_fails():
            self._state_views.adopt()
        self.write_hyperparameters()
        if self._early is not None:
            self._early.begun = True

    def step_parts(self, parts: Sequence[tuple[FlatGroup, Part]], gradient_of: GradientOf) -> None:
        """Step those parameters of some parts that have a gradient.

        Args:
            parts: parts of the flat buffers, each with its buffer.
            gradient_of: returns the gradient of a parameter, or None.
        """
        found = self._gradients(parts, gradient_of)
        if self._early is not None and self._early.settings.clip == "tensor" and self._max_grad_norm is not None:
            for flat, part, present in found:
                flat.clip_each(part, present, self._max_grad_norm)
        for flat, part, present in found:
            if flat.slots_without_entry:
                self._tell_options_without_effect()
                self._state_views.add_first_entries(flat, part, present)
        if self._early is not None:
            for _, look in self._watchers.values():
                look(pair for _, part, present in found for pair in zip(part.params, present.tensors, strict=True))
        scalars = self._scalars(found)
        for flat, part, present in found:
            if present.any:
                flat.step(part, present, scalars)
                if self.options.advance_versions:
                    flat.advance_versions(part, present)

    def _scalars(self, found: Sequence[tuple[FlatGroup, Part, MatchedGradients]]) -> ops.Scalars:
        if self._early is not None:
            norm = None
            if self._early.settings.clip == "previous" and self._max_grad_norm is not None:
                norm = self._previous_norm
                self._norms += [(each[1], *own) for each in found for own in norms_of([each])]
            return NO_SCALARS if norm is None else ops.Scalars(norm=norm)
        norm = joint_norm(norms_of(found)) if self._max_grad_norm is not None else None
        scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        return NO_SCALARS if scale is norm is found_inf is None else ops.Scalars(scale, norm, found_inf)

    def _remember_norm(self) -> None:
        """Keep the norm of this step's gradients, with which the next ones are clipped, if it is finite."""
        if not self._norms:
            return
        # In an order of their own: that in which they came differs between processes, and so would the last bits.
        order = {part: number for number, part in enumerate(p for flat in self._flat_groups for p in flat.parts)}
        norms, self._norms = sorted(self._norms, key=lambda norm: order[norm[0]]), []
        norm = joint_norm([(norm, divided) for _, norm, divided in norms])
        assert norm is not None  # there are some
        if self._previous_norm is None or self._previous_norm.shape != norm.shape:  # or the state was separated
            self._previous_norm = torch.zeros_like(norm)  # clips nothing
        self._previous_norm.copy_(torch.where(norm.isfinite(), norm, self._previous_norm))

    @property
    def steps_in_backward(self) -> bool:
        """Whether parameters are stepped during the backward pass."""
        return self.options.early is not None

    def accumulate(self) -> AbstractContextManager[None]:
        """Let backward passes in a ``with`` block only accumulate gradients: with ``in_backward``, those of all
        micro-batches but the last. Without ``in_backward`` every backward pass does."""
        return contextlib.nullcontext() if self._early is None else self._early.accumulate()

    def follow_trainer(
        self, *, model: nn.Module | None = None, accumulates: Callable[[], bool] | None = None, clips: str = ""
    ) -> None:
        """With ``in_backward``, do as a trainer does that wraps the model and accumulates gradients by itself.

        Args:
            model: the wrapped model, in which a ``DistributedDataParallel`` is looked for.
            accumulates: tells whether other backward passes follow before ``step()``.
            clips: the trainer's option that clips gradients after the backward pass, as it was set; empty without one.

        Raises:
            ValueError: the trainer clips gradients, which are not there any more then.
        """
        if (early := self.options.early) is None:
            return
        if clips:
            raise ValueError(
                f"{clips} clips gradients after the backward pass, and in_backward has used them by then: set it to 0, "
                'and pass the optimizer max_grad_norm= and in_backward=InBackward(clip="previous"), or leave out '
                "in_backward"
            )
        if accumulates is not None:
            self.accumulates = accumulates
        found = () if model is None else model.modules()
        wrapper = next((module for module in found if isinstance(module, DistributedDataParallel)), None)
        if wrapper is not None and early.model is None:
            self.options = replace(self.options, in_backward=replace(early, model=wrapper))
        self._step_in_backward()  # with hooks that all ask the trainer

    def watch_backward(self, begin: Callable[[], None], look: Look) -> RemovableHandle:
        """With ``in_backward``, call ``begin`` when a step begins, and ``look`` with gradients before they are used.

        Args:
            begin: called once in a step, before anything is written.
            look: called with pairs of a parameter and its gradient, of which it may read the data. Several calls
                together have all gradients of a step.
        """
        handle = RemovableHandle(self._watchers)
        self._watchers[handle.id] = begin, look
        return handle

    def _tell_options_without_effect(self) -> None:
        # At the first step: until then the model may still be converted.
        if not self._told:
            self._told = True
            if self._max_grad_norm is None and any(map(was_changed, self.buckets.params)):
                log.warning(
                    "the gradients of the stack were changed after stack.backward(): clip_grad_norm_ takes the norm of "
                    "all replicas together; leave it out and pass max_grad_norm= to the optimizer, which clips each "
                    "replica by itself"
                )
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
        """Clear the gradients as torch.optim does; with ``gradients="fixed"`` always by filling them with zeros.

        With ``in_backward``, forget a backward pass that ``step()`` has not ended. What it has stepped stays so.
        """
        if self._early is not None:
            if stepped := self._early.stepped:
                log.warning(
                    "zero_grad() between backward() and step(): %d of %d parameters have taken this step in the "
                    "backward pass (in_backward), and keep it; the others have not. Load a checkpoint to undo it",
                    stepped,
                    len(self.buckets.params),
                )
            self._norms = []
            self._early.cancel()
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

    def state_flats(self) -> dict[str, Tensor]:
        """Return the flat buffers of all floating-point state (moments, no step counts), laid out like
        ``buckets.flats`` and named ``"number of the flat buffer/name of the state"``.

        State that all replicas of a stack share is left out: it follows from their common gradient and needs no
        averaging. State in 8 bits is decoded: these are copies, which :meth:`write_state_flats` writes back.
        """
        return {
            f"{number}/{name}": buffer
            for number, flat in enumerate(self._flat_groups)
            if flat.replicas == 1 or not flat.shares_state
            for name, buffer in flat.read_states().items()
        }

    def write_state_flats(self, flats: Mapping[str, Tensor]) -> None:
        """Write changed copies of :meth:`state_flats` back: state in 8 bits is encoded, rounding to nearest."""
        if self.options.state_dtype == torch.int8:
            for number, flat in enumerate(self._flat_groups):
                of_group = {name: flats[key] for name in flat.states if (key := f"{number}/{name}") in flats}
                flat.write_states(of_group)

    def all_state_flats(self) -> dict[str, Tensor]:
        """Return every flat buffer of the state: those of :meth:`state_flats`, those that all replicas of a stack
        share, the step counts as ``"number of the flat buffer/step"``, of state in 8 bits codes and scales, and the
        norm of the last gradients, if there is one."""
        found = {} if self._previous_norm is None else {PREVIOUS_NORM: self._previous_norm}
        for number, flat in enumerate(self._flat_groups):
            found |= {f"{number}/{name}": buffer for name, buffer in flat.states.items() if buffer is not None}
            found |= {f"{number}/{scale_name(name)}": part for name, part in flat.scales.items() if part is not None}
            found[f"{number}/step"] = flat.steps
        return found

    def step_flats(self) -> list[Tensor]:
        """Return the step counts of all parameters, one tensor for each flat buffer of parameters."""
        return [flat.steps for flat in self._flat_groups]

    @property
    def shares_state(self) -> bool:
        """Whether all replicas of a stack have one state."""
        return all(flat.replicas is not None and flat.shares_state for flat in self._flat_groups)

    def separate_state(self) -> None:
        """Give every replica of a stack a copy of the state that all of them share, for gradients that differ.

        The state gets other memory: a CUDA graph that captured the step before is no longer valid.
        """
        if self.shares_state:
            self._state_views.separate()
            self._hyperparameters.invalidate()

    def share_state(self) -> None:
        """Give all replicas of a stack one state again: that of the first. The other states are dropped.

        Where numbers that act on the moments differ between replicas, the next step separates them again.
        """
        if self.buckets.replicas is not None and not self.shares_state:
            self._state_views.share()
            self._hyperparameters.invalidate()
            if self._previous_norm is not None:  # there may be one for each replica
                self._previous_norm = self._previous_norm.reshape(-1)[0].clone()

    def state_dict(self) -> dict[str, Any]:
        self._refuse_in_mid_step("state_dict()")
        self._notice_regrouped_parameters()
        if self._state_views.any_replaced():
            self._state_views.adopt()
        saved = saved_state(super().state_dict())
        if self._previous_norm is not None:
            saved["param_groups"][0][PREVIOUS_NORM] = self._previous_norm.clone()
        return saved

    def add_param_group(self, param_group: Group) -> None:
        self._refuse_in_mid_step("add_param_group()")
        if isinstance(param_group, dict):  # torch refuses other types
            check_params(param_group.get("params"))
        super().add_param_group(param_group)
        try:
            group = self.param_groups[-1]
            make_plain(group)
            check_own_entries(group, self.shared_options)
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
        self._refuse_in_mid_step("a copy of the optimizer")
        return super().__getstate__() | {
            "_max_grad_norm": self._max_grad_norm,
            "options": self.options,
            "_given": self._given,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over groups and state from ``load_state_dict``, ``pickle`` or ``deepcopy``."""
        state = state | {"state": unwrap_tensors(state["state"])}
        complete_groups(state["param_groups"], state.get("defaults") or self.defaults)
        for param, entries in state["state"].items():
            if replicas_of(param) is not None:
                state["state"][param] = fit_state(entries, param)
        built = hasattr(self, "_flat_groups")
        if built:
            if self._early is not None:
                self._norms = []
                self._early.cancel()
            self._notice_regrouped_parameters()
            self.rehome()
        norms = [group.pop(PREVIOUS_NORM, None) for group in state["param_groups"]]
        super().__setstate__(state)
        if built:
            self._state_views.adopt()
            self._hyperparameters.invalidate()
        else:
            self._watchers = OrderedDict()
            self._build()
        norm = norms[0] if norms else None
        self._previous_norm = None if norm is None else norm.to(self.buckets.flats[0].device, copy=True)

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
        self._hyperparameters = HyperparameterWriter(self, self._flat_groups, self._state_views)
        if self.options.gradients == "fixed":
            self._fixed = [FixedGradients(flat) for flat in self._flat_groups]
        self._step_in_backward()
        self._norms = []
        self._previous_norm = None

    def _step_in_backward(self) -> None:
        if self._early is not None:
            self._early.remove()
        take_over(self.buckets.params)
        if (settings := self.options.early) is not None:
            self._early = BackwardSteps(self, self._flat_groups, settings)

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

    def _gradients(
        self, parts: Sequence[tuple[FlatGroup, Part]], gradient_of: GradientOf
    ) -> list[tuple[FlatGroup, Part, MatchedGradients]]:
        if self._fixed:
            pairs = zip(parts, self._fixed, strict=True)
            return [(flat, part, fixed.gradients()) for (flat, part), fixed in pairs]
        found = [(flat, part, flat.gradients(part, gradient_of)) for flat, part in parts]
        # A parameter transposed in place keeps its address. Its gradient then has another layout and is copied.
        if any(present.copied for _, _, present in found) and self.buckets.rehome():
            found = [(flat, part, flat.gradients(part, gradient_of)) for flat, part in parts]
        return found


class HyperparameterWriter:
    """Writes a row for each replica and parameter group into the hyperparameter tables, when a number changed.

    Args:
        optimizer: the optimizer whose groups are read.
        flat_groups: the flat groups whose tables are written.
        state_views: the state, which becomes each replica's own once their numbers for the moments differ.
    """

    def __init__(self, optimizer: FusedOptimizer, flat_groups: list[FlatGroup], state_views: StateViews) -> None:
        self.optimizer, self.flat_groups, self.state_views = optimizer, flat_groups, state_views
        self.replicas = optimizer.buckets.replicas
        self._tables = list({id(flat.table): flat.table for flat in flat_groups}.values())
        self._names = [name for name in optimizer.defaults if name not in IMPLEMENTATION_OPTIONS]
        self._values_of = itemgetter(*self._names)
        self._written: list[Any] | None = None

    def invalidate(self) -> None:
        """Write everything again the next time."""
        self._written = None

    def note(self) -> SettingsBefore:
        """Note all hyperparameters; return a function that tells which was changed since, and how."""
        optimizer = self.optimizer
        groups, limit = list(optimizer.param_groups), optimizer.max_grad_norm
        noted = [(*self._values_of(group), group.get(PER_REPLICA)) for group in groups]
        tensors = [value for values in noted for value in _flattened(values) if isinstance(value, Tensor)]
        versions = list(map(times_written, tensors))

        def changed() -> str | None:
            if optimizer.max_grad_norm != limit:
                return f"max_grad_norm was changed from {limit} to {optimizer.max_grad_norm}"
            written = {id(tensor) for tensor, n in zip(tensors, versions, strict=True) if times_written(tensor) != n}
            for number, (group, before) in enumerate(zip(groups, noted, strict=True)):
                now = (*self._values_of(group), group.get(PER_REPLICA))
                if not written and all(map(is_, now, before)):
                    continue
                for name, new, old in zip((*self._names, PER_REPLICA), now, before, strict=True):
                    if not _is_as_before(new, old, written):
                        return f"{name} of parameter group {number} was changed from {old!r} to {new!r}"
            return None

        return changed

    def write(self) -> None:
        """Bring the hyperparameters to the devices."""
        groups = self.optimizer.param_groups
        if self._written is None or any(PER_REPLICA in group for group in groups):
            self._write_all()
            return
        values = list(map(self._values_of, groups))
        if len(values) == len(self._written) and all(map(_are_same, values, self._written)):
            return
        if not _only_usual_floats_changed(values, self._written):
            self._write_all()
        elif values != self._written:  # as a schedule does at every step
            self._write_tables([self._table_row(group) for group in groups])
            self._written = values

    def _write_all(self) -> None:
        """Write numbers, tensors and per-replica values, with all checks."""
        groups = self.optimizer.param_groups
        for group in groups:
            make_plain(group)
        values = [(*self._values_of(group), *group.get(PER_REPLICA, {}).items()) for group in groups]
        # The value of a tensor can change in place: then the tables are written every time.
        has_tensors = any(
            isinstance(value, Tensor | np.ndarray | np.generic)
            for group_values in values
            for value in _flattened(group_values)
        )
        if not has_tensors and values == self._written:
            return
        for group in groups:
            check_own_entries(group, self.optimizer.shared_options)
            self.optimizer.check_group(group)
            check_seed(group.get(ROUNDING_SEED, 0))
        by_group = [replica_groups(group, self.replicas) for group in groups]
        table_rows = [self._table_row(group) for group in chain.from_iterable(zip(*by_group, strict=True))]
        if self.flat_groups[0].shares_state and not shares_moments(self.optimizer.rule, table_rows, len(groups)):
            self.state_views.separate()
        self._write_tables(table_rows)
        self._written = None if has_tensors else values

    def _table_row(self, group: Group) -> dict[str, float | Tensor]:
        row = self.optimizer.row(group)
        row["max_grad_norm"] = self.optimizer.max_grad_norm or 0.0
        row["seed"] = group.get(ROUNDING_SEED, 0)
        return row

    def _write_tables(self, table_rows: list[dict[str, float | Tensor]]) -> None:
        for table in self._tables:
            table.write(table_rows)
        self.state_views.update_names()


def _are_same(values: tuple[Any, ...], before: tuple[Any, ...]) -> bool:
    """Return whether hyperparameters are the same objects as before."""
    return len(values) == len(before) and all(map(is_, values, before))


def _is_as_before(now: Any, before: Any, written: Collection[int]) -> bool:
    """Return whether a hyperparameter has its value of before; ``written`` are tensors that were written since."""
    if isinstance(now, tuple) and isinstance(before, tuple) and len(now) == len(before):
        return all(_is_as_before(*pair, written) for pair in zip(now, before, strict=True))
    if isinstance(now, Tensor) or isinstance(before, Tensor):
        return now is before and id(now) not in written
    return bool(now is before or now == before)


def _only_usual_floats_changed(values: list[tuple[Any, ...]], before: list[tuple[Any, ...]]) -> bool:
    """Return whether every hyperparameter is the same object as before, or a float in the place of a float.

    A float between 0 and 1 is in the range of every hyperparameter. Others, and NaN, are to be checked.
    """
    if len(values) != len(before):
        return False
    for group_values, earlier in zip(values, before, strict=True):
        if len(group_values) != len(earlier):
            return False
        for now, then in zip(group_values, earlier, strict=True):
            if now is then or (type(now) is float and type(then) is float and 0 < now < 1):
                continue
            if not (type(now) is tuple and type(then) is tuple and len(now) == len(then)):
                return False
            if not all(type(value) is float for value in then):
                return False
            if not all(type(value) is float and 0 < value < 1 for value in now):
                return False
    return True


def _flattened(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, tuple):
            yield from _flattened(value)
        else:
            yield value
