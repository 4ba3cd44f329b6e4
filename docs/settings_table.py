"""Write docs/controller-constants.md: ``python docs/settings_table.py``.

Its tables come from hdet_kernels/controller/settings.py: every field, its default, and the comment above it.
"""

from __future__ import annotations

import ast
from pathlib import Path

from hdet_kernels.controller import settings

PAGE = Path(__file__).parent / "controller-constants.md"
HEAD = """# The controllers' constants

Every constant of the [controllers](controller.md), written by `python docs/settings_table.py` from
`hdet_kernels/controller/settings.py`. Another value is passed as `settings=`, for instance
`hk.RegressionController(settings=RegressionSettings(cut=3.0))`. They are saved with a run, which resumes only
under the same values. "Share" means a share of the run unless it says otherwise; logarithms are natural."""


def page() -> str:
    """Return the page: a table for each class of settings."""
    source = Path(settings.__file__).read_text()
    parts = [HEAD]
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef):
            lines = source.splitlines()[node.lineno : node.end_lineno]
            parts.append(f"## {node.name}\n\n{ast.get_docstring(node)}\n\n{_table(lines)}")
    return "\n\n".join(parts) + "\n"


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


if __name__ == "__main__":
    PAGE.write_text(page())
