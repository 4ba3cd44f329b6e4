"""Describe one run, read results files (command, machine, date, and the records of all runs), and find records."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

# A record of a run, and a run that is to be made: the part of the suite, the task, and what else it needs.
Record = dict[str, Any]
Job = dict[str, Any]


@dataclass(frozen=True)
class Spec:
    """A run.

    Args:
        task: Name of the task.
        method: "plain", a configuration of HDET, or a peer (``methods.py``).
        lr: Peak learning rate at the start; None for the method "scout", which finds one.
        seed: Seed of the model and of the data order.
        schedule: "onecycle", "cosine" or "constant".
        probe: Whether the controller reads a probe instead of training losses.
        steps: Number of steps; None for the task's own.
        factors: Factors of the learning rates of parameter groups; without any there is one group.
        options: Constants of the controller.
    """

    task: str
    method: str
    lr: float | None
    seed: int
    schedule: str = "onecycle"
    probe: bool = True
    steps: int | None = None
    factors: dict[str, float] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)

    def record(self) -> Record:
        """Return the fields as a dict."""
        return asdict(self)


def select(records: Sequence[Record], **wanted: object) -> list[Record]:
    """Return the records with these entries, without failed runs."""
    exact = {key: value for key, value in wanted.items() if not isinstance(value, float | dict)}
    others = {key: value for key, value in wanted.items() if key not in exact}
    return [
        record
        for record in records
        if "error" not in record
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


# Time series of a run, which are not written.
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
        """Return the content as plain types: floats with five digits, without time series."""
        records = [
            {
                key: value
                for key, value in (record.get("spec", {}) | record).items()  # a failed run has but its spec
                if key != "spec" and key not in TIME_SERIES
            }
            for record in self.records
        ]
        return {**asdict(self), "records": _rounded(records)}


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
