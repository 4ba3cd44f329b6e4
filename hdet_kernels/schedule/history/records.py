"""The records of syncs: the last ones in full, and a summary of all of them that does not grow."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import numpy as np

from hdet_kernels.controller.findings import Findings
from hdet_kernels.converge import Outcome
from hdet_kernels.fanout.spread import Placement
from hdet_kernels.schedule.history.metrics import flat, loss_metrics, short_names, value_metrics

Kind = Literal["sync", "early", "last", "manual", "scout"]

#: Records that are kept in full. A run has 40 syncs by default, and 1000 if it has a million steps.
WINDOW = 1000

#: Points of the summary's curve. When there are twice as many, every other one is dropped.
POINTS = 128


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
        gradients: ``"shared"``, ``"local"``, or ``"unknown"``.
        bytes: payload that this process handed to collectives.
        collectives: number of them.
        seconds: how long training stood still in this process: waiting for slower replicas included, the probe not.
        landed: the step after which the average was applied: ``step``, or up to ``overlap_steps`` later.
        taken: the replica that all others became a copy of (``merge="best"``); None for a mean.
        undone: the step whose average all replicas returned to, because training broke; None if they did not.
        slopes: slope of the loss in the logarithm of a hyperparameter, by name, where the controller found one; None
            where it does not act or tells none.
        errors: standard errors of these slopes, by name, where they are known.
        posterior: mean and standard deviation of the logarithm of the right peak over the given one, by name of the
            learning rate; None where none is kept (``trust`` of 3 or less).
        distance: root mean square of the replicas' distances from their mean, over the norm of the mean; None where it
            is not known. Of a sharded replica that of the shard in this process.
    """

    step: int
    cycle: int
    kind: Kind
    losses: list[float]
    probes: list[float] | None
    base: dict[str, float]
    values: dict[str, list[float]]
    excluded: list[int]
    gradients: Literal["shared", "local", "unknown"]
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
    ) -> SyncRecord:
        """Return the record of an average.

        Args:
            outcome: that of the average.
            placed: what the replicas had trained with.
            names: names of the hyperparameters.
            step, cycle, kind, undone: as the fields.
            gradients: as it is known; ``"auto"``: as the average found out.
            landed: as the field; None: ``step``.
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
            gradients=_found(outcome.shared) if gradients == "auto" else gradients,
            bytes=outcome.bytes,
            collectives=outcome.collectives,
            seconds=outcome.seconds,
            landed=step if landed is None else landed,
            taken=outcome.taken,
            undone=undone,
            distance=outcome.distance,
            **(findings.by_name(names) if findings else {}),
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as a dict."""
        return asdict(self)

    def metrics(self, *, replicas: bool = True) -> dict[str, float]:
        """Return the numbers of this sync under flat names, for a logger. ``docs/usage/loggers.md`` lists them.

        What is not known, or not finite, is left out.

        Args:
            replicas: whether every replica has entries of its own.
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
                "seconds": self.seconds,
                "bytes": self.bytes,
                "collectives": self.collectives,
            }
        )

    @property
    def mean_loss(self) -> float | None:
        """The mean of the finite training losses; None if there is none."""
        losses = np.array(self.losses, dtype=np.float64)  # thousands of them where there are thousands of replicas
        finite = losses[np.isfinite(losses)]
        return math.fsum((finite / len(finite)).tolist()) if len(finite) else None


def _found(shared: bool | None) -> Literal["shared", "local", "unknown"]:
    if shared is None:
        return "unknown"
    return "shared" if shared else "local"


@dataclass
class HistorySummary:
    """Totals over all syncs of a run. Its size does not depend on their number.

    Attributes:
        syncs, collectives, bytes, seconds: how many, and the sums over them.
        excluded: how often a replica was left out.
        undone: how often all replicas returned to an earlier average.
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
    base: dict[str, dict[str, float]] = field(default_factory=dict)
    loss: dict[str, float] = field(default_factory=dict)
    every: int = 1
    points: list[dict[str, Any]] = field(default_factory=list)

    def add(self, record: SyncRecord) -> None:
        """Count one more sync."""
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
        self.undone += record.undone is not None
        for name, value in record.base.items():
            self.base[name] = _extended(self.base.get(name, {}), value)
        if (loss := record.mean_loss) is not None:
            self.loss = _extended(self.loss, loss)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as a dict of plain values."""
        return asdict(self)


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
    """The last ``WINDOW`` records of a run, and the summary of all.

    Args:
        records: those so far.
        summary: that of all syncs so far; by default it is made from ``records``.

    Attributes:
        untold: the records that callbacks have not been called with yet.
    """

    def __init__(self, records: Iterable[SyncRecord] = (), summary: HistorySummary | None = None) -> None:
        self.records: list[SyncRecord] = []
        self.summary = HistorySummary()
        self.untold: deque[SyncRecord] = deque(maxlen=WINDOW)
        for record in records:
            self.add(record)
        self.untold.clear()
        if summary is not None:
            self.summary = summary

    def add(self, record: SyncRecord) -> None:
        """Append a record; the oldest one leaves if there are too many."""
        self.summary.add(record)
        self.records.append(record)
        self.untold.append(record)
        if len(self.records) > WINDOW:
            del self.records[:-WINDOW]

    def take_untold(self) -> list[SyncRecord]:
        """Return the records since the last call of this method."""
        records = list(self.untold)
        self.untold.clear()
        return records

    @property
    def last_step(self) -> int | None:
        """The step of the last sync; None before the first."""
        return self.records[-1].step if self.records else None

    @staticmethod
    def of(records: Sequence[dict[str, Any]], summary: dict[str, Any]) -> History:
        """Return the history that was saved as these two."""
        copied = {**summary, "base": {name: dict(each) for name, each in summary["base"].items()}}
        copied |= {"loss": dict(summary["loss"]), "points": list(summary["points"])}
        return History([SyncRecord(**record) for record in records], HistorySummary(**copied))
