"""Count the cases of a suite that were measured, skipped or failed."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree


@dataclass
class Outcome:
    """Result of one suite: measured cases, reasons of skipped and failed ones.

    ``cut``: the suite ended before all cases had begun. ``interrupted``: it was ended by Ctrl-C.
    """

    name: str
    seconds: float = 0.0
    cut: bool = False
    interrupted: bool = False
    passed: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    failed: dict[str, str] = field(default_factory=dict)

    @property
    def line(self) -> str:
        """Summarise the counts in a few words."""
        end = ", then stopped" if self.cut else ""
        if self.failed:
            return f"{len(self.failed)} failed, {self.passed} measured{end}"
        if not self.passed and not self.cut:
            return f"skipped: {'; '.join(self.skipped) or 'no case for this device'}"
        return f"{self.passed} measured, {self.skipped.total()} skipped{end}"


def read_ends(path: Path, outcome: Outcome) -> None:
    """Add the result of every case in pytest's JUnit file to ``outcome``."""
    for case in ElementTree.parse(path).iter("testcase"):
        skipped = case.find("skipped")
        wrong = case.find("failure") if case.find("failure") is not None else case.find("error")
        if wrong is not None:
            outcome.failed[f"{case.get('name')}"] = " ".join(wrong.get("message", "").split())[:300]
        elif skipped is not None:
            outcome.skipped[skipped.get("message", "")] += 1
        else:
            outcome.passed += 1
