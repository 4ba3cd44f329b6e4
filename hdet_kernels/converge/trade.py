"""The average of CPU tensors over gloo, in two phases: the means arrive beside the tensors, and then all are written.

Of every bucket each process computes one shard of the mean. It receives this shard of all other processes, sums them in
the order of the processes, and sends the result to all. That is as many bytes as an all-reduce, but its input is only
read: a copy, which would be restored after a failure, is not needed. Every process receives the same bytes, so that all
agree bit for bit.

Only after all processes have confirmed that everything arrived is anything written. Two processes need no shards
(:mod:`.swap`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hdet_kernels.buckets import Bucket
from hdet_kernels.converge.distance import norm_of_mean
from hdet_kernels.converge.swap import Swap
from hdet_kernels.converge.transport import (
    Cost,
    Mean,
    Regions,
    Staging,
    Transfer,
    Transport,
    divide_within_range,
    pack_scaled,
    run_transfers,
)
from hdet_kernels.converge.two_phase import Room, confirm, write_all
from hdet_kernels.ensemble import Trading
from hdet_kernels.tensors import devices_of

# The most bytes of a bucket that has to be packed. Two of them are packed at a time, and stay in the last-level cache.
PACKED_BYTES = 16 * 2**20


class Trade:
    """Averages flat CPU tensors over the processes of a transport.

    Memory for the means, one copy of what is averaged, can be kept from one average to the next: to get it anew from
    the operating system can take longer than the average itself.

    Args:
        transport: the size of the buckets, and how these are packed.
        ensemble: that of the transport.
        keeps_memory: whether the memory is kept.

    """

    def __init__(self, transport: Transport, ensemble: Trading, *, keeps_memory: bool = True) -> None:
        self._norm, self._distance = math.nan, math.nan  # of the latest average; one of them is known
        self._transport, self._ensemble = transport, ensemble
        self._room, self._staging = Room(keeps=keeps_memory), Staging()
        one_each = ensemble.processes == transport.ensemble.size == 2
        self._swap = Swap(transport, ensemble, keeps_memory=keeps_memory) if one_each else None

    def fits(self, regions: Regions) -> bool:
        """Return whether all of these tensors can be averaged here. The same on all processes."""
        devices = set[torch.device]().union(*map(devices_of, regions))
        return self._ensemble.processes > 1 and all(map(self._ensemble.trades, devices))

    def average(
        self, regions: Regions, included: NDArray[np.bool_], *, rescaled: bool, measured: int
    ) -> tuple[Cost, Callable[[], None]]:
        """Exchange the means over the ``included`` replicas, [replicas]. Collective. Writes to none of the tensors.

        Args:
            regions, included, rescaled: see :meth:`.transport.Transport.average`.
            measured: the number of tensors, counted from the first, whose means :meth:`norm` is the norm of.

        Returns:
            The cost, in which a bucket counts as one collective, and a function that writes the means to the tensors.
            That takes no other process, and once begun it is completed even if it is interrupted.
        """
        if self._swap is not None and included.all() and not rescaled:
            return self._swapped(self._swap, regions, measured)
        transport = self._transport
        buckets: list[tuple[Sequence[Tensor], Bucket]] = []
        lengths = []  # of the part of each bucket that is measured, which is at its start
        for region in regions:
            for _, bucket in transport.cut([region], self._bucket_bytes(region)):
                buckets.append((region, bucket))
                lengths.append(sum(piece.stop - piece.start for piece in bucket.pieces if piece.index < measured))
            measured -= len(region)
        if not buckets:
            return Cost(), lambda: None
        mean = Mean.over(included, transport.ensemble, torch.device("cpu"), rescaled=rescaled)
        processes = self._ensemble.processes
        sizes = [-(-bucket.numel // processes) * processes for _, bucket in buckets]
        memory = self._room.take([(size, bucket.dtype) for size, (_, bucket) in zip(sizes, buckets, strict=True)])
        squares: list[Tensor] = []
        cost = run_transfers(self._transfers(buckets, memory, lengths, included, mean, squares))
        total = confirm(self._ensemble, math.fsum(map(float, squares)))
        self._room.keep(memory)

        divisor = mean.after if _divided_last(mean) else 1.0
        self._norm, self._distance = math.sqrt(total) / divisor, math.nan

        def write() -> None:
            write_all(
                [
                    partial(self._write, region, bucket, means[: bucket.numel], divisor)
                    for (region, bucket), means in zip(buckets, memory, strict=True)
                ]
            )

        return Cost(cost.bytes, len(buckets)), write

    def _swapped(self, swap: Swap, regions: Regions, measured: int) -> tuple[Cost, Callable[[], None]]:
        cost, write_means = swap.average(regions, measured=measured)

        def write() -> None:
            write_means()
            self._norm, self._distance = math.nan, swap.distance

        return cost, write

    def norm(self, norms: NDArray[np.float64]) -> float:
        """Return the norm of the means of the latest average, after they were written.

        Args:
            norms: those of the replicas before the average.
        """
        return self._norm if math.isnan(self._distance) else norm_of_mean(norms, self._distance)

    def _bucket_bytes(self, region: Sequence[Tensor]) -> int:
        limit = self._transport.bucket_bytes
        return limit if len(region) == 1 else min(limit, PACKED_BYTES)

    def _transfers(
        self,
        buckets: Sequence[tuple[Sequence[Tensor], Bucket]],
        memory: Sequence[Tensor],
        lengths: Sequence[int],
        included: NDArray[np.bool_],
        mean: Mean,
        squares: list[Tensor],
    ) -> Iterator[tuple[Transfer, int]]:
        """Yield the transfer of every bucket, and its bytes."""
        contributors = np.flatnonzero(included.reshape(self._ensemble.processes, -1).any(axis=1)).tolist()
        for (region, bucket), room, length in zip(buckets, memory, lengths, strict=True):

            def measure(means: Tensor, start: int, length: int = length) -> None:
                if start < length:
                    squares.append(self._transport.checksum_of_one([means[: length - start]], means.device) ** 2)

            # The scale divides what is sent, so that it has to be packed then.
            whole = self._transport.in_place(region, bucket) if mean.scale == 1 else None
            if whole is None:
                yield self._packed(region, bucket, mean, contributors, room, measure), bucket.nbytes
            else:
                yield self._rounds(whole, mean, contributors, room, measure), bucket.nbytes

    def _packed(
        self,
        region: Sequence[Tensor],
        bucket: Bucket,
        mean: Mean,
        contributors: Sequence[int],
        room: Tensor,
        measure: Callable[[Tensor, int], None],
    ) -> Transfer:
        with self._staging.buffer(bucket) as packed:
            if mean.scale == 1:
                packer, tensors = self._transport.packer(region, bucket)
                packer.pack(tensors, packed, mean.included)
            else:
                pack_scaled(region, bucket, mean, packed)
            yield from self._rounds(packed, mean, contributors, room, measure)

    def _rounds(
        self,
        own: Tensor,
        mean: Mean,
        contributors: Sequence[int],
        room: Tensor,
        measure: Callable[[Tensor, int], None],
    ) -> Transfer:
        """Exchange one bucket: every process receives what is added to its shard, then the means of all shards.

        Args:
            own: what this process adds to the mean.
            mean: how the mean is computed.
            contributors: the processes that add to it.
            room: memory for the mean, with places of equal size for the shards.
            measure: takes the means of the shard of this process, and where in the bucket they start.
        """
        ensemble = self._ensemble
        places = room.view(ensemble.processes, -1)
        sizes = _shard_sizes(own.numel(), ensemble.processes)
        size, here = sizes[ensemble.process], ensemble.process
        parts = own.split(sizes)
        # The means of the others arrive later. Until then their places hold what the others add to this shard.
        added = [place[:size] if process in contributors else None for process, place in enumerate(places)]
        yield ensemble.trade([part if here in contributors else None for part in parts], added)
        terms = [parts[here] if process == here else places[process][:size] for process in contributors]
        means = [place[:length] for place, length in zip(places, sizes, strict=True)]
        _sum_up(means[here], terms)
        if mean.scale != 1:
            divide_within_range(means[here], mean.after)
        elif not _divided_last(mean):
            means[here].div_(mean.after)
        measure(means[here], sum(sizes[:here]))
        yield ensemble.trade([means[here]] * ensemble.processes, means)

    def _write(self, region: Sequence[Tensor], bucket: Bucket, means: Tensor, divisor: float) -> None:
        whole = self._transport.in_place(region, bucket)
        if whole is None:
            packer, tensors = self._transport.packer(region, bucket)
            packer.unpack(tensors, means, divisor)
        elif divisor == 1:
            whole.copy_(means)
        else:
            torch.mul(means, 1 / divisor, out=whole)


def _shard_sizes(numel: int, processes: int) -> list[int]:
    """Return the elements of each process's shard: equally many, and fewer or none in the last ones."""
    size = -(-numel // processes)
    return [min(size, max(numel - size * process, 0)) for process in range(processes)]


def _sum_up(target: Tensor, terms: Sequence[Tensor]) -> None:
    """Set ``target`` to the sum of ``terms``, in their order."""
    if len(terms) == 1:
        target.copy_(terms[0])
    else:
        torch.add(terms[0], terms[1], out=target)
    for term in terms[2:]:
        target.add_(term)


def _divided_last(mean: Mean) -> bool:
    """Return whether the sum is divided when it is written instead of before it is sent.

    By a power of two: multiplication has the same result then, bit for bit, and takes no time beside the copying. A
    division does, and is left to the one process that has the shard.
    """
    return mean.scale == 1 and math.frexp(mean.after)[0] == 0.5
