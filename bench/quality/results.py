"""Results files: command, machine, date, and the records of all runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from .pool import Job
from .selection import select
from .spec import Record

# Time series of a run; they are written only where a plot needs them.
TIME_SERIES = ("curve", "rates", "values")


@dataclass(frozen=True)
class Report:
    """Content of a results file.

    ``earlier`` describes the runs that records were taken over from. ``notes`` are sentences on how they were made that
    the records do not tell; the page has them.
    """

    command: str
    machine: str
    date: str
    seconds: float
    size: str
    best: dict[str, float]
    records: list[Record]
    earlier: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def sources(self) -> list[str]:
        """Describe the runs that the records come from: command, date, machine, count and duration."""
        failed = sum("error" in record for record in self.records)
        runs = f"{len(self.records)} runs{' in all' if self.earlier else ''}, {self.seconds:.0f} s"
        own = f"`{self.command}`, {self.date}, {self.machine}: {runs}{f', {failed} of them failed' if failed else ''}."
        return [*self.earlier, own]

    def lacking(self, jobs: Sequence[Job]) -> list[Job]:
        """Return the jobs that no run among the records was made for."""
        runs: dict[tuple[object, ...], list[Record]] = {}
        for record in self.records:
            runs.setdefault(_place(record), []).append(record)
        wanted = [{key: value for key, value in job.items() if key != "spec"} | job.get("spec", {}) for job in jobs]
        return [
            job
            for job, entries in zip(jobs, wanted, strict=True)
            if not select(runs.get(_place(entries), []), **entries)
        ]

    def plain(self) -> dict[str, Any]:
        """Return the content as plain types: floats with five digits, and time series only where a plot needs them."""
        records = [
            {
                key: value
                for key, value in (record.get("spec", {}) | record).items()  # a failed run has but its spec
                if key != "spec" and (key not in TIME_SERIES or record["kind"] == "paper")
            }
            for record in self.records
        ]
        return {**asdict(self), "records": _rounded(records)}

    def losses(self, **wanted: object) -> list[float]:
        """Return the validation losses of the runs with these entries."""
        return [record["val"] for record in select(self.records, **wanted)]


def joined(reports: Sequence[Report]) -> Report:
    """Return the records of several files of one size as one."""
    if len(reports) == 1:
        return reports[0]
    last = reports[-1]
    records = [record for report in reports for record in report.records]
    best = {task: rate for report in reports for task, rate in report.best.items()}
    sources = [source for report in reports[:-1] for source in report.sources]
    notes = [note for report in reports for note in report.notes]
    return replace(last, records=records, best=best, earlier=[*sources, *last.earlier], notes=notes)


def _place(entries: Record) -> tuple[object, ...]:
    return tuple(entries.get(key) for key in ("kind", "task", "method", "seed"))


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {key: _rounded(entry) for key, entry in value.items()}
    return [_rounded(entry) for entry in value] if isinstance(value, list | tuple) else value
