"""Average tensors over processes, bucket by bucket, with the collectives of ``torch.distributed``.

A bucket is packed into a staging buffer, all-reduced there, and unpacked; the next one is packed meanwhile. With a
backup the means stay in their buffers until all processes have confirmed that everything arrived. Only then is a
tensor written, so that a failure leaves all of them as they were, whatever a collective that hangs still writes.

Every process has the same bits afterwards, because all-reduce gives equal bits to all ranks: gloo and NCCL sum each
segment in one place and copy the result (``tests/converge/test_equal_bits.py`` checks it for gloo, whose all-reduce is
a ring). Division and rounding are the same on all processes. So no broadcast follows.
"""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hdet_kernels.buckets import Bucket, cut
from hdet_kernels.converge.attendance import Attendance
from hdet_kernels.converge.split_masters import Region, SplitRegion, outline
from hdet_kernels.converge.summary import Checksum
from hdet_kernels.ensemble import Collective, Ensemble, held
from hdet_kernels.ops.backends import resolve
from hdet_kernels.ops.pack import Pack
from hdet_kernels.tensors import Piece

# Transfers that run at the same time.
IN_FLIGHT = 2

# The most bytes of a bucket of CPU tensors. The collectives of two buckets overlap, and every bucket costs some Python:
# averaging 64 MB took each of two gloo ranks 61 ms of CPU time in buckets of 8 MiB, 57 in 16, 56 in 32 and in 64
# (medians of 60 in turns, on a machine that was busy otherwise).
CPU_BYTES = 32 * 2**20

# The mean size of pieces, in elements, from which torch copies them one by one.
LARGE = 4096

# Cached divisions into buckets, and packing tables. One sync needs fewer, unless a model is cut into very many buckets.
MOST_CACHED = 256

_dtype_of, _device_of = attrgetter("dtype"), attrgetter("device")

R = TypeVar("R", bound=Region)

#: Address of the first element, and number of elements.
Key = tuple[int, int]

#: Writes something that has arrived. May be called again, completely or after an interrupt, with the same result.
Write = Callable[[], None]

# The steps of one bucket: a generator that starts a collective, yields it, continues when it has finished, and returns
# the function that writes the result.
Transfer = Generator[Collective, None, Write]


@dataclass(frozen=True)
class Cost:
    """Bytes that this process passed to collectives, and the number of collectives."""

    bytes: int = 0
    collectives: int = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.bytes + other.bytes, self.collectives + other.collectives)


def gather_cost(ensemble: Ensemble, columns: int) -> Cost:
    """Return the cost of gathering rows of float64 numbers, in this process."""
    return Cost(8 * columns * ensemble.rows, 1 if ensemble.parts == 1 else 2) if ensemble.talks else Cost()


@dataclass(frozen=True)
class Mean:
    """How a mean over some replicas is computed: a sum over local rows, a collective and divisions.

    Attributes:
        included: which of the rows of this process take part.
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
        own, count = tuple(included[held(ensemble)].tolist()), int(included.sum())
        if rescaled:
            scale = 2.0 ** count.bit_length()
            return Mean(own, "sum", 1, count / scale, scale)
        if included.all() and ensemble.averages(device):
            return Mean(own, "mean", ensemble.rows, 1)
        return Mean(own, "sum", 1, count)


@dataclass
class Averaged:
    """The cost of an average, and by number of the bucket Σ x² over its measured means, as soon as they are written."""

    cost: Cost
    squares: dict[int, Tensor | float]

    @property
    def norm(self) -> float:
        """The norm of the measured means."""
        return math.sqrt(sum(float(self.squares[number]) for number in sorted(self.squares)))


@dataclass
class Staged:
    """Copies of buckets in staging buffers, by address and length of what was copied, and their norm, [1]."""

    buffers: dict[Key, Tensor]
    norm: Tensor


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
        self.staging = Staging()
        self._packs: dict[object, Pack] = {}
        self._cuts: dict[object, list[Bucket]] = {}

    def checksum_of_one(self, tensors: Sequence[Tensor], device: torch.device) -> Tensor:
        """Return the checksum of 1-D tensors that exist once, however many replicas this process holds."""
        return self._checksum_of_one(tensors, device)[0]

    def average(
        self,
        regions: Sequence[Region],
        included: NDArray[np.bool_],
        *,
        rescaled: bool = False,
        measured: int = 0,
        writes: list[Write] | None = None,
        staged: Staged | None = None,
    ) -> Averaged:
        """Replace every tensor by its mean over the ``included`` replicas, [replicas]. Collective.

        Args:
            regions: the tensors.
            included: the replicas that enter the mean. The others receive it too.
            rescaled: whether to scale the values down before they are summed, in one more pass: the mean of finite
                values is finite then even where their sum is not.
            measured: the number of tensors, counted from the first, of whose means the squares are summed.
            writes: if given, nothing is written: the functions that do so are appended, for :meth:`write`.
            staged: what :meth:`stage` has copied since the tensors last changed.
        """
        averaged = Averaged(Cost(), {})
        if self.ensemble.size == 1 and not self.ensemble.talks:
            return averaged
        if staged is None:
            self._leave_lent()
        copies = {} if staged is None else staged.buffers
        deferred = writes is not None
        transfers = self._transfers(regions, included, rescaled, measured, copies, averaged.squares, deferred=deferred)
        cost = run_transfers(transfers, writes)
        for unused in copies.values():
            self.staging.give(unused)
        if not deferred:
            self.staging = Staging()
        averaged.cost = cost if self.ensemble.talks else Cost()
        return averaged

    def stage(self, regions: Sequence[Region], *, copied: bool = True) -> Staged | None:
        """Copy the buckets of ``regions`` to staging buffers and take the norm of all in the same pass.

        Without a copy the norm is taken by the same pass from each tensor to itself, so that it has the same bits.

        Returns:
            None where that would not be one pass: of small tensors, of those that have to be converted or joined, of
            float64, whose squares may overflow, and without the extension.
        """
        self._leave_lent()
        buffers: dict[Key, Tensor] = {}
        squares = 0.0
        for region in regions:
            for bucket in self._cut(region, self._limit(region)):
                pieces = self._measurable(region, bucket)
                if pieces is None or bucket.dtype == torch.float64:
                    for buffer in buffers.values():
                        self.staging.give(buffer)
                    return None
                pairs: Iterable[tuple[Tensor, Tensor]] = zip(pieces, pieces, strict=True)
                if copied:
                    buffers[_key(pieces)] = buffer = self.staging.take(bucket)
                    pairs = _spans(pieces, buffer)
                squares += sum(self._divide(piece, 1, out) for piece, out in pairs)
        return Staged(buffers, torch.tensor([squares], dtype=torch.float64, device="cpu").sqrt())

    def _leave_lent(self) -> None:
        """Leave the staging buffers to an average that failed: something may still be written to them."""
        if self.staging.lent:
            self.staging = Staging()

    def write(self, writes: Sequence[Write]) -> None:
        """Write everything that has arrived, even if that is interrupted; then the interrupt is raised.

        The staging buffers of CPU tensors are kept for the next average: to get as much memory from the operating
        system can take longer than the average itself.
        """
        missing = list(writes)
        try:
            while missing:
                missing[-1]()
                missing.pop()
        except BaseException:
            for write in missing:
                write()
            raise
        for write in writes:
            if isinstance(write, _Unpack) and write.packed.is_cpu:
                self.staging.give(write.packed)

    def _transfers(
        self,
        regions: Sequence[Region],
        included: NDArray[np.bool_],
        rescaled: bool,
        measured: int,
        copies: dict[Key, Tensor],
        squares: dict[int, Tensor | float],
        *,
        deferred: bool,
    ) -> Iterator[tuple[Transfer, int]]:
        """Yield the transfer of every bucket, and its bytes. ``copies`` that are used are taken out."""
        number = 0
        for region in regions:
            for bucket in self._cut(region, self._limit(region)):
                mean = Mean.over(included, self.ensemble, bucket.device, rescaled=rescaled)
                # The measured elements are the first ones of a bucket.
                length = sum(piece.stop - piece.start for piece in bucket.pieces if piece.index < measured)
                place = _Place(self, region, bucket, length, number, squares)
                yield self._transfer(place, mean, copies, deferred=deferred), bucket.nbytes
                number += 1
            measured -= len(outline(region))

    def _transfer(self, place: _Place, mean: Mean, copies: dict[Key, Tensor], *, deferred: bool) -> Transfer:
        region, bucket, scaled = place.region, place.bucket, mean.scale != 1
        pieces = self._measurable(region, bucket) if copies else None
        copy = None if pieces is None else copies.pop(_key(pieces), None)
        whole = None if deferred or scaled or not mean.included[0] else self.in_place(region, bucket)
        values = whole if whole is not None else self.staging.take(bucket) if copy is None else copy
        if scaled:
            pack_scaled(region, bucket, mean, values)
        elif whole is None and (copy is None or not mean.included[0]):
            self.pack(region, bucket, values, mean.included, mean.before)
        yield self.ensemble.all_reduce(values, mean.operation)
        divisor = mean.after
        if scaled:
            divide_within_range(values, divisor)
            divisor = 1
        arrived = _Unpack(place, values, divisor)
        if deferred:
            return arrived
        arrived()
        if whole is None:
            self.staging.give(values)
        return _nothing

    def _measurable(self, region: Region, bucket: Bucket) -> list[Tensor] | None:
        """Return the pieces of a bucket as views, if they can be copied, divided and measured in one pass."""
        if bucket.device.type != "cpu" or resolve(bucket.device, self.backend) != "cpp":
            return None
        if (whole := self.in_place(region, bucket)) is not None:
            return None if whole.is_inference() else [whole]
        return None if isinstance(region, SplitRegion) else self._large_pieces(region, bucket)

    def _divide(self, values: Tensor, divisor: float, out: Tensor) -> float:
        """Write ``values`` / ``divisor`` to ``out`` and return the sum of its squares, in one pass."""
        squares: float = torch.ops.hdet_kernels.divide(values, divisor, out)
        torch.autograd.graph.increment_version([out])  # as after any write in place
        return squares

    def _limit(self, region: Region) -> int:
        on_cpu = all(tensor.is_cpu for tensor in outline(region))
        return min(self.bucket_bytes, CPU_BYTES) if on_cpu else self.bucket_bytes

    def _cut(self, region: Region, bucket_bytes: int) -> list[Bucket]:
        tensors = outline(region)
        key = (bucket_bytes, *map(Tensor.numel, tensors), *map(_dtype_of, tensors), *map(_device_of, tensors))
        if key not in self._cuts:
            if len(self._cuts) == MOST_CACHED:
                self._cuts.clear()
                self._packs.clear()  # most are found by their bucket
            self._cuts[key] = cut(
                tensors if self.ensemble.rows == 1 else [tensor[0] for tensor in tensors], bucket_bytes
            )
        return self._cuts[key]

    def cut(self, regions: Sequence[R], bucket_bytes: int | None = None) -> Iterator[tuple[R, Bucket]]:
        """Yield every bucket with the region that it is cut from. ``bucket_bytes`` defaults to the transport's."""
        for region in regions:
            for bucket in self._cut(region, self.bucket_bytes if bucket_bytes is None else bucket_bytes):
                yield region, bucket

    def in_place(self, region: Region, bucket: Bucket) -> Tensor | None:
        """Return the bucket as a view of the tensor's own memory; None if it has to be packed or joined."""
        first = bucket.pieces[0]
        if len(bucket.pieces) > 1 or self.ensemble.rows > 1 or isinstance(region, SplitRegion):
            return None
        tensor = region[first.index]
        return tensor[first.start : first.stop] if tensor.dtype == bucket.dtype else None

    def pack(
        self, region: Region, bucket: Bucket, out: Tensor, included: Sequence[bool] | None = None, divisor: float = 1.0
    ) -> None:
        """Write the sum of the bucket over the ``included`` rows, divided, to ``out``. Other rows are not read."""
        if isinstance(region, SplitRegion):
            if self.ensemble.rows == 1 and (included is None or included[0]):
                divide(region.read(bucket, out), divisor, out)
                return
            region, bucket = [region.read(bucket)], replace(bucket, pieces=(Piece(0, 0, bucket.numel),))
        if included is not None and not any(included):
            out.zero_()
        elif (pieces := self._large_pieces(region, bucket)) is not None:
            for piece, span in _spans(pieces, out):
                divide(piece, divisor, span)
        else:
            packer, tensors = self._packer(region, bucket)
            packer.pack(tensors, out, included, divisor)

    def unpack(self, region: Region, bucket: Bucket, values: Tensor, divisor: float = 1.0) -> None:
        """Set the bucket to ``values``, 1-D, divided, in all rows."""
        if isinstance(region, SplitRegion):
            region.write(values if divisor == 1 else divide(values, divisor, torch.empty_like(values)), bucket)
        elif (pieces := self._large_pieces(region, bucket)) is not None:
            for piece, span in _spans(pieces, values):
                divide(span, divisor, piece)
        else:
            packer, tensors = self._packer(region, bucket)
            packer.unpack(tensors, values, divisor)

    def first_row(self, region: Region, bucket: Bucket, out: Tensor | None = None) -> Tensor:
        """Return a copy of the bucket of the first replica in this process, written to ``out`` if given."""
        out = torch.empty(bucket.numel, dtype=bucket.dtype, device=bucket.device) if out is None else out
        if isinstance(region, SplitRegion):
            return region.read_first(bucket, out)
        self.pack(region, bucket, out, [True] + [False] * (self.ensemble.rows - 1))
        return out

    def _large_pieces(self, region: Sequence[Tensor], bucket: Bucket) -> list[Tensor] | None:
        """Return the pieces of a bucket as views, if torch's own copies of CPU tensors are faster than a packing table.

        They are if the pieces are large: 64 MB took 4 ms, with the table of the extension 10 to 12.
        """
        several = self.ensemble.rows > 1 or bucket.numel < LARGE * len(bucket.pieces)
        if several or bucket.device.type != "cpu":
            return None
        pieces = [region[piece.index][piece.start : piece.stop] for piece in bucket.pieces]
        plain = all(piece.dtype == bucket.dtype and not piece.is_inference() for piece in pieces)
        return pieces if plain else None

    def _packer(self, region: Sequence[Tensor], bucket: Bucket) -> tuple[Pack, list[Tensor]]:
        """Return the packer of a bucket and the tensors that it takes. Cached, because buckets recur at every sync."""
        rows, first, last = self.ensemble.rows, bucket.pieces[0], bucket.pieces[-1]
        tensors = list(region[first.index : last.index + 1])
        if len(tensors) == 1 and rows == 1:
            tensors = [tensors[0][first.start : first.stop]]
        whole = len(tensors) == 1 and tensors[0].numel() == rows * bucket.numel  # those of equal size share a packer
        key = (bucket.device, bucket.dtype, bucket.numel) if whole else bucket
        if key not in self._packs:
            if len(self._packs) == MOST_CACHED:
                self._packs.clear()
            pieces = [Piece(piece.index - first.index, piece.start, piece.stop) for piece in bucket.pieces]
            self._packs[key] = Pack(
                [tensor.numel() // rows for tensor in tensors],
                [Piece(0, 0, bucket.numel)] if whole else pieces,
                *(bucket.device, bucket.dtype),
                rows=rows,
                backend=self.backend,
            )
        return self._packs[key], tensors


class Staging:
    """A pool of staging buffers."""

    def __init__(self) -> None:
        self._free: list[Tensor] = []
        self._lent: dict[int, Tensor] = {}  # by address, because what is lent may be a part

    def take(self, bucket: Bucket) -> Tensor:
        """Return a buffer of the bucket's size, dtype and device, for one transfer to use."""
        fits = (each for each in self._free if (each.device, each.dtype) == (bucket.device, bucket.dtype))
        buffer = next((each for each in fits if each.numel() >= bucket.numel), None)
        if buffer is None:
            with torch.inference_mode(False):  # a buffer made in inference mode could not be written outside of it
                buffer = torch.empty(bucket.numel, dtype=bucket.dtype, device=bucket.device)
        self._free = [each for each in self._free if each is not buffer]
        self._lent[buffer.data_ptr()] = buffer
        return buffer[: bucket.numel]

    @property
    def lent(self) -> bool:
        """Whether a buffer is in use."""
        return bool(self._lent)

    def give(self, buffer: Tensor) -> None:
        """Take back a buffer that is not in use any more."""
        self._free.append(self._lent.pop(buffer.data_ptr()))


@dataclass(frozen=True)
class _Place:
    """The place of a bucket: the tensors that it is of, and where the squares of its first ``length`` means go."""

    transport: Transport
    region: Region
    bucket: Bucket
    length: int
    number: int
    squares: dict[int, Tensor | float]


@dataclass(frozen=True)
class _Unpack:
    """Write the sum of a bucket, divided, to its tensors. What is measured has the same bits with a backup as without.

    The sum may lie in the tensor itself, and then this may be called once only.
    """

    place: _Place
    packed: Tensor
    divisor: float

    def __call__(self) -> None:
        place, packed, divisor = self.place, self.packed, self.divisor
        transport, region, bucket, length = place.transport, place.region, place.bucket, place.length
        pieces = transport._measurable(region, bucket) if length == bucket.numel else None
        if pieces is not None:
            each = (transport._divide(span, divisor, piece) for piece, span in _spans(pieces, packed))
            place.squares[place.number] = sum(each)
            return
        if length:
            norm = transport.checksum_of_one([packed[:length]], packed.device)
            place.squares[place.number] = (norm / divisor) ** 2
        whole = transport.in_place(region, bucket)
        if whole is not None and whole.data_ptr() == packed.data_ptr():
            divide(whole, divisor, whole)
        else:
            transport.unpack(region, bucket, packed, divisor)


def _key(pieces: Sequence[Tensor]) -> Key:
    return pieces[0].data_ptr(), sum(piece.numel() for piece in pieces)


def _spans(pieces: Sequence[Tensor], values: Tensor) -> Iterable[tuple[Tensor, Tensor]]:
    """Return each piece with its span of ``values``."""
    return zip(pieces, values.split([piece.numel() for piece in pieces]), strict=True)


def divide(values: Tensor, divisor: float, out: Tensor) -> Tensor:
    """Write ``values`` / ``divisor`` to ``out`` and return it.

    A product has the same bits where the divisor is a power of two.
    """
    if divisor == 1:
        return out.copy_(values)
    if math.frexp(divisor)[0] == 0.5:
        return torch.mul(values, 1 / divisor, out=out)
    # By a tensor: on a GPU torch multiplies with the reciprocal of a number, and the kernels of ops divide.
    return torch.div(values, torch.full((), divisor, dtype=values.dtype, device=values.device), out=out)


def pack_scaled(region: Region, bucket: Bucket, mean: Mean, packed: Tensor) -> None:
    """Pack the sum of the included rows, each divided by the scale first. In plain torch: it is hardly ever needed."""
    packed.zero_()
    spans = packed.split([piece.stop - piece.start for piece in bucket.pieces])
    for piece, span in zip(bucket.pieces, spans, strict=True):
        if isinstance(region, SplitRegion):
            rows = region.read(bucket).view(len(mean.included), -1)
        else:
            rows = region[piece.index].view(len(mean.included), -1)[:, piece.start : piece.stop]
        for row, taken in zip(rows, mean.included, strict=True):
            if taken:
                span.add_(row.to(packed.dtype) / mean.scale)


def divide_within_range(values: Tensor, divisor: float) -> None:
    """Divide, and where finite values become infinite by rounding, take the largest finite ones."""
    finite, most = values.isfinite(), torch.finfo(values.dtype).max
    divide(values, divisor, values)
    values.copy_(torch.where(finite, values.clamp(-most, most), values))


def _nothing() -> None:
    """Write nothing: it is written already."""


def run_transfers(transfers: Iterable[tuple[Transfer, int]], writes: list[Write] | None = None) -> Cost:
    """Run all transfers, at most ``IN_FLIGHT`` at a time.

    If one fails, the others that were started are waited for, so that nothing writes to their tensors any more. Then
    the error is raised.

    Args:
        transfers: every transfer with its bytes.
        writes: if given, what has arrived is not written: the functions that do so are appended.
    """
    active: deque[tuple[Transfer, Collective]] = deque()
    size = collectives = 0

    def advance(transfer: Transfer) -> int:
        """Run a transfer to its next collective, and return how many were started: one, or none at its end."""
        try:
            active.append((transfer, next(transfer)))
        except StopIteration as end:
            if writes is None:
                end.value()
            else:
                writes.append(end.value)
            return 0
        return 1

    def finish_oldest() -> int:
        transfer, work = active.popleft()
        work.wait()
        return advance(transfer)

    try:
        for transfer, nbytes in transfers:
            while len(active) == IN_FLIGHT:
                collectives += finish_oldest()
            collectives += advance(transfer)
            size += nbytes
        while active:
            collectives += finish_oldest()
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

    def write() -> None:
        received = packed.split([part.numel() for part in parts])
        for tensor, part in zip(integers, received, strict=True):
            values = part.to(tensor.device).clone().view(tensor.dtype)  # a clone starts at an aligned address
            tensor.copy_((values.expand(rows, -1) if rows > 1 else values).reshape(tensor.shape))

    def transfer() -> Transfer:
        yield ensemble.broadcast(packed, first)
        return write

    return transfer(), packed.nbytes


def take_largest(
    ensemble: Ensemble, counts: Tensor, included: NDArray[np.bool_], device: torch.device
) -> tuple[Transfer, int]:
    """Return the transfer, and its bytes, that sets step counts to the largest of any included replica.

    The counts travel on ``device``.
    """
    here = bool(included[held(ensemble)].any())
    sent = (counts if here else torch.full_like(counts, -torch.inf)).to(device, copy=True)

    def write() -> None:
        counts.copy_(sent)

    def transfer() -> Transfer:
        yield ensemble.all_reduce(sent, "max")
        return write

    return transfer(), sent.nbytes
