"""The outer optimizer: from one consensus to the next by a step of SGD, whose gradient is what the replicas moved.

With θ_k, what the last sync ended with, and θ̄, the mean of the replicas now:

Δ = θ_k − θ̄;  v ← μ·v + Δ;  θ_{k+1} = θ_k − lr·(Δ + μ·v), or θ_k − lr·v without ``nesterov``.

On local gradients that is DiLoCo. With lr = 1 and μ = 0 it is the plain mean, bit for bit.
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hdet_kernels.buckets import Bucket
from hdet_kernels.checks import check_positive, check_share
from hdet_kernels.converge.transport import Courier, Regions
from hdet_kernels.tensors import wide_dtype

log = logging.getLogger("hdet_kernels")


@dataclass(frozen=True)
class Outer:
    """The constants of the outer step: those of ``torch.optim.SGD`` without dampening, and with DiLoCo's defaults."""

    lr: float = 0.7
    momentum: float = 0.9
    nesterov: bool = True

    def __post_init__(self) -> None:
        check_positive("lr", self.lr)
        check_share("momentum", self.momentum, below_one=True)
        if not isinstance(self.nesterov, bool):
            raise ValueError(f"nesterov must be True or False, got {self.nesterov!r}")

    def constants(self) -> dict[str, float]:
        """As plain numbers, by name."""
        return {"lr": float(self.lr), "momentum": float(self.momentum), "nesterov": self.nesterov}


def check_outer(outer: object) -> None:
    if outer is not None and not isinstance(outer, Outer):
        raise TypeError(f"outer must be None or an hdet_kernels.Outer, such as Outer(lr=0.7), got {outer!r}")


class OuterStep:
    """Takes the outer steps of the same tensors again and again. Remembers θ_k and v, once for all replicas that this
    process holds, in fp32, or fp64 of doubles: a flat tensor for each region, device and dtype of travel."""

    def __init__(self, outer: Outer, courier: Courier) -> None:
        self.outer, self.courier = outer, courier
        self._consensus: list[Tensor] = []
        self._velocity: list[Tensor] | None = None
        #: [rows] checksums of where the replicas began, until they have met for the first time.
        self._start: Tensor | None = None

    def begin(self, regions: Regions, device: torch.device) -> None:
        """The replicas are where they begin. Whether that is one place, they find out at their first sync."""
        self._start = self.courier.checksum([tensor for region in regions for tensor in region], device)
        self._velocity = None
        self._remember(regions)

    def checksum(self, regions: Regions, device: torch.device) -> Tensor | float:
        """[rows], or of no dimensions: what is equal on all replicas exactly, but for luck, if they can take the next
        step together. NaN, which equals nothing, where what is remembered is of other tensors."""
        if not self._fits(list(self.courier.places(regions, _WHOLE))):
            return math.nan
        if self._start is not None:
            return self._start.to(device, wide_dtype(device))
        return self.courier.checksum_of_one([*self._consensus, *(self._velocity or ())], device)

    def step(self, regions: Regions, *, known: bool, moves: bool) -> None:
        """The tensors are the mean of all replicas and become θ_{k+1}. Not ``known``: there is no θ_k that all share,
        and the mean is the next one. Not ``moves``: it is too, but v stays."""
        if not known:
            log.warning("the replicas do not come from one place: this average is a plain mean, outer= acts from here")
            self._velocity = None
        elif moves:
            if self._velocity is None and self.outer.momentum:
                self._velocity = [torch.zeros_like(flat) for flat in self._consensus]
            for number, (region, bucket) in enumerate(self.courier.places(regions, _WHOLE)):
                whole = self.courier.in_place(region, bucket)
                mean = self.courier.first(region, bucket) if whole is None else whole
                self._advance(mean, self._consensus[number], self._velocity[number] if self._velocity else None)
                if whole is None:
                    pack, tensors = self.courier.pack_of(region, bucket)
                    pack.unpack(tensors, mean)
        self._start = None
        # Read again: parameters of half precision that have no masters are what θ_{k+1} was rounded to.
        self._remember(regions)

    def _advance(self, mean: Tensor, consensus: Tensor, velocity: Tensor | None) -> None:
        """``mean`` becomes θ_{k+1} = θ̄ + (1 − lr)·Δ − lr·μ·v, with the new v or, without ``nesterov``, the old one: as
        above, but exact where it is the plain mean. ``consensus`` is used up."""
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

    def _remember(self, regions: Regions) -> None:
        places = list(self.courier.places(regions, _WHOLE))
        if not self._fits(places):
            self._consensus = [torch.empty(b.numel, dtype=b.dtype, device=b.device) for _, b in places]
        for (region, bucket), flat in zip(places, self._consensus, strict=True):
            self.courier.first(region, bucket, flat)

    def _fits(self, places: Sequence[tuple[Sequence[Tensor], Bucket]]) -> bool:
        return [flat.numel() for flat in self._consensus] == [bucket.numel for _, bucket in places]

    def state_dict(self) -> dict[str, Any]:
        return {
            "consensus": [flat.clone() for flat in self._consensus],
            "velocity": None if self._velocity is None else [flat.clone() for flat in self._velocity],
            "start": None if self._start is None else self._start.reshape(-1).tolist(),
            "part": [self.courier.ensemble.part, self.courier.ensemble.parts],
        }

    def check_state_dict(self, state: dict[str, Any]) -> None:
        """Raise unless :meth:`load_state_dict` can take ``state``."""
        part, parts = self.courier.ensemble.part, self.courier.ensemble.parts
        if state["part"] != [part, parts]:
            saved, of = state["part"]
            raise ValueError(
                f"the checkpoint has what the outer optimizer remembers of part {saved} of {of} of a replica, this "
                f"process holds part {part} of {parts}: load the file of a process that held the same part"
            )
        sizes, here = ([(t.numel(), t.dtype) for t in tensors] for tensors in (state["consensus"], self._consensus))
        if sizes != here:
            raise ValueError(
                f"the checkpoint's outer optimizer remembers flat tensors of {_spell(sizes)}, this one of "
                f"{_spell(here)}: resume with the model and the class of optimizer that it was saved with"
            )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """From whichever replica: all remember the same."""
        self.check_state_dict(state)
        places = [flat.device for flat in self._consensus]
        self._consensus = _on(places, state["consensus"])
        self._velocity = None if state["velocity"] is None else _on(places, state["velocity"])
        self._start = None
        if state["start"] is not None:
            # As one number, for however many replicas are here now: of their place, or that they have none in common.
            first, *others = state["start"]
            one = first if all(other == first for other in others) else math.nan
            self._start = torch.tensor(one, dtype=torch.float64, device="cpu")


#: A bucket that takes all: what is remembered does not depend on how things travel.
_WHOLE = sys.maxsize


def _on(devices: list[torch.device], saved: list[Tensor]) -> list[Tensor]:
    return [tensor.to(device, copy=True) for device, tensor in zip(devices, saved, strict=True)]


def _spell(sizes: list[tuple[int, torch.dtype]]) -> str:
    return ", ".join(f"{numel} {str(dtype).removeprefix('torch.')}" for numel, dtype in sizes) or "no elements"
