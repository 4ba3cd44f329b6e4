"""Loading state in the precision in which it was saved.

``Optimizer.load_state_dict`` casts every floating-point tensor to the dtype of its parameter, but leaves other objects
alone. So tensors pass through it inside a wrapper object.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class _Wrapped:
    tensor: Tensor


def wrap_tensors(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return the same state_dict with the tensors of its state wrapped."""
    state = {
        param: {name: _Wrapped(value) if isinstance(value, Tensor) else value for name, value in entries.items()}
        if isinstance(entries, Mapping)
        else entries
        for param, entries in state_dict["state"].items()
    }
    return state_dict | {"state": state}


def unwrap_tensors(state: Mapping[Any, Any]) -> defaultdict[Any, Any]:
    """Return state that ``load_state_dict`` has mapped to parameters, with its tensors unwrapped."""
    plain: defaultdict[Any, Any] = defaultdict(dict)
    for param, entries in state.items():
        plain[param] = (
            {name: value.tensor if isinstance(value, _Wrapped) else value for name, value in entries.items()}
            if isinstance(entries, Mapping)
            else entries
        )
    return plain
