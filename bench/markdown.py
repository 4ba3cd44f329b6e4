"""Format Markdown tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table_lines(header: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> list[str]:
    """Return the lines of a Markdown table; the first ``left`` columns are left-aligned, the others right-aligned."""
    rule = ["---"] * left + ["---:"] * (len(header) - left)
    return [f"| {' | '.join(cells)} |" for cells in (header, rule, *rows)]


def section_text(heading: str, description: str, source: str, *blocks: Sequence[str]) -> str:
    """Return a section: a heading of the second level, a description, its source, and blocks of lines."""
    parts = [f"## {heading}", description, source, *("\n".join(block) for block in blocks)]
    return "\n\n".join(filter(None, parts))
