"""What one rank records of its run: failures, and digests of nested values, equal exactly if all bits are."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass
class Failure:
    """An exception that a call of the user's raised.

    Attributes:
        call: ``"build"``, ``"load"``, ``"backward"``, ``"optimizer"``, ``"scheduler"`` or ``"after"``.
        step: finished steps.
        kind: name of the class.
        message: its text and that of its causes.
        changed: the parts that the call changed.
        digests: the parts after the call.
        seconds: time that the call took.
    """

    call: str
    step: int
    kind: str
    message: str
    changed: list[str]
    digests: dict[str, str]
    seconds: float


@dataclass
class Record:
    """The run of one rank.

    Attributes:
        digests: of every part, by step.
        consensus: by the step of a sync: digest of what a sync makes equal, and whether rows are equal.
        failures: in order.
        vectors: parameters right before and after the sync at the step of the case.
        excluded: by step: the replicas that were left out.
        collectives: by step.
        finite: whether everything is finite at the end.
        fired: whether the fault has acted on this rank.
        step: finished steps.
    """

    digests: dict[int, dict[str, str]] = field(default_factory=dict)
    consensus: dict[int, tuple[str, bool]] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)
    vectors: list[Any] = field(default_factory=list)
    excluded: dict[int, list[int]] = field(default_factory=dict)
    collectives: dict[int, int] = field(default_factory=dict)
    finite: bool = False
    fired: bool = False
    step: int = 0


def digest(value: Any) -> str:
    """Return a digest of tensors, numbers and containers. NaN has the digest of the same NaN."""
    found = hashlib.blake2b(digest_size=12)
    _feed(found, value)
    return found.hexdigest()


def _feed(found: Any, value: Any) -> None:
    if isinstance(value, Tensor):
        local = value.to_local() if hasattr(value, "to_local") else value
        flat = local.detach().cpu().contiguous().reshape(-1)
        found.update(f"{value.dtype} {tuple(local.shape)}".encode())
        found.update(flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b"")
    elif isinstance(value, dict):
        for key, entry in value.items():
            found.update(f"{key!r}:".encode())
            _feed(found, entry)
    elif isinstance(value, list | tuple):
        found.update(f"[{len(value)}".encode())
        if value and all(type(entry) is float for entry in value):
            found.update(np.array(value).tobytes())  # the state of a controller has long lists
            return
        for entry in value:
            _feed(found, entry)
    else:
        found.update((value.hex() if isinstance(value, float) else repr(value)).encode())
