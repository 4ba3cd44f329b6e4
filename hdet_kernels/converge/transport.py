"""How tensors travel: bucket by bucket, one being packed or unpacked while another is on its way."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hdet_kernels.buckets import Bucket, cut
from hdet_kernels.converge.payload import Checksum
from hdet_kernels.ensemble import Collective, Ensemble, held
from hdet_kernels.ops.pack import Pack

#: Buckets on their way at the same time, and so the staging buffers that exist at the same time.
IN_FLIGHT = 2

#: Layouts whose tables are kept: those of one sync, unless a model is cut into very many buckets.
MOST_PACKS = 256

#: Tensors of one region may share a bucket.
Regions = Sequence[Sequence[Tensor]]

#: The steps of one bucket: it starts a collective, yields it, and goes on when that has arrived.
Journey = Generator[Collective, None, None]


@dataclass(frozen=True)
class Cost:
    """Payload of the collectives as this process handed it to them, and how many there were."""

    bytes: int = 0
    collectives: int = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.bytes + other.bytes, self.collectives + other.collectives)


@dataclass(frozen=True)
class Mean:
    """How the mean over some replicas is made of a local sum, a collective and a division.

    included: which of the rows held here take part. before, after: what is divided by before and after the collective.
    """

    included: tuple[bool, ...]
    operation: str
    before: float
    after: float

    @staticmethod
    def over(included: NDArray[np.bool_], ensemble: Ensemble, device: torch.device) -> Mean:
        own = tuple(included[held(ensemble)].tolist())
        if included.all() and ensemble.averages(device):
            return Mean(own, "mean", ensemble.rows, 1)
        return Mean(own, "sum", 1, int(included.sum()))


class Staging:
    """Buffers that buckets travel in, used again and again: as many as are on their way at a time."""

    def __init__(self) -> None:
        self._free: list[Tensor] = []

    @contextlib.contextmanager
    def buffer(self, bucket: Bucket) -> Iterator[Tensor]:
        fitting = (b for b in self._free if (b.device, b.dtype) == (bucket.device, bucket.dtype))
        found = next((b for b in fitting if b.numel() >= bucket.numel), None)
        if found is None:
            found = torch.empty(bucket.numel, dtype=bucket.dtype, device=bucket.device)
        else:
            self._free = [b for b in self._free if b is not found]
        yield found[: bucket.numel]
        self._free.append(found)


class Courier:
    """Carries 1-D tensors ([rows, n] where this process holds several replicas) in buckets of ``bucket_bytes``."""

    def __init__(self, ensemble: Ensemble, bucket_bytes: int, backend: str | None) -> None:
        self.ensemble, self.bucket_bytes, self.backend = ensemble, bucket_bytes, backend
        self.checksum = Checksum(ensemble.rows, backend)
        self._checksum_of_one = Checksum(1, backend)
        self._packs: dict[object, Pack] = {}

    def checksum_of_one(self, tensors: Sequence[Tensor], device: torch.device) -> Tensor:
        """The checksum of what there is once, however many replicas this process holds."""
        return self._checksum_of_one(tensors, device)[0]

    def average(self, regions: Regions, included: NDArray[np.bool_]) -> Cost:
        """Replace every tensor by its mean over the included replicas."""
        if self.ensemble.size == 1 and not self.ensemble.talks:
            return Cost()
        cost = travel(self._journeys(regions, included))
        return cost if self.ensemble.talks else Cost()

    def _journeys(self, regions: Regions, included: NDArray[np.bool_]) -> Iterable[tuple[Journey, int]]:
        """The journey of every bucket, and its bytes."""
        staging = Staging()
        for region, bucket in self.places(regions):
            mean = Mean.over(included, self.ensemble, bucket.device)
            whole = self.in_place(region, bucket)
            if whole is None:
                yield self._staged(region, bucket, mean, staging), bucket.nbytes
            else:
                yield self._in_place(whole, mean), bucket.nbytes

    def places(self, regions: Regions, bucket_bytes: int | None = None) -> Iterator[tuple[Sequence[Tensor], Bucket]]:
        """Every bucket, with the region that it is cut from."""
        for region in regions:
            one = region if self.ensemble.rows == 1 else [tensor[0] for tensor in region]
            for bucket in cut(one, self.bucket_bytes if bucket_bytes is None else bucket_bytes):
                yield region, bucket

    def first(self, region: Sequence[Tensor], bucket: Bucket, flat: Tensor | None = None) -> Tensor:
        """A copy of the bucket, in ``flat`` if given, as the first replica here has it."""
        flat = torch.empty(bucket.numel, dtype=bucket.dtype, device=bucket.device) if flat is None else flat
        pack, tensors = self.pack_of(region, bucket)
        pack.pack(tensors, flat, [True] + [False] * (self.ensemble.rows - 1))
        return flat

    def in_place(self, region: Sequence[Tensor], bucket: Bucket) -> Tensor | None:
        """The bucket as it lies in memory, where it is one piece of what can travel as it is."""
        first = bucket.pieces[0]
        if len(bucket.pieces) > 1 or self.ensemble.rows > 1 or region[first.index].dtype != bucket.dtype:
            return None
        return region[first.index][first.start : first.stop]

    def pack_of(self, region: Sequence[Tensor], bucket: Bucket) -> tuple[Pack, list[Tensor]]:
        """The packer of a bucket, and the tensors that it takes. Layouts come back at every sync: tables are kept."""
        first, last = bucket.pieces[0].index, bucket.pieces[-1].index
        tensors = list(region[first : last + 1])
        key = (bucket, tuple((tensor.shape, tensor.dtype) for tensor in tensors))
        if key not in self._packs:
            if len(self._packs) == MOST_PACKS:
                self._packs.clear()
            pieces = [type(piece)(piece.index - first, piece.start, piece.stop) for piece in bucket.pieces]
            numels = [tensor.numel() // self.ensemble.rows for tensor in tensors]
            self._packs[key] = Pack(
                numels, pieces, bucket.device, bucket.dtype, rows=self.ensemble.rows, backend=self.backend
            )
        return self._packs[key], tensors

    def _in_place(self, tensor: Tensor, mean: Mean) -> Journey:
        if not mean.included[0]:
            tensor.zero_()  # not multiplied by zero: NaN and infinity would survive that
        yield self.ensemble.all_reduce(tensor, mean.operation)
        if mean.after != 1:
            tensor.div_(mean.after)

    def _staged(self, region: Sequence[Tensor], bucket: Bucket, mean: Mean, staging: Staging) -> Journey:
        pack, tensors = self.pack_of(region, bucket)
        with staging.buffer(bucket) as travelling:
            pack.pack(tensors, travelling, mean.included, mean.before)
            yield self.ensemble.all_reduce(travelling, mean.operation)
            pack.unpack(tensors, travelling, mean.after)


def travel(journeys: Iterable[tuple[Journey, int]]) -> Cost:
    """Bring all to their ends, with at most :data:`IN_FLIGHT` on their way. If one fails the others are waited for,
    so that nothing writes to their tensors any more, and then it raises."""
    active: deque[tuple[Journey, Collective]] = deque()
    size = collectives = 0

    def advance() -> int:
        journey, work = active.popleft()
        work.wait()
        following = next(journey, None)
        if following is None:
            return 0
        active.append((journey, following))
        return 1

    try:
        for journey, nbytes in journeys:
            while len(active) == IN_FLIGHT:
                collectives += advance()
            active.append((journey, next(journey)))
            size, collectives = size + nbytes, collectives + 1
        while active:
            collectives += advance()
    except BaseException:
        for journey, work in active:
            with contextlib.suppress(Exception):
                work.wait()
            journey.close()
        raise
    return Cost(size, collectives)


def take_first(ensemble: Ensemble, integers: Sequence[Tensor], included: NDArray[np.bool_]) -> tuple[Journey, int]:
    """Integer tensors, which have no mean, become those of the first included replica."""
    first = int(np.flatnonzero(included)[0])
    rows, row = ensemble.rows, max(first - ensemble.replica, 0) % ensemble.rows
    # As bytes: there are many kinds of integers, and no collective knows all of them.
    own = [tensor.reshape(rows, -1)[row] if rows > 1 else tensor.reshape(-1) for tensor in integers]
    parts = [tensor.view(torch.uint8) for tensor in own]
    travelling = torch.cat([part.to(integers[0].device) for part in parts])

    def journey() -> Journey:
        yield ensemble.broadcast(travelling, first)
        received = travelling.split([part.numel() for part in parts])
        for tensor, part in zip(integers, received, strict=True):
            values = part.to(tensor.device).clone().view(tensor.dtype)  # a clone begins at an aligned address
            tensor.copy_((values.expand(rows, -1) if rows > 1 else values).reshape(tensor.shape))

    return journey(), travelling.nbytes


def take_largest(
    ensemble: Ensemble, counts: Tensor, included: NDArray[np.bool_], device: torch.device
) -> tuple[Journey, int]:
    """Step counts become the largest of any included replica; they travel on ``device``."""
    here = bool(included[held(ensemble)].any())
    travelling = (counts if here else torch.full_like(counts, -torch.inf)).to(device)

    def journey() -> Journey:
        yield ensemble.all_reduce(travelling, "max")
        counts.copy_(travelling)

    return journey(), travelling.nbytes
