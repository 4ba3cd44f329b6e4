"""Agreement: the conclusions that every process draws from the gathered handshake rows, all the same ones.

All functions here are pure: numbers of the handshake in, conclusions or an error message out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]

# The most tensors that an error message names, and the most ranks that it lists one by one.
_MOST_NAMED, _MOST_LISTED = 3, 8


@dataclass(frozen=True)
class Agreement:
    """The conclusions of all processes from the gathered rows. Arrays have one entry per replica.

    Attributes:
        losses: mean training loss; NaN where none was recorded.
        probes: loss on the probe; NaN without a probe, infinite where the probe's loss was not finite.
        healthy: whether parameters, state, buffers and loss are finite.
        ranks: [replicas, parts] the global ranks.
        norms: [replicas, parts] the checksums of the parameters: their norms, where all are of one kind.
        shared: whether all gradients are the same; None if not all replicas sent a fingerprint.
        equal: whether all parameters are the same.
        has_state: whether any replica has optimizer state.
        same_state: whether the layout of the optimizer state is the same.
        same_counts: whether the step counts are the same.
        same_integers: whether the integer buffers are the same.
        same_consensus: whether all remember the same last consensus.
        same_outer: whether the outer step starts from the same place on all replicas.
        nonfinite_alike: whether buffers have elements that are not finite, the same ones on all healthy replicas.
        masks_changed: whether a buffer has changed that was not finite at the start.
        may_overflow: whether a sum over the healthy replicas may be infinite although all values are finite.
        kept: step of the earlier state that all replicas can return to; None if they differ or keep none.
        state_apart: whether optimizer state differs between healthy replicas.
        no_mean: whether a part of the optimizer state of some replica has no mean.
    """

    losses: Floats
    probes: Floats
    healthy: Flags
    ranks: Floats
    norms: Floats
    shared: bool | None
    equal: bool
    has_state: bool
    same_state: bool
    same_counts: bool
    same_integers: bool
    same_consensus: bool
    same_outer: bool
    nonfinite_alike: bool
    masks_changed: bool
    may_overflow: bool
    kept: int | None = None
    state_apart: bool = False
    no_mean: bool = False


class NoneSound(RuntimeError):
    """The error for a sync at which no replica is healthy. Every process raises it, with nothing changed.

    Attributes:
        agreement: the conclusions from the handshake.
        found: what is not finite, and on which ranks.
    """

    def __init__(self, message: str, agreement: Agreement, found: str) -> None:
        super().__init__(message)
        self.agreement, self.found = agreement, found

    @property
    def kept(self) -> int | None:
        """The step of the earlier state that all replicas can return to; None if there is none."""
        return self.agreement.kept


def conclude(columns: Mapping[str, Floats]) -> Agreement:
    """Return the conclusions from the gathered columns, each [replicas, parts]."""
    finite_values: Flags = np.atleast_1d(np.isfinite(columns["checksum"] + columns["rest"]).all(axis=1))
    # What all replicas share is by design. Where they differ, those without anything that is not finite are healthy.
    finite_buffers: Flags = same(columns["nonfinite"]) | (columns["nonfinite"] == 0).all(axis=1)
    healthy: Flags = finite_values & finite_buffers & _finite_losses(columns)
    gradients = columns["gradients"]
    sent = not np.isnan(gradients).any()
    shared = True if len(healthy) == 1 else same(gradients) if sent else None
    return Agreement(
        losses=_mean_losses(columns),
        probes=columns["probe"].mean(axis=1),
        healthy=healthy,
        ranks=columns["rank"],
        norms=columns["checksum"],
        shared=shared,
        equal=same(columns["checksum"]),
        has_state=bool(columns["state"].any()),
        same_state=same(columns["state"]),
        same_counts=same(columns["counts"]),
        same_integers=same(columns["integers"]),
        same_consensus=same(columns["consensus"]),
        same_outer=bool(np.isfinite(columns["outer"]).all()) and same(columns["outer"]),
        nonfinite_alike=bool(columns["nonfinite"][healthy].any()),
        masks_changed=bool(columns["masks"].any()),
        may_overflow=_may_overflow(columns, healthy),
        kept=_kept(columns["kept"]),
        state_apart=not all(same(columns[name][healthy]) for name in ("state", "moments", "coded")),
        no_mean=bool(columns["coded"].any()),
    )


def left_out(columns: Mapping[str, Floats]) -> Literal["no", "maybe", "yes"]:
    """Return whether some replica made a step of the scheduler without one of the optimizer, by mistake.

    A ``GradScaler`` leaves optimizer steps out too. But it does so on all replicas if they share their gradients, and a
    loss was recorded for the step. Replicas that lack steps and losses in proportion did not come to these steps.
    """
    steps, losses = columns["stepped"], columns["loss_count"]
    if np.isnan(steps).any() or same(steps):
        return "no"
    in_proportion = not same(losses) and bool((losses * steps[:1] == losses[:1] * steps).all())
    return "yes" if in_proportion or same(columns["gradients"]) else "maybe"


def _kept(column: Floats) -> int | None:
    first = column.flat[0]
    return int(first) if (column == first).all() and first >= 0 else None


def _mean_losses(columns: Mapping[str, Floats]) -> Floats:
    with np.errstate(invalid="ignore", divide="ignore"):
        losses: Floats = columns["loss_sum"].sum(axis=1) / columns["loss_count"].sum(axis=1)
    return losses


def _finite_losses(columns: Mapping[str, Floats]) -> Flags:
    recorded = columns["loss_count"].sum(axis=1) > 0
    finite: Flags = (np.isfinite(_mean_losses(columns)) | ~recorded) & ~np.isinf(columns["probe"].mean(axis=1))
    return finite


def _may_overflow(columns: Mapping[str, Floats], healthy: Flags) -> bool:
    """Whether a float32 sum over the ``healthy`` replicas, of values or of their differences to the last consensus, may
    be infinite. No sum of elements is larger than the sum of the norms, which the checksums are."""
    consensus = np.nan_to_num(columns["consensus"], nan=0.0)
    with np.errstate(over="ignore"):
        bound = (columns["checksum"] + columns["rest"] + consensus)[healthy].sum()
    # Half of the range is for roundings on the way, such as those of a compressed difference.
    return not bound < np.finfo(np.float32).max / 2


def same(column: Floats) -> bool:
    """Whether all replicas have the same value, in each part of [replicas, parts] for itself. NaN equals nothing."""
    return bool((column == column[:1]).all())


def none_sound(columns: Mapping[str, Floats], names: Sequence[Sequence[str]], step: int) -> NoneSound:
    """Return the error for a sync at which no replica is healthy.

    Args:
        columns: the gathered columns, each [replicas, parts].
        names: the tensors that are not finite, for every part of every replica.
        step: of the sync.
    """
    ranks = columns["rank"]
    tensors = list(dict.fromkeys(name for part in names for name in part))
    found = []
    for tensor in tensors[:_MOST_NAMED]:
        who = np.array([tensor in part for part in names]).reshape(ranks.shape)
        found.append(f"{tensor} on {name_ranks(who, ranks)}")
    if len(tensors) > _MOST_NAMED:
        found.append(f"{len(tensors) - _MOST_NAMED} more tensors")
    if not (finite_loss := _finite_losses(columns)).all():
        found.append(f"the loss on {name_ranks(~finite_loss, ranks)}")
    remedy = "resume from the last checkpoint with a lower learning rate, or find the batch that caused it"
    if finite_loss.all() and tensors and all(name.startswith("buffer") for name in tensors):
        remedy = (
            "where buffers are not finite differs between the replicas; keep them finite, or pass "
            "averaging=hk.Averaging(buffers=False)"
        )
    what = ", ".join(found)
    message = f"no replica is sound at step {step}; not finite: {what}. Nothing was overwritten: {remedy}"
    return NoneSound(message, conclude(columns), what)


def name_ranks(chosen: Flags, ranks: Floats) -> str:
    """Return "rank 2" or "ranks 0, 1, 3": the ``ranks`` [replicas, parts] of the ``chosen`` replicas or parts.

    Where a rank holds several replicas, they are named by their numbers: "replicas 2, 3 of rank 1". Many are
    named as "ranks 0-516, 518-1023".
    """
    flags = chosen if chosen.ndim == 2 else np.broadcast_to(chosen[:, None], ranks.shape)
    if len(np.unique(ranks[:, 0])) == len(ranks):
        return _plural("rank", ranks[flags])
    held = {rank: np.flatnonzero(flags[:, 0] & (ranks[:, 0] == rank)) for rank in np.unique(ranks[flags])}
    if len(np.unique(ranks)) == 1:
        return _plural("replica", np.flatnonzero(flags[:, 0]))
    return " and ".join(f"{_plural('replica', numbers)} of rank {rank:.0f}" for rank, numbers in held.items())


def _plural(noun: str, numbers: NDArray[Any]) -> str:
    if len(numbers) <= _MOST_LISTED:
        listed = [f"{number:.0f}" for number in numbers]
    else:
        runs = np.split(numbers, np.flatnonzero(np.diff(numbers) != 1) + 1)
        listed = [f"{run[0]:.0f}-{run[-1]:.0f}" if len(run) > 1 else f"{run[0]:.0f}" for run in runs]
    return f"{noun}{'s' if len(numbers) != 1 else ''} {', '.join(listed)}"
