"""Select records of runs by their entries."""

from __future__ import annotations

import math
from collections.abc import Sequence

from .spec import Record


def select(records: Sequence[Record], **wanted: object) -> list[Record]:
    """Return the records with these entries, without failed runs."""
    exact = {key: value for key, value in wanted.items() if not isinstance(value, float | dict)}
    others = {key: value for key, value in wanted.items() if key not in exact}
    return [
        record
        for record in records
        if "val" in record
        and all(record.get(key) == value for key, value in exact.items())
        and all(same(record.get(key), value) for key, value in others.items())
    ]


def same(found: object, wanted: object) -> bool:
    """Return whether two entries of records are equal up to the five digits of results files."""
    if isinstance(wanted, float):
        return isinstance(found, float) and math.isclose(found, wanted, rel_tol=1e-4)
    if isinstance(wanted, dict) and isinstance(found, dict):
        return found.keys() == wanted.keys() and all(same(found[key], wanted[key]) for key in wanted)
    return found == wanted
