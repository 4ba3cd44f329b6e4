"""The pages of the documentation, their Python blocks, and what each block needs to run."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]

#: Every page whose links are checked and whose Python blocks run.
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])

_FENCE = re.compile(r"(?P<needs><!-- needs: [^\n]*-->\n+)?^```(?P<language>\w*)[^\n]*\n(?P<code>.*?)^```$", re.M | re.S)
_NEEDS = re.compile(r"<!-- needs: (gpu|(?P<ranks>\d+) ranks) -->")


@dataclass(frozen=True)
class Block:
    """One fenced Python block.

    needs: what the HTML comment above the block says: ``"cpu"`` (no comment), ``"gpu"`` or ``"4 ranks"``.
    line: where its code begins in the page, from 1.
    """

    page: str
    line: int
    code: str
    needs: str

    def compiled(self) -> object:
        """Return the code, with line numbers and a file name that point into the page."""
        return compile("\n" * (self.line - 1) + self.code, self.page, "exec", dont_inherit=True)


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks_of(page: Path) -> list[Block]:
    """Return the Python blocks of a page, in order.

    Raises:
        ValueError: if a comment above a block asks for something that the tests do not know.
    """
    text = page.read_text()
    found = []
    for match in _FENCE.finditer(text):
        if match["language"] != "python":
            continue
        needs = "cpu"
        if match["needs"]:
            known = _NEEDS.fullmatch(match["needs"].strip())
            if known is None:
                raise ValueError(f"{name_of(page)} needs 'gpu' or '4 ranks', got {match['needs'].strip()!r}")
            needs = known[1]
        line = text.count("\n", 0, match.start("code")) + 1
        found.append(Block(name_of(page), line, match["code"], needs))
    return found


def prose_of(page: Path) -> str:
    """Return the text of a page without its fenced blocks and HTML comments."""
    return re.sub(r"<!--.*?-->", "", _FENCE.sub("", page.read_text()), flags=re.S)
