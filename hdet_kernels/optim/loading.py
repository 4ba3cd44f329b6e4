"""Checks of a ``state_dict`` before anything of it is loaded, and the form in which torch loads it without rounding.

torch loads almost anything, and raises ``KeyError`` at the next step where an entry is missing. The fused optimizers
have state for every parameter in flat buffers, in which a gap would be zeros, so everything is checked first.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from hdet_kernels.checks import MOST_STEPS
from hdet_kernels.optim.coded_state import check_coded, decoded_entries, is_coded, scale_name, with_own_shapes
from hdet_kernels.optim.group_entries import (
    IMPLEMENTATION_OPTIONS,
    PER_REPLICA,
    PER_REPLICA_BASE,
    ROUNDING_SEED,
    Group,
    drop_values_of_other_stacks,
    make_plain,
)
from hdet_kernels.optim.options import check_own_entries, check_seed
from hdet_kernels.optim.state_views import MASTER, MASTER_LOW, StatefulOptimizer
from hdet_kernels.sharded import why_unlike
from hdet_kernels.tensors import replicas_of

#: Options of FusedMuon that torch.optim.Muon does not have.
_MUON_OPTIONS = ("use_muon", "adamw_betas", "normuon", "normuon_beta2")

#: Options that a group may lack: ours, and those that torch adds itself when it loads an older state_dict.
_ADDED_OPTIONS = (*IMPLEMENTATION_OPTIONS, ROUNDING_SEED, "amsgrad", "maximize", "nesterov", *_MUON_OPTIONS)


@contextmanager
def loaded_through(
    optimizer: Optimizer, state_dict: object, prepare: Callable[[dict[str, Any]], dict[str, Any]]
) -> Iterator[None]:
    """Have ``load_state_dict`` of torch, called in this block, take what ``prepare`` makes of the state_dict."""
    if not isinstance(state_dict, dict):
        kind = type(state_dict).__name__
        raise TypeError(f"load_state_dict expects a dict, as optimizer.state_dict() returns it, got a {kind}")
    # The last of the hooks: those of the user may change what is loaded.
    handle = optimizer.register_load_state_dict_pre_hook(lambda _, given: prepare(given))
    try:
        yield
    finally:
        handle.remove()


def check_state_dict(optimizer: StatefulOptimizer, state_dict: object) -> None:
    """Raise ValueError unless ``optimizer`` can continue from ``state_dict``.

    Accepted is what torch.optim saves and continues from: parameters that have never been stepped have no entry or an
    empty one, step counts are numbers or tensors, momentum buffers of SGD may be missing or None, and groups may lack
    options that torch does not know or adds by itself. Numbers of groups and parameters are left
    to torch, which compares them itself.
    """
    state, groups = _parts(state_dict)
    if [len(group["params"]) for group in groups] != [len(group["params"]) for group in optimizer.param_groups]:
        return
    kind = type(optimizer).__name__
    check_keys(state, groups)
    for number, (saved, own) in enumerate(zip(groups, optimizer.param_groups, strict=True)):
        _check_options(number, saved, optimizer.defaults, kind)
        group = optimizer.defaults | {name: value for name, value in saved.items() if name != "params"}
        make_plain(group)
        check_own_entries(group, getattr(optimizer, "shared_options", None))
        optimizer.check_group(group)
        check_seed(group.get(ROUNDING_SEED, 0))
        _check_per_replica(group)
        needed = () if optimizer.optional_state else optimizer.state_names(group)
        needed = ("step", *needed) if optimizer.shows_step_of(group) else needed
        for where, key, param in _members(number, saved, own["params"]):
            entries = state.get(key, {})
            if not isinstance(entries, Mapping):
                raise ValueError(f"{where} is a {type(entries).__name__}, expected a dict of tensors")
            if entries or optimizer.eager_state:
                _check_names(where, entries, needed, optimizer.known_states(group), kind)
                _check_values(where, entries, param, optimizer)


def check_keys(state: Mapping[Any, Any], groups: Sequence[Mapping[str, Any]]) -> None:
    """Raise ValueError unless every parameter has a key of its own, and every entry of the state a parameter."""
    keys = [key for group in groups for key in group["params"]]
    known = set(keys)
    if len(known) < len(keys):
        raise ValueError(f"the loaded state_dict lists a parameter twice in params: {keys!r:.200}; the file is damaged")
    if lost := [key for key in state if key not in known]:
        raise ValueError(
            f"the loaded state_dict has state of the parameters {lost!r:.200}, its groups list params {keys!r:.200}: "
            "what it has for them would be lost. Load an undamaged state_dict"
        )


def _check_options(number: int, saved: Mapping[str, Any], defaults: Mapping[str, Any], kind: str) -> None:
    missing = [name for name in defaults if name not in saved and name not in _ADDED_OPTIONS]
    if missing:
        raise ValueError(
            f"group {number} of the loaded state_dict has no {', '.join(missing)}, which {kind} needs: it is of "
            "another kind of optimizer, or damaged. Load a state_dict of the same kind of optimizer"
        )


def prepare_state_dict(optimizer: StatefulOptimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return a checked state_dict in the form in which torch loads it without rounding.

    torch casts loaded state to the dtype of its parameter, which would round float32 moments of bf16 parameters.
    """
    state_dict = _in_own_form(optimizer, state_dict)
    check_state_dict(optimizer, state_dict)
    return wrap_tensors(state_dict)


def complete_groups(groups: Iterable[Group], defaults: Mapping[str, Any]) -> None:
    """Give loaded groups the options of the optimizer's own groups.

    Options that choose one of torch's implementations are dropped. What torch.optim does not save, as the rounding
    seed, gets its default.
    """
    for group in groups:
        for name in IMPLEMENTATION_OPTIONS:
            group.pop(name, None)
        drop_values_of_other_stacks(group)
        for name, value in defaults.items():
            if name not in IMPLEMENTATION_OPTIONS:
                group.setdefault(name, value)
        make_plain(group)


def _in_own_form(optimizer: StatefulOptimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return a state_dict with the keys that its groups list, and with codes of the shapes of ``state[p]``.

    ``torch.distributed.checkpoint`` makes text of the keys ("0"), so that torch would take the state for that of no
    parameter, and an empty dict of the scales of state that was saved decoded and flattened: these are left out.
    """
    saved, groups = _parts(state_dict)
    keys = [key for group in groups for key in group["params"]]
    by_text = {str(key): key for key in keys}
    state: dict[Any, Any] = {}
    for key, entries in saved.items():
        key = by_text.get(key, key) if isinstance(key, str) else key
        both = isinstance(entries, Mapping) and isinstance(state.get(key), Mapping)
        state[key] = {**state[key], **entries} if both else entries
    own = [param for group in optimizer.param_groups for param in group["params"]]
    for key, param in zip(keys, own, strict=False):
        entries = state.get(key)
        if not isinstance(entries, Mapping) or not all(isinstance(name, str) for name in entries):
            continue  # the checks refuse it
        decoded = {scale_name(name) for name, value in entries.items() if not is_coded(value)}
        state[key] = {
            name: value
            for name, value in with_own_shapes(entries, param).items()
            if not (name in decoded and isinstance(value, Mapping) and not value)
        }
    return {**state_dict, "state": state}


def _parts(state_dict: object) -> tuple[Mapping[Any, Any], list[Any]]:
    """Return the state and the groups of a state_dict, after a check of their types."""
    fits = isinstance(state_dict, Mapping) and isinstance(state_dict.get("state"), Mapping)
    groups = state_dict.get("param_groups") if isinstance(state_dict, Mapping) else None
    if not fits or not isinstance(groups, list | tuple) or not groups:
        keys = sorted(map(str, state_dict)) if isinstance(state_dict, Mapping) else type(state_dict).__name__
        raise ValueError(
            "the state_dict of an optimizer is a dict with a dict 'state' and a list 'param_groups', got "
            f"{keys}; pass what optimizer.state_dict() returned"
        )
    for number, group in enumerate(groups):
        if not isinstance(group, Mapping) or not isinstance(group.get("params"), list | tuple):
            raise ValueError(f"group {number} of the loaded state_dict has no list 'params'; the file is damaged")
        if not all(isinstance(key, int | str) for key in group["params"]):
            raise ValueError(f"group {number} of the loaded state_dict lists {group['params']!r}, expected numbers")
    state = state_dict["state"]  # type: ignore[index]
    return state, list(groups)


def _members(number: int, saved: Mapping[str, Any], params: Sequence[Tensor]) -> Iterator[tuple[str, Any, Tensor]]:
    """Return for each parameter of a group a description for messages, its key in the state, and itself."""
    names = saved.get("param_names")
    named = isinstance(names, list | tuple) and len(names) == len(params)
    for index, (key, param) in enumerate(zip(saved["params"], params, strict=True)):
        name = f" {names[index]!r}" if named else ""  # type: ignore[index]
        yield f"the loaded state of parameter {index}{name} of group {number}", key, param


def _check_names(
    where: str, entries: Mapping[str, Any], needed: Sequence[str], states: Sequence[str], kind: str
) -> None:
    missing = [name for name in needed if entries.get(name) is None]
    scales = [scale_name(name) for name in states if is_coded(entries.get(name))]
    unknown = [name for name in entries if name not in (*states, *scales, "step", MASTER, MASTER_LOW)]
    if missing or unknown:
        raise ValueError(
            f"{where} has {', '.join(map(str, entries)) or 'no entries'}; {kind} "
            + " and ".join(
                [f"needs {', '.join(missing)}"] * bool(missing)
                + [f"does not know {', '.join(map(str, unknown))}"] * bool(unknown)
            )
            + ". Load a state_dict of the same kind of optimizer, or start without one"
        )


def _check_values(where: str, entries: Mapping[str, Any], param: Tensor, optimizer: StatefulOptimizer) -> None:
    rows = set()
    scales = {scale_name(name) for name, value in entries.items() if is_coded(value)}
    stacked = replicas_of(param) is not None
    for name, value in entries.items():
        if name == "step" or name in scales or value is None:
            continue
        if name not in (MASTER, MASTER_LOW) and is_coded(value):
            check_coded(where, name, entries)
            rows.add(_check_shape(where, name, value, param, tuple(param.shape[1:] if stacked else param.shape)))
            continue
        fits = isinstance(value, Tensor) and (
            value.is_floating_point() or (name == MASTER_LOW and value.dtype in (torch.int16, torch.int32))
        )
        if not fits or value.layout is not torch.strided:
            given = f"{value.dtype} {value.layout}" if isinstance(value, Tensor) else repr(value)
            expected = "int16" if name == MASTER_LOW else "floating-point"
            raise ValueError(f"{where} has {name}={given}, expected a tensor of {expected} numbers")
        if value.is_meta:
            raise ValueError(f"{where} has {name} on the meta device, without values; load it on a real device")
        if (why_not := why_unlike(param, value)) is not None:
            raise ValueError(f"{where} has a {name} that {why_not}")
        own = optimizer.state_shape(name, tuple(param.shape[1:] if stacked else param.shape))
        rows.add(_check_shape(where, name, value, param, own))
    _check_step(where, entries.get("step", 0), rows, counts_down=optimizer.optional_state)


def _check_shape(where: str, name: str, value: Tensor, param: Tensor, own: tuple[int, ...]) -> int | None:
    """Raise ValueError unless ``value``, of shape ``own`` for one replica, fits; return how many have their own."""
    if value.shape == own:  # of a stack: one for all replicas
        return None
    if replicas_of(param) is not None and value.shape[1:] == own and value.dim() == len(own) + 1 and len(value):
        return len(value)
    raise ValueError(
        f"{where} has {name} of shape {tuple(value.shape)}, its parameter has {tuple(param.shape)}; "
        + (
            "the state_dict is of a stack whose replicas have their own moments: load it into a stack"
            if value.shape[1:] == param.shape and value.dim() == param.dim() + 1
            else "the state_dict is of another model, or its parameters are in another order"
        )
    )


def _check_step(where: str, step: object, rows: set[int | None], *, counts_down: bool) -> None:
    """Raise ValueError unless ``step`` is a whole number, or one for each of ``rows`` replicas with their own moments.

    With ``counts_down`` those without a momentum buffer are negative, as SGD counts them.
    """
    if isinstance(step, Tensor):
        fits = step.numel() == 1 or (step.dim() == 1 and len(step) in rows)
        if not fits or step.is_complex() or step.is_meta or step.layout is not torch.strided:
            raise ValueError(f"{where} has a step of shape {tuple(step.shape)} and {step.dtype}, expected one number")
        counts: list[Any] = step.detach().double().flatten().tolist()
    else:
        counts = [step]
    for count in counts:
        number = isinstance(count, int | float | np.number) and not isinstance(count, bool)
        if not number or not (-MOST_STEPS if counts_down else 0) <= count <= MOST_STEPS or count % 1:
            raise ValueError(
                f"{where} has step={step!r}, expected a whole number{'' if counts_down else ' of at least 0'}"
            )


def _check_per_replica(group: Group) -> None:
    for name in (PER_REPLICA, PER_REPLICA_BASE):
        values_of = group.get(name, {})
        if not isinstance(values_of, Mapping) or not all(isinstance(key, str) for key in values_of):
            raise ValueError(f"a loaded group has {name}={values_of!r}, expected a dict by the keys of the group")
    for key, values in group.get(PER_REPLICA, {}).items():
        numbers = isinstance(values, list | tuple) and all(isinstance(value, Real | Tensor) for value in values)
        if not numbers:
            raise ValueError(f"a loaded group has {PER_REPLICA}[{key!r}]={values!r}, expected one number per replica")


def fit_state(entries: Mapping[str, Any], param: Tensor) -> dict[str, Any]:
    """Return loaded state of a stacked parameter in a form that fits its number of replicas.

    Per-replica state of a stack with another number of replicas becomes one state for all: the mean over the replicas,
    and the largest step count. After a sync with local gradients, all replicas are equal.
    """
    # A state has the shape of its parameter, or one number for each row (NorMuon).
    shapes = (tuple(param.shape[1:]), (*param.shape[1:-1], 1))
    fitted = dict(entries)
    coded = [value for value in fitted.values() if is_coded(value)]
    if any(tuple(value.shape[1:]) in shapes and len(value) != len(param) for value in coded):
        fitted = decoded_entries(entries)
    others = {"step", *(scale_name(name) for name, value in fitted.items() if is_coded(value))}
    per_replica = [
        name
        for name, value in fitted.items()
        if name not in others and isinstance(value, Tensor) and value.dim() and tuple(value.shape[1:]) in shapes
    ]
    of_other_stack = [name for name in per_replica if len(fitted[name]) not in (0, len(param))]
    for name in of_other_stack:
        # In float64 the mean of equal numbers is that number.
        fitted[name] = fitted[name].double().mean(0).to(fitted[name].dtype)
    if of_other_stack and isinstance(fitted.get("step"), Tensor) and fitted["step"].dim():
        fitted["step"] = fitted["step"].max()
    return fitted


@dataclass(frozen=True)
class _Wrapped:
    tensor: Tensor


def wrap_tensors(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return the same state_dict with the tensors of its state wrapped."""
    wrapped = with_values(state_dict["state"], lambda value: _Wrapped(value) if isinstance(value, Tensor) else value)
    return state_dict | {"state": wrapped}


def unwrap_tensors(state: Mapping[Any, Any]) -> defaultdict[Any, Any]:
    """Return state that ``load_state_dict`` has mapped to parameters, with its tensors unwrapped."""
    plain = with_values(state, lambda value: value.tensor if isinstance(value, _Wrapped) else value)
    return defaultdict(dict, plain)


def with_values(state: Mapping[Any, Any], change: Callable[[Any], Any]) -> dict[Any, Any]:
    """Return the state of all parameters with every value changed."""
    return {
        key: {name: change(value) for name, value in entries.items()} if isinstance(entries, Mapping) else entries
        for key, entries in state.items()
    }
