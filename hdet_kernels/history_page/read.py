"""Read the records of a run from a file: the lines of ``history_file=``, or a JSON list of records."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from hdet_kernels.report import record_of
from hdet_kernels.schedule.history.records import SyncRecord


def read_history(path: str | os.PathLike[str]) -> list[SyncRecord]:
    """Return the records of a file, oldest first.

    A last line that was cut off while it was written is left out.

    Raises:
        ValueError: if the file cannot be read, is empty, or holds something else. The message names the line.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise ValueError(
            f"there is no file {path}: pass the history_file= of a scheduler, or a JSON list of its records"
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read as text: {error}") from error
    if not text.strip():
        raise ValueError(f"{path} is empty: there is nothing to show before the first sync of a run")
    entries = _of_list(text, path) if text.lstrip().startswith("[") else _of_lines(text, path)
    if not entries:
        raise ValueError(f"{path} has no record: there is nothing to show before the first sync of a run")
    return [_record(path, place, entry) for place, entry in entries]


def _of_list(text: str, path: Path) -> list[tuple[str, Any]]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    return [(f"entry {number}", entry) for number, entry in enumerate(found)]


def _of_lines(text: str, path: Path) -> list[tuple[str, Any]]:
    lines = [(number, line) for number, line in enumerate(text.splitlines(), start=1) if line.strip()]
    found = []
    for number, line in lines:
        try:
            found.append((f"line {number}", json.loads(line)))
        except ValueError as error:
            cut_off = number == lines[-1][0] and not text.endswith("\n") and found
            if not cut_off:
                raise ValueError(
                    f"{path}, line {number} is not valid JSON ({error}): pass the history_file= of a scheduler, with "
                    "one record to a line, or a JSON list of records"
                ) from error
    return found


def _record(path: Path, place: str, entry: Any) -> SyncRecord:
    try:
        record = record_of(place, entry)
        complete = record.base.keys() == record.values.keys() and len(record.losses) > 0
        if complete:
            record.metrics()
    except (TypeError, ValueError, AttributeError, KeyError) as error:
        raise ValueError(f"{path}, {place} is not the record of a sync: {error}") from error
    if not complete:
        raise ValueError(f"{path}, {place} is not the record of a sync: base, values and losses do not fit each other")
    return record
