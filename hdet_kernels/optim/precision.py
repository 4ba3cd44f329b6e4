"""Loaded state in the precision in which it was saved.

``Optimizer.load_state_dict`` casts every floating tensor to the dtype of its parameter, but leaves alone what is no
tensor: so tensors pass through it in a wrapper.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.optim import Optimizer


@dataclass(frozen=True)
class _Wrapped:
    tensor: Tensor


def in_its_precision(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """A ``load_state_dict`` pre-hook: the same state_dict with its tensors wrapped."""
    state = {
        param: {name: _Wrapped(value) if isinstance(value, Tensor) else value for name, value in entries.items()}
        if isinstance(entries, Mapping)
        else entries
        for param, entries in state_dict["state"].items()
    }
    return state_dict | {"state": state}


def unwrapped(state: Mapping[Any, Any]) -> defaultdict[Any, Any]:
    """State as ``load_state_dict`` has mapped it to parameters, with its tensors as tensors again."""
    plain: defaultdict[Any, Any] = defaultdict(dict)
    for param, entries in state.items():
        plain[param] = (
            {name: value.tensor if isinstance(value, _Wrapped) else value for name, value in entries.items()}
            if isinstance(entries, Mapping)
            else entries
        )
    return plain
