"""Digests of nested values: equal exactly if all bits are."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import torch
from torch import Tensor


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
