"""The compressed average: replicas send their rounded difference to the last consensus, with error feedback.

A replica sends Q(θ − c + e), with the last consensus c and the error e that its earlier roundings left. It keeps
e ← θ − c + e − Q(·). Every process adds up one shard of the differences of all processes and sends Q(mean + e′) of it,
where e′ is the error of this second rounding. All processes add what they receive to their consensus c.

Nothing that was rounded away is lost: it is sent later. The sum of all that was sent differs from the sum of the exact
means only by the current e and e′, which do not grow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hdet_kernels.buckets import Bucket
from hdet_kernels.converge.settings import Format
from hdet_kernels.converge.split_masters import Region
from hdet_kernels.converge.transport import Cost, Staging, Transfer, Transport, run_transfers
from hdet_kernels.ops.wire import Wire, shard_elements


@dataclass(frozen=True)
class _BucketMemory:
    """The memory of one bucket in a process: c, its own error e, and the error e′ of its shard."""

    consensus: Tensor
    error: Tensor
    shard_error: Tensor


class Compression:
    """The compressed mean of the same tensors, sync after sync."""

    def __init__(self, format: Format) -> None:
        self.format = format
        self._memory: list[_BucketMemory] | None = None
        self._wires: dict[object, Wire] = {}

    def matches(self, transport: Transport, regions: Sequence[Region]) -> bool:
        """Return whether a consensus of these tensors is remembered."""
        sizes = [bucket.numel for _, bucket in transport.cut(regions)]
        return self._memory is not None and sizes == [known.consensus.numel() for known in self._memory]

    def consensus(self, transport: Transport, regions: Sequence[Region]) -> list[Tensor] | None:
        return [known.consensus for known in self._memory or ()] if self.matches(transport, regions) else None

    def remember(self, transport: Transport, regions: Sequence[Region], *, keep_errors: bool) -> None:
        """Remember the tensors, which are now equal on all replicas, as the consensus.

        With ``keep_errors`` those of earlier roundings stay. Those of an unhealthy replica must be dropped.
        """
        known = self._memory if self.matches(transport, regions) else None
        memory = []
        for number, (region, bucket) in enumerate(transport.cut(regions)):
            own = None if known is None else known[number]
            consensus = transport.first_row(region, bucket, None if own is None else own.consensus)
            memory.append(own if own is not None and keep_errors else self._without_errors(transport, consensus))
        self._memory = memory

    def average(
        self, transport: Transport, regions: Sequence[Region], *, backup: bool
    ) -> tuple[Cost, Callable[[], None]]:
        """Exchange the differences. Return the cost, and a function that writes the new consensus to every tensor.

        With ``backup`` the errors of earlier roundings are kept until that function is called, so that they are as
        before if the exchange fails. Without it they are lost then, and the next average is sent in full.
        """
        memory = self._memory
        if memory is None:
            raise RuntimeError("there is no consensus yet that differences could refer to: average in full first")
        if backup:
            memory = [
                replace(known, error=known.error.clone(), shard_error=known.shard_error.clone()) for known in memory
            ]
        else:
            self._memory = None
        received: list[Tensor] = []
        buckets, staging = list(transport.cut(regions)), Staging()

        def transfers() -> Iterator[tuple[Transfer, int]]:
            for (region, bucket), known in zip(buckets, memory, strict=True):
                received.append(self._wire(transport, bucket.numel, bucket.device).empty())
                yield self._transfer(transport, region, bucket, known, received[-1], staging), received[-1].nbytes

        def apply() -> None:
            for (region, bucket), known, gathered in zip(buckets, memory, received, strict=True):
                whole = transport.in_place(region, bucket)
                self._wire(transport, bucket.numel, bucket.device).decode(gathered, known.consensus, whole)
                if whole is None:
                    transport.unpack(region, bucket, known.consensus)
            self._memory = memory

        return run_transfers(transfers()), apply

    def _transfer(
        self,
        transport: Transport,
        region: Region,
        bucket: Bucket,
        known: _BucketMemory,
        gathered: Tensor,
        staging: Staging,
    ) -> Transfer:
        ensemble, wire = transport.ensemble, self._wire(transport, bucket.numel, bucket.device)
        sent, received = wire.empty(), wire.empty()
        if (whole := transport.in_place(region, bucket)) is not None:
            wire.encode(whole, known.consensus, known.error, sent)
        else:
            packed = staging.take(bucket)
            transport.pack(region, bucket, packed, divisor=ensemble.rows)
            wire.encode(packed, known.consensus, known.error, sent)
            staging.give(packed)
        yield ensemble.exchange(received, sent)
        merged = torch.empty_like(sent[0])
        wire.merge(received, ensemble.processes, known.shard_error, merged)
        yield ensemble.collect(gathered, merged)
        return lambda: None  # the consensus is written when all buckets have arrived

    def state_dict(self, processes: int, *, copied: bool = True) -> dict[str, Any] | None:
        """Return consensus and errors, by bucket; None if there is no consensus.

        With ``copied=False`` they are the tensors in use, which the next average overwrites.
        """
        if self._memory is None:
            return None
        state: dict[str, Any] = {"format": self.format, "processes": processes}
        for name in ("consensus", "error", "shard_error"):
            tensors = [getattr(known, name) for known in self._memory]
            state[name] = [tensor.clone() for tensor in tensors] if copied else tensors
        return state

    def check_state_dict(self, state: dict[str, Any]) -> None:
        """Raise ValueError unless every bucket of ``state`` has a consensus and errors that belong together."""
        sizes = {name: [tensor.numel() for tensor in state[name]] for name in ("consensus", "error", "shard_error")}
        shards = [shard_elements(numel, state["processes"]) for numel in sizes["consensus"]]
        if sizes["error"] != sizes["consensus"] or sizes["shard_error"] != shards:
            raise ValueError(
                f"the checkpoint's hdet.compression has buckets of {sizes['consensus']} elements with errors of "
                f"{sizes['error']} and {sizes['shard_error']}: load an undamaged checkpoint"
            )

    def load_state_dict(
        self, state: dict[str, Any] | None, transport: Transport, regions: Sequence[Region], *, own: bool
    ) -> None:
        """Load the consensus, and the errors if they are still valid: if this process saved them (``own``).

        None, or a state of other tensors, makes the next average travel in full. Errors of another number of processes
        or of another format are dropped.
        """
        self._memory = None
        buckets = [bucket for _, bucket in transport.cut(regions)]
        sizes = [bucket.numel for bucket in buckets]
        if state is None or sizes != [consensus.numel() for consensus in state["consensus"]]:
            return
        same = own and (state["format"], state["processes"]) == (self.format, transport.ensemble.processes)
        memory = []
        saved = zip(buckets, state["consensus"], state["error"], state["shard_error"], strict=True)
        for bucket, consensus, error, shard_error in saved:
            known = self._without_errors(transport, consensus.to(bucket.device, bucket.dtype, copy=True))
            if same:
                known.error.copy_(error)
                known.shard_error.copy_(shard_error)
            memory.append(known)
        self._memory = memory

    def _without_errors(self, transport: Transport, consensus: Tensor) -> _BucketMemory:
        wire = self._wire(transport, consensus.numel(), consensus.device)
        return _BucketMemory(consensus, torch.zeros_like(consensus), consensus.new_zeros(wire.shard))

    def _wire(self, transport: Transport, numel: int, device: torch.device) -> Wire:
        key = (numel, device, transport)
        if key not in self._wires:
            self._wires[key] = Wire(self.format, numel, transport.ensemble.processes, device, backend=transport.backend)
        return self._wires[key]
