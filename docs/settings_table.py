"""Write the tables of the controllers' settings into docs/controller.md: ``python docs/settings_table.py``.

The tables come from hdet_kernels/controller/settings.py: every field, its default, and the comment above it.
"""

from __future__ import annotations

import ast
from pathlib import Path

from hdet_kernels.controller import settings

BEGIN, END = "<!-- settings -->", "<!-- /settings -->"
TITLES = {
    "SlopeSettings": "Regression and hypergradient",
    "RegressionSettings": "Regression only",
    "SoftmaxSettings": "Softmax",
}


def tables() -> str:
    """Return one table for each class of settings, as Markdown."""
    source = Path(settings.__file__).read_text()
    parts = []
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef):
            lines = source.splitlines()[node.lineno : node.end_lineno]
            parts.append(f"**{TITLES[node.name]}** (`{node.name}`)\n\n{_table(lines)}")
    return "\n\n".join(parts)


def _table(lines: list[str]) -> str:
    rows, comment = ["| setting | default | meaning |", "|---|---|---|"], ""
    for line in map(str.strip, lines):
        if line.startswith("#:"):
            comment = f"{comment} {line.removeprefix('#:').strip()}".strip()
        elif ":" in line and "=" in line and not line.startswith(('"', "#")):
            name, default = line.split(":")[0], line.split("=")[1].strip()
            meaning = comment.replace("``", "`").replace("|", "\\|")
            rows.append(f"| `{name}` | {default} | {meaning} |")
            comment = ""
    return "\n".join(rows)


def with_tables(page: str) -> str:
    """Return a page with the tables between its two markers."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    if not after:
        raise ValueError(f"the page needs the lines {BEGIN} and {END}, between which the tables go")
    return f"{before}{BEGIN}\n{tables()}\n{END}{after}"


if __name__ == "__main__":
    path = Path(__file__).parent / "controller.md"
    path.write_text(with_tables(path.read_text()))
