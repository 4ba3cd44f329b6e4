"""The records of syncs: the last ones in full, a summary of all, a file of them, metrics, and callbacks.

Metrics are flat names as loggers take them (``hdet/base/lr``, ``hdet/replica0/loss``, …), with letters, digits and
``_ . - /`` only. A number that is not known or not finite has no entry.
"""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import math
import os
import re
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from torch.utils.hooks import RemovableHandle

from hdet_kernels.checks import check_callable, check_flag, spell
from hdet_kernels.controller.protocol import Findings
from hdet_kernels.converge import Outcome
from hdet_kernels.fanout.spread import Placement
from hdet_kernels.schedule.acts import EVENTS, Act, ActKind, peak_words
from hdet_kernels.schedule.losses import AnyNumber

Kind = Literal["sync", "early", "last", "manual", "scout"]
Gradients = Literal["shared", "local", "teams", "unknown"]

#: What an average found out about gradients, in words.
_FOUND: dict[bool | None, Gradients] = {None: "unknown", True: "shared", False: "local"}

#: Records that are kept in full. A run has 40 syncs by default, and 1000 if it has a million steps.
WINDOW = 1000

#: Points of the summary's curve. When there are twice as many, every other one is dropped.
POINTS = 128


#: Events that a summary keeps, and hyperparameters and events that it prints.
MOST_EVENTS, MOST_ROWS = 32, 8


@dataclass(frozen=True)
class SyncRecord:
    """One sync. Lists have one entry for each replica.

    Args:
        step: finished steps.
        cycle: number of the cycle that ended.
        kind: ``"sync"`` at a multiple of ``sync_every``, ``"early"`` before the first, ``"last"`` at the end of the
            run, ``"manual"`` for ``scheduler.converge()``, ``"scout"`` for the end of a scouting round: then ``cycle``
            is its number, ``values`` are peaks of the learning rate, and nothing was averaged.
        losses: mean training loss since the last sync; NaN if none was recorded.
        probes: losses on the probe, where it ran.
        base: base value of every hyperparameter, by name.
        values: value that each replica trained with, by name.
        excluded: replicas that were not finite; they were left out of the mean and received it.
        gradients: ``"shared"``, ``"local"``, ``"teams"`` (one for each of two teams), or ``"unknown"``.
        bytes: payload that this process handed to collectives.
        collectives: number of them.
        seconds: how long training stood still in this process: waiting for slower replicas included, the probe not.
        landed: the step after which the average was applied: ``step``, or up to ``overlap_steps`` later.
        taken: the replica that all others became a copy of (``merge="best"``); None for a mean.
        undone: the step since which everything is undone, because training broke: the one after which the schedule had
            begun. All replicas are at the start, and it begins again; or where they were before a trial, and it goes
            on there. None: nothing is undone.
        slopes: slope of the loss in the logarithm of a hyperparameter, by name, where the controller found one; None
            where it does not act or tells none.
        errors: standard errors of these slopes, by name, where they are known.
        posterior: mean and standard deviation of the logarithm of the right peak over the given one, by name of the
            learning rate; None where none is kept (``trust`` of 3 or less).
        distance: root mean square of the replicas' distances from their mean, over the norm of the mean; None where it
            is not known. Of a sharded replica that of the shard in this process.
        act: what the controller did: ``"return"`` (all replicas returned to the start, with lower learning rates),
            ``"trial"`` (the same, to compare), ``"back"`` (a trial was no better), ``"won"`` (it was better),
            ``"lost"`` (it was no better, and could not be undone), ``"move"`` (values were moved by a little); None:
            nothing was moved.
        why: what it did and why, in one sentence, as it was logged: the step, the sign and its numbers, old and new
            values, and how many are left; None: nothing was moved.
        judgement: the numbers that the controller judged this sync by; None where it does not act or tells none. Those
            of the default controller: ``level`` (mean loss), ``last`` (that of the sync before), ``lowest``, ``gain``
            (since the first sync), ``usual_change`` (of the level, from sync to sync), ``slope`` (mean of all slopes of
            learning rates over their errors).
        peaks: the given peak of the schedule and the one after this sync, by name of the learning rate; None where the
            controller does not scale the schedule.
    """

    step: int
    cycle: int
    kind: Kind
    losses: list[AnyNumber]
    probes: list[AnyNumber] | None
    base: dict[str, float]
    values: dict[str, list[float]]
    excluded: list[int]
    gradients: Gradients
    bytes: int
    collectives: int
    seconds: float
    landed: int | None = None
    taken: int | None = None
    undone: int | None = None
    slopes: dict[str, float] | None = None
    errors: dict[str, float] | None = None
    posterior: dict[str, list[float]] | None = None
    distance: float | None = None
    act: ActKind | None = None
    why: str | None = None
    judgement: dict[str, float] | None = None
    peaks: dict[str, list[float]] | None = None

    @staticmethod
    def of(
        outcome: Outcome,
        placed: Placement,
        names: Sequence[str],
        *,
        step: int,
        cycle: int,
        kind: Kind,
        gradients: Literal["auto", "shared", "local"] = "auto",
        landed: int | None = None,
        undone: int | None = None,
        findings: Findings | None = None,
        act: Act | None = None,
        peaks: dict[str, list[float]] | None = None,
    ) -> SyncRecord:
        """Return the record of an average. What is not explained here is as the fields.

        Args:
            outcome: that of the average.
            placed: what the replicas had trained with.
            names: names of the hyperparameters.
            gradients: as it is known; ``"auto"``: as the average found out.
            landed: None: ``step``.
            findings: those of the controller, if it acted.
        """
        return SyncRecord(
            step=step,
            cycle=cycle,
            kind=kind,
            losses=outcome.losses.tolist(),
            probes=None if np.isnan(outcome.probes).all() else outcome.probes.tolist(),
            base=dict(zip(names, placed.base.tolist(), strict=True)),
            values=dict(zip(names, placed.values.tolist(), strict=True)),
            excluded=np.flatnonzero(~outcome.healthy).tolist(),
            gradients=_FOUND[outcome.shared] if gradients == "auto" else gradients,
            bytes=outcome.bytes,
            collectives=outcome.collectives,
            seconds=outcome.seconds,
            landed=step if landed is None else landed,
            taken=outcome.taken,
            undone=undone,
            distance=outcome.distance,
            act=None if act is None else act.kind,
            why=None if act is None else act.why,
            peaks=peaks,
            **(findings.by_name(names) if findings else {}),
        )

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def event(self) -> str | None:
        """The sentence of :attr:`why` where replicas returned to the start or went back, or a rate was found."""
        return self.why if self.act in EVENTS else None

    def metrics(self, *, replicas: bool = True) -> dict[str, float]:
        """Return the numbers of this sync under flat names, for a logger. ``docs/usage/loggers.md`` lists them.

        What is not known, or not finite, is left out. ``replicas``: every replica has entries of its own.
        """
        short = short_names(list(self.base))
        posterior = (self.posterior or {}).items()
        return flat(
            {
                "step": self.step,
                "cycle": self.cycle,
                **value_metrics(self.base, self.values, replicas=replicas),
                **loss_metrics("loss", self.losses, replicas=replicas),
                **loss_metrics("probe", self.probes, replicas=replicas),
                **{f"slope/{short[name]}": slope for name, slope in (self.slopes or {}).items()},
                **{f"slope_error/{short[name]}": error for name, error in (self.errors or {}).items()},
                **{f"log_peak/{short[name]}": mean for name, (mean, _) in posterior},
                **{f"log_peak_deviation/{short[name]}": deviation for name, (_, deviation) in posterior},
                "distance": self.distance,
                "excluded": len(self.excluded),
                "returned": self.undone is not None,
                **{f"peak/{short[name]}": now for name, (_, now) in (self.peaks or {}).items()},
                "seconds": self.seconds,
                "bytes": self.bytes,
                "collectives": self.collectives,
            }
        )

    @property
    def mean_loss(self) -> float | None:
        """The mean of the finite training losses; None if there is none."""
        return mean_of_finite(self.losses)


def mean_of_finite(losses: Sequence[float | None]) -> float | None:
    """Return the mean of the finite losses; None if there is none."""
    numbers = np.array(losses, dtype=np.float64)  # thousands of them where there are thousands of replicas
    finite = numbers[np.isfinite(numbers)]
    return math.fsum((finite / len(finite)).tolist()) if len(finite) else None


@dataclass
class HistorySummary:
    """Totals over all syncs of a run. Its size does not depend on their number.

    Attributes:
        syncs, collectives, bytes, seconds: how many, and the sums over them.
        excluded: how often a replica was left out.
        undone: how often all replicas returned to the start.
        lost: steps that were undone.
        aside: those of them that the last trial set aside, if nothing was undone after it.
        events: the last returns, and a learning rate that was found: ``step`` and ``why``.
        peaks: the given peak of the schedule and the last one, by name of the learning rate.
        base: ``first``, ``lowest``, ``highest`` and ``last`` value of every hyperparameter at a sync, by name.
        loss: the same of the mean training loss; empty before the first that is known.
        every: every how many syncs the curve has a point.
        points: the curve: ``step``, mean ``loss`` (or None) and ``base`` values of some syncs, from the first one on.
    """

    syncs: int = 0
    collectives: int = 0
    bytes: int = 0
    seconds: float = 0.0
    excluded: int = 0
    undone: int = 0
    lost: int = 0
    aside: int = 0
    events: list[dict[str, Any]] = field(default_factory=list)
    peaks: dict[str, list[float]] = field(default_factory=dict)
    base: dict[str, dict[str, float]] = field(default_factory=dict)
    loss: dict[str, float] = field(default_factory=dict)
    every: int = 1
    points: list[dict[str, Any]] = field(default_factory=list, repr=False)

    def add(self, record: SyncRecord) -> None:
        if self.syncs % self.every == 0:
            self.points.append({"step": record.step, "loss": record.mean_loss, "base": dict(record.base)})
            if len(self.points) == 2 * POINTS:
                del self.points[1::2]
                self.every *= 2
        self.syncs += 1
        self.collectives += record.collectives
        self.bytes += record.bytes
        self.seconds += record.seconds
        self.excluded += len(record.excluded)
        if record.undone is not None:
            steps = (record.step if record.landed is None else record.landed) - record.undone
            self.undone += record.act != "back"
            # What a trial set aside is not lost if the run goes back to it.
            self.lost += steps - self.aside if record.act == "back" else steps
            self.aside = steps if record.act == "trial" else 0
        if record.event is not None:
            self.events = [*self.events, {"step": record.step, "why": record.event}][-MOST_EVENTS:]
        self.peaks = record.peaks or self.peaks
        for name, value in record.base.items():
            self.base[name] = _extended(self.base.get(name, {}), value)
        if (loss := record.mean_loss) is not None:
            self.loss = _extended(self.loss, loss)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def outcome(self) -> str:
        """Return what became of the peaks that were given, in one line: "peak of lr/0 0.2 given, 0.0667 used; …"."""
        returns = "no return" if not self.undone else f"{self.undone} return{'' if self.undone == 1 else 's'}"
        lost = f", {self.lost} steps lost" if self.lost else ""
        return "; ".join(part for part in (peak_words(self.peaks), returns + lost) if part)

    def __str__(self) -> str:
        """Return a screenful: what happened to the learning rate, the losses and what the syncs cost."""
        rows = [("loss", self.loss), *list(self.base.items())[:MOST_ROWS]]
        width = max(len(name) for name, _ in rows)
        lines = [f"{self.syncs} syncs, {self.seconds:.3g} s, {self.bytes} bytes; replicas left out: {self.excluded}"]
        for name, values in rows:
            lines.append(f"{name:<{width}}  " + ", ".join(f"{word} {value:.4g}" for word, value in values.items()))
        if len(self.base) > MOST_ROWS:
            lines.append(f"… and {len(self.base) - MOST_ROWS} more")
        lines.append(self.outcome())
        return "\n".join([*lines, *(f"- {event['why']}" for event in self.events[-MOST_ROWS:])])


def _extended(known: dict[str, float], value: float) -> dict[str, float]:
    """Return first, lowest, highest and last of some values with one more."""
    if not known:
        return dict.fromkeys(("first", "lowest", "highest", "last"), value)
    return {
        "first": known["first"],
        "lowest": min(known["lowest"], value),
        "highest": max(known["highest"], value),
        "last": value,
    }


class History:
    """The last ``WINDOW`` records of a run, the summary of all, and the records that callbacks have not seen yet."""

    def __init__(self, records: Iterable[SyncRecord] = (), summary: HistorySummary | None = None) -> None:
        self.records = list(records)
        self.summary = HistorySummary() if summary is None else summary
        self.unreported: deque[SyncRecord] = deque(maxlen=WINDOW)

    def add(self, record: SyncRecord) -> None:
        """Append a record; the oldest one leaves if there are too many."""
        self.summary.add(record)
        self.records.append(record)
        self.unreported.append(record)
        if len(self.records) > WINDOW:
            del self.records[:-WINDOW]

    def take_unreported(self) -> list[SyncRecord]:
        """Return the records since the last call of this method."""
        records = list(self.unreported)
        self.unreported.clear()
        return records

    @property
    def last_step(self) -> int | None:
        return self.records[-1].step if self.records else None

    @staticmethod
    def of(records: Sequence[dict[str, Any]], summary: dict[str, Any]) -> History:
        return History([SyncRecord(**record) for record in records], HistorySummary(**copy.deepcopy(summary)))


def short_names(names: Sequence[str]) -> dict[str, str]:
    """Return how hyperparameters are called in metrics: ``lr`` for ``lr/0`` where no other group has an ``lr/…``."""
    stems = [name.rpartition("/")[0] or name for name in names]
    short = [stem if stems.count(stem) == 1 else name for name, stem in zip(names, stems, strict=True)]
    return {name: re.sub(r"[^\w./-]+", "_", each).strip("_") for name, each in zip(names, short, strict=True)}


def value_metrics(
    base: Mapping[str, float], values: Mapping[str, Sequence[float]], *, replicas: bool
) -> dict[str, float | None]:
    """Return base values and, if asked for, those of every replica."""
    short = short_names(list(base))
    found: dict[str, float | None] = {f"base/{short[name]}": value for name, value in base.items()}
    if replicas:
        found |= {f"replica{r}/{short[name]}": v for name, each in values.items() for r, v in enumerate(each)}
    return found


def loss_metrics(what: str, losses: Sequence[float | None] | None, *, replicas: bool) -> dict[str, float | None]:
    """Return the mean of the finite losses and, if asked for, that of every replica."""
    if losses is None:
        return {}
    each = {f"replica{replica}/{what}": loss for replica, loss in enumerate(losses)} if replicas else {}
    return {what: mean_of_finite(losses), **each}


def flat(entries: Mapping[str, float | None]) -> dict[str, float]:
    """Return the entries that are finite numbers, as floats, with the package's prefix."""
    known = ((name, value) for name, value in entries.items() if value is not None)
    return {f"hdet/{name}": float(value) for name, value in known if math.isfinite(value)}


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
            raise TypeError(f"history_file must be a path, got {spell(path)}")
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
        """Write the newest record; ``before`` is the history before it."""
        self._waiting.append(json.dumps(without_nan(record.to_dict())) + "\n")
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
    end, found, sought = 0, None, {"step": record.step, "kind": record.kind, "landed": record.landed}
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            end += len(line)
            with contextlib.suppress(ValueError):  # a line that was cut off, or is not ours
                read = json.loads(line)
                if line.endswith(b"\n") and isinstance(read, dict) and sought.items() <= read.items():
                    found = end
                    if number == count:
                        break
    return found


def without_nan(value: Any) -> Any:
    """Return nested dicts and lists with None for numbers that JSON does not have."""
    if isinstance(value, dict):
        return {key: without_nan(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [without_nan(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


SyncCallback = Callable[[SyncRecord], object]


class SyncCallbacks:
    """The callbacks of a scheduler, in the order in which they came. ``running``: they are being called now."""

    def __init__(self) -> None:
        self._callbacks: OrderedDict[int, tuple[SyncCallback, bool]] = OrderedDict()  # with every_process
        self.running = False

    def add(self, callback: SyncCallback, every_process: bool | None) -> RemovableHandle:
        """Add a callback and return a handle that removes it; see :meth:`.WithCycle.on_sync`."""
        check_callable("callback", callback, "callback(record), with a SyncRecord", takes=1)
        if every_process is None:
            every_process = getattr(callback, "every_process", True)
        every_process = check_flag("every_process", every_process)
        handle = RemovableHandle(self._callbacks)
        self._callbacks[handle.id] = (callback, every_process)
        return handle

    def call(self, records: Iterable[SyncRecord], *, first: bool) -> None:
        """Call every callback with every record; ``first``: this is the first process.

        Raises:
            Exception: that of a callback, after all have been called; an ExceptionGroup if several raised.
        """
        failures: list[Exception] = []
        self.running = True
        try:
            for record in records:
                for callback, every_process in list(self._callbacks.values()):
                    try:
                        if every_process or first:
                            callback(record)
                    except Exception as error:
                        failures.append(error)
        finally:
            self.running = False
        if len(failures) == 1:
            raise failures[0]
        if failures:
            raise ExceptionGroup("several callbacks of on_sync raised", failures)
