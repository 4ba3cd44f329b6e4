"""Format numbers and Markdown tables."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence


def table(header: Sequence[object], rows: Iterable[Sequence[object]], left: int = 1) -> str:
    """Return a Markdown table whose first ``left`` columns are aligned to the left, the others to the right."""
    marks = ["---"] * left + ["---:"] * (len(header) - left)
    lines = [list(map(str, header)), marks, *(list(map(str, row)) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def wrapped(text: str) -> str:
    """Break lines between words, so that links stay whole."""
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)


def short(value: float) -> str:
    """Format a number with four significant digits, or all digits before the point."""
    return f"{value:.0f}" if value >= 1000 else f"{value:#.4g}"


def spaced(value: float) -> str:
    """Format a whole number with spaces between thousands."""
    return f"{value:,.0f}".replace(",", " ")


def percent(value: float) -> str:
    """Format percents with one digit after the point, large ones without."""
    text = f"{value:.1f}" if abs(value) < 9.95 else f"{value:.0f}"
    return "0.0" if text == "-0.0" else text.replace("-", "−")
