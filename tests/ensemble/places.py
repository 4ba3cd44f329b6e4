"""Where an ensemble says that its process is."""

from __future__ import annotations

from typing import Any

NAMES = ("size", "replica", "rows", "part", "parts", "processes", "process", "talks", "rank")

#: One process with one replica.
ALONE = {"size": 1, "replica": 0, "rows": 1, "part": 0, "parts": 1, "processes": 1, "process": 0, "rank": 0}


def place(ensemble: Any) -> dict[str, Any]:
    """Return the attributes by which an ensemble tells its size, and the place of this process in it."""
    return {name: getattr(ensemble, name) for name in NAMES}
