"""Constants of the controller that were fitted without the family of the task that they are judged on.

The family of a task are all tasks that share its data or its architecture, itself included. ``constants.json`` has the
constants by task: ``{task: {constant: value}}``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from .results import Record, same
from .tasks import TASKS

Constants = dict[str, dict[str, Any]]
CONSTANTS = Path(__file__).parent / "results" / "constants.json"
# Methods whose controller has the constants.
FITTED = ("hdet", "scout")


def family(task: str) -> set[str]:
    """Return the tasks that share the data or the architecture of a task, itself included."""
    own = TASKS[task]
    return {name for name, other in TASKS.items() if other.data == own.data or other.architecture == own.architecture}


def read(path: Path = CONSTANTS) -> Constants:
    """Return the constants by task; none where there is no file."""
    found: Constants = json.loads(path.read_text()) if path.exists() else {}
    return found


def current(records: Iterable[Record], constants: Constants) -> list[Record]:
    """Return the records without HDET runs whose constants are not those of ``constants``."""
    return [
        record for record in records if not takes_constants(record) or same(record["options"], _of(constants, record))
    ]


def counts(records: Iterable[Record], constants: Constants) -> tuple[int, int, int]:
    """Return the number of HDET runs, of those with constants fitted without their family, and of those with none."""
    runs = [record for record in records if takes_constants(record) and "val" in record]
    right = sum(bool(_of(constants, run)) and same(run["options"], _of(constants, run)) for run in runs)
    return len(runs), right, sum(not run["options"] for run in runs)


def verdict(records: Iterable[Record], constants: Constants) -> str:
    """Say how many HDET runs had constants fitted without the family of their task; nothing without such runs."""
    runs, right, own = counts(records, constants)
    if not runs:
        return ""
    if right == runs:
        return f"All {runs} HDET runs had constants that were fitted without the family of their task."
    rest = f"; **{own} had the defaults of the package**" if own else ""
    other = runs - right - own
    rest += f"; **{other} had constants that `constants.json` does not have for their task**" if other else ""
    return f"{right} of {runs} HDET runs had constants that were fitted without the family of their task{rest}."


def takes_constants(record: Mapping[str, Any]) -> bool:
    """Return whether a record is of an HDET run of the zoo, whose controller has fitted constants."""
    return record.get("method") in FITTED and record["kind"] in ("start", "none")


def _of(constants: Constants, record: Record) -> dict[str, Any]:
    return constants.get(record["task"], {})
