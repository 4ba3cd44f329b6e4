"""Decide what a sync averages, from the handshake alone, so that every process decides the same.

All functions here are pure: numbers of the handshake in, a plan out; no tensors, no process group.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hdet_kernels.converge.agreement import Agreement
from hdet_kernels.converge.settings import AverageState, Merge


@dataclass(frozen=True)
class AverageRequest:
    """The request of the caller of an average.

    Attributes:
        call: name of the operation; all replicas must be in the same one.
        average_state: True, False, or ``"auto"``: unless the gradients are shared and the state is equal on all
            replicas. Optimizer state is also averaged when a replica is left out, so that this replica gets finite
            moments.
        include_state: False leaves optimizer state and step counts alone in every case.
        known_shared: whether gradients are shared, used if the handshake does not show it. If neither is known the
            state is averaged: that is correct in both cases and merely costs more.
        needs_shared: raise an error if gradients are local.
        needs_loss: raise an error if a replica recorded no loss.
        skip_if_equal: do not average parameters that are equal on all replicas with shared gradients. Plain data
            parallelism then stays bit for bit the same.
        in_full: do not compress.
        heals: average the state for a replica that was left out of an earlier average.
        outer: take the outer step, if there is an outer optimizer.
        agreed: called when the replicas have agreed, before anything is averaged. It may be collective: if it fails,
            everything is as it was.
    """

    call: str = "sync"
    average_state: AverageState = "auto"
    include_state: bool = True
    known_shared: bool | None = None
    needs_shared: bool = False
    needs_loss: bool = False
    skip_if_equal: bool = False
    in_full: bool = False
    heals: bool = False
    outer: bool = True
    agreed: Callable[[], None] | None = None

    def shared(self, agreement: Agreement) -> bool | None:
        """Return whether gradients are shared, as the handshake shows it or else as it is known; None if unknown."""
        return self.known_shared if agreement.shared is None else agreement.shared

    def check_gradients(self, agreement: Agreement) -> None:
        """Raise RuntimeError if shared gradients are needed and the gradients are local."""
        if self.needs_shared and self.shared(agreement) is False:
            raise RuntimeError(
                "the hypergradient controller needs gradients that are averaged over the replicas at every step, but "
                "they differ: wrap the model in DistributedDataParallel, or use the regression controller"
            )


@dataclass(frozen=True)
class Plan:
    """The decision of all replicas on what to average.

    Attributes:
        healthy: [replicas] whose values and losses are finite.
        included: [replicas] that enter the mean which all receive.
        taken: the only included replica, if ``merge="best"`` chose one by its loss.
        shared: whether gradients are shared; None if unknown.
        params: average the parameters.
        compressed: send the parameters as differences to the last consensus.
        remembered: the parameters travel in full; keep the result as the consensus of the next differences.
        state: average the optimizer state.
        counts: set the step counts to the largest of any included replica.
        integers: copy the integer buffers of the first included replica.
        masks: average the buffers that were not finite at the start, because one has changed.
        keeps_nonfinite: leave elements of buffers as they are where the mean is not finite.
        uneven_state: an error: state is to be averaged that only some replicas have.
        no_mean: an error: state is to be averaged, and a part of it has no mean.
        rescaled: scale the values down before they are summed, because the sum might overflow.
        heals: the state is not a part of this average, and has to be averaged after it.
    """

    healthy: NDArray[np.bool_]
    included: NDArray[np.bool_]
    taken: int | None
    shared: bool | None
    params: bool
    compressed: bool
    remembered: bool
    state: bool
    counts: bool
    integers: bool
    masks: bool
    keeps_nonfinite: bool
    uneven_state: bool
    rescaled: bool
    no_mean: bool = False
    heals: bool = False


def decide(agreement: Agreement, request: AverageRequest, *, merge: Merge, compresses: bool) -> Plan:
    """Return the plan of an average.

    Args:
        agreement: the outcome of the handshake.
        request: what the caller asks for.
        merge: ``"mean"``, or ``"best"`` to copy the replica with the lowest loss.
        compresses: whether parameters travel as differences to the last consensus where possible.
    """
    taken = best(agreement) if merge == "best" else None
    shared = request.shared(agreement)
    excluded = not agreement.healthy.all()
    # Shared gradients do not make all state equal: a second set of weights depends on the learning rate.
    auto = not shared or agreement.state_apart
    wanted = bool(auto if request.average_state == "auto" else request.average_state)
    # Where an unhealthy replica has another state layout than the others, the others keep their own state.
    needed = (wanted or excluded or request.heals) and agreement.has_state and agreement.same_state
    state = needed and request.include_state
    params = excluded or not (request.skip_if_equal and agreement.equal and shared is True)
    compresses = compresses and params and not request.in_full
    # A difference of huge values might overflow, and a rounded one even more so.
    compressed = compresses and agreement.same_consensus and not excluded and not agreement.may_overflow
    return Plan(
        healthy=agreement.healthy,
        included=agreement.healthy if taken is None else np.arange(len(agreement.healthy)) == taken,
        taken=taken,
        shared=shared,
        params=params,
        compressed=compressed,
        remembered=compresses and not compressed,
        state=state,
        counts=state and not agreement.same_counts,
        integers=not agreement.same_integers,
        masks=agreement.masks_changed,
        keeps_nonfinite=agreement.masks_changed or agreement.nonfinite_alike,
        uneven_state=wanted and agreement.has_state and not agreement.same_state,
        rescaled=agreement.may_overflow,
        no_mean=wanted and agreement.no_mean and agreement.state_apart,
        heals=(excluded or needed) and not state,
    )


def compared(losses: NDArray[np.float64], probes: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the losses by which replicas are compared: those on the probe, or without a probe the training losses."""
    return losses if np.isnan(probes).all() else probes


def best(agreement: Agreement) -> int | None:
    """Return the healthy replica with the lowest loss (see :func:`compared`), the first of several; None if no healthy
    replica has a finite loss."""
    losses = compared(agreement.losses, agreement.probes)
    candidates = np.where(agreement.healthy & np.isfinite(losses), losses, np.inf)
    return int(np.argmin(candidates)) if np.isfinite(candidates).any() else None
