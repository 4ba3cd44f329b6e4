"""The settings of an average, with their checks: :class:`Averaging`, and the :class:`Outer` step in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from hdet_kernels.buckets import checked_bucket_bytes
from hdet_kernels.checks import (
    check_choice,
    check_flag,
    check_kind,
    check_positive,
    check_share,
    check_whole,
    keep_plain,
)

AverageState = Literal["auto"] | bool
Format = Literal["bf16", "int8"]
Merge = Literal["mean", "best"]


@dataclass(frozen=True)
class Outer:
    """The constants of the outer step: those of ``torch.optim.SGD`` without dampening. The defaults are DiLoCo's."""

    lr: float = 0.7
    momentum: float = 0.9
    nesterov: bool = True

    def __post_init__(self) -> None:
        keep_plain(
            self,
            lr=check_positive("lr", self.lr),
            momentum=check_share("momentum", self.momentum, below_one=True),
            nesterov=check_flag("nesterov", self.nesterov),
        )

    def constants(self) -> dict[str, float]:
        """Return the constants as plain numbers, by name."""
        return {"lr": self.lr, "momentum": self.momentum, "nesterov": self.nesterov}


@dataclass(frozen=True)
class Averaging:
    """How the replicas are averaged. The defaults are a plain mean of everything that differs.

    Attributes:
        compress: ``"bf16"`` or ``"int8"``: parameters travel as rounded differences to the last consensus, with error
            feedback. State and buffers travel in full, and so do parameters the first time and when a replica is left
            out.
        overlap_steps: the average runs behind this many training steps, and its correction is added then.
        backup: keep a copy of what is averaged until the average is complete, so that everything is as it was if a peer
            dies. Without it, a failure leaves a mixture of old and averaged values.
        bucket_bytes: the most that one collective carries. Default: 512 MiB.
        outer: an :class:`Outer`: a step of an outer optimizer follows every average.
        merge: ``"mean"``, or ``"best"``: all replicas become a copy of the healthy one with the lowest loss.
        state: average the optimizer's state too: True, False, or ``"auto"``: with local gradients, and where replicas
            differ in it.
        buffers: average the model's buffers.
    """

    compress: Format | None = None
    overlap_steps: int = 0
    backup: bool = True
    bucket_bytes: int | None = None
    outer: Outer | None = None
    merge: Merge = "mean"
    state: AverageState = "auto"
    buffers: bool = True

    def __post_init__(self) -> None:
        check_choice("compress", self.compress, (None, *get_args(Format)))
        if self.outer is not None:
            check_kind("outer", self.outer, Outer, "None or an hdet_kernels.Outer, such as Outer(lr=0.7)")
        check_choice("merge", self.merge, get_args(Merge))
        others = {name: value for name in ("outer", "compress") if (value := getattr(self, name)) is not None}
        if self.merge == "best" and others:
            given = ", ".join(f"{name}={value!r}" for name, value in others.items())
            raise ValueError(f"merge='best' copies one replica as it is, got {given} with it: leave one of the two out")
        check_choice("state", self.state, ("auto", True, False))
        keep_plain(
            self,
            overlap_steps=check_whole("overlap_steps", self.overlap_steps, at_least=0),
            backup=check_flag("backup", self.backup),
            bucket_bytes=None if self.bucket_bytes is None else checked_bucket_bytes(self.bucket_bytes),
            buffers=check_flag("buffers", self.buffers),
        )
        if self.overlap_steps:
            self.check_overlap()

    def check_overlap(self) -> None:
        """Raise ValueError if averages cannot overlap with training."""
        if self.outer is not None or self.merge == "best":
            given = f"outer={self.outer}" if self.outer is not None else "merge='best'"
            raise ValueError(
                f"{given} needs all replicas at one place when the next cycle starts, and an overlapped average "
                "leaves them apart: pass overlap_steps=0"
            )
