"""Results files: command, machine, date, and the records of all runs."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from .pool import Job
from .spec import Record
from .suite import select

# Time series of a run; they are written only where a plot needs them.
TIME_SERIES = ("curve", "rates", "values")


@dataclass(frozen=True)
class Report:
    """Content of a results file; ``earlier`` describes the runs that records were taken over from."""

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
        """Describe the runs that the records come from: command, date, machine, count and duration."""
        failed = sum("error" in record for record in self.records)
        runs = f"{len(self.records)} runs{' in all' if self.earlier else ''}, {self.seconds:.0f} s"
        own = f"`{self.command}`, {self.date}, {self.machine}: {runs}{f', {failed} of them failed' if failed else ''}."
        return [*self.earlier, own]

    def lacks(self, job: Job) -> bool:
        """Return whether no run of ``job`` is among the records."""
        wanted = {key: value for key, value in job.items() if key != "spec"} | job.get("spec", {})
        return not select(self.records, **wanted)

    def plain(self) -> dict[str, Any]:
        """Return the content as plain types: floats with five digits, and time series only where a plot needs them."""
        records = [
            {
                key: value
                for key, value in record.items()
                if key != "spec" and (key not in TIME_SERIES or record["kind"] == "paper")
            }
            for record in self.records
        ]
        return {**asdict(self), "records": _rounded(records)}

    def losses(self, **wanted: object) -> list[float]:
        """Return the validation losses of the runs with these entries."""
        return [record["val"] for record in select(self.records, **wanted)]


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {key: _rounded(entry) for key, entry in value.items()}
    return [_rounded(entry) for entry in value] if isinstance(value, list | tuple) else value
