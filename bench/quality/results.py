"""A results file: what was run, where and when, and the records of all runs."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from .pool import Job
from .spec import Record
from .suite import select

#: What is recorded of a run over time.
DRAWN = ("curve", "rates", "values")


@dataclass(frozen=True)
class Report:
    """``earlier`` says where the records are from that this run found done."""

    command: str
    machine: str
    date: str
    seconds: float
    size: str
    best: dict[str, float]
    records: list[Record]
    earlier: list[str] = field(default_factory=list)

    @property
    def sources(self) -> list[str]:
        """Which runs the records are from: commands, dates, machines, and how many of how long."""
        failed = sum("error" in record for record in self.records)
        runs = f"{len(self.records)} runs{' in all' if self.earlier else ''}, {self.seconds:.0f} s"
        own = f"`{self.command}`, {self.date}, {self.machine}: {runs}{f', {failed} of them failed' if failed else ''}."
        return [*self.earlier, own]

    def lacks(self, job: Job) -> bool:
        """Whether no run of ``job`` is among the records."""
        wanted = {key: value for key, value in job.items() if key != "spec"} | job.get("spec", {})
        return not select(self.records, **wanted)

    def plain(self) -> dict[str, Any]:
        """As it is written: five digits, and what a run went through only where that is drawn."""
        records = [
            {
                key: value
                for key, value in record.items()
                if key != "spec" and (key not in DRAWN or record["kind"] == "paper")
            }
            for record in self.records
        ]
        return {**asdict(self), "records": _rounded(records)}

    def losses(self, **wanted: object) -> list[float]:
        return [record["val"] for record in select(self.records, **wanted)]


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {key: _rounded(entry) for key, entry in value.items()}
    return [_rounded(entry) for entry in value] if isinstance(value, list | tuple) else value
