"""The average itself: every tensor of a payload becomes the mean that the plan asks for, all of them or none.

The replicas have agreed on the plan before (``converger.py``). What travels compressed, what is traded and what is
averaged where it lies is decided here; the parts that do so are ``compress.py``, ``trade.py`` and ``transport.py``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from hdet_kernels.converge.compress import Compression
from hdet_kernels.converge.handshake import row_bytes
from hdet_kernels.converge.nonfinite import keep_own
from hdet_kernels.converge.payload import Payload
from hdet_kernels.converge.plan import Plan
from hdet_kernels.converge.trade import Trade
from hdet_kernels.converge.transport import Cost, Transport, run_transfers, take_first, take_largest
from hdet_kernels.converge.two_phase import write_all
from hdet_kernels.ensemble import Ensemble, Trading, held
from hdet_kernels.tensors import devices_of


class Averaging:
    """Averages payloads as planned.

    Args:
        transport: carries the collectives, except where another one is passed.
        compression: of the parameters, if they travel compressed.
        backup: whether a failed average leaves everything as it was; see :class:`.converger.Converger`.
        leaves_split: whether means of split masters that were kept until the end are left as they are, because more
            happens to them before they are settled.
    """

    def __init__(
        self, transport: Transport, compression: Compression | None, *, backup: bool, leaves_split: bool = False
    ) -> None:
        self.transport, self.compression, self.backup = transport, compression, backup
        self.leaves_split = leaves_split
        ensemble = transport.ensemble
        # Each keeps memory of its own: one for all that is averaged at once, one for the parts of split masters.
        self._trade, self._trade_of_parts = (
            Trade(transport, ensemble, keeps_memory=backup) if isinstance(ensemble, Trading) else None for _ in range(2)
        )

    def trade_of(self, payload: Payload, plan: Plan) -> Trade | None:
        """Return what averages the payload without changing it before the end, if it can: the same on all processes."""
        if self._trade is None or not self._trade.fits([*payload.regions_in_full(plan), payload.split.params]):
            return None
        return self._trade

    def run_or_restore(self, payload: Payload, plan: Plan, trade: Trade | None) -> Cost:
        """Average the payload in place, as planned; with ``backup`` all of it or nothing. Collective."""
        if not (self.backup and self.transport.ensemble.talks):
            return self.run(self.transport, payload, plan, trade)
        with payload.restore_on_failure(plan, written_last=trade is not None):
            return self.run(self.transport, payload, plan, trade, keeps_split=True)

    def run(
        self,
        transport: Transport,
        payload: Payload,
        plan: Plan,
        trade: Trade | None = None,
        *,
        keeps_split: bool = False,
    ) -> Cost:
        """Average the payload in place, as planned. Collective. An error names the ranks that are missing.

        ``keeps_split``: write split masters last, as a trade does with everything.
        """
        with transport.attendance.explained():
            return self._run_plan(transport, payload, plan, trade, keeps_split or trade is not None)

    def _run_plan(
        self, transport: Transport, payload: Payload, plan: Plan, trade: Trade | None, keeps_split: bool
    ) -> Cost:
        ensemble = transport.ensemble
        cost = handshake_cost(ensemble)
        own = [buffer.clone() for buffer in payload.all_buffers] if plan.keeps_nonfinite else []
        regions, write_means = payload.regions_in_full(plan), None
        if trade is None:
            cost += transport.average(regions, plan.included, rescaled=plan.rescaled)
        else:
            measured = len(payload.all_params) if plan.params and not plan.compressed else 0
            more, write_means = trade.average(regions, plan.included, rescaled=plan.rescaled, measured=measured)
            cost += more
        if plan.params and not plan.compressed and payload.split.halves:
            of_parts = None if trade is None else self._trade_of_parts
            cost += payload.split.average(
                transport, of_parts, plan.included, rescaled=plan.rescaled, deferred=keeps_split
            )
        if plan.integers and payload.integers:
            cost += run_transfers([take_first(ensemble, payload.integers, plan.included)])
        if plan.counts and payload.counts is not None:
            cost += run_transfers([take_largest(ensemble, payload.counts, plan.included, payload.device)])
        write_consensus: Callable[[], None] | None = None
        if self.compression is not None and plan.compressed:
            more, write_consensus = self.compression.average(
                transport, payload.compressible, backup=self.backup and ensemble.talks
            )
            cost += more
        for device in devices_of([*payload.all_params, *payload.buffers]):
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()  # a failed collective raises here, not steps later
        if ensemble.parts > 1:
            ensemble.confirm()
            cost += Cost(4, 1)
        write_split = None if self.leaves_split else payload.split.write_kept
        write_all([write for write in (write_means, write_split) if write is not None])
        for averaged, before in zip(payload.all_buffers, own, strict=bool(own)):
            keep_own(averaged, before, plan.healthy[held(ensemble)].tolist())
        if write_consensus is not None:
            write_consensus()
        if self.compression is not None and plan.remembered:
            healthy = bool(plan.healthy[held(ensemble)].all())
            self.compression.remember(transport, payload.compressible, keep_errors=healthy)
        return cost


def handshake_cost(ensemble: Ensemble) -> Cost:
    """Return the cost of the handshake alone, in this process."""
    return Cost(row_bytes(ensemble), 1 if ensemble.parts == 1 else 2) if ensemble.talks else Cost()
