"""Converge: the mean of all replicas, bucket by bucket.

First every replica shows one control row: step, loss, layout, whether its numbers are finite. Replicas that disagree
get an error that names them instead of a hang or a wrong mean; a replica that is not finite is left out and receives
the mean of the others. Only then does anything move, in ⌈bytes / bucket_bytes⌉ collectives; and if one of them fails,
everything is as it was.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hdet_kernels.buckets import BUCKET_BYTES, Buckets, checked_bucket_bytes
from hdet_kernels.converge.compress import Compression, Format, check_format
from hdet_kernels.converge.handshake import Numbers, Report, Verdict, disagreement, meet, row_bytes, short_hash
from hdet_kernels.converge.outer import Outer, OuterStep, check_outer
from hdet_kernels.converge.overlap import Correction, Flight
from hdet_kernels.converge.payload import Content, check_shards, check_tensor, described, flattener, integer_hash
from hdet_kernels.converge.plan import Asked, AverageState, Merge, Plan, check_merge, decide
from hdet_kernels.converge.transport import Cost, Courier, take_first, take_largest, travel
from hdet_kernels.ensemble import Ensemble, held
from hdet_kernels.ops.pack import MOST_ROWS
from hdet_kernels.tensors import distinct, layout_hash, local, unique

__all__ = ["Asked", "AverageState", "Converger", "Merge", "Outcome", "Report"]


class Counts(Protocol):
    """The step counts of an optimizer."""

    def read(self) -> Tensor: ...

    def write(self, counts: Tensor) -> None: ...


@dataclass(frozen=True)
class Outcome:
    """What a converge found and did. Arrays have one entry a replica; NaN is a loss that was not given.

    shared: whether all replicas have the same gradients (None: not known).
    bytes: payload of the collectives as this process handed it to them, control row included. The two collectives of a
        compressed bucket count as the AllReduce that they stand for.
    taken: the replica that all became a copy of, with ``merge="best"``.
    """

    losses: NDArray[np.float64]
    probes: NDArray[np.float64]
    healthy: NDArray[np.bool_]
    shared: bool | None
    bytes: int
    collectives: int
    seconds: float
    taken: int | None = None


class Converger:
    """Averages parameters over an ensemble, and optimizer state and buffers where asked.

    With ``outer=`` an average of the parameters, but not that of :meth:`consensus`, ends with a step of the outer
    optimizer. Its first one starts from where the parameters are when the Converger is built, or at the last call of
    :meth:`begin`; where replicas begin apart, their first mean is a plain one, and the outer optimizer starts there.

    Args:
        params: a :class:`Buckets` (averaged in place, in the parameters' own memory) or loose parameters (packed into
            staging buffers, averaged there and unpacked). Of distributed tensors the local shards are averaged.
        ensemble: the replicas. Where a process holds several of them (64 at most), the tensors have one row for each.
        state: returns the optimizer state that belongs with the parameters, by name, as it is at that moment.
        counts: the optimizer's step counts: where they differ, as after a step that was skipped on one replica, they
            become the largest when state is averaged.
        buffers: returns the buffers of the model, as they are at that moment: floating-point ones are averaged,
            integers become those of the first sound replica. Those with infinities from the start (attention masks)
            stay as they are.
        bucket_bytes: what one collective carries at most, and the size of each of the two staging buffers. Default:
            that of the ``Buckets``, or 512 MiB.
        compress: ``"bf16"`` or ``"int8"``: parameters travel as rounded differences to the last consensus. State and
            buffers travel in full, and so do parameters the first time and when a replica is left out.
        error_feedback: what the rounding took is sent the next time.
        backup: keep a copy of what is averaged until all of it has arrived, so that a peer that dies in the middle
            leaves everything as it was. Without it, what fails in the middle leaves a mixture.
        outer: an :class:`hdet_kernels.Outer`. Costs two copies of the parameters of one replica (one without momentum).
        merge: ``"mean"``, or ``"best"``: instead of the mean all take what the one sound replica has whose loss is
            lowest, on the probe where there is one; the first of several. Where no loss is known, the mean.
        backend: of the kernels; see :func:`hdet_kernels.use_backend`.
    """

    def __init__(
        self,
        params: Buckets | Iterable[Tensor],
        ensemble: Ensemble,
        *,
        state: Callable[[], Mapping[str, Tensor]] = dict,
        counts: Counts | None = None,
        buffers: Callable[[], Sequence[Tensor]] = tuple,
        bucket_bytes: int | None = None,
        compress: Format | None = None,
        error_feedback: bool = True,
        backup: bool = True,
        outer: Outer | None = None,
        merge: Merge = "mean",
        backend: str | None = None,
    ) -> None:
        if ensemble.rows > MOST_ROWS:
            raise ValueError(
                f"at most {MOST_ROWS} replicas of one process are averaged, got {ensemble.rows}: stack fewer, in "
                "several processes if need be"
            )
        self.buckets = params if isinstance(params, Buckets) else None
        given = params.params if isinstance(params, Buckets) else unique(params)
        # Integers (quantised frozen weights) have no mean and do not diverge.
        self.params = tuple(param for param in given if param.is_floating_point() or param.is_complex())
        if not self.params:
            raise ValueError("there are no parameters to average: the optimizer's parameter groups are empty")
        for index, param in enumerate(self.params):
            check_shards(index, param, ensemble)
        for tensor in (*self.params, *buffers()):
            check_tensor(tensor, ensemble)
        if bucket_bytes is None:
            bucket_bytes = self.buckets.bucket_bytes if self.buckets else BUCKET_BYTES
        self.bucket_bytes = checked_bucket_bytes(bucket_bytes)
        check_format(compress)
        check_outer(outer)
        check_merge(merge, outer=outer, compress=compress)
        self.state, self.counts, self.buffers = state, counts, buffers
        #: Buffers that are infinite in places from the start, by number: masks, which are constants and no damage.
        self._masks = [number for number, buffer in enumerate(buffers()) if _is_mask(buffer)]
        self.ensemble, self.backup, self.compress, self.merge = ensemble, backup, compress, merge
        self._content(include_state=False)  # refuses what cannot be flattened, now and not after the first T steps
        self._courier = Courier(ensemble, self.bucket_bytes, backend)
        #: For what runs beside the training: connections of its own, and on a GPU a stream.
        self._behind: Courier | None = None
        self._stream: torch.cuda.Stream | None = None
        self._compression = Compression(compress, error_feedback=error_feedback) if compress else None
        self._outer = OuterStep(outer, self._courier) if outer else None
        self.begin()

    def begin(self) -> None:
        """The parameters are now where the outer optimizer starts from."""
        if self._outer is None or (self.params[0].is_cuda and torch.cuda.is_current_stream_capturing()):
            return  # a captured copy would be made again with every replay
        content = self._content(include_state=False)
        self._outer.begin(content.params, content.device)

    def converge(self, report: Report, asked: Asked = Asked()) -> Outcome:  # noqa: B008 (frozen)
        """Show the control rows, check them, then average. Collective: every process must call it.

        Raises RuntimeError with everything as it was: on every process if the replicas disagree or none is finite,
        on those that are left if one dies."""
        start = time.perf_counter()
        content = self._content(asked.include_state)
        verdict, plan = self._agree(self._courier, report, content, asked)
        with self._unharmed(content, plan):
            cost = self._average(self._courier, content, plan)
        if self._outer is not None:
            self._outer.step(content.params, known=verdict.same_outer, moves=asked.outer)
            if self._compression is not None and (plan.compressed or plan.remembered):
                # The next differences are small against where the replicas go on from, not against the mean.
                self._compression.remember(self._courier, self._compressible(content), sound=True)
        self._settle(content)
        return self._outcome(verdict, plan, cost, time.perf_counter() - start)

    @contextlib.contextmanager
    def consensus(self, report: Report) -> Iterator[None]:
        """The averaged parameters and buffers (with ``merge="best"`` those of the best replica) inside the block, this
        replica's own again after it."""
        own = [tensor.clone() for tensor in self._covered()]
        try:
            content = self._content(include_state=False)
            asked = Asked("consensus", include_state=False, in_full=True)
            _, plan = self._agree(self._courier, report, content, asked)
            self._average(self._courier, content, plan)
            self._settle(content)
            yield
        finally:
            for tensor, value in zip(self._covered(), own, strict=True):
                tensor.copy_(value)

    def start(self, report: Report, asked: Asked = Asked()) -> Flight[Outcome]:  # noqa: B008 (frozen)
        """Begin :meth:`converge` on a copy of what there is now, and return at once. :meth:`land` ends it."""
        self.check_overlap()
        start = time.perf_counter()
        # Not the state, as long as gradients are shared: should a replica turn out bad, the state is healed on landing.
        with_state = asked.include_state and (
            asked.average_state is True or (asked.average_state == "auto" and asked.known_shared is not True)
        )
        asked = replace(asked, include_state=with_state)
        content = self._content(with_state)
        if len(devices := {tensor.device for tensor in content.tensors if tensor.is_cuda}) > 1:
            raise ValueError(f"an average beside the training needs all tensors on one GPU, they are on {devices}")
        if self._behind is None:
            # The one time that it waits: only replicas that agree to overlap can make connections for it.
            self._agree(self._courier, report, content, asked)
            self._behind = Courier(self.ensemble.twin(), self.bucket_bytes, self._courier.backend)
            self._stream = torch.cuda.Stream(content.device) if content.device.type == "cuda" else None
        courier, before, after = self._behind, content.copy(), content.copy()

        def fly() -> tuple[Correction, Outcome]:
            verdict, plan = self._agree(courier, report, after, asked)
            cost = self._average(courier, after, plan)
            own = tuple(plan.healthy[held(self.ensemble)].tolist())
            correction = Correction.between(before, after, sound=own, heal=not plan.healthy.all() and not plan.state)
            return correction, self._outcome(verdict, plan, cost, 0.0)

        return Flight(fly, self._stream, time.perf_counter() - start)

    def land(self, flight: Flight[Outcome]) -> Outcome:
        """Wait for what :meth:`start` began, and apply it: parameters move by the difference between the consensus and
        what this replica had then. Raises, with nothing changed, what :meth:`converge` would have raised."""
        start = time.perf_counter()
        correction, outcome = flight.wait()
        cost = self._heal(outcome.healthy) if correction.heal else Cost()
        content = self._content(correction.has_state)
        correction.apply(content)
        if content.counts is not None and self.counts is not None:
            self.counts.write(content.counts)
        self._settle(content)
        return replace(
            outcome,
            seconds=flight.seconds + time.perf_counter() - start,
            bytes=outcome.bytes + cost.bytes,
            collectives=outcome.collectives + cost.collectives,
        )

    def check_overlap(self) -> None:
        """Raise if an average cannot run beside the training."""
        if self._outer is not None or self.merge == "best":
            given = f"outer={self._outer.outer}" if self._outer is not None else "merge='best'"
            raise ValueError(
                f"{given} needs all replicas at one place when the next cycle starts, and an average that lands later "
                "leaves them apart: pass overlap_steps=0"
            )

    def settings(self) -> dict[str, Any]:
        """What must be equal on all replicas."""
        return {
            "bucket_bytes": self.bucket_bytes,
            "compress": self.compress,
            "masks": self._masks,
            "outer": self._outer.outer.constants() if self._outer else None,
            "merge": self.merge,
        }

    def state_dict(self) -> dict[str, Any] | None:
        """The memory of the compression, if there is any."""
        return self._compression.state_dict(self.ensemble.processes) if self._compression else None

    def load_state_dict(self, state: dict[str, Any] | None, *, own: bool) -> None:
        """``own``: whether it was saved by the process that holds the same replicas."""
        if self._compression is not None:
            regions = self._compressible(self._content(include_state=False))
            self._compression.load_state_dict(state, self._courier, regions, own=own)

    def outer_state_dict(self) -> dict[str, Any] | None:
        """The memory of the outer optimizer, if there is one."""
        return self._outer.state_dict() if self._outer else None

    def check_outer_state_dict(self, state: dict[str, Any] | None) -> None:
        """Raise unless :meth:`load_outer_state_dict` can take ``state``."""
        if self._outer is not None and state is not None:
            self._outer.check_state_dict(state)

    def load_outer_state_dict(self, state: dict[str, Any] | None) -> None:
        if self._outer is not None and state is not None:
            self._outer.load_state_dict(state)

    def _covered(self) -> list[Tensor]:
        """The parameters (and their masters) and buffers that are averaged."""
        masters = [master for master in self.buckets.masters if master is not None] if self.buckets else []
        return [local(tensor) for tensor in (*self.params, *masters, *unique(self.buffers()))]

    def _settle(self, content: Content) -> None:
        """Write what has been averaged in a copy, or in full, to where it belongs."""
        content.put_back()
        if self.buckets is not None:
            self.buckets.round_masters()

    def _content(self, include_state: bool) -> Content:
        gapped: list[tuple[Tensor, Tensor]] = []
        flat = flattener(self.ensemble.rows, gapped)
        if self.buckets is not None:
            self.buckets.rehome()
            self.buckets.refresh_masters()
        # A buffer may be a parameter's own memory, and two of them may be one.
        moving = [buffer for number, buffer in enumerate(self.buffers()) if number not in self._masks]
        parts = distinct(local(tensor) for tensor in (*self.params, *moving))
        own = {local(param).data_ptr() for param in self.params}
        loose = [part for part in parts if part.numel() and part.data_ptr() in own]
        buffers = [part for part in parts if part.numel() and part.data_ptr() not in own]
        floating = [buffer for buffer in buffers if buffer.is_floating_point() or buffer.is_complex()]
        homed = None if self.buckets is None else [[flat(full)] for full in self.buckets.full if full.numel()]
        return Content(
            params=[[flat(param) for param in loose]] if homed is None else homed,
            buffers=[flat(buffer) for buffer in floating],
            state={name: flat(value) for name, value in (self.state().items() if include_state else ())},
            integers=[buffer for buffer in buffers if not (buffer.is_floating_point() or buffer.is_complex())],
            counts=self.counts.read() if include_state and self.counts is not None else None,
            gapped=gapped,
            tensors=self._covered(),
            device=self.params[0].device,
        )

    def _agree(self, courier: Courier, report: Report, content: Content, asked: Asked) -> tuple[Verdict, Plan]:
        """Meet the other replicas and decide with them what is averaged."""
        ensemble = courier.ensemble
        report = replace(report, settings={"call": asked.call, **report.settings, **self.settings()})
        verdict = meet(ensemble, report, self._numbers(courier, content), needs_loss=asked.needs_loss)
        if asked.needs_shared and asked.shared(verdict) is False:
            raise RuntimeError(
                "the hypergradient controller needs gradients that are averaged over the replicas at every step, but "
                "they differ: wrap the model in DistributedDataParallel, or use the regression controller"
            )
        compresses = self._compression is not None and ensemble.talks
        plan = decide(verdict, asked, merge=self.merge, compresses=compresses)
        if plan.uneven_state:
            layout = described(content.state.values(), content.state)
            raise disagreement(ensemble, layout, "the optimizer state that there is", _UNEVEN_STATE, verdict.ranks)
        return verdict, plan

    def _numbers(self, courier: Courier, content: Content) -> Numbers:
        checksum = courier.checksum  # not one for all: a flight checks beside the training
        device = content.device
        layouts = {"layout": (content.tensors, None), "state": (content.state.values(), content.state.keys())}
        return Numbers(
            layout=layout_hash(content.tensors),
            state=layout_hash(content.state.values(), content.state.keys()) if content.state else 0,
            counts=0 if content.counts is None else short_hash(content.counts.tolist()),
            integers=integer_hash(content.integers, courier.ensemble.rows, device),
            checksum=checksum(content.all_params, device),
            rest=checksum([*content.buffers, *content.state.values()], device),
            consensus=self._consensus(courier, content),
            outer=math.nan if self._outer is None else self._outer.checksum(content.params, device),
            describe=lambda name: described(*layouts[name]),
        )

    def _consensus(self, courier: Courier, content: Content) -> Tensor | float:
        """A checksum of the consensus that differences would refer to; NaN, which equals nothing, if there is none."""
        if self._compression is None:
            return math.nan
        known = self._compression.consensus(courier, self._compressible(content))
        return math.nan if known is None else courier.checksum_of_one(known, content.device)

    def _compressible(self, content: Content) -> list[list[Tensor]]:
        """Parameters that travel as fp32: a difference of doubles would lose its last digits."""
        return [[tensor for tensor in region if tensor.dtype != torch.float64] for region in content.params]

    def _regions(self, content: Content, plan: Plan) -> list[list[Tensor]]:
        """What travels in full; the tensors of one region may share a bucket. Homed parameters are regions of their
        own: alone in a bucket they are averaged in place."""
        others = [*content.buffers, *(content.state.values() if plan.state else ())]
        if not plan.params:
            return [others]
        if plan.compressed:
            return [[*(tensor for tensor in content.all_params if tensor.dtype == torch.float64), *others]]
        if self.buckets is not None:
            return [*content.params, others]
        return [[*content.all_params, *others]]

    def _average(self, courier: Courier, content: Content, plan: Plan) -> Cost:
        ensemble = courier.ensemble
        cost = Cost(row_bytes(ensemble), 1 if ensemble.parts == 1 else 2) if ensemble.talks else Cost()
        cost += courier.average(self._regions(content, plan), plan.included)
        if plan.integers and content.integers:
            cost += travel([take_first(ensemble, content.integers, plan.included)])
        if plan.counts and content.counts is not None:
            cost += travel([take_largest(ensemble, content.counts, plan.included, content.device)])
            if courier is self._courier and self.counts is not None:  # what flies is a copy
                self.counts.write(content.counts)
        take: Callable[[], None] | None = None
        if self._compression is not None and plan.compressed:
            more, take = self._compression.average(courier, self._compressible(content))
            cost += more
        for device in {tensor.device for tensor in (*content.all_params, *content.buffers) if tensor.is_cuda}:
            torch.cuda.current_stream(device).synchronize()  # a failed collective raises here, not steps later
        if ensemble.parts > 1:
            ensemble.confirm()
            cost += Cost(4, 1)
        if take is not None:
            take()
        if self._compression is not None and plan.remembered:
            sound = bool(plan.healthy[held(self.ensemble)].all())
            self._compression.remember(courier, self._compressible(content), sound=sound)
        return cost

    def _heal(self, healthy_then: NDArray[np.bool_]) -> Cost:
        """State and step counts of the replicas that were sound at the sync and are now, for those that were left out.
        Raises with nothing changed."""
        state_alone = replace(self._content(include_state=True), params=[], buffers=[], integers=[])
        asked = Asked("heal", average_state=False, in_full=True, heals=True)
        verdict, plan = self._agree(self._courier, Report(step=0), state_alone, asked)
        both = verdict.healthy & healthy_then if len(healthy_then) == len(verdict.healthy) else verdict.healthy
        plan = replace(plan, included=both if both.any() else verdict.healthy, params=False)
        with self._unharmed(state_alone, plan):
            return self._average(self._courier, state_alone, plan)

    @contextlib.contextmanager
    def _unharmed(self, content: Content, plan: Plan) -> Iterator[None]:
        """Bring everything back that the block has changed if it raises; without a backup, nothing."""
        if not (self.backup and self.ensemble.talks):
            yield
            return
        regions = self._regions(content, plan)
        changed = [*itertools.chain.from_iterable(regions), *(content.integers if plan.integers else ())]
        kept = [tensor.clone() for tensor in changed]
        counts = None if content.counts is None else content.counts.clone()
        try:
            yield
        except BaseException:
            for tensor, own in zip(changed, kept, strict=True):
                tensor.copy_(own)
            if counts is not None and self.counts is not None and plan.counts:
                self.counts.write(counts)
            raise

    def _outcome(self, verdict: Verdict, plan: Plan, cost: Cost, seconds: float) -> Outcome:
        return Outcome(
            verdict.losses,
            verdict.probes,
            plan.healthy,
            plan.shared,
            cost.bytes,
            cost.collectives,
            seconds,
            taken=plan.taken,
        )


def _is_mask(buffer: Tensor) -> bool:
    buffer = local(buffer)
    return buffer.is_floating_point() and bool(buffer.isinf().any()) and not bool(buffer.isnan().any())


_UNEVEN_STATE = (
    "a parameter had its first gradient on some replicas only, or a step was skipped on some; pass "
    "average_state=False, or use an optimizer of hdet_kernels, which has state for all parameters"
)
