"""Average tensors over processes, bucket by bucket: one bucket is packed while another is in a collective."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hdet_kernels.buckets import Bucket, Piece, cut
from hdet_kernels.converge.attendance import Attendance
from hdet_kernels.converge.split_region import Region, SplitRegion
from hdet_kernels.converge.summary import Checksum
from hdet_kernels.ensemble import Collective, Ensemble, held
from hdet_kernels.ops.pack import Pack

# Transfers that run at the same time, and so the number of staging buffers that exist at the same time.
IN_FLIGHT = 2

# Cached packing tables. One sync needs fewer, unless the model is cut into very many buckets.
MOST_PACKS = 256

# Groups of tensors. Tensors of one region may share a bucket.
Regions = Sequence[Sequence[Tensor]]

R = TypeVar("R", bound=Region)

# The steps of one bucket: a generator that starts a collective, yields it, and continues when it has finished.
Transfer = Generator[Collective, None, None]


@dataclass(frozen=True)
class Cost:
    """Bytes that this process passed to collectives, and the number of collectives."""

    bytes: int = 0
    collectives: int = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.bytes + other.bytes, self.collectives + other.collectives)


@dataclass(frozen=True)
class Mean:
    """How a mean over some replicas is computed: a sum over local rows, a collective and divisions.

    Attributes:
        included: which of the rows held here take part.
        operation: the collective, ``"mean"`` or ``"sum"``.
        before: divisor of the sum over local rows, before the collective.
        after: divisor after the collective.
        scale: divisor of every value before anything is summed. A power of two, so that it rounds nothing but numbers
            below 2⁻¹²⁶·scale.
    """

    included: tuple[bool, ...]
    operation: str
    before: float
    after: float
    scale: float = 1.0

    @staticmethod
    def over(included: NDArray[np.bool_], ensemble: Ensemble, device: torch.device, *, rescaled: bool = False) -> Mean:
        """Return how to average over the ``included`` replicas, [replicas], on ``device``.

        ``rescaled``: the sum might overflow where the mean does not, so the values are scaled down first.
        """
        own = tuple(included[held(ensemble)].tolist())
        if rescaled:
            count = int(included.sum())
            scale = 2.0 ** count.bit_length()
            return Mean(own, "sum", 1, count / scale, scale)
        if included.all() and ensemble.averages(device):
            return Mean(own, "mean", ensemble.rows, 1)
        return Mean(own, "sum", 1, int(included.sum()))


class Staging:
    """A pool of staging buffers, reused from bucket to bucket: as many as transfers run at a time."""

    def __init__(self) -> None:
        self._free: list[Tensor] = []

    @contextlib.contextmanager
    def buffer(self, bucket: Bucket) -> Iterator[Tensor]:
        """Lend a buffer of the bucket's size, dtype and device."""
        fitting = (b for b in self._free if (b.device, b.dtype) == (bucket.device, bucket.dtype))
        found = next((b for b in fitting if b.numel() >= bucket.numel), None)
        if found is None:
            found = torch.empty(bucket.numel, dtype=bucket.dtype, device=bucket.device)
        else:
            self._free = [b for b in self._free if b is not found]
        yield found[: bucket.numel]
        self._free.append(found)


class Transport:
    """Averages flat tensors, 1-D or [rows, n] where this process holds several replicas, over an ensemble.

    Args:
        ensemble: the replicas and their collectives.
        bucket_bytes: the most that one collective carries.
        backend: of the packing kernels; see :func:`hdet_kernels.use_backend`.
    """

    def __init__(self, ensemble: Ensemble, bucket_bytes: int, backend: str | None) -> None:
        self.ensemble, self.bucket_bytes, self.backend = ensemble, bucket_bytes, backend
        self.checksum = Checksum(ensemble.rows, backend)
        self._checksum_of_one = Checksum(1, backend)
        self.attendance = Attendance(ensemble)
        self._packs: dict[object, Pack] = {}

    def checksum_of_one(self, tensors: Sequence[Tensor], device: torch.device) -> Tensor:
        """Return the checksum of 1-D tensors that exist once, however many replicas this process holds."""
        return self._checksum_of_one(tensors, device)[0]

    def average(self, regions: Regions, included: NDArray[np.bool_], *, rescaled: bool = False) -> Cost:
        """Replace every tensor by its mean over the ``included`` replicas, [replicas]. Collective.

        With ``rescaled`` the mean of finite values is finite even where their sum is not; it takes one more pass.
        """
        if self.ensemble.size == 1 and not self.ensemble.talks:
            return Cost()
        cost = run_transfers(self._transfers(regions, included, rescaled))
        return cost if self.ensemble.talks else Cost()

    def _transfers(
        self, regions: Regions, included: NDArray[np.bool_], rescaled: bool
    ) -> Iterable[tuple[Transfer, int]]:
        """Yield the transfer of every bucket, and its bytes."""
        staging = Staging()
        for region, bucket in self.cut(regions):
            mean = Mean.over(included, self.ensemble, bucket.device, rescaled=rescaled)
            whole = self.in_place(region, bucket)
            if whole is None:
                yield self._staged(region, bucket, mean, staging), bucket.nbytes
            else:
                yield self._in_place(whole, mean), bucket.nbytes

    def _in_place(self, tensor: Tensor, mean: Mean) -> Transfer:
        if not mean.included[0]:
            tensor.zero_()  # multiplying by zero would keep NaN and infinity
        if mean.scale != 1:
            tensor.div_(mean.scale)
        yield self.ensemble.all_reduce(tensor, mean.operation)
        if mean.scale != 1:
            divide_within_range(tensor, mean.after)
        elif mean.after != 1:
            tensor.div_(mean.after)

    def _staged(self, region: Sequence[Tensor], bucket: Bucket, mean: Mean, staging: Staging) -> Transfer:
        packer, tensors = self.packer(region, bucket)
        with staging.buffer(bucket) as packed:
            if mean.scale == 1:
                packer.pack(tensors, packed, mean.included, mean.before)
            else:
                pack_scaled(region, bucket, mean, packed)
            yield self.ensemble.all_reduce(packed, mean.operation)
            if mean.scale == 1:
                packer.unpack(tensors, packed, mean.after)
            else:
                divide_within_range(packed, mean.after)
                packer.unpack(tensors, packed)

    def cut(self, regions: Sequence[R], bucket_bytes: int | None = None) -> Iterator[tuple[R, Bucket]]:
        """Yield every bucket with the region that it is cut from. ``bucket_bytes`` defaults to the transport's."""
        for region in regions:
            tensors = [region.param] if isinstance(region, SplitRegion) else region
            one_row = tensors if self.ensemble.rows == 1 else [tensor[0] for tensor in tensors]
            for bucket in cut(one_row, self.bucket_bytes if bucket_bytes is None else bucket_bytes):
                yield region, bucket

    def first_row(self, region: Region, bucket: Bucket, out: Tensor | None = None) -> Tensor:
        """Return a copy of the bucket of the first replica held here, written to ``out`` if given."""
        out = torch.empty(bucket.numel, dtype=bucket.dtype, device=bucket.device) if out is None else out
        if isinstance(region, SplitRegion):
            return region.first(bucket, out)
        packer, tensors = self.packer(region, bucket)
        packer.pack(tensors, out, [True] + [False] * (self.ensemble.rows - 1))
        return out

    def mean_of_rows(self, region: Region, bucket: Bucket, out: Tensor) -> None:
        """Write the mean of the bucket over the replicas held here to ``out``."""
        if isinstance(region, SplitRegion):
            if self.ensemble.rows == 1:
                region.joined(bucket, out)
                return
            region, bucket = [region.joined(bucket)], replace(bucket, pieces=(Piece(0, 0, bucket.numel),))
        packer, tensors = self.packer(region, bucket)
        packer.pack(tensors, out, divisor=self.ensemble.rows)

    def write(self, region: Region, bucket: Bucket, values: Tensor) -> None:
        """Set the bucket to ``values``, 1-D, in all replicas held here."""
        if isinstance(region, SplitRegion):
            region.write(bucket, values)
            return
        packer, tensors = self.packer(region, bucket)
        packer.unpack(tensors, values)

    def in_place(self, region: Region, bucket: Bucket) -> Tensor | None:
        """Return the bucket as a view of the tensor's own memory; None if it has to be packed or joined."""
        first = bucket.pieces[0]
        if len(bucket.pieces) > 1 or self.ensemble.rows > 1:
            return None
        if isinstance(region, SplitRegion):
            return region.kept_of(bucket)
        if region[first.index].dtype != bucket.dtype:
            return None
        return region[first.index][first.start : first.stop]

    def packer(self, region: Sequence[Tensor], bucket: Bucket) -> tuple[Pack, list[Tensor]]:
        """Return the packer of a bucket and the tensors that it takes. Cached, because layouts recur at every sync."""
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


def pack_scaled(region: Sequence[Tensor], bucket: Bucket, mean: Mean, packed: Tensor) -> None:
    """Pack the sum of the included rows, each divided by the scale first. In plain torch: it is hardly ever needed."""
    packed.zero_()
    spans = packed.split([piece.stop - piece.start for piece in bucket.pieces])
    for piece, span in zip(bucket.pieces, spans, strict=True):
        rows = region[piece.index].view(len(mean.included), -1)
        for row, taken in zip(rows, mean.included, strict=True):
            if taken:
                span.add_(row[piece.start : piece.stop].to(packed.dtype) / mean.scale)


def divide_within_range(values: Tensor, divisor: float) -> None:
    """Divide, and where finite values become infinite by rounding, take the largest finite ones."""
    finite, most = values.isfinite(), torch.finfo(values.dtype).max
    values.div_(divisor)
    values.copy_(torch.where(finite, values.clamp(-most, most), values))


def run_transfers(transfers: Iterable[tuple[Transfer, int]], in_flight: int = IN_FLIGHT) -> Cost:
    """Run all transfers, at most ``in_flight`` at a time.

    If one fails, the others that were started are waited for, so that nothing writes to their tensors any more. Then
    the error is raised.

    Args:
        transfers: every transfer with its bytes.
        in_flight: how many run at the same time.
    """
    active: deque[tuple[Transfer, Collective]] = deque()
    size = collectives = 0

    def advance() -> int:
        """Finish the oldest collective, start the next one of its transfer, and return how many were started."""
        transfer, work = active.popleft()
        work.wait()
        following = next(transfer, None)
        if following is None:
            return 0
        active.append((transfer, following))
        return 1

    try:
        for transfer, nbytes in transfers:
            while len(active) == in_flight:
                collectives += advance()
            active.append((transfer, next(transfer)))
            size, collectives = size + nbytes, collectives + 1
        while active:
            collectives += advance()
    except BaseException:
        for transfer, work in active:
            with contextlib.suppress(Exception):
                work.wait()
            transfer.close()
        raise
    return Cost(size, collectives)


def take_first(ensemble: Ensemble, integers: Sequence[Tensor], included: NDArray[np.bool_]) -> tuple[Transfer, int]:
    """Return the transfer, and its bytes, that sets integer tensors to those of the first included replica."""
    first = int(np.flatnonzero(included)[0])
    rows, row = ensemble.rows, max(first - ensemble.replica, 0) % ensemble.rows
    # As bytes, because no backend supports every integer dtype.
    own = [tensor.reshape(rows, -1)[row] if rows > 1 else tensor.reshape(-1) for tensor in integers]
    parts = [tensor.view(torch.uint8) for tensor in own]
    packed = torch.cat([part.to(integers[0].device) for part in parts])

    def transfer() -> Transfer:
        yield ensemble.broadcast(packed, first)
        received = packed.split([part.numel() for part in parts])
        for tensor, part in zip(integers, received, strict=True):
            values = part.to(tensor.device).clone().view(tensor.dtype)  # a clone starts at an aligned address
            tensor.copy_((values.expand(rows, -1) if rows > 1 else values).reshape(tensor.shape))

    return transfer(), packed.nbytes


def take_largest(
    ensemble: Ensemble, counts: Tensor, included: NDArray[np.bool_], device: torch.device
) -> tuple[Transfer, int]:
    """Return the transfer, and its bytes, that sets step counts to the largest of any included replica.

    The counts travel on ``device``.
    """
    here = bool(included[held(ensemble)].any())
    sent = (counts if here else torch.full_like(counts, -torch.inf)).to(device)

    def transfer() -> Transfer:
        yield ensemble.all_reduce(sent, "max")
        counts.copy_(sent)

    return transfer(), sent.nbytes
