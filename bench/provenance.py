"""Where a recorded figure comes from: the entries with which every record of this folder's own commands begins."""

from __future__ import annotations

import datetime

import torch


def provenance(command: str) -> dict[str, str]:
    """Return the command that makes a record, the date and the version of torch."""
    return {"command": command, "date": datetime.date.today().isoformat(), "torch": torch.__version__}
