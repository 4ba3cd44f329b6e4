"""Converge: replace every replica by the mean of all, bucket by bucket.

First every replica sends one handshake row: step, loss, layout, whether its values are finite. Replicas that disagree
get an error that names them, instead of a hang or a wrong mean. A replica with non-finite values is left out and
receives the mean of the others. Only then is anything averaged, in ⌈bytes / bucket_bytes⌉ collectives, beside the
tensors: they are written when all processes have confirmed that everything arrived.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hdet_kernels.buckets import BUCKET_BYTES, Buckets, checked_bucket_bytes
from hdet_kernels.checks import check_callable, check_flag
from hdet_kernels.converge.agreement import Agreement
from hdet_kernels.converge.attendance import Attendance
from hdet_kernels.converge.compress import Compression
from hdet_kernels.converge.handshake import Report, disagreement, exchange_reports, handshake_cost
from hdet_kernels.converge.outcome import Outcome, distance_of
from hdet_kernels.converge.outer import OuterStep
from hdet_kernels.converge.overlap import Correction, OverlappedAverage
from hdet_kernels.converge.payload import Counts, ModelTensors, Names, NoMean, Payload
from hdet_kernels.converge.plan import AverageRequest, Plan, decide
from hdet_kernels.converge.settings import Averaging, Format, Merge, Outer
from hdet_kernels.converge.summary import TensorSummary, describe_layout, keep_own
from hdet_kernels.converge.transport import (
    Cost,
    Staged,
    Staging,
    Transport,
    Write,
    run_transfers,
    take_first,
    take_largest,
)
from hdet_kernels.ensemble import Ensemble, check_ensemble, held
from hdet_kernels.ops.backends import resolve
from hdet_kernels.ops.pack import MOST_ROWS
from hdet_kernels.tensors import devices_of, local

log = logging.getLogger("hdet_kernels")


class Converger:
    """Averages parameters, and where asked optimizer state and buffers, over an ensemble.

    With ``outer=`` an average of the parameters ends with a step of the outer optimizer, except in :meth:`consensus`.
    The first outer step starts from the parameters at construction, or at the last call of :meth:`begin`. If the
    replicas then have different parameters, their first average is a plain mean, and the outer optimizer starts there.

    Args:
        params: a :class:`Buckets` (averaged in place, in the parameters' own memory) or loose parameters (packed into
            staging buffers, averaged there and unpacked). Of distributed tensors the local shards are averaged.
        ensemble: the replicas. Where a process holds several (64 at most), the tensors have one row for each.
        state: returns the current optimizer state of the parameters, by name.
        write_state: takes the averaged state, by name, where ``state`` returns copies (of state in 8 bits).
        counts: the optimizer's step counts. Where they differ, as after a step that one replica skipped, they become
            the largest when state is averaged.
        buffers: returns the current buffers of the model. Floating-point ones are averaged, integer ones become those
            of the first healthy replica. Elements that are not finite on all replicas alike stay as they are. A buffer
            that is not finite at construction (an attention mask, a running minimum) is averaged once it has changed.
        names: returns names of parameters and buffers, where they have any. Replicas compare them, so that layers of
            one shape in another order are an error, and messages use them.
        bucket_bytes: the most that one collective carries, and the size of each of the two staging buffers. Default:
            that of the ``Buckets``, or 512 MiB.
        compress: ``"bf16"`` or ``"int8"``: parameters travel as rounded differences to the last consensus, with error
            feedback. State and buffers travel in full, and so do parameters the first time and when a replica is left
            out.
        backup: keep a copy of what is averaged until the average is complete, so that everything is as it was if a peer
            dies. The average is formed in this copy; on a CPU its memory is kept for the next average. Without it,
            every bucket is written as it arrives, and a failure leaves a mixture of old and averaged values.
        outer: an :class:`hdet_kernels.Outer`. Costs two copies of the parameters of one replica (one without momentum).
        merge: ``"mean"``, or ``"best"``: all replicas become a copy of the healthy one with the lowest loss, on the
            probe where there is one; the first of several. Without any loss, the mean.
        backend: of the kernels; see :func:`hdet_kernels.use_backend`.
        no_mean: returns the current optimizer state if a part of it has no mean. It is not averaged then, and where an
            average is due and replicas differ in it that is an error.
    """

    def __init__(
        self,
        params: Buckets | Iterable[Tensor],
        ensemble: Ensemble,
        *,
        state: Callable[[], Mapping[str, Tensor]] = dict,
        write_state: Callable[[Mapping[str, Tensor]], None] | None = None,
        counts: Counts | None = None,
        buffers: Callable[[], Sequence[Tensor]] = tuple,
        names: Names = tuple,
        bucket_bytes: int | None = None,
        compress: Format | None = None,
        backup: bool = True,
        outer: Outer | None = None,
        merge: Merge = "mean",
        backend: str | None = None,
        no_mean: Callable[[], NoMean | None] = lambda: None,
    ) -> None:
        check_ensemble("ensemble", ensemble)
        check_callable("state", state, "state(), a dict of tensors", takes=0)
        check_callable("buffers", buffers, "buffers(), a list of tensors", takes=0)
        check_callable("names", names, "names(), pairs of a name and a tensor", takes=0)
        if write_state is not None:
            check_callable("write_state", write_state, "write_state(state), with a dict of tensors", takes=1)
        for method in ("read", "write") if counts is not None else ():
            check_callable(f"counts.{method}", getattr(counts, method, None), f"counts.{method}()")
        backup = check_flag("backup", backup)
        if ensemble.rows > MOST_ROWS:
            raise ValueError(
                f"at most {MOST_ROWS} replicas of one process are averaged, got {ensemble.rows}: stack fewer, in "
                "several processes if need be"
            )
        self.tensors = ModelTensors(params, ensemble, state, counts, buffers, names, write_state, backend, no_mean)
        resolve(self.tensors.params[0].device, backend)  # raises for a backend that is unknown or cannot be used
        if bucket_bytes is None:
            bucket_bytes = params.bucket_bytes if isinstance(params, Buckets) else BUCKET_BYTES
        self.bucket_bytes = checked_bucket_bytes(bucket_bytes)
        self._settings = Averaging(compress=compress, outer=outer, merge=merge)
        self.ensemble, self.backup, self.compress, self.merge = ensemble, backup, compress, merge
        self._transport = Transport(ensemble, self.bucket_bytes, backend)
        # Overlapped averages have process groups of their own and, on a GPU, a stream. Made when first needed.
        self._background: Transport | None = None
        self._stream: torch.cuda.Stream | None = None
        self._compression = Compression(compress) if compress else None
        self._outer = OuterStep(outer, self._transport) if outer else None
        self._warned_nonfinite = False
        self.begin()

    def begin(self) -> None:
        """Let the outer optimizer start from the current parameters."""
        if self._outer is None or (self.tensors.params[0].is_cuda and torch.cuda.is_current_stream_capturing()):
            return  # a captured copy would be repeated by every replay
        payload = self.tensors.payload(include_state=False, reads=True)
        self._outer.begin(payload.params, payload.checksum_of_params(self._transport.checksum, self.bucket_bytes))

    # One sync, top to bottom

    def converge(self, report: Report, request: AverageRequest = AverageRequest()) -> Outcome:  # noqa: B008 (frozen)
        """Exchange the handshake rows, check them, then average. Collective: every process must call it.

        Raises:
            RuntimeError: with everything as it was; on every process if the replicas disagree or none is healthy, on
                the remaining ones if a process dies.
        """
        start = time.perf_counter()
        payload = self.tensors.payload(include_state=request.include_state)
        # With a backup the average needs a copy of the parameters, and the pass that makes it finds their norm too.
        staging = self.ensemble.talks and self._compression is None
        staged = self._transport.stage(payload.params, copied=self.backup) if staging else None
        agreement, plan = self._agree(self._transport, report, payload, request, staged)
        if request.agreed is not None:
            with self._transport.attendance.explained():
                request.agreed()
        cost, norm = self._average(self._transport, payload, plan, backup=self.backup, staged=staged)
        distance = distance_of(self.ensemble, agreement, plan, payload.outlines, norm)
        self._take_outer_step(payload, plan, same_start=agreement.same_outer, advance=request.outer)
        self.tensors.write_back(payload, counts=plan.counts)
        return Outcome.of(agreement, plan, cost, time.perf_counter() - start, distance)

    def _agree(
        self,
        transport: Transport,
        report: Report,
        payload: Payload,
        request: AverageRequest,
        staged: Staged | None = None,
    ) -> tuple[Agreement, Plan]:
        """Exchange reports with the other replicas and decide with them what is averaged. Collective."""
        ensemble = transport.ensemble
        report = replace(report, settings={"call": request.call, **report.settings, **self.settings()})
        consensus = self._compression.consensus(transport, payload.compressible) if self._compression else None
        summary = payload.summary(
            transport.checksum,  # each transport has its own: an overlapped average runs in another thread
            consensus=math.nan if consensus is None else transport.checksum_of_one(consensus, payload.device),
            outer=math.nan if self._outer is None else self._outer.checksum(payload.params, payload.device),
            bucket_bytes=self.bucket_bytes,
            norm=None if staged is None else staged.norm,
        )
        transport.attendance.enter(request.call, report.step)
        agreement = exchange_reports(transport.attendance, report, summary, needs_loss=request.needs_loss)
        self._log_nonfinite(agreement, summary, report.step)
        request.check_gradients(agreement)
        compresses = self._compression is not None and ensemble.talks
        plan = decide(agreement, request, merge=self.merge, compresses=compresses)
        if plan.no_mean:
            raise TypeError(payload.no_mean.why if payload.no_mean else "the state of another replica has no mean")
        if plan.uneven_state:
            layout = describe_layout(payload.state.values(), payload.state)
            raise disagreement(transport.attendance, layout, "the optimizer state", _UNEVEN_STATE, agreement.ranks)
        return agreement, plan

    def _log_nonfinite(self, agreement: Agreement, summary: TensorSummary, step: int) -> None:
        """Name the tensors held here that are not finite: those of replicas that are left out, and buffers, once."""
        own = agreement.healthy[held(self.ensemble)]
        alike = agreement.nonfinite_alike and not self._warned_nonfinite
        if own.all() and not alike:
            return
        names = summary.describe("finite")
        for row in np.flatnonzero(~own).tolist():
            replica, found = self.ensemble.replica + row, ", ".join(names[str(row)][:3]) or "the loss"
            log.warning("step %d: replica %d is left out of the mean; not finite: %s", step, replica, found)
        if alike and own.any():
            self._warned_nonfinite = True
            found = ", ".join(names[str(int(np.argmax(own)))][:3])
            log.warning("step %d: %s: elements that are not finite on all replicas stay as they are", step, found)

    def _average(
        self, transport: Transport, payload: Payload, plan: Plan, *, backup: bool, staged: Staged | None = None
    ) -> tuple[Cost, float]:
        """Average the payload as planned; return the cost and the norm of the mean. Collective.

        With ``backup`` nothing is written before all processes have confirmed that everything arrived. An error names
        the ranks that are missing.
        """
        ensemble, compression = transport.ensemble, self._compression
        writes: list[Write] = []
        deferred = writes if backup and ensemble.talks else None
        own = [buffer.clone() for buffer in payload.all_buffers] if plan.keeps_nonfinite else []
        with transport.attendance.explained():
            averaged = transport.average(
                payload.regions_in_full(plan),
                plan.included,
                rescaled=plan.rescaled,
                measured=len(payload.outlines) if plan.params and not plan.compressed else 0,
                writes=deferred,
                staged=staged,
            )
            cost = handshake_cost(ensemble) + averaged.cost
            if plan.integers and payload.integers:
                cost += run_transfers([take_first(ensemble, payload.integers, plan.included)], deferred)
            if plan.counts and payload.counts is not None:
                counts = take_largest(ensemble, payload.counts, plan.included, payload.device)
                cost += run_transfers([counts], deferred)
            if compression is not None and plan.compressed:
                more, write_consensus = compression.average(
                    transport, payload.compressible, backup=backup and ensemble.talks
                )
                cost += more
                writes.append(write_consensus)
            self._confirm(transport, payload)
            transport.write(writes)
        norm = averaged.norm
        for buffer, before in zip(payload.all_buffers, own, strict=bool(own)):
            keep_own(buffer, before, plan.healthy[held(ensemble)].tolist())
        if compression is not None and plan.compressed:
            consensus = compression.consensus(transport, payload.compressible) or []
            norm = float(transport.checksum_of_one(consensus, payload.device))
        if compression is not None and plan.remembered:
            transport.staging = Staging()  # differences will travel from here on, and need no buffers of that size
            healthy = bool(plan.healthy[held(ensemble)].all())
            compression.remember(transport, payload.compressible, keep_errors=healthy)
        return cost, norm

    def _confirm(self, transport: Transport, payload: Payload) -> None:
        """Wait until everything has arrived on all processes. Else one might write what another never received."""
        for device in devices_of([*payload.outlines, *payload.buffers]):
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()  # a failed collective raises here, not steps later
        if transport.ensemble.talks:
            transport.ensemble.gather(torch.zeros(transport.ensemble.rows, 1, dtype=torch.float64, device="cpu"))

    def _take_outer_step(self, payload: Payload, plan: Plan, *, same_start: bool, advance: bool) -> None:
        if self._outer is None:
            return
        self._outer.step(payload.params, same_start=same_start, advance=advance)
        if self._compression is not None and (plan.compressed or plan.remembered):
            # The next differences are small relative to where the replicas continue from, not to the mean.
            self._compression.remember(self._transport, payload.compressible, keep_errors=True)

    # The averaged model, for a while

    @contextlib.contextmanager
    def consensus(self, report: Report, *, with_state: bool = False) -> Iterator[None]:
        """Have the averaged parameters and buffers inside the block; restore this replica's own after it. Collective.

        With ``merge="best"`` they are those of the best replica. ``with_state``: have the averaged optimizer state too.
        """
        own = [tensor.clone() for tensor in self.tensors.covered()]
        state = [local(tensor) for tensor in self.tensors.state().values()] if with_state else []
        own_state = [tensor.clone() for tensor in state]
        try:
            payload = self.tensors.payload(include_state=with_state)
            request = AverageRequest("consensus", average_state=with_state, include_state=with_state, in_full=True)
            _, plan = self._agree(self._transport, report, payload, request)
            self._average(self._transport, payload, plan, backup=False)
            self.tensors.write_back(payload, counts=False)
            yield
        finally:
            for tensor, value in zip((*self.tensors.covered(), *state), (*own, *own_state), strict=True):
                tensor.copy_(value)
            self.tensors.written()

    # A sync that overlaps with the next training steps

    def check_overlap(self) -> None:
        """Raise ValueError if averages cannot overlap with training."""
        self._settings.check_overlap()

    def start(
        self,
        report: Report,
        request: AverageRequest = AverageRequest(),  # noqa: B008 (frozen)
    ) -> OverlappedAverage[Outcome]:
        """Start :meth:`converge` on a copy of the current tensors and return at once. :meth:`land` ends it."""
        self.check_overlap()
        start = time.perf_counter()
        # Without the state while gradients are shared. If a replica turns out to be unhealthy, or its state to differ,
        # land() averages it.
        with_state = request.include_state and (
            request.average_state is True or (request.average_state == "auto" and request.known_shared is not True)
        )
        payload = self.tensors.payload(include_state=request.include_state)
        if not with_state or payload.no_mean is not None:
            payload = payload.without_state(self._transport.checksum)
        request = replace(request, include_state=with_state)
        if len(devices := {tensor.device for tensor in payload.inventory.tensors if tensor.is_cuda}) > 1:
            raise ValueError(f"an overlapped average needs all tensors on one GPU, they are on {devices}")
        if self._background is None:
            # Waits, this once: new process groups can only be made by replicas that agree to overlap.
            self._agree(self._transport, report, payload, request)
            with self._transport.attendance.explained():
                twin = self.ensemble.twin()
            self._background = Transport(twin, self.bucket_bytes, self._transport.backend)
            self._stream = torch.cuda.Stream(payload.device) if payload.device.type == "cuda" else None
        transport, before, after = self._background, payload.copy(), payload.copy()

        def average() -> tuple[Correction, Outcome]:
            agreement, plan = self._agree(transport, report, after, request)
            cost, norm = self._average(transport, after, plan, backup=False)
            own = tuple(plan.healthy[held(self.ensemble)].tolist())
            distance = distance_of(self.ensemble, agreement, plan, after.outlines, norm)
            correction = Correction.between(before, after, sound=own, heal=plan.heals)
            return correction, Outcome.of(agreement, plan, cost, 0.0, distance)

        return OverlappedAverage(average, self._stream, time.perf_counter() - start)

    def land(self, average: OverlappedAverage[Outcome], *, kept: int | None = None) -> Outcome:
        """Wait for the average that :meth:`start` began, and apply it.

        Parameters move by the difference between the consensus and what this replica had at :meth:`start`. Raises what
        :meth:`converge` would have raised, with nothing changed. ``kept``: see :class:`.handshake.Report`.
        """
        start = time.perf_counter()
        correction, outcome = average.wait()
        cost = self._heal(outcome.healthy, kept) if correction.heal else Cost()
        payload = self.tensors.payload(include_state=correction.has_state)
        correction.apply(payload)
        self.tensors.write_back(payload, counts=True)
        return replace(
            outcome,
            seconds=average.seconds + time.perf_counter() - start,
            bytes=outcome.bytes + cost.bytes,
            collectives=outcome.collectives + cost.collectives,
        )

    def _heal(self, healthy_then: NDArray[np.bool_], kept: int | None) -> Cost:
        """Average state and step counts over the replicas that were healthy at the sync and still are, for the others.

        Raises with nothing changed.
        """
        payload = self.tensors.payload(include_state=True)
        state_alone = replace(payload, params=[], buffers=[], masks=[], masks_changed=False, integers=[])
        request = AverageRequest("heal", average_state=False, in_full=True, heals=True)
        agreement, plan = self._agree(self._transport, Report(step=0, kept=kept), state_alone, request)
        both = agreement.healthy & healthy_then if len(healthy_then) == len(agreement.healthy) else agreement.healthy
        plan = replace(plan, included=both if both.any() else agreement.healthy, params=False)
        cost, _ = self._average(self._transport, state_alone, plan, backup=self.backup)
        self.tensors.write_back(state_alone, counts=plan.counts)
        return cost

    @property
    def attendance(self) -> Attendance:
        """Notes that this process comes to a collective, and explains why one failed."""
        return self._transport.attendance

    def settings(self) -> dict[str, Any]:
        """Return the settings that must be equal on all replicas."""
        return {
            "bucket_bytes": self.bucket_bytes,
            "compress": self.compress,
            "outer": self._outer.outer.constants() if self._outer else None,
            "merge": self.merge,
        }

    # What it remembers from one average to the next, for checkpoints

    def state_dict(self, *, copied: bool = True) -> dict[str, Any] | None:
        """Return the state of the compression; None without compression or before its first average.

        With ``copied=False`` it has the tensors in use, which the next average overwrites.
        """
        return self._compression.state_dict(self.ensemble.processes, copied=copied) if self._compression else None

    def memories(self) -> list[object]:
        """Return the objects that remember something from one average to the next."""
        return [memory for memory in (self._compression, self._outer) if memory is not None]

    def check_state_dict(self, state: dict[str, Any] | None) -> None:
        """Raise ValueError unless :meth:`load_state_dict` accepts ``state``."""
        if self._compression is not None and state is not None:
            self._compression.check_state_dict(state)

    def load_state_dict(self, state: dict[str, Any] | None, *, own: bool) -> None:
        """Load the state of the compression. ``own``: whether a process with the same replicas saved it."""
        if self._compression is not None:
            payload = self.tensors.payload(include_state=False, reads=True)
            self._compression.load_state_dict(state, self._transport, payload.compressible, own=own)

    def outer_state_dict(self, *, copied: bool = True) -> dict[str, Any] | None:
        """Return the state of the outer optimizer, if there is one; see :meth:`state_dict` for ``copied``."""
        return self._outer.state_dict(copied=copied) if self._outer else None

    def check_outer_state_dict(self, state: dict[str, Any] | None) -> None:
        """Raise ValueError unless :meth:`load_outer_state_dict` accepts ``state``."""
        if self._outer is not None and state is not None:
            self._outer.check_state_dict(state)

    def load_outer_state_dict(self, state: dict[str, Any] | None) -> None:
        """Load the state of the outer optimizer."""
        if self._outer is not None and state is not None:
            self._outer.load_state_dict(state)


_UNEVEN_STATE = (
    "a parameter had its first gradient on some replicas only, or a step was skipped on some; pass "
    "averaging=hk.Averaging(state=False), or use an optimizer of hdet_kernels, which has state for all parameters"
)
