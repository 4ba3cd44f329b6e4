"""The whole state of any optimizer, for a copy of it: moments, step counts, and entries that are no tensors.

State comes into being with the first step. To return to a time before it means that it is as before its first step: the
state of a fused optimizer becomes zeros in place, because captured CUDA graphs hold its addresses. The entries of other
optimizers are removed, unless the optimizer is made for such graphs (``capturable=True``).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from hdet_kernels.tensors import local

#: State of torch's capturable optimizers before the first step. Rprop's and ASGD's step sizes depend on the learning
#: rate of that step and are not among them.
_INITIAL = {
    **dict.fromkeys(("step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "square_avg", "acc_delta"), 0.0),
    **dict.fromkeys(("momentum_buffer", "grad_avg", "prev", "ax"), 0.0),
    "mu_product": 1.0,
}


def whole_state(optimizer: Optimizer, *, alike: bool) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors of an optimizer's state by name, and its other values. The tensors are those in use.

    Args:
        optimizer: any optimizer.
        alike: whether all replicas of a stack have the same state, so that one of each suffices.
    """
    if (flats := _flats(optimizer)) is not None:
        # Only state that every replica of a stack has for itself is 2-D.
        return {name: flat[0] if alike and flat.dim() == 2 else flat for name, flat in flats().items()}, {}
    tensors, others = {}, {}
    for name, _, value in _entries(optimizer):
        if isinstance(value, Tensor):
            tensors[name] = local(value)
        else:
            others[name] = copy.deepcopy(value)
    return tensors, others


def state_pairs(optimizer: Optimizer, tensors: dict[str, Tensor]) -> list[tuple[str, Tensor, Tensor]]:
    """Return the name, the tensor in use and the copy of all state that has a copy."""
    if (flats := _flats(optimizer)) is not None:
        return [
            (name, _by_replica(flat, tensors[name]), tensors[name]) for name, flat in flats().items() if name in tensors
        ]
    now = {name: local(value) for name, _, value in _entries(optimizer) if isinstance(value, Tensor)}
    return [(name, tensor, tensors[name]) for name, tensor in now.items() if name in tensors]


def reset_others(optimizer: Optimizer, tensors: dict[str, Tensor], others: dict[str, Any]) -> None:
    """Bring back all state that :func:`state_pairs` leaves out.

    Args:
        optimizer: any optimizer.
        tensors, others: what :func:`whole_state` returned.
    """
    if (flats := _flats(optimizer)) is not None:
        for name, flat in flats().items():
            if name not in tensors:
                flat.zero_()
        return
    capturable = {id(p): bool(g.get("capturable")) for g in optimizer.param_groups for p in g["params"]}
    for name, param, value in list(_entries(optimizer)):
        key = name.partition("/")[2]
        if name in others:
            optimizer.state[param][key] = copy.deepcopy(others[name])
        elif name in tensors and isinstance(value, Tensor):
            continue
        elif capturable[id(param)] and key in _INITIAL and isinstance(value, Tensor):
            local(value).fill_(_INITIAL[key])
        else:
            del optimizer.state[param][key]


def _by_replica(counts: Tensor, saved: Tensor) -> Tensor:
    """Return the step counts as [replicas, …] if the replicas of a stack have got a state of their own since then."""
    several = counts.dim() == saved.dim() == 1 and saved.numel() and not counts.numel() % saved.numel()
    return counts.view(-1, saved.numel()) if several and counts.shape != saved.shape else counts


def _flats(optimizer: Optimizer) -> Callable[[], dict[str, Tensor]] | None:
    """Return the function of a fused optimizer that returns its flat state; None for any other optimizer."""
    found = getattr(optimizer, "all_state_flats", None)
    return found if callable(found) else None


def _entries(optimizer: Optimizer) -> Iterator[tuple[str, Tensor, Any]]:
    """Yield the name, the parameter and the value of every entry of the state."""
    params = {id(param): param for group in optimizer.param_groups for param in group["params"]}
    for index, param in enumerate(params.values()):
        for key, value in optimizer.state.get(param, {}).items():
            yield f"{index}/{key}", param, value
