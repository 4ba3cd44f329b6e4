"""Every record of a run in a file, one JSON object to a line: ``history_file=`` of the schedulers.

A resumed run continues its file behind the last sync of its checkpoint: later lines, from before the interruption, are
removed because the resumed run writes them again. A file of another run is never overwritten, but moved aside.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections import deque
from pathlib import Path
from typing import Any

from hdet_kernels.schedule.history.records import WINDOW, History, SyncRecord

log = logging.getLogger("hdet_kernels")


class HistoryFile:
    """Appends records to a file. Training goes on if that fails: the lines are kept and written with the next ones.

    Args:
        path: the file; its folder must exist.

    Raises:
        TypeError, ValueError: before anything is written.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        if not isinstance(path, str | os.PathLike):
            raise TypeError(f"history_file must be a path, got {path!r}")
        self.path = Path(path)
        if self.path.is_dir() or not self.path.parent.is_dir():
            raise ValueError(
                f"history_file={str(path)!r} must be a file in a folder that exists: make the folder first"
            )
        self._waiting: deque[str] = deque(maxlen=WINDOW)
        self._in_place = False

    def reopen(self) -> None:
        """Look again, before the next record, where the file has to be continued: a checkpoint was loaded."""
        self._in_place = False
        self._waiting.clear()

    def append(self, record: SyncRecord, before: History) -> None:
        """Write a record.

        Args:
            record: the newest one.
            before: the history before it.
        """
        self._waiting.append(json.dumps(_without_nan(record.to_dict())) + "\n")
        try:
            if not self._in_place:
                self._find_place(before)
                self._in_place = True
            with self.path.open("a", encoding="utf-8") as file:
                file.writelines(self._waiting)
            self._waiting.clear()
        except OSError as error:
            log.error("%s cannot be written (%s): %d records wait", self.path, error, len(self._waiting))

    def _find_place(self, before: History) -> None:
        """Cut the file behind the last record of ``before``, or move it aside if it does not have that record."""
        if not self.path.exists() or not self.path.stat().st_size:
            if before.records:
                log.warning("%s is new: it begins after step %s", self.path, before.last_step)
            return
        end = _end_of(before.records[-1], before.summary.syncs, self.path) if before.records else None
        if end is None:
            aside = next(
                name for n in range(1, 10**6) if not (name := self.path.with_name(f"{self.path.name}.{n}")).exists()
            )
            log.warning("%s has the history of another run: it is %s from now on", self.path, aside)
            self.path.rename(aside)
        elif end < self.path.stat().st_size:
            os.truncate(self.path, end)


def _end_of(record: SyncRecord, count: int, path: Path) -> int | None:
    """Return where in the file the line of ``record`` ends, the ``count``-th if several fit; None if none does."""
    end, found = 0, None
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            end += len(line)
            if line.endswith(b"\n") and _is(record, line):
                found = end
                if number == count:
                    break
    return found


def _is(record: SyncRecord, line: bytes) -> bool:
    try:
        read = json.loads(line)
    except ValueError:
        return False
    known = (record.step, record.kind, record.landed)
    return isinstance(read, dict) and (read.get("step"), read.get("kind"), read.get("landed")) == known


def _without_nan(value: Any) -> Any:
    """Return the value with None for numbers that JSON does not have."""
    if isinstance(value, dict):
        return {key: _without_nan(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_without_nan(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
