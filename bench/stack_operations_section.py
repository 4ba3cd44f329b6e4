"""Format the records of ``stack_operations.py`` as a section of Markdown."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.markdown import section_text, table_lines

Record = dict[str, Any]

DESCRIPTION = (
    "Every operation in a `ReplicaStack`, beside separate modules: losses and gradients, in fp32 and under autocast. "
    "**equal**: no loss and no gradient is further from fp64 than twice the distance of the separate modules (the "
    "largest of several runs whose parameters differ by a rounding) and a rounding. *loop*: equal, but "
    "`torch.func.vmap` computes this operation in a loop over the replicas. *one by one*: equal, but the whole loss "
    "is computed one replica after another, which the log says once. –: torch itself does not compute it in this "
    "precision. Random operations are *equal* if every replica draws numbers of its own."
)


def read_records(folder: Path) -> list[Record]:
    """Return the records of all devices in ``folder``, those of GPUs first."""
    found = [json.loads(path.read_text()) for path in sorted(folder.glob("*_stack_operations.json"))]
    return sorted(found, key=lambda record: record["device"] == "CPU")


def stack_operations_section(records: Sequence[Record]) -> str:
    """Return the section: a table with a column for each device and precision, and counts.

    Args:
        records: the records of :func:`read_records`, one per device.
    """
    columns: dict[tuple[str, str], dict[str, Any]] = {}
    for record in records:
        for entry in record["operations"]:
            columns.setdefault((record["device"], entry["precision"]), {})[entry["operation"]] = entry
    names = list(dict.fromkeys(name for column in columns.values() for name in column))
    body = [[name, *(_cell(column.get(name)) for column in columns.values())] for name in names]
    counts = [_counts(where, column.values()) for where, column in columns.items()]
    sources = [f"{r['machine']}, torch {r['torch']}, {r['date']}. `{r['command']}`" for r in records]
    header = ["operation", *(f"{device}, {precision}" for device, precision in columns)]
    table = table_lines(header, body, left=len(header))
    return section_text("Operations in a stack", DESCRIPTION, "\n".join(sources), counts, table)


def _cell(entry: dict[str, Any] | None) -> str:
    if entry is None or entry["result"] == "unknown":
        return "–"
    if entry["result"] != "equal":
        return f"**{entry['result']}**"
    return "*one by one*" if entry["one by one"] else ("*loop*" if entry["loops"] else "equal")


def _counts(where: tuple[str, str], entries: Any) -> str:
    cells = [_cell(entry).strip("*") for entry in entries]
    counted = [f"{cells.count(kind)} {kind}" for kind in ("equal", "loop", "one by one", "refused", "wrong")]
    return f"- {where[0]}, {where[1]}: {', '.join(counted)} of {len(cells) - cells.count('–')}"
