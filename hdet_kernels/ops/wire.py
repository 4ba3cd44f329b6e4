"""The parts of a compressed average of replicas. The caller runs the collectives between them.

Each of ``W`` processes has a bucket of ``n`` float32 parameters ``x``, and a ``consensus`` that is the same on all of
them, bit for bit. Q(d) is the number that a receiver decodes after ``d`` was encoded::

    encode   d = x − consensus + error         sends Q(d), cut into W shards        error ← d − Q(d)
                                               (all_to_all: process s receives shard s of every process)
    merge    m = (Σ_w Q_w)/divisor + error     sends Q(m), one shard                error ← m − Q(m)
                                               (all_gather: every process receives all shards)
    decode   consensus ← consensus + Q(m)

The rounding errors of one average are sent with the next (error feedback). So the consensus stays within one error of
each kind of the exact mean, however many averages there were. Every process decodes the same bytes, so all processes
agree bit for bit.

``"bf16"`` sends the nearest bf16: 2 bytes an element. ``"int8"`` sends a whole number from −127 to 127 in units of
``scale = max|d|/127``, which :data:`BLOCK` elements share: 1 byte an element and 4 bytes a block. A block whose scale
is zero is sent as zeros. A number that overflows its format becomes infinite or NaN on all processes (in int8 its whole
block does), so an overflow does not go unnoticed.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hdet_kernels.ops.backends import implementation, resolve

#: The encodings, in the order of ``csrc/wire.h``.
FORMATS = ("bf16", "int8")

#: Elements that share a scale in int8. The scales add 1.6 % to the bytes, and each thread of a warp has 8 elements.
BLOCK = 256

#: The elements of a shard are a multiple of this, so that an encoded shard is a multiple of 16 bytes in every format.
GRAIN = 4 * BLOCK

#: The most shards: on a GPU they are the second dimension of a grid.
MOST_SHARDS = 65535


def encoded_bytes(format: str, shard: int) -> int:
    """Return the bytes of an encoded shard: its elements, followed in int8 by the float32 scales of its blocks."""
    return 2 * shard if format == "bf16" else shard + 4 * (shard // BLOCK)


def shard_elements(numel: int, shards: int) -> int:
    """Return the elements of each of ``shards`` shards of a bucket, the same for all."""
    return -(-numel // (shards * GRAIN)) * GRAIN


class Wire:
    """The format and layout of one bucket's compressed average, and its operations.

    ``x``, ``consensus``, ``target`` and the error of :meth:`encode` are contiguous float32 [numel]; the error of
    :meth:`merge` is float32 [shard]. An error of ``None`` means no error feedback. Errors begin as zeros. All numbers
    must be finite.

    Args:
        format: One of :data:`FORMATS`.
        numel: The elements of the bucket.
        shards: The number of processes.
        device: The device of the bucket.
        backend: A backend by name; the fastest available by default.

    Attributes:
        shard: The elements of a shard, the same for all shards. Those beyond ``numel`` are sent as zeros.
        shard_bytes: The bytes of an encoded shard, a multiple of 16.
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
        self.shard = shard_elements(numel, shards)
        self.shard_bytes = encoded_bytes(format, self.shard)
        self.backend = resolve(self.device, backend)
        self._module = implementation(self.backend, "wire")
        self._number = FORMATS.index(format)

    def empty(self) -> Tensor:
        """Return an uninitialised uint8 tensor [shards, shard_bytes], to send from or to receive in."""
        return torch.empty((self.shards, self.shard_bytes), dtype=torch.uint8, device=self.device)

    def encode(self, x: Tensor, consensus: Tensor, error: Tensor | None, wire: Tensor) -> None:
        """Write the encoding of x − consensus + error to every byte of ``wire`` [shards, shard_bytes].

        ``error`` becomes the part that the encoding lost.
        """
        self._check_floats(self.numel, x=x, consensus=consensus, error=error)
        self._check_wire("wire", wire, (self.shards, self.shard_bytes))
        if self.numel:
            self._module.encode(self._number, x, consensus, error, wire)

    def merge(self, wires: Tensor, divisor: float, error: Tensor | None, wire: Tensor) -> None:
        """Write the encoding of Σ/divisor + error to ``wire`` [shard_bytes].

        The sum Σ is over ``wires`` [shards, shard_bytes], one encoded shard from each process, in their order.
        ``error`` becomes the part that the encoding lost.
        """
        if not math.isfinite(divisor) or divisor == 0:
            raise ValueError(f"divisor must be a finite number other than 0, such as the process count, got {divisor}")
        self._check_floats(self.shard, error=error)
        self._check_wire("wires", wires, (self.shards, self.shard_bytes))
        self._check_wire("wire", wire, (self.shard_bytes,))
        if self.numel:
            self._module.merge(self._number, wires, float(divisor), error, wire)

    def decode(self, wire: Tensor, consensus: Tensor, target: Tensor | None = None) -> None:
        """Add the decoded ``wire`` [shards, shard_bytes] to the consensus, and copy the sum to ``target`` if given."""
        self._check_wire("wire", wire, (self.shards, self.shard_bytes))
        self._check_floats(self.numel, consensus=consensus, target=target)
        if self.numel:
            self._module.decode(self._number, wire, consensus, target)

    def _check_floats(self, numel: int, **given: Tensor | None) -> None:
        for name, tensor in given.items():
            if tensor is not None:
                remedy = "pass tensor.float().contiguous().view(-1), or make a Wire for this size"
                self._check(name, tensor, torch.float32, (numel,), remedy)

    def _check_wire(self, name: str, wire: Tensor, shape: tuple[int, ...]) -> None:
        self._check(name, wire, torch.uint8, shape, "take Wire.empty() or a row of it")
        if wire.data_ptr() % 16:
            raise ValueError(
                f"{name} must lie at a multiple of 16 bytes, got address {wire.data_ptr():#x}; take Wire.empty() or a "
                "row of it"
            )

    def _check(self, name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...], remedy: str) -> None:
        if tensor.shape != shape or tensor.dtype != dtype or not tensor.is_contiguous():
            contiguous = "" if tensor.is_contiguous() else ", which is not contiguous"
            raise ValueError(
                f"{name} must be a contiguous {dtype} tensor of shape {shape}, got {tensor.dtype} of shape "
                f"{tuple(tensor.shape)}{contiguous}; {remedy}"
            )
        if tensor.device != self.device:
            raise ValueError(f"{name} is on {tensor.device} and this Wire for {self.device}; they must be together")
