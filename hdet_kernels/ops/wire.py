"""What a compressed average of replicas computes and sends; the collectives between its parts are the caller's.

``W`` processes have a bucket of ``n`` float32 parameters ``x`` each, and a ``consensus``, the same to the bit on all of
them. With Q for what is left of a number after it has travelled::

    encode   d = x − consensus + error         sends Q(d), cut into W shards        error ← d − Q(d)
                                               (all_to_all: process s receives shard s of every process)
    merge    m = (Σ_w Q_w)/divisor + error     sends Q(m), one shard                error ← m − Q(m)
                                               (all_gather: every process receives all shards)
    decode   consensus ← consensus + Q(m)

What one average loses is in the errors, and travels with the next: the consensus stays within one error of each kind of
the exact mean, however many averages there were. Every process decodes the same bytes, so that they agree to the bit.

``"bf16"`` is the nearest bf16, 2 bytes an element. ``"int8"`` is a whole number q from −127 to 127 of steps of the size
``scale = max|d|/127``, which :data:`BLOCK` elements share: 1 byte an element and 4 a block. A block whose scale is zero
travels as zeros. Where a number overflows its format the whole block (int8) or the number (bf16) becomes infinite or
NaN for all processes: an overflow shows.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hdet_kernels.ops import _implementation
from hdet_kernels.ops.backends import resolve

#: How numbers travel, in the order of ``csrc/wire.h``.
FORMATS = ("bf16", "int8")

#: Elements that share a scale in int8: it adds 1.6 % to the bytes, and a warp of a GPU has 8 of them a thread.
BLOCK = 256

#: A shard is a multiple of it: then a row of a wire is one of 16 bytes, in every format.
GRAIN = 4 * BLOCK

#: The rows of a wire are the second dimension of a grid on a GPU.
MOST_SHARDS = 65535


def row_bytes(format: str, shard: int) -> int:
    """The bytes of an encoded shard: its elements, and in int8 the float32 scales of its blocks behind them."""
    return 2 * shard if format == "bf16" else shard + 4 * (shard // BLOCK)


class Wire:
    """The format and layout of one bucket's compressed average, and its operations.

    ``shards`` is the number of processes. A shard has :attr:`shard` elements, the same for all; those beyond ``numel``
    travel as zeros. Encoded it has :attr:`shard_bytes` bytes, a multiple of 16.

    ``x``, ``consensus``, ``target`` and the error of :meth:`encode` are contiguous float32 [numel], that of
    :meth:`merge` float32 [shard]; ``None`` is without feedback. Errors begin as zeros. All numbers have to be finite.
    """

    def __init__(
        self, format: str, numel: int, shards: int, device: torch.device | str, *, backend: str | None = None
    ) -> None:
        if format not in FORMATS:
            raise ValueError(f"unknown wire format {format!r}; choose one of {', '.join(FORMATS)}")
        if numel < 0:
            raise ValueError(f"numel must be the number of elements of a bucket, at least 0, got {numel}")
        if not 1 <= shards <= MOST_SHARDS:
            raise ValueError(f"shards must be the number of processes, 1 to {MOST_SHARDS}, got {shards}")
        self.format, self.numel, self.shards = format, numel, shards
        self.device = torch.empty(0, device=device).device  # with its index
        self.shard = -(-numel // (shards * GRAIN)) * GRAIN
        self.shard_bytes = row_bytes(format, self.shard)
        self.backend = resolve(self.device, backend)
        self._encode, self._merge, self._decode = _implementation(self.backend).wire_operators()
        self._number = FORMATS.index(format)

    def empty(self) -> Tensor:
        """uint8 [shards, shard_bytes], to send or to receive."""
        return torch.empty((self.shards, self.shard_bytes), dtype=torch.uint8, device=self.device)

    def encode(self, x: Tensor, consensus: Tensor, error: Tensor | None, wire: Tensor) -> None:
        """Writes Q(x − consensus + error) to ``wire`` [shards, shard_bytes], every byte of it, and the new error."""
        self._check_floats(self.numel, x=x, consensus=consensus, error=error)
        self._check_wire("wire", wire, (self.shards, self.shard_bytes))
        self._encode(self._number, x, consensus, error, wire)

    def merge(self, wires: Tensor, divisor: float, error: Tensor | None, wire: Tensor) -> None:
        """Writes Q(Σ/divisor + error) of the rows of ``wires`` [shards, shard_bytes], one from each process, summed in
        their order, to ``wire`` [shard_bytes], and the new error."""
        if not math.isfinite(divisor) or divisor == 0:
            raise ValueError(f"divisor must be a finite number other than 0, as the number of processes, got {divisor}")
        self._check_floats(self.shard, error=error)
        self._check_wire("wires", wires, (self.shards, self.shard_bytes))
        self._check_wire("wire", wire, (self.shard_bytes,))
        self._merge(self._number, wires, float(divisor), error, wire)

    def decode(self, wire: Tensor, consensus: Tensor, target: Tensor | None = None) -> None:
        """Adds what ``wire`` [shards, shard_bytes] brings to the consensus, and writes that to ``target`` as well."""
        self._check_wire("wire", wire, (self.shards, self.shard_bytes))
        self._check_floats(self.numel, consensus=consensus, target=target)
        self._decode(self._number, wire, consensus, target)

    def _check_floats(self, numel: int, **given: Tensor | None) -> None:
        for name, tensor in given.items():
            if tensor is None:
                continue
            if tensor.shape != (numel,) or tensor.dtype != torch.float32 or not tensor.is_contiguous():
                raise ValueError(
                    f"{name} must be a contiguous torch.float32 tensor of {numel} elements, got {_what(tensor)}; "
                    "pass tensor.float().contiguous().view(-1), or make a Wire for this size"
                )
            self._check_device(name, tensor)

    def _check_wire(self, name: str, wire: Tensor, shape: tuple[int, ...]) -> None:
        if wire.shape != shape or wire.dtype != torch.uint8 or not wire.is_contiguous():
            raise ValueError(
                f"{name} must be a contiguous torch.uint8 tensor of shape {shape}, got {_what(wire)}; "
                "take Wire.empty() or a row of it"
            )
        self._check_device(name, wire)
        if wire.data_ptr() % 16:
            raise ValueError(
                f"{name} must lie at a multiple of 16 bytes, got address {wire.data_ptr():#x}; "
                "take Wire.empty() or a row of it"
            )

    def _check_device(self, name: str, tensor: Tensor) -> None:
        if tensor.device != self.device:
            raise ValueError(f"{name} is on {tensor.device} and this Wire for {self.device}; they must be together")


def _what(tensor: Tensor) -> str:
    contiguous = "" if tensor.is_contiguous() else ", which is not contiguous"
    return f"{tensor.dtype} of shape {tuple(tensor.shape)}{contiguous}"
