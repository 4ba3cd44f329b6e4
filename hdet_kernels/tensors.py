"""Helpers for dtypes, strides, views and stacked parameters, shared by the kernels and everything above them."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Slot:
    """Where one parameter lives: elements ``offset .. offset + numel`` of flat buffer ``flat``, in memory order. Of a
    stacked parameter, where each of its replicas lives in its row."""

    flat: int
    offset: int
    numel: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def view(self, flat: Tensor) -> Tensor:
        """The parameter's part of a buffer laid out like its own, with the parameter's shape and strides; of a buffer
        [replicas, n], that of all replicas."""
        if flat.dim() == 1:
            return torch.as_strided(flat, self.shape, self.stride, self.offset)
        shape, stride = (flat.shape[0], *self.shape), (flat.stride(0), *self.stride)
        return torch.as_strided(flat, shape, stride, self.offset)


@dataclass(frozen=True)
class Piece:
    """Elements ``start .. stop`` of tensor ``index``, in memory order."""

    index: int
    start: int
    stop: int


def travel_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which values are summed over replicas. Half-precision values travel as fp32: summed as bf16 or
    fp16, the mean of eight replicas would be rounded seven times (and fp16 can overflow) before it is divided."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def wide_dtype(device: torch.device) -> torch.dtype:
    """The dtype for sums of many numbers: fp64, but for the one kind of device that does not know it."""
    return torch.float32 if device.type == "mps" else torch.float64


def in_full(param: Tensor, master: Tensor) -> Tensor:
    """The master where the parameter (of 16 bits) is its rounding, to the bit; elsewhere the parameter."""
    own = param.view(torch.int16) == master.to(param.dtype).view(torch.int16)
    return torch.where(own, master, param.to(master.dtype))


def local(tensor: Tensor) -> Tensor:
    """The part of a distributed tensor that is here; any other tensor as it is."""
    with torch.no_grad():
        part: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part.detach()


def flat_view(tensor: Tensor) -> Tensor:
    """The elements of a dense tensor in memory order, as a 1-D view of the same memory (complex as pairs of reals)."""
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
    """Whether the elements fill their span of memory without gaps or overlaps, in whatever order of dimensions."""
    expected = 1
    for size, stride in sorted(zip(tensor.shape, tensor.stride(), strict=True), key=lambda pair: pair[1]):
        if size == 1:
            continue
        if stride != expected:
            return tensor.numel() == 0
        expected *= size
    return True


def has_overlap(tensor: Tensor) -> bool:
    """Whether elements may share memory: a dimension does not step over all that the smaller ones reach."""
    reach = 1
    for size, stride in sorted(zip(tensor.shape, tensor.stride(), strict=True), key=lambda pair: pair[1]):
        if size > 1:
            if stride < reach:
                return tensor.numel() > 0
            reach = stride * (size - 1) + reach
    return False


def layout_hash(tensors: Iterable[Tensor], names: Iterable[str] | None = None) -> int:
    """48 bits that agree between processes exactly if the tensors agree in number, order, shape, strides, dtype and,
    where given, names. (48 bits survive a trip through float64.)"""
    digest = hashlib.blake2b(digest_size=6)
    for tensor, name in zip(tensors, itertools.repeat("") if names is None else names, strict=names is not None):
        digest.update(f"{name}{tuple(tensor.shape)}{tuple(tensor.stride())}{tensor.dtype};".encode())
    return int.from_bytes(digest.digest(), "big")


def unique(tensors: Iterable[Tensor]) -> tuple[Tensor, ...]:
    """The tensors in order, each object once (tied parameters are one object)."""
    if isinstance(tensors, Tensor):
        raise TypeError("expected several tensors, such as model.parameters(), got a single one: pass [tensor]")
    return tuple({id(tensor): tensor for tensor in tensors}.values())


def distinct(tensors: Iterable[Tensor]) -> list[Tensor]:
    """The tensors in order, each memory once: tied tensors are one. Raises if two share a part of their memory."""
    kept: dict[object, Tensor] = {}
    for tensor in tensors:
        # Elements that fill their memory have one mean, in whatever shape they are seen.
        seen = tensor.numel() if is_dense(tensor) else (tensor.shape, tensor.stride())
        where = (tensor.device, tensor.data_ptr(), tensor.dtype, seen)
        kept.setdefault(where if tensor.numel() else id(tensor), tensor)
    # Tensors with gaps may lie in each other's.
    dense = [tensor for tensor in kept.values() if tensor.numel() and is_dense(tensor)]
    spans = sorted((str(t.device), t.data_ptr(), t.data_ptr() + t.nbytes, tuple(t.shape)) for t in dense)
    for (device, _, end, shape), (next_device, start, _, next_shape) in itertools.pairwise(spans):
        if device == next_device and start < end:
            raise ValueError(
                f"two tensors, of shapes {shape} and {next_shape}, share a part of their memory; only tensors that are "
                "tied as a whole can be averaged: clone one of them"
            )
    return list(kept.values())


def replicas_of(param: Tensor) -> int | None:
    """How many replicas a parameter is a stack of; None for a plain one."""
    return getattr(param, "replicas", None)


def one_replica(param: Tensor, value: Tensor | None = None) -> Tensor:
    """A parameter, or ``value`` of its shape, as one replica has it: of a stack the first row, else as it is."""
    tensor = param if value is None else value
    return tensor if replicas_of(param) is None else tensor.detach()[0]


def share_gradients(params: Iterable[Tensor]) -> bool:
    """Whether all are stacks whose replicas have one gradient."""
    return all(getattr(param, "shares_gradient", False) for param in params)
