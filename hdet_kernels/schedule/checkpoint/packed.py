"""Wrap a part of a checkpoint so that ``torch.distributed.checkpoint`` saves and loads it whole.

That library (DCP) takes dicts and lists apart. It saves every leaf under its path, drops empty
dicts, and loads only into entries that the scheduler which loads has already. History and state of a controller grow
during a run, so that a scheduler which is built anew has fewer entries. A tuple is a leaf to DCP: it is saved whole,
and what is loaded takes its place, whatever is in it.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor


def packed(state: dict[str, Any]) -> tuple[dict[str, Any]]:
    """Return ``state`` as one object, with its tensors on the CPU.

    DCP brings the tensors of such an object back to the device that they were saved on, which another machine may not
    have.
    """
    return (_on_cpu(state),)


def unpacked(entry: object) -> object:
    """Return what :func:`packed` was given. Anything else is returned as it is: earlier formats did not pack it."""
    return entry[0] if isinstance(entry, tuple | list) and len(entry) == 1 else entry


def _on_cpu(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().cpu()
    if type(value) is dict:
        return {key: _on_cpu(entry) for key, entry in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_on_cpu(entry) for entry in value)
    return value
