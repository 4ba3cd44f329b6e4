"""``optimizer.state`` as torch.optim shows it, made of parts of flat buffers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from hdet_kernels.ops import OPTIONAL_STATES
from hdet_kernels.ops.chunks import NO_GRADIENT, MatchedGradients
from hdet_kernels.optim.coded_state import (
    decoded,
    decoded_entries,
    is_coded,
    saved_codes,
    scale_name,
    with_own_shapes,
)
from hdet_kernels.optim.flat_group import FlatGroup, Part
from hdet_kernels.optim.group_entries import Group
from hdet_kernels.optim.options import Options
from hdet_kernels.optim.watch import SpotCheck
from hdet_kernels.sharded import distributed_like, is_distributed, part_like, part_of
from hdet_kernels.split_master import copy_of, low_of_copy
from hdet_kernels.tensors import compact, own_storage

#: The name in ``state[p]`` of the float32 master of a bf16 or fp16 parameter.
MASTER = "master"

#: The name in ``state[p]`` of the lower half of a split master (:mod:`hdet_kernels.split_master`), int16.
MASTER_LOW = "master_low"


class StatefulOptimizer(Protocol):
    """The members of :class:`.base.FusedOptimizer` by which its state is shown and loaded."""

    eager_state: ClassVar[bool]
    optional_state: ClassVar[bool]
    options: Options
    defaults: dict[str, Any]
    param_groups: list[Group]
    state: Any

    def check_group(self, group: Mapping[str, Any]) -> None: ...
    def state_names(self, group: Group) -> tuple[str, ...]: ...
    def known_states(self, group: Group) -> tuple[str, ...]: ...
    def state_shape(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]: ...
    def shows_step_of(self, group: Group) -> bool: ...
    def initial_state(self, name: str, group: Group) -> float: ...


class StateViews:
    """The entries of ``optimizer.state``: parts of the flat state, added by loading or by a parameter's first step.

    Each has a storage of its own (:func:`.tensors.own_storage`), so that saving one writes nothing of the others.

    An entry that the user replaces as a whole (``state[p] = {…}``, ``state.clear()``) is copied into the flat state.
    Replacing all entries is noticed at the next step. Replacing a single one is noticed within
    ``len(state) / ITEMS_PER_STEP`` steps, or when the state is saved. Values inside an entry must be changed in place.
    """

    def __init__(self, optimizer: StatefulOptimizer, flat_groups: list[FlatGroup]) -> None:
        self.optimizer = optimizer
        self.flat_groups = flat_groups
        #: The entries that were added, by parameter.
        self._entries: dict[Tensor, dict[str, Any]] = {}
        self._spot_check: SpotCheck[tuple[Tensor, dict[str, Any]]] = SpotCheck([])
        self._names: list[tuple[str, ...]] = []

    @torch.no_grad()
    def adopt(self) -> None:
        """Copy the contents of ``optimizer.state`` into the flat state, and make its entries views of that.

        An entry that is incomplete raises KeyError, as torch's step does, with nothing changed.
        """
        optimizer = self.optimizer
        self._check_complete()
        self._entries = {}
        sharing = [group for group in self.flat_groups if group.shares_state]
        if any(self._has_state_per_replica(flat, index) for flat in sharing for index in range(len(flat.params))):
            # Separate for all parameters or for none: the reason holds for those that have no state yet, too.
            for flat in sharing:
                flat.separate_state()
        for flat in self.flat_groups:
            flat.slots_without_entry = set(range(len(flat.params)))
            for index, tied in enumerate(flat.params):
                group = optimizer.param_groups[flat.groups[index]]
                given = self._given_entry(tied)
                names = optimizer.state_names(group)
                kept = [name for name in optimizer.known_states(group) if given.get(name) is not None]
                for name in dict.fromkeys([*names, *kept]):
                    if name in kept:
                        value = given[name]
                        scales = given.get(scale_name(name)) if is_coded(value) else None
                        if scales is not None and is_distributed(tied[0]) and not is_distributed(value):
                            # Its blocks are those of the whole tensor.
                            value, scales = decoded(name, value, scales), None
                        flat.write_state(name, index, part_like(tied[0], value), scales)
                    else:
                        flat.write_state(name, index, optimizer.initial_state(name, group))
                if flat.master is not None:
                    _write_master(flat.view(flat.master, index), tied[0], given)
                # Rules whose state has no step count need to know only whether they have stepped before.
                step = given.get("step", 1.0 if kept else 0.0)
                if isinstance(step, Tensor):
                    flat.step_count(index).copy_(step.reshape(()) if step.numel() == 1 else step)
                else:
                    flat.step_count(index).fill_(step)
                if given or optimizer.eager_state:
                    self._add_entry(flat, index, (*names, *kept))
        self._remember()
        self._names = [optimizer.state_names(group) for group in optimizer.param_groups]

    def separate(self) -> None:
        """Give every replica of a stack its own copy of the state that all of them shared."""
        for flat in self.flat_groups:
            flat.separate_state()
        self.adopt()

    @torch.no_grad()
    def share(self) -> None:
        """Give all replicas of a stack one state: that of the first."""
        for flat in self.flat_groups:
            counted = (*flat.states, *map(scale_name, flat.states), "step")
            for param in (param for tied in flat.params for param in tied if param in self.optimizer.state):
                self.optimizer.state[param] = {
                    name: value[0].clone() if name in counted and isinstance(value, Tensor) and value.dim() else value
                    for name, value in self.optimizer.state[param].items()
                }
            flat.share_state()
        self.adopt()

    def add_first_entries(self, flat: FlatGroup, part: Part, grads: MatchedGradients) -> None:
        """Add the entries of parameters of a part that step for the first time, as torch.optim does."""
        there = zip(part.slots, grads.table[:, 0] != NO_GRADIENT, strict=False)  # the table may have every replica's
        fresh = [index for index, has in there if has and index in flat.slots_without_entry]
        if not fresh:  # parameters that never get a gradient
            return
        state = self.optimizer.state
        if any(state.get(param) and self._is_replaced(param) for i in fresh for param in flat.params[i]):
            self.adopt()  # the user gave one of them a state
            fresh = [index for index in fresh if index in flat.slots_without_entry]
        for index in fresh:
            self._add_entry(flat, index, self._names[flat.groups[index]])
        self._remember()

    def update_names(self) -> None:
        """Take note of state that a changed hyperparameter calls for (a momentum that was zero)."""
        names = [self.optimizer.state_names(group) for group in self.optimizer.param_groups]
        if names != self._names:
            for flat in self.flat_groups:
                flat.slots_without_entry = set(range(len(flat.params)))
            self._names = names

    def spot_check_fails(self) -> bool:
        """Return whether the whole state, or one of the entries checked this time, was replaced."""
        state = self.optimizer.state
        if state is not self._state_object or len(state) != self._entry_count:
            return True
        return any(state.get(param) is not entry for param, entry in self._spot_check.next_items())

    def any_replaced(self) -> bool:
        """Return whether any entry was replaced."""
        return any(map(self._is_replaced, self._entries))

    def _check_complete(self) -> None:
        for flat in self.flat_groups:
            for index, tied in enumerate(flat.params):
                given = self._given_entry(tied)
                group = self.optimizer.param_groups[flat.groups[index]]
                names = self.optimizer.state_names(group) if given else ()
                needed = [name for name in names if name not in OPTIONAL_STATES]
                needed += ["step"] if given and self.optimizer.shows_step_of(group) else []
                needed += [scale_name(name) for name in flat.states if is_coded(given.get(name))]
                missing = [name for name in needed if given.get(name) is None]
                if missing:
                    raise KeyError(
                        f"the state of a parameter of shape {tuple(tied[0].shape)} has {', '.join(map(str, given))}, "
                        f"but not {', '.join(missing)}: give all of them, or an empty dict to start afresh"
                    )

    def _given_entry(self, tied: Iterable[Tensor]) -> Mapping[str, Any]:
        # Some wrappers (ZeroRedundancyOptimizer) put what they load into the state itself.
        state = self.optimizer.state
        return next((with_own_shapes(state[p], p) for p in tied if state.get(p)), {})

    def _has_state_per_replica(self, flat: FlatGroup, index: int) -> bool:
        given = self._given_entry(flat.params[index])
        return any(
            isinstance(given.get(name), Tensor) and given[name].shape != flat.state_shape(name, index)
            for name in flat.states
        )

    def _is_replaced(self, param: Tensor) -> bool:
        return self.optimizer.state.get(param) is not self._entries.get(param)

    def _remember(self) -> None:
        self._state_object, self._entry_count = self.optimizer.state, len(self.optimizer.state)
        self._spot_check = SpotCheck(list(self._entries.items()))

    def _add_entry(self, flat: FlatGroup, index: int, names: Iterable[str]) -> None:
        flat.slots_without_entry.discard(index)
        optimizer = self.optimizer
        # Stochastic rounding depends on the step count, so every rule's checkpoint needs it then.
        counted = optimizer.options.rounds_stochastically
        counted = counted or optimizer.shows_step_of(optimizer.param_groups[flat.groups[index]])
        shown: dict[str, Tensor] = {"step": flat.step_count(index)} if counted else {}
        for name in names:
            shown[name] = flat.view(flat.state_buffer(name), index)
            if (scales := flat.scale_view(name, index)) is not None:
                shown[scale_name(name)] = scales
        if flat.master is not None:
            shown[master_name(flat.master)] = flat.view(flat.master, index)
        shown = {name: own_storage(view) for name, view in shown.items()}
        for param in flat.params[index] if shown else ():
            entry = optimizer.state[param]
            for name in flat.states:
                if name in shown or not is_coded(entry.get(name)):
                    entry.pop(scale_name(name), None)  # of codes that were loaded and decoded
            for name in (MASTER, MASTER_LOW) if flat.master is not None else (MASTER_LOW,):
                entry.pop(name, None)  # of masters that were loaded in the other form, or are not kept
            whole = ("step", *map(scale_name, flat.states))
            entry.update({name: own if name in whole else distributed_like(param, own) for name, own in shown.items()})
            self._entries[param] = entry


def master_name(master: Tensor) -> str:
    """Return the name in ``state[p]`` of a master: a float32 copy, or the lower half of a split one."""
    return MASTER_LOW if master.dtype == torch.int16 else MASTER


def _write_master(master: Tensor, param: Tensor, given: Mapping[str, Any]) -> None:
    """Write the master of a parameter: as its entry gives it, in whichever form, or else the parameter itself.

    torch's optimizers make floating-point numbers of a lower half that they load, and do not update it: it is left out.
    """
    forms = [name for name in (MASTER_LOW, MASTER) if name in given]
    forms = [name for name in forms if name == MASTER or not given[name].is_floating_point()]
    value = part_like(param, given[forms[0]]) if forms else None
    if master.dtype == torch.int16:
        if value is None:
            master.zero_()
        else:
            master.copy_(low_of_copy(value.float()) if value.is_floating_point() else value)
    elif value is not None and value.is_floating_point():
        master.copy_(value)
    else:
        own = part_of(param)
        # A lower half belongs to bf16. A parameter of another dtype was converted since, and counts alone.
        if value is not None and own.dtype == torch.bfloat16:
            own = copy_of(own, value.to(own.device, torch.int16).expand_as(own))
        master.copy_(own)


def saved_state(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return a state_dict whose tensors can be saved: by themselves, and on any number of processes.

    The rows of a stack lie between those of other parameters and are copied. Distributed codes are decoded: their
    scales are those of one way to divide them. Lower halves of distributed masters become int32: neither NCCL nor gloo
    gathers int16. Other codes get a dimension (:func:`.coded_state.saved_codes`). Everything else is as it was.
    """
    state = {
        key: _saved_entries(entries) if isinstance(entries, dict) else entries
        for key, entries in state_dict["state"].items()
    }
    return state_dict | {"state": state}


def _saved_entries(entries: dict[str, Any]) -> dict[str, Any]:
    if any(is_coded(value) and is_distributed(value) for value in entries.values()):
        entries = decoded_entries(entries)
    return {name: _saved(value) for name, value in entries.items()}


def _saved(value: Any) -> Any:
    if type(value) is Tensor:
        return saved_codes(compact(value)) if is_coded(value) else compact(value)
    wide = isinstance(value, Tensor) and value.dtype == torch.int16 and is_distributed(value)
    return value.to(torch.int32) if wide else value
