"""``state_dict`` of a stack, and plain copies of its module.

Every function takes the template and the stacked tensors [R, *shape], by the names that they have in the template.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hdet_kernels.stack.template import tensors_by_name
from hdet_kernels.tensors import compact, wide_dtype

StackedTensors = Mapping[tuple[str, ...], Tensor]


def stack_state(template: nn.Module, stacked: StackedTensors) -> dict[str, Any]:
    """Return the template's ``state_dict`` with stacked tensors in the places of those that have rows.

    Rows in a flat buffer, between those of other tensors, are copied: a file would hold the others as well. Tied
    tensors share their copy.
    """
    entries = _entries(template, stacked)
    copies = {id(value): compact(value) for value, has_rows in entries.values() if has_rows}
    return {name: copies.get(id(value), value) for name, (value, _) in entries.items()}


def _entries(template: nn.Module, stacked: StackedTensors) -> dict[str, tuple[Any, bool]]:
    """Return the entries of the ``state_dict``, each with whether it has rows."""
    state = template.state_dict(keep_vars=True)
    own = tensors_by_name(template)
    # Matched by the tensors themselves, since hooks of the module may have renamed the entries.
    rows = {id(own[name]): tensor.detach() for names, tensor in stacked.items() for name in names}
    return {
        name: (rows[id(value)], True)
        if id(value) in rows
        else (value.detach() if isinstance(value, Tensor) else value, False)
        for name, value in state.items()
    }


@torch.no_grad()
def load_stack_state(template: nn.Module, stacked: StackedTensors, state_dict: Mapping[str, Any], strict: bool) -> Any:
    """Load the state of a stack, or of a plain module, whose tensors then go to all rows.

    Returns:
        Missing and unexpected keys, as ``nn.Module.load_state_dict`` does.

    Raises:
        RuntimeError: a shape does not fit, or keys do not and ``strict`` is set. Nothing is changed then.
    """
    own = _entries(template, stacked)
    missing = [name for name in own if name not in state_dict]
    unexpected = [name for name in state_dict if name not in own]
    wrong = []
    for name, (tensor, has_rows) in own.items():
        value = state_dict.get(name)
        if name not in state_dict or not isinstance(tensor, Tensor):
            continue
        shapes = [tensor.shape, tensor.shape[1:]] if has_rows else [tensor.shape]
        if not isinstance(value, Tensor) or value.shape not in shapes:
            given = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            wrong.append(f"{name} is {given}, expected {' or '.join(str(tuple(shape)) for shape in shapes)}")
    if strict and (missing or unexpected):
        wrong += [f"missing: {', '.join(missing)}"] * bool(missing)
        wrong += [f"unexpected: {', '.join(unexpected)}"] * bool(unexpected)
    if wrong:
        replicas = len(next(iter(stacked.values())))
        raise RuntimeError(f"the state_dict does not fit a stack of {replicas} replicas: {'; '.join(wrong)}")
    for name, (tensor, _) in own.items():
        if name in state_dict and isinstance(tensor, Tensor):
            tensor.copy_(state_dict[name])
        elif name in state_dict:
            owner = name.removesuffix("_extra_state").removesuffix(".")
            template.get_submodule(owner).set_extra_state(state_dict[name])
    result = nn.Module().load_state_dict({})  # torch's result, whose type has no public name
    result.missing_keys.extend(missing)
    result.unexpected_keys.extend(unexpected)
    return result


@torch.no_grad()
def copy_template(template: nn.Module, values: StackedTensors) -> nn.Module:
    """Return a copy of the template with ``values`` [*shape] in the places of the tensors of these names."""
    # deepcopy refuses tensors that are part of a graph; torch.nn.utils.weight_norm keeps some as attributes.
    attributes = (value for part in template.modules() for value in vars(part).values())
    computed = [value for value in attributes if isinstance(value, Tensor) and not value.is_leaf]
    copied = copy.deepcopy(template, {id(value): value.detach().clone() for value in computed})
    tensors = tensors_by_name(copied)
    for names, value in values.items():
        for name in names:
            tensors[name].copy_(value)
    return copied


def mean_module(template: nn.Module, stacked: StackedTensors) -> nn.Module:
    """Return a copy of the template with the mean of the finite replicas.

    Integer buffers are those of the first finite replica.

    Raises:
        RuntimeError: no replica is finite.
    """
    finite = finite_replicas(template, stacked)
    if not finite.any():
        raise RuntimeError(
            "no replica is finite: each has NaN or infinity in its parameters or buffers; load a checkpoint"
        )
    rows = finite.nonzero().flatten()

    def mean(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point() and not tensor.is_complex():
            return tensor[rows[0]]
        wide = torch.promote_types(tensor.dtype, wide_dtype(tensor.device))
        return tensor[rows.to(tensor.device)].to(wide).mean(0)

    return copy_template(template, {names: mean(tensor) for names, tensor in stacked.items()})


@torch.no_grad()
def finite_replicas(template: nn.Module, stacked: StackedTensors) -> Tensor:
    """Return [R], which replicas are finite.

    Non-finite buffer entries are allowed where the template's buffer is non-finite (attention masks).
    """
    first = next(iter(stacked.values()))
    finite_rows = torch.ones(len(first), dtype=torch.bool, device=first.device)
    own = dict(template.named_buffers(remove_duplicate=False))
    for names, tensor in stacked.items():
        finite = tensor.isfinite()
        if names[0] in own:
            finite |= ~own[names[0]].isfinite()
        finite_rows &= finite.unsqueeze(-1).flatten(1).all(1).to(first.device)
    return finite_rows
