"""The compressed average: what travels is the difference to the last consensus, in few bits, with error feedback.

A replica sends Q(θ − c + e) and keeps e ← θ − c + e − Q(·), what the rounding took, for the next time. Every process
adds up one shard of the differences of all, and sends Q(mean + e′) of it, again keeping what the rounding took. All
add what they receive to their consensus c. Nothing that was rounded away is lost, only late: the sum of all that
travelled differs from the sum of the exact means by what is in e and e′ now, which does not grow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from hdet_kernels.buckets import Bucket
from hdet_kernels.converge.transport import Cost, Courier, Journey, Regions, Staging, travel
from hdet_kernels.ops.wire import FORMATS, Wire

Format = Literal["bf16", "int8"]


def check_format(compress: str | None) -> None:
    if compress is not None and compress not in FORMATS:
        raise ValueError(f"compress must be None or one of {', '.join(map(repr, FORMATS))}, got {compress!r}")


@dataclass(frozen=True)
class _Memory:
    """What a process remembers of a bucket: the consensus, what its own rounding took, and what that of its shard."""

    consensus: Tensor
    error: Tensor | None
    shard_error: Tensor | None


class Compression:
    """The compressed mean of the same tensors again and again."""

    def __init__(self, format: Format, *, error_feedback: bool) -> None:
        self.format, self.error_feedback = format, error_feedback
        self._memory: list[_Memory] | None = None
        self._wires: dict[object, Wire] = {}

    def fits(self, courier: Courier, regions: Regions) -> bool:
        """Whether there is a consensus of these tensors to send differences to."""
        if self._memory is None:
            return False
        sizes = [bucket.numel for _, bucket in courier.places(regions)]
        return sizes == [known.consensus.numel() for known in self._memory]

    def consensus(self, courier: Courier, regions: Regions) -> list[Tensor] | None:
        """The last consensus of these tensors, if it is known."""
        return [known.consensus for known in self._memory or ()] if self.fits(courier, regions) else None

    def remember(self, courier: Courier, regions: Regions, *, sound: bool) -> None:
        """Take the tensors, which are equal on all replicas now, for the consensus. What is still owed stays owed,
        unless this replica was not sound."""
        owed = self._memory if sound and self.fits(courier, regions) else None
        memory = []
        for number, (region, bucket) in enumerate(courier.places(regions)):
            consensus = courier.first(region, bucket)
            fresh = self._fresh(courier, consensus)
            memory.append(fresh if owed is None else replace(owed[number], consensus=consensus))
        self._memory = memory

    def average(self, courier: Courier, regions: Regions) -> tuple[Cost, Callable[[], None]]:
        """Let the differences travel; returns what replaces every tensor by the new consensus."""
        memory = self._memory
        if memory is None:
            raise RuntimeError("there is no consensus yet that differences could refer to")
        # From here on the errors change: should this fail, the next average has to travel in full.
        self._memory = None
        arrived: list[Tensor] = []
        places, staging = list(courier.places(regions)), Staging()

        def journeys() -> Iterator[tuple[Journey, int]]:
            for (region, bucket), known in zip(places, memory, strict=True):
                arrived.append(self._wire(courier, bucket.numel, bucket.device).empty())
                yield self._journey(courier, region, bucket, known, arrived[-1], staging), arrived[-1].nbytes

        def take() -> None:
            for (region, bucket), known, gathered in zip(places, memory, arrived, strict=True):
                whole = courier.in_place(region, bucket)
                self._wire(courier, bucket.numel, bucket.device).decode(gathered, known.consensus, whole)
                if whole is None:
                    pack, tensors = courier.pack_of(region, bucket)
                    pack.unpack(tensors, known.consensus)
            self._memory = memory

        return travel(journeys()), take

    def _journey(
        self,
        courier: Courier,
        region: Sequence[Tensor],
        bucket: Bucket,
        known: _Memory,
        gathered: Tensor,
        staging: Staging,
    ) -> Journey:
        ensemble, wire = courier.ensemble, self._wire(courier, bucket.numel, bucket.device)
        sent, received = wire.empty(), wire.empty()
        if (whole := courier.in_place(region, bucket)) is not None:
            wire.encode(whole, known.consensus, known.error, sent)
        else:
            pack, tensors = courier.pack_of(region, bucket)
            with staging.buffer(bucket) as packed:
                pack.pack(tensors, packed, divisor=ensemble.rows)
                wire.encode(packed, known.consensus, known.error, sent)
        yield ensemble.exchange(received, sent)
        merged = torch.empty_like(sent[0])
        wire.merge(received, ensemble.processes, known.shard_error, merged)
        yield ensemble.collect(gathered, merged)

    def state_dict(self, processes: int) -> dict[str, Any] | None:
        if self._memory is None:
            return None
        return {
            "format": self.format,
            "processes": processes,
            "consensus": [known.consensus.clone() for known in self._memory],
            "error": [known.error if known.error is None else known.error.clone() for known in self._memory],
            "shard_error": [k.shard_error if k.shard_error is None else k.shard_error.clone() for k in self._memory],
        }

    def load_state_dict(self, state: dict[str, Any] | None, courier: Courier, regions: Regions, *, own: bool) -> None:
        """``own``: whether this very process saved it. What others owe is theirs, and what is owed in other shards or
        bits cannot be taken over."""
        self._memory = None
        devices = [bucket.device for _, bucket in courier.places(regions)]
        if state is None or len(devices) != len(state["consensus"]):
            return
        same = own and (state["format"], state["processes"]) == (self.format, courier.ensemble.processes)
        memory = []
        saved = zip(devices, state["consensus"], state["error"], state["shard_error"], strict=True)
        for device, consensus, error, shard_error in saved:
            known = self._fresh(courier, consensus.to(device, copy=True))
            if same and known.error is not None and known.shard_error is not None and error is not None:
                known.error.copy_(error)
                known.shard_error.copy_(shard_error)
            memory.append(known)
        self._memory = memory

    def _fresh(self, courier: Courier, consensus: Tensor) -> _Memory:
        if not self.error_feedback:
            return _Memory(consensus, None, None)
        wire = self._wire(courier, consensus.numel(), consensus.device)
        return _Memory(consensus, torch.zeros_like(consensus), consensus.new_zeros(wire.shard))

    def _wire(self, courier: Courier, numel: int, device: torch.device) -> Wire:
        key = (numel, device, courier)
        if key not in self._wires:
            self._wires[key] = Wire(self.format, numel, courier.ensemble.processes, device, backend=courier.backend)
        return self._wires[key]
