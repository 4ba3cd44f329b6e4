"""The memory of a converger from one average to the next, saved and loaded with checkpoints.

That is the last consensus and the rounding errors of compressed averages, and the momentum of the outer optimizer.
"""

from __future__ import annotations

from typing import Any

from hdet_kernels.converge.compress import Compression
from hdet_kernels.converge.outer import OuterStep
from hdet_kernels.converge.payload import ModelTensors
from hdet_kernels.converge.transport import Transport
from hdet_kernels.ensemble import Ensemble


class AverageMemory:
    """The methods of a converger that save and load what it remembers."""

    ensemble: Ensemble
    tensors: ModelTensors
    _transport: Transport
    _compression: Compression | None
    _outer: OuterStep | None

    def state_dict(self, *, copied: bool = True) -> dict[str, Any] | None:
        """Return the state of the compression; None without compression or before its first average.

        With ``copied=False`` it has the tensors in use, which the next average overwrites.
        """
        return self._compression.state_dict(self.ensemble.processes, copied=copied) if self._compression else None

    def memories(self) -> list[object]:
        """Return the objects that remember something from one average to the next."""
        return [memory for memory in (self._compression, self._outer) if memory is not None]

    def check_state_dict(self, state: dict[str, Any] | None) -> None:
        """Raise ValueError unless :meth:`load_state_dict` accepts ``state``."""
        if self._compression is not None and state is not None:
            self._compression.check_state_dict(state)

    def load_state_dict(self, state: dict[str, Any] | None, *, own: bool) -> None:
        """Load the state of the compression. ``own``: whether a process with the same replicas saved it."""
        if self._compression is not None:
            at_once = self._transport.bucket_bytes
            payload = self.tensors.payload(include_state=False, reads=True, bucket_bytes=at_once)
            self._compression.load_state_dict(state, self._transport, payload.compressible, own=own)

    def outer_state_dict(self, *, copied: bool = True) -> dict[str, Any] | None:
        """Return the state of the outer optimizer, if there is one; see :meth:`state_dict` for ``copied``."""
        return self._outer.state_dict(copied=copied) if self._outer else None

    def check_outer_state_dict(self, state: dict[str, Any] | None) -> None:
        """Raise ValueError unless :meth:`load_outer_state_dict` accepts ``state``."""
        if self._outer is not None and state is not None:
            self._outer.check_state_dict(state)

    def load_outer_state_dict(self, state: dict[str, Any] | None) -> None:
        """Load the state of the outer optimizer."""
        if self._outer is not None and state is not None:
            self._outer.load_state_dict(state)
