"""Modules that a test file names, and that are imported where a test first needs them.

Every process of pytest imports every test file, and transformers takes it five seconds.
"""

from __future__ import annotations

import importlib
from typing import Any


class Later:
    """The module ``name``, which is imported when something of it is first asked for."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("_"):  # pytest asks whatever a test file has whether it is a test
            raise AttributeError(attribute)
        return getattr(importlib.import_module(self._name), attribute)
