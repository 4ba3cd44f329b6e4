"""What one rank records of its run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Failure:
    """An exception that a call of the user's raised.

    Attributes:
        call: ``"build"``, ``"load"``, ``"backward"``, ``"optimizer"``, ``"scheduler"`` or ``"after"``.
        step: finished steps.
        kind: name of the class.
        runtime: whether it is a RuntimeError.
        message: its text and that of its causes.
        changed: the parts that the call changed.
        digests: the parts after the call.
        seconds: time that the call took.
    """

    call: str
    step: int
    kind: str
    runtime: bool
    message: str
    changed: list[str]
    digests: dict[str, str]
    seconds: float


@dataclass
class Record:
    """The run of one rank.

    Attributes:
        digests: of every part, by step.
        consensus: by the step of a sync: digest of what a sync makes equal, and whether rows are equal.
        failures: in order.
        vectors: parameters right before and after the sync at the step of the case.
        excluded: by step: the replicas that were left out.
        collectives: by step.
        finite: whether everything is finite at the end.
        fired: whether the fault has acted on this rank.
        step: finished steps.
    """

    digests: dict[int, dict[str, str]] = field(default_factory=dict)
    consensus: dict[int, tuple[str, bool]] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)
    vectors: list[Any] = field(default_factory=list)
    excluded: dict[int, list[int]] = field(default_factory=dict)
    collectives: dict[int, int] = field(default_factory=dict)
    finite: bool = False
    fired: bool = False
    step: int = 0
