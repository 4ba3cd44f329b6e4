"""The frontends of docs/frontend.md, as classes: the tests run the code that the page shows."""

from __future__ import annotations

from typing import Any

import hdet_kernels as hk
from tests.docs.pages import ROOT, Block, blocks_of

PAGE = ROOT / "docs" / "frontend.md"


def block_of(name: str) -> Block:
    """Return the block of the page that defines a class."""
    (found,) = (block for block in blocks_of(PAGE) if f"\nclass {name}" in f"\n{block.code}")
    return found


def frontends() -> dict[str, Any]:
    """Return the classes by name. Nothing but ``hk`` is there for them."""
    names: dict[str, Any] = {"hk": hk, "__name__": "frontend"}
    for name in ("SharedFrontend", "LocalFrontend"):
        exec(block_of(name).compiled(), names)
    return names
