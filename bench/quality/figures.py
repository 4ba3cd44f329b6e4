"""Make and save figures of the quality suite, without pyplot: the user's global state is not touched."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any


def new_figure(rows: int, columns: int, width: float, height: float, **shared: bool) -> tuple[Any, Any]:
    """Return a figure and its axes by row and column; width and height are those of one panel, in inches."""
    figure = importlib.import_module("matplotlib.figure").Figure(figsize=(width * columns, height * rows))
    return figure, figure.subplots(rows, columns, squeeze=False, **shared)


def save(figure: Any, path: Path) -> None:
    """Write a figure with what stands beside its panels."""
    figure.tight_layout()
    figure.savefig(path, dpi=110, bbox_inches="tight")
