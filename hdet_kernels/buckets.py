"""Flat buffers for parameters, and buckets of bounded size for collectives.

:class:`Buckets` moves parameters into one contiguous buffer per device and dtype and makes them parts of it, so that
one kernel or one collective can process all of them. :func:`cut` divides any tensors into buckets of a bounded size,
one for each collective.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from hdet_kernels.checks import check_callable, check_whole
from hdet_kernels.ops.halves import read_halves, write_halves
from hdet_kernels.sharded import Divided, divided_along, gathered_shards, is_distributed, part_of
from hdet_kernels.tensors import (
    Piece,
    Slot,
    in_full,
    in_shared_memory,
    is_dense,
    one_replica,
    own_storage,
    replicas_of,
    travel_dtype,
    unique,
)
from hdet_kernels.torch_internals import set_local_part

#: Bytes of one collective. A 124 M-parameter fp32 model fits into one. Every bucket pays the latency of all hops again
#: (``bench/cost_model.py``).
BUCKET_BYTES = 512 * 2**20

#: Every tensor starts at a multiple of this in its flat buffer: one GPU cache line, or 8 accesses of 16 bytes.
ALIGN_BYTES = 128


class Buckets:
    """Parameters in one contiguous buffer per (device, dtype, kind), each of them a part of it with its own strides.

    The ``Parameter`` objects stay the same, so that ``model.load_state_dict``, autograd, DDP and ``torch.compile`` keep
    working. Each has a storage object of its own over its part (:func:`.tensors.own_storage`), so that saving one
    writes nothing of the others. A parameter given twice, or tied to another one (same memory, shape and strides), has
    one slot. Gaps between tensors are zeros. Stacked parameters, [replicas, …] each, share buffers [replicas, n] and
    their storage.

    Of a distributed parameter (DTensor) it is the part of this process that moves. Distributed parameters have buffers
    of their own, one for each way in which they are divided over a mesh. FSDP then gathers from these buffers.

    Args:
        params: the parameters to move.
        bucket_bytes: the most bytes that one collective on them carries.
        kind_of: the kind of a parameter; those of different kinds have different buffers. Default: one kind.

    Raises:
        ValueError, TypeError: before anything is moved, if a parameter cannot be: not a dense strided tensor,
            overlapping memory, memory shared in part with another parameter, or memory that other processes may share.
    """

    @torch.inference_mode(False)  # buffers made in inference mode could not be written outside of it
    def __init__(
        self,
        params: Iterable[Tensor],
        bucket_bytes: int = BUCKET_BYTES,
        *,
        kind_of: Callable[[Tensor], Hashable] | None = None,
    ) -> None:
        self.params: tuple[Tensor, ...] = unique(params)
        if not self.params:
            raise ValueError("Buckets got no parameters: pass model.parameters() or an optimizer's parameters")
        self.bucket_bytes = checked_bucket_bytes(bucket_bytes)
        if kind_of is not None:
            check_callable("kind_of", kind_of, "kind_of(param)", takes=1)
        for index, param in enumerate(self.params):
            check_movable(index, param)
        #: The number of replicas of stacked parameters; None for plain parameters.
        self.replicas = common_replicas(self.params)
        parts = [part_of(param) for param in self.params]
        one = [one_replica(param, part) for param, part in zip(self.params, parts, strict=True)]
        owner = tied_to(one)
        shards = gathered_shards(self.params)

        keys: list[tuple[torch.device, torch.dtype, Divided, bool, Hashable]] = []
        ends: list[int] = []
        slots: list[Slot] = []
        # Elements that each parameter takes up, with those that FSDP pads its shard with.
        self._lengths: list[int] = []
        for index, (param, part) in enumerate(zip(self.params, one, strict=True)):
            shard = shards.get(id(param))
            self._lengths.append(part.numel() if shard is None else shard.padded)
            if owner[index] != index:
                slots.append(slots[owner[index]])
                continue
            kind = None if kind_of is None else kind_of(param)
            key = (part.device, part.dtype, divided_along(param), shard is not None and shard.pinned, kind)
            if key not in keys:
                keys.append(key)
                ends.append(0)
            flat = keys.index(key)
            slots.append(Slot(flat, ends[flat], part.numel(), tuple(part.shape), tuple(part.stride())))
            ends[flat] = _aligned(ends[flat] + self._lengths[index], part.element_size())
        self.slots: tuple[Slot, ...] = tuple(slots)
        leading = () if self.replicas is None else (self.replicas,)
        self.flats: tuple[Tensor, ...] = tuple(
            torch.zeros((*leading, end), device=device, dtype=dtype, pin_memory=pinned)
            for end, (device, dtype, _, pinned, _) in zip(ends, keys, strict=True)
        )
        #: Masters of half-precision buffers: float32 copies, or int16 lower halves; None for buffers without one.
        self.masters: tuple[Tensor | None, ...] = (None,) * len(self.flats)
        self._views = self.views(self.flats)
        # Tensors that were made in inference mode have no version.
        self._versioned = [param for param in self.params if not param.is_inference()]
        with torch.no_grad():
            for part, view in zip(parts, self._views, strict=True):
                view.copy_(part)
        self._take_home(range(len(self.params)))

    def views(self, flats: Sequence[Tensor]) -> list[Tensor]:
        """Return a view for each parameter, with its shape and strides, of buffers laid out like :attr:`flats`."""
        return [slot.view(flats[slot.flat]) for slot in self.slots]

    def advance_versions(self) -> None:
        """Tell autograd that the parameters were written in place, through :attr:`flats`.

        A later backward through a graph that was recorded before then raises an error, as after any write in place,
        instead of computing gradients from the new values.
        """
        torch.autograd.graph.increment_version(self._versioned)

    def keep_masters(self, wanted: Callable[[torch.dtype], bool], *, split: bool = False) -> None:
        """Make masters of the buffers for whose dtype ``wanted`` is true.

        With ``split`` those of bf16 buffers are split (:mod:`.split_master`) and not float32 copies.
        """

        def master_of(flat: Tensor) -> Tensor:
            splits = split and flat.dtype == torch.bfloat16
            return torch.zeros_like(flat, dtype=torch.int16) if splits else flat.float()

        self.masters = tuple(master_of(flat) if wanted(flat.dtype) else None for flat in self.flats)

    def refresh_masters(self) -> None:
        """Copy parameters into their masters where they are no longer their master's rounding.

        That happens when something else than the optimizer writes a parameter. Split masters always fit.
        """
        for flat, master in zip(self.flats, self.masters, strict=True):
            if master is not None and master.dtype == torch.float32:
                master.copy_(in_full(flat, master))

    @property
    def full(self) -> tuple[Tensor, ...]:
        """The parameters in full precision: the masters, and the buffers that have none. Split masters are joined:
        these are copies. :meth:`write_full` takes over what is written to all of them."""
        return self._joined(self.unsplit())

    def read_full(self) -> tuple[Tensor, ...]:
        """Return :attr:`full` as it would be after :meth:`refresh_masters`, with the masters left as they are."""
        return self._joined(self.unsplit(fresh=True))

    @property
    def split_masters(self) -> dict[int, tuple[Tensor, Tensor]]:
        """The buffers whose masters are split, each with the lower halves, by number of the buffer."""
        pairs = enumerate(zip(self.flats, self.masters, strict=True))
        return {number: (flat, low) for number, (flat, low) in pairs if low is not None and low.dtype == torch.int16}

    def unsplit(self, *, fresh: bool = False) -> tuple[Tensor | None, ...]:
        """Return :attr:`full` with None for split masters. ``fresh``: as :meth:`read_full` does."""

        def read(flat: Tensor, master: Tensor | None) -> Tensor | None:
            if master is None:
                return flat
            if master.dtype == torch.int16:
                return None
            return in_full(flat, master) if fresh else master

        return tuple(read(flat, master) for flat, master in zip(self.flats, self.masters, strict=True))

    def _joined(self, unsplit: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
        split = self.split_masters
        return tuple(read_halves(*split[number]) if each is None else each for number, each in enumerate(unsplit))

    def write_full(self, full: Sequence[Tensor | None]) -> None:
        """Take over values that were written to the tensors of :attr:`full`: round masters, and split copies of them.

        Where it is None, everything is written already. :meth:`advance_versions` is left to the caller.
        """
        for flat, master, value in zip(self.flats, self.masters, full, strict=True):
            if master is None or value is None:
                continue
            if master.dtype == torch.int16:
                write_halves(value, flat, master)
            else:
                flat.copy_(master)

    def moved(self) -> list[int]:
        """Return the indices of parameters that are no longer in their slot (``.to()``, ``.data = …``).

        Parameters that a module replaced by new objects (``load_state_dict(assign=True)``) are not noticed here, as in
        any optimizer.
        """
        return [
            index
            for index, (part, view) in enumerate(zip(map(part_of, self.params), self._views, strict=True))
            if (part.data_ptr() != view.data_ptr() and view.numel())
            or (part.device, part.dtype, part.shape, part.stride())
            != (view.device, view.dtype, view.shape, view.stride())
        ]

    def converted(self) -> bool:
        """Return whether a parameter has another device or dtype than its slot, and all have the shapes of theirs."""
        pairs = list(zip(map(part_of, self.params), self._views, strict=True))
        if any(part.shape != view.shape or in_shared_memory(part) for part, view in pairs):
            return False
        return any((part.device, part.dtype) != (view.device, view.dtype) for part, view in pairs)

    def rehome(self) -> list[int]:
        """Bring parameters that were moved away back into their slots, with their values; return their indices.

        Raises:
            RuntimeError: before anything is copied, if one changed its device, dtype or shape, or was put into memory
                that other processes share.
        """
        moved = self.moved()
        for index in moved:
            param, view = part_of(self.params[index]), self._views[index]
            if in_shared_memory(param):
                raise RuntimeError(
                    f"parameter {index} of shape {tuple(param.shape)} was put into shared memory after the optimizer "
                    "was built (share_memory()), which trains it in memory of this process: other processes would not "
                    "see the steps. Train with torch.optim, or send copies of the parameters to the other processes"
                )
            now, then = (param.device, param.dtype, tuple(param.shape)), (view.device, view.dtype, tuple(view.shape))
            if now != then:
                raise RuntimeError(
                    f"parameter {index} was {_described(*then)} when the optimizer was built and is "
                    f"{_described(*now)} now; move or convert the model before building the optimizer, or build the "
                    "optimizer and its scheduler again after model.to()"
                )
        # Copied out first: a parameter may use the memory of another one's slot.
        values = [part_of(self.params[index]).detach().clone() for index in moved]
        for index, value in zip(moved, values, strict=True):
            self._views[index].copy_(value)
        self._take_home(moved)
        return moved

    def _take_home(self, indices: Iterable[int]) -> None:
        """Make parameters the tensors of their slots. Tied parameters have the same slot, and get the same storage."""
        shards = gathered_shards(self.params)
        owned: dict[int, Tensor] = {}
        for index in indices:
            param, slot = self.params[index], self.slots[index]
            # Not the view itself: share_memory() gives a storage other memory, and the view must keep its own.
            if not is_distributed(param):
                if id(slot) not in owned:
                    owned[id(slot)] = own_storage(self._views[index])
                param.data = owned[id(slot)]
                continue
            if id(slot) not in owned:
                owned[id(slot)] = own_storage(self.flats[slot.flat][slot.offset : slot.offset + self._lengths[index]])
            memory = owned[id(slot)]
            set_local_part(param, torch.as_strided(memory, slot.shape, slot.stride))
            if (shard := shards.get(id(param))) is not None:
                shard.gather_from(memory)


def check_movable(index: int, param: Tensor) -> None:
    """Raise TypeError or ValueError if parameter ``index`` cannot be moved into a flat buffer."""
    if not isinstance(param, Tensor):
        raise TypeError(f"Buckets expected tensors, parameter {index} is a {type(param).__name__}")
    if is_distributed(param) and any(placement.is_partial() for placement in param.placements):  # type: ignore[attr-defined]
        raise ValueError(
            f"parameter {index} is a DTensor with placements {param.placements}, a sum that is not formed yet: "  # type: ignore[attr-defined]
            "redistribute it to Shard or Replicate placements first"
        )
    param = part_of(param)
    known = type(param) in (Tensor, torch.nn.Parameter) or replicas_of(param) is not None
    if not known or param.layout is not torch.strided:
        raise TypeError(
            f"parameter {index} is a {type(param).__name__} of layout {param.layout}; only dense torch tensors can be "
            "moved into contiguous buckets"
        )
    if param.is_meta:
        raise ValueError(f"parameter {index} is on the meta device and has no values yet: materialise the model first")
    if in_shared_memory(param):
        raise ValueError(
            f"parameter {index} of shape {tuple(param.shape)} is in memory that other processes may share "
            "(share_memory(), torch.from_file), and would be moved out of it: they would not see its updates. Train it "
            "with torch.optim, or build the optimizer on a copy (copy.deepcopy(model)) and send parameters to the "
            "other processes"
        )
    if not is_dense(one_replica(param)):
        raise ValueError(
            f"parameter {index} of shape {tuple(param.shape)} has strides {param.stride()}: gaps or overlaps in memory "
            "cannot be kept in a bucket; make it contiguous first (param.data = param.data.contiguous())"
        )


def common_replicas(params: Sequence[Tensor]) -> int | None:
    """Return how many replicas the parameters stack, None for plain ones; raise ValueError if they differ in that."""
    found = [replicas_of(param) for param in params]
    for index, count in enumerate(found):
        if count != found[0]:
            names = ["a plain one" if n is None else f"a stack of {n} replicas" for n in (found[0], count)]
            raise ValueError(
                f"parameter 0 is {names[0]} and parameter {index} {names[1]}; the parameters of one optimizer must be "
                "those of one stack, or all plain: build an optimizer for each"
            )
    return found[0]


def tied_to(params: Sequence[Tensor]) -> list[int]:
    """Return for each parameter the index of the first one with exactly the same memory: its own, if it is not tied."""
    owner = list(range(len(params)))
    filled = [i for i in owner if params[i].numel()]
    filled.sort(key=lambda i: (str(params[i].device), params[i].data_ptr(), i))
    for before, index in itertools.pairwise(filled):
        a, b = params[before], params[index]
        if a.device != b.device or a.data_ptr() + a.numel() * a.element_size() <= b.data_ptr():
            continue
        if (a.data_ptr(), a.shape, a.stride(), a.dtype) != (b.data_ptr(), b.shape, b.stride(), b.dtype):
            raise ValueError(
                f"parameters {before} and {index} share part of their memory; only parameters that are tied as a "
                "whole can be moved into contiguous buckets"
            )
        owner[index] = owner[before]
    return owner


@dataclass(frozen=True, eq=False)
class Bucket:
    """The content of one collective: pieces of tensors on one device, as elements of ``dtype``."""

    device: torch.device
    dtype: torch.dtype
    pieces: tuple[Piece, ...]

    @cached_property
    def numel(self) -> int:
        return sum(piece.stop - piece.start for piece in self.pieces)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


def cut(tensors: Sequence[Tensor], bucket_bytes: int = BUCKET_BYTES) -> list[Bucket]:
    """Divide 1-D tensors into the fewest buckets of at most ``bucket_bytes`` (and at least one element).

    Each device and dtype in which values are summed has ⌈bytes / bucket_bytes⌉ buckets. A tensor may be split between
    buckets. Every element is in exactly one piece.
    """
    capacity_bytes = checked_bucket_bytes(bucket_bytes)
    buckets: list[Bucket] = []
    pending: dict[tuple[torch.device, torch.dtype], list[Piece]] = {}
    room: dict[tuple[torch.device, torch.dtype], int] = {}
    for index, tensor in enumerate(tensors):
        key = (tensor.device, travel_dtype(tensor.dtype))
        capacity = max(capacity_bytes // key[1].itemsize, 1)
        start = 0
        while start < tensor.numel():
            take = min(tensor.numel() - start, room.setdefault(key, capacity))
            pending.setdefault(key, []).append(Piece(index, start, start + take))
            start += take
            room[key] -= take
            if room[key] == 0:
                buckets.append(Bucket(*key, tuple(pending.pop(key))))
                room[key] = capacity
    buckets.extend(Bucket(*key, tuple(pieces)) for key, pieces in pending.items())
    return buckets


def checked_bucket_bytes(bucket_bytes: int) -> int:
    """Return ``bucket_bytes``; raise ValueError unless it is a whole number of at least 1."""
    return check_whole("bucket_bytes", bucket_bytes, at_least=1)


def _aligned(elements: int, itemsize: int) -> int:
    """Return the first aligned offset after ``elements`` elements."""
    unit = max(ALIGN_BYTES // itemsize, 1)
    return math.ceil(elements / unit) * unit


def _described(device: torch.device, dtype: torch.dtype, shape: tuple[int, ...]) -> str:
    return f"{dtype} {shape} on {device}"
