"""Properties and views of tensors: dtypes, strides, memory layout, and parameters that stack several replicas.

The kernels and everything above them use these functions. They know nothing of HDET.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack, to_dlpack  # type: ignore[attr-defined]

from hdet_kernels.checks import check_iterable, spell
from hdet_kernels.split_master import joined

_is_cpu = attrgetter("is_cpu")


@dataclass(frozen=True)
class Slot:
    """The place of one parameter: elements ``offset .. offset + numel`` of flat buffer ``flat``, in memory order.

    For a stacked parameter it is the place of each replica within its row.
    """

    flat: int
    offset: int
    numel: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def view(self, flat: Tensor) -> Tensor:
        """Return the parameter's part of ``flat``, with the parameter's shape and strides.

        ``flat`` is laid out like the parameter's own buffer. Of a buffer [replicas, n] the view has all replicas.
        """
        if flat.dim() == 1:
            return torch.as_strided(flat, self.shape, self.stride, self.offset)
        shape, stride = (flat.shape[0], *self.shape), (flat.stride(0), *self.stride)
        return torch.as_strided(flat, shape, stride, self.offset)

    def in_order(self, strides: Sequence[int]) -> bool:
        """Return whether a tensor of the slot's shape with these strides has its elements in the order of the slot."""
        each = zip(self.shape, strides, self.stride, strict=True)
        return all(size == 1 or got == own for size, got, own in each)


@dataclass(frozen=True)
class Piece:
    """Elements ``start .. stop`` of tensor number ``index``, in memory order."""

    index: int
    start: int
    stop: int


def travel_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which values are summed over replicas.

    16-bit values are summed in fp32. As bf16 or fp16 the sum of eight replicas would be rounded seven times before the
    division, and fp16 could overflow.
    """
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def wide_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype for sums of many numbers: fp64, or fp32 on MPS, which has no fp64."""
    return torch.float32 if device.type == "mps" else torch.float64


def checksum(tensor: Tensor) -> Tensor:
    """Return a number that is equal for two tensors if, and almost surely only if, they are bit-equal.

    It adds norm and sum of the elements in fp64, of a sparse tensor those that it has.
    """
    values = tensor.coalesce().values() if tensor.is_sparse else tensor
    values = torch.view_as_real(values) if values.is_complex() else values
    wide = wide_dtype(values.device)
    return torch.linalg.vector_norm(values, dtype=wide) + 0.618 * values.sum(dtype=wide)


def in_full(param: Tensor, master: Tensor) -> Tensor:
    """Return the master where the 16-bit parameter is its rounding, bit for bit, and the parameter elsewhere.

    A split master (int16, see :mod:`~hdet_kernels.split_master`) always fits its parameter.
    """
    if master.dtype == torch.int16:
        return joined(param, master)
    own = param.view(torch.int16) == master.to(param.dtype).view(torch.int16)
    return torch.where(own, master, param.to(master.dtype))


def devices_of(tensors: Sequence[Tensor]) -> set[torch.device]:
    """Return the devices of tensors. That of many CPU tensors is found without a device object for each."""
    if tensors and all(map(_is_cpu, tensors)):
        return {torch.device("cpu")}
    return {tensor.device for tensor in tensors}


def local(tensor: Tensor) -> Tensor:
    """Return this process's part of a distributed tensor; any other tensor unchanged."""
    if not hasattr(tensor, "to_local"):
        return tensor.detach()
    with torch.no_grad():
        part: Tensor = tensor.to_local()
    return part.detach()


def flat_view(tensor: Tensor) -> Tensor:
    """Return the elements of a dense tensor in memory order, as a 1-D view of the same memory.

    Complex elements become pairs of reals. Elements with gaps or overlaps in memory raise ValueError.
    """
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if tensor.is_contiguous():
        return tensor.view(-1)
    if not is_dense(tensor):
        raise ValueError(
            f"a tensor of shape {tuple(tensor.shape)} with strides {tensor.stride()} has gaps or overlaps in memory "
            "and cannot be averaged in place; make it contiguous (tensor.contiguous()) before training"
        )
    return torch.as_strided(tensor, (tensor.numel(),), (1,))


def is_dense(tensor: Tensor) -> bool:
    """Return whether the elements fill their span of memory without gaps or overlaps, in any order of dimensions."""
    if tensor.is_contiguous():  # by far the most common, and there may be very many tensors
        return True
    expected = 1
    for size, stride in sorted(zip(tensor.shape, tensor.stride(), strict=True), key=lambda pair: pair[1]):
        if size == 1:
            continue
        if stride != expected:
            return tensor.numel() == 0
        expected *= size
    return True


def has_overlap(tensor: Tensor) -> bool:
    """Return whether elements may share memory."""
    # They may if a dimension's stride is smaller than the span that the dimensions of smaller stride cover.
    reach = 1
    for size, stride in sorted(zip(tensor.shape, tensor.stride(), strict=True), key=lambda pair: pair[1]):
        if size > 1:
            if stride < reach:
                return tensor.numel() > 0
            reach = stride * (size - 1) + reach
    return False


def own_storage(view: Tensor) -> Tensor:
    """Return the same memory as a tensor with a storage of its own, which covers exactly the elements of ``view``.

    A slice of a flat buffer has the storage of the whole buffer. ``torch.save`` writes storages, so a file with one
    layer would hold all of them, and savers that look for tied tensors by their storage (safetensors, Accelerate) would
    take all layers for one. A tensor that comes through DLPack has a storage object of its own, which keeps the memory
    alive.

    Tensors with gaps (the rows of a stack), on devices other than CPU and CUDA, and of tensor subclasses are returned
    as they are; :func:`compact` copies these where they are saved.
    """
    if type(view) is not Tensor or view.device.type not in ("cpu", "cuda") or not is_dense(view):
        return view
    owned: Tensor = from_dlpack(to_dlpack(view))
    if owned.stride() != view.stride():  # some versions of torch change the strides of dimensions of size 1
        owned.set_(owned.untyped_storage(), 0, view.shape, view.stride())
    return owned


def compact(tensor: Tensor) -> Tensor:
    """Return ``tensor`` if its storage holds nothing else, and a copy of it otherwise, for saving."""
    if tensor.untyped_storage().nbytes() == tensor.nbytes:
        return tensor
    # In the order in which the elements lie in memory, in which the blocks of state in 8 bits run.
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda dimension: -strides[dimension])
    back = [order.index(dimension) for dimension in range(tensor.dim())]
    return tensor.permute(order).clone(memory_format=torch.contiguous_format).permute(back)


def in_shared_memory(tensor: Tensor) -> bool:
    """Return whether other processes may have the memory of a tensor mapped (``share_memory_``, ``torch.from_file``).

    Only memory of the CPU counts: every CUDA tensor calls itself shared.
    """
    return tensor.device.type == "cpu" and tensor.is_shared()


def layout_hash(tensors: Iterable[Tensor], names: Iterable[str] | None = None) -> int:
    """Return a 48-bit hash of the number, order, shapes, strides, dtypes and, where given, names of tensors.

    Processes compare it to find out whether their tensors agree. float64 holds 48 bits exactly.
    """
    digest = hashlib.blake2b(digest_size=6)
    for tensor, name in zip(tensors, itertools.repeat("") if names is None else names, strict=names is not None):
        digest.update(f"{name}{tuple(tensor.shape)}{tuple(tensor.stride())}{tensor.dtype};".encode())
    return int.from_bytes(digest.digest(), "big")


def unique(tensors: Iterable[Tensor], name: str = "params") -> tuple[Tensor, ...]:
    """Return the tensors in order, each object once (tied parameters are one object).

    Raises:
        TypeError: for others; the message has the ``name`` of the argument.
    """
    if isinstance(tensors, Tensor):
        raise TypeError(f"{name} must be several tensors, got {spell(tensors)}: pass [tensor]")
    check_iterable(name, tensors, "several tensors", remedy="pass model.parameters()")
    found = tuple({id(tensor): tensor for tensor in tensors}.values())
    for index, tensor in enumerate(found):
        if not isinstance(tensor, Tensor):
            raise TypeError(
                f"{name} must be tensors, got {spell(tensor)} as number {index}: pass model.parameters(), or the "
                "parameters of an optimizer's groups"
            )
    return found


def distinct(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return the tensors in order, each memory once; raise ValueError if two share only a part of theirs."""
    kept: dict[object, Tensor] = {}
    for tensor in tensors:
        # Dense tensors over the same memory have the same elements, whatever their shapes.
        extent = tensor.numel() if is_dense(tensor) else (tensor.shape, tensor.stride())
        where = (tensor.device, tensor.data_ptr(), tensor.dtype, extent)
        kept.setdefault(where if tensor.numel() else id(tensor), tensor)
    # Only dense tensors are compared: a tensor with gaps may lie in the gaps of another.
    dense = [tensor for tensor in kept.values() if tensor.numel() and is_dense(tensor)]
    spans = sorted((str(t.device), t.data_ptr(), t.data_ptr() + t.nbytes, tuple(t.shape)) for t in dense)
    for (device, _, end, shape), (next_device, start, _, next_shape) in itertools.pairwise(spans):
        if device == next_device and start < end:
            raise ValueError(
                f"two tensors, of shapes {shape} and {next_shape}, share a part of their memory; only tensors that are "
                "tied as a whole can be averaged; clone one of them"
            )
    return list(kept.values())


def replicas_of(param: Tensor) -> int | None:
    """Return how many replicas a stacked parameter holds; ``None`` for any other parameter."""
    return getattr(param, "replicas", None)


def one_replica(param: Tensor, value: Tensor | None = None) -> Tensor:
    """Return one replica of ``param``, or of ``value`` of its shape: of a stack the first row, else all of it."""
    tensor = param if value is None else value
    return tensor if replicas_of(param) is None else tensor.detach()[0]


def share_gradients(params: Iterable[Tensor]) -> bool:
    """Return whether all parameters are stacks whose replicas share one gradient."""
    return all(getattr(param, "shares_gradient", False) for param in params)
