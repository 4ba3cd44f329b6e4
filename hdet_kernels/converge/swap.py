"""The average of the CPU tensors of two processes over gloo: they swap their values, and then each writes the means.

Between two processes that is as many bytes as an all-reduce, in one round of messages. Large tensors are sent from
their own memory, wherever they lie. What arrives is added to the tensors only after both processes have confirmed that
everything arrived, in the same pass that writes and measures. Both add the same two numbers, so that they
agree bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter

from torch import Tensor

from hdet_kernels.buckets import Bucket
from hdet_kernels.converge.transport import Cost, Regions, Staging, Transfer, Transport, run_transfers
from hdet_kernels.converge.two_phase import Room, confirm, write_all
from hdet_kernels.ensemble import Trading
from hdet_kernels.ops.pack import Pack
from hdet_kernels.ops.pair_mean import PairMean
from hdet_kernels.tensors import Piece, travel_dtype

# The most bytes of a message from a tensor's own memory. Every message costs time in Python: an average of 64 MB took
# each of two processes of one machine 49 ms of CPU time in messages of 1 MiB, 44 ms of 4 MiB, 41 ms of 16 or 64 MiB.
MESSAGE_BYTES = 16 * 2**20

# The most bytes of a message that is packed: two of them are packed at a time, and stay in the cache.
PACKED_BYTES = 4 * 2**20

# The fewest bytes of a tensor that is sent from its own memory: a message has a cost of its own, a copy one by size. An
# estimate of where they are equal.
ALONE_BYTES = 2**18

# Messages from the memory of tensors that travel at the same time. Each packed message needs a staging buffer.
MOST_MESSAGES = 64

_dtype_of = attrgetter("dtype")


@dataclass(frozen=True)
class _Message:
    """A part of a bucket, from element ``start`` on. ``pack`` gathers it from ``tensors``, whose numbers are given.

    Without a pack it is one piece, which is sent from its own memory.
    """

    start: int
    part: Bucket
    tensors: slice
    pack: Pack | None


@dataclass(frozen=True)
class _Part:
    """One bucket of a region: the order in which it takes the region's tensors, its messages and its pack.

    The first ``measured`` elements belong to the measured tensors.
    """

    region: int
    order: tuple[int, ...]
    bucket: Bucket
    messages: tuple[_Message, ...]
    pack: Pack
    measured: int


class Swap:
    """Averages flat CPU tensors over two processes that hold one replica each.

    Args:
        transport: the size of the buckets, and how these are packed.
        ensemble: that of the transport.
        keeps_memory: whether the memory for what arrives, one copy of what is averaged, is kept.

    Attributes:
        distance: of the two replicas from each other, ‖θ₀ − θ₁‖, in the tensors that the latest average was to measure;
            NaN before the first one was written.
    """

    def __init__(self, transport: Transport, ensemble: Trading, *, keeps_memory: bool) -> None:
        self.distance = math.nan
        self._transport, self._ensemble = transport, ensemble
        self._room, self._staging = Room(keeps=keeps_memory), Staging()
        self._planned: tuple[object, list[_Part]] | None = None

    def average(self, regions: Regions, *, measured: int) -> tuple[Cost, Callable[[], None]]:
        """Exchange the values; see :meth:`.trade.Trade.average`. Writing the means sets :attr:`distance`."""
        parts = self._plan(regions, measured)
        if not parts:
            return Cost(), lambda: None
        tensors = [[regions[part.region][index] for index in part.order] for part in parts]
        memory = self._room.take([(part.pack.numel, part.bucket.dtype) for part in parts])
        run_transfers(self._transfers(parts, tensors, memory, packed=False), MOST_MESSAGES)
        run_transfers(self._transfers(parts, tensors, memory, packed=True))
        confirm(self._ensemble, 0.0)
        self._room.keep(memory)
        means = [
            PairMean(part.pack, own, received, part.measured)
            for part, own, received in zip(parts, tensors, memory, strict=True)
        ]

        def write() -> None:
            write_all([mean.write for mean in means])
            self.distance = math.sqrt(math.fsum(mean.squared_distance for mean in means))

        return Cost(sum(part.bucket.nbytes for part in parts), len(parts)), write

    def _transfers(
        self, parts: Sequence[_Part], tensors: Sequence[Sequence[Tensor]], memory: Sequence[Tensor], *, packed: bool
    ) -> Iterator[tuple[Transfer, int]]:
        """Yield the transfers, and their bytes, of all messages that are packed, or of all others."""
        for part, own, room in zip(parts, tensors, memory, strict=True):
            for message in part.messages:
                if packed == (message.pack is not None):
                    place = room[message.start : message.start + message.part.numel]
                    yield self._transfer(message, own, place), place.nbytes

    def _transfer(self, message: _Message, own: Sequence[Tensor], place: Tensor) -> Transfer:
        if message.pack is None:
            (piece,) = message.part.pieces
            yield self._ensemble.trade([own[piece.index][piece.start : piece.stop]] * 2, [place] * 2)
            return
        with self._staging.buffer(message.part) as packed:
            message.pack.pack(own[message.tensors], packed)
            yield self._ensemble.trade([packed] * 2, [place] * 2)

    def _plan(self, regions: Regions, measured: int) -> list[_Part]:
        """Divide the tensors into buckets and messages; kept, because the same tensors come at every sync."""
        shapes = [(tuple(map(Tensor.numel, region)), tuple(map(_dtype_of, region))) for region in regions]
        key = (shapes, measured)
        if self._planned is None or self._planned[0] != key:
            self._planned = None  # its tables may be large
            self._planned = key, list(self._parts(regions, measured))
        return self._planned[1]

    def _parts(self, regions: Regions, measured: int) -> Iterator[_Part]:
        for number, region in enumerate(regions):
            count = min(max(measured, 0), len(region))
            measured -= len(region)
            # What is measured comes first. What is packed comes together, so that it takes few messages.
            order = sorted(range(len(region)), key=lambda i: (i >= count, _travels_alone(region[i]) == (i < count)))
            ordered = [region[index] for index in order]
            for _, bucket in self._transport.cut([ordered]):
                elements = sum(piece.stop - piece.start for piece in bucket.pieces if piece.index < count)
                messages = tuple(self._messages(ordered, bucket))
                yield _Part(number, tuple(order), bucket, messages, self._pack(ordered, bucket), elements)

    def _messages(self, tensors: Sequence[Tensor], bucket: Bucket) -> Iterator[_Message]:
        """Yield the messages of a bucket, in the order of its elements."""
        pieces: list[Piece] = []
        start = size = 0

        def message() -> _Message:
            nonlocal start, size
            found = Bucket(bucket.device, bucket.dtype, tuple(pieces))
            between = slice(pieces[0].index, pieces[-1].index + 1)
            whole = self._transport.in_place(tensors, found) is not None
            pack = None if whole else self._pack(tensors[between], found, pieces[0].index)
            made = _Message(start, found, between, pack)
            pieces.clear()
            start, size = start + size, 0
            return made

        for piece in bucket.pieces:
            alone, done = _travels_alone(tensors[piece.index]), piece.start
            if alone and pieces:
                yield message()
            limit = max((MESSAGE_BYTES if alone else PACKED_BYTES) // bucket.dtype.itemsize, 1)
            while done < piece.stop:
                taken = min(piece.stop - done, limit - size)
                pieces.append(Piece(piece.index, done, done + taken))
                done, size = done + taken, size + taken
                if size == limit or (alone and done == piece.stop):
                    yield message()
        if pieces:
            yield message()

    def _pack(self, tensors: Sequence[Tensor], bucket: Bucket, first: int = 0) -> Pack:
        """Return the pack of a bucket of ``tensors``, of which the first one has number ``first`` in the bucket."""
        pieces = [Piece(piece.index - first, piece.start, piece.stop) for piece in bucket.pieces]
        numels = [tensor.numel() for tensor in tensors]
        return Pack(numels, pieces, bucket.device, bucket.dtype, backend=self._transport.backend)


def _travels_alone(tensor: Tensor) -> bool:
    return tensor.nbytes >= ALONE_BYTES and tensor.dtype == travel_dtype(tensor.dtype)
