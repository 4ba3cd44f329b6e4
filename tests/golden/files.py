"""Where the checkpoints of each version lie."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

FOLDER = Path(__file__).parent


def path_of(version: str, name: str) -> Path:
    return FOLDER / version / f"{name}.pt"


def all_files() -> list[tuple[str, str]]:
    """Return version and name of every checkpoint."""
    return sorted((path.parent.name, path.stem) for path in FOLDER.glob("*/*.pt"))


def load(version: str, name: str) -> list[dict[str, Any]]:
    """Return the checkpoints of all ranks of a case."""
    saved = torch.load(path_of(version, name), weights_only=True)
    assert saved["version"] == version
    ranks: list[dict[str, Any]] = saved["ranks"]
    return ranks
