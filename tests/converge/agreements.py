"""Agreements of two or more replicas, for the tests of what follows from them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from hdet_kernels.converge.agreement import Agreement


def agreement(**changes: Any) -> Agreement:
    """Return an agreement of three healthy replicas with local gradients and optimizer state, where all else agrees.

    Lists become arrays; ``losses``, ``probes`` and ``healthy`` may have any common length.
    """
    healthy = changes.get("healthy", [True, True, True])
    defaults: dict[str, Any] = {
        "losses": [1.0] * len(healthy),
        "probes": [math.nan] * len(healthy),
        "healthy": healthy,
        "ranks": [[float(rank)] for rank in range(len(healthy))],
        "norms": [[1.0]] * len(healthy),
        "shared": False,
        "equal": False,
        "has_state": True,
        "same_state": True,
        "same_counts": True,
        "same_integers": True,
        "same_consensus": True,
        "same_outer": True,
        "nonfinite_alike": False,
        "masks_changed": False,
        "may_overflow": False,
    }
    values = {**defaults, **changes}
    return Agreement(**{name: np.array(value) if isinstance(value, list) else value for name, value in values.items()})
