"""The outer optimizer: move from one consensus to the next by an SGD step whose gradient is what the replicas moved.

With θ_k, the parameters after the last sync, and θ̄, the mean of the replicas now:

Δ = θ_k − θ̄;  v ← μ·v + Δ;  θ_{k+1} = θ_k − lr·(Δ + μ·v), or θ_k − lr·v without ``nesterov``.

On local gradients this is DiLoCo. With lr = 1 and μ = 0 it is the plain mean, bit for bit.
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hdet_kernels.buckets import Bucket
from hdet_kernels.converge.settings import Outer
from hdet_kernels.converge.split_masters import Region, SplitRegion
from hdet_kernels.converge.transport import Transport
from hdet_kernels.tensors import wide_dtype

log = logging.getLogger("hdet_kernels")

# Bucket size without a limit: what is remembered does not depend on bucket_bytes.
_UNLIMITED = sys.maxsize


class OuterStep:
    """Takes the outer steps of the same tensors, sync after sync.

    Remembers θ_k and v once for all replicas that this process holds, in fp32 (fp64 for doubles), as one flat tensor
    per region, device and dtype.
    """

    def __init__(self, outer: Outer, transport: Transport) -> None:
        self.outer, self.transport = outer, transport
        self._consensus: list[Tensor] = []
        self._velocity: list[Tensor] | None = None
        # [rows] checksums of the initial parameters, until the first sync shows whether all replicas have the same.
        self._start: Tensor | None = None

    def begin(self, regions: Sequence[Region], checksum: Tensor) -> None:
        """Start from the current tensors, with these checksums [rows]."""
        self._start = checksum
        self._velocity = None
        self._remember(regions)

    def checksum(self, regions: Sequence[Region], device: torch.device) -> Tensor | float:
        """Return a checksum, [rows] or scalar, that is equal on all replicas if they can take the next step together.

        It is NaN, which equals nothing, if other tensors are remembered.
        """
        if not self._matches(list(self.transport.cut(regions, _UNLIMITED))):
            return math.nan
        if self._start is not None:
            return self._start.to(device, wide_dtype(device))
        return self.transport.checksum_of_one([*self._consensus, *(self._velocity or ())], device)

    def step(self, regions: Sequence[Region], *, same_start: bool, advance: bool) -> None:
        """Replace the tensors, which are the mean of all replicas, by θ_{k+1}.

        It is the mean itself where the replicas do not remember the same θ_k (then v restarts at 0), and without
        ``advance`` (then v is kept).
        """
        if not same_start:
            log.warning(
                "the replicas do not start from the same parameters: this average is a plain mean, and the outer "
                "optimizer starts from it"
            )
            self._velocity = None
        if not (same_start and advance):
            self._remember(regions)
        else:
            if self._velocity is None and self.outer.momentum:
                self._velocity = [torch.zeros_like(flat) for flat in self._consensus]
            for number, (region, bucket) in enumerate(self.transport.cut(regions, _UNLIMITED)):
                velocity = self._velocity[number] if self._velocity else None
                self._advance_region(region, bucket, self._consensus[number], velocity)
        self._start = None

    def _advance_region(self, region: Region, whole: Bucket, consensus: Tensor, velocity: Tensor | None) -> None:
        """Replace the tensors of a region, which are one bucket, and ``consensus`` by θ_{k+1}."""
        parts = self._parts(region, whole)
        sizes = [part.numel for part in parts]
        velocities = [None] * len(parts) if velocity is None else velocity.split(sizes)
        for part, before, v in zip(parts, consensus.split(sizes), velocities, strict=True):
            own = self.transport.in_place(region, part)
            mean = self.transport.first_row(region, part) if own is None else own
            self._advance(mean, before, v)
            if own is None:
                self.transport.unpack(region, part, mean)
            if isinstance(region, SplitRegion):
                before.copy_(mean)
            else:  # read back, because half-precision parameters without master weights have rounded θ_{k+1}
                self.transport.first_row(region, part, before)

    def _advance(self, mean: Tensor, consensus: Tensor, velocity: Tensor | None) -> None:
        """Turn ``mean`` into θ_{k+1} = θ̄ + (1 − lr)·Δ − lr·μ·v, in place; ``consensus`` is overwritten.

        v is the new velocity, or without ``nesterov`` the old one. This equals the formula above, but is exact where
        the step is the plain mean.
        """
        lr, momentum = self.outer.lr, self.outer.momentum
        moved = consensus.sub_(mean)
        mean.add_(moved, alpha=1 - lr)
        if velocity is None:
            return
        if not self.outer.nesterov:
            mean.add_(velocity, alpha=-lr * momentum)
        velocity.mul_(momentum).add_(moved)
        if self.outer.nesterov:
            mean.add_(velocity, alpha=-lr * momentum)

    def _remember(self, regions: Sequence[Region]) -> None:
        buckets = list(self.transport.cut(regions, _UNLIMITED))
        if not self._matches(buckets):
            self._consensus = [torch.empty(b.numel, dtype=b.dtype, device=b.device) for _, b in buckets]
        for (region, bucket), flat in zip(buckets, self._consensus, strict=True):
            parts = self._parts(region, bucket)
            for part, to in zip(parts, flat.split([part.numel for part in parts]), strict=True):
                self.transport.first_row(region, part, to)

    def _parts(self, region: Region, whole: Bucket) -> list[Bucket]:
        """Return what is read and written at a time of a region that is one bucket: of split masters less than all."""
        return [part for _, part in self.transport.cut([region])] if isinstance(region, SplitRegion) else [whole]

    def _matches(self, buckets: Sequence[tuple[Region, Bucket]]) -> bool:
        return [flat.numel() for flat in self._consensus] == [bucket.numel for _, bucket in buckets]

    def state_dict(self, *, copied: bool = True) -> dict[str, Any]:
        """Return the state; ``copied=False`` has the tensors in use, which the next step overwrites."""
        return {
            "consensus": [flat.clone() if copied else flat for flat in self._consensus],
            "velocity": self._velocity and [flat.clone() if copied else flat for flat in self._velocity],
            "start": None if self._start is None else self._start.reshape(-1).tolist(),
            "part": [self.transport.ensemble.part, self.transport.ensemble.parts],
        }

    def check_state_dict(self, state: dict[str, Any]) -> None:
        part, parts = self.transport.ensemble.part, self.transport.ensemble.parts
        if state["part"] != [part, parts]:
            saved, of = state["part"]
            raise ValueError(
                f"the checkpoint has the outer optimizer's state of part {saved} of {of} of a replica, this process "
                f"holds part {part} of {parts}: load the file of a process that held the same part"
            )
        velocity = state["consensus"] if state["velocity"] is None else state["velocity"]
        for tensors in (state["consensus"], velocity):
            sizes, here = ([(t.numel(), t.dtype) for t in each] for each in (tensors, self._consensus))
            if sizes != here:
                raise ValueError(
                    f"the checkpoint's outer optimizer remembers flat tensors of {_spell(sizes)}, this one of "
                    f"{_spell(here)}: resume with the model and the class of optimizer that it was saved with"
                )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the state of any replica: all remember the same."""
        self.check_state_dict(state)
        devices = [flat.device for flat in self._consensus]
        copied = {
            name: [tensor.to(device, copy=True) for device, tensor in zip(devices, state[name], strict=True)]
            for name in ("consensus", "velocity")
            if state[name] is not None
        }
        self._consensus, self._velocity = copied["consensus"], copied.get("velocity")
        self._start = None
        if state["start"] is not None:
            # One number, for however many replicas this process holds now: NaN if the saved rows started apart.
            first, *others = state["start"]
            one = first if all(other == first for other in others) else math.nan
            self._start = torch.tensor(one, dtype=torch.float64, device="cpu")


def _spell(sizes: list[tuple[int, torch.dtype]]) -> str:
    return ", ".join(f"{numel} {str(dtype).removeprefix('torch.')}" for numel, dtype in sizes) or "no elements"
