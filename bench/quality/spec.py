"""What a run is, and what is recorded of it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

Record = dict[str, Any]


@dataclass(frozen=True)
class Spec:
    """A run. ``factors`` multiplies the learning rates of parameter groups; without it there is one group."""

    task: str
    method: str
    lr: float
    seed: int
    schedule: str = "onecycle"
    probe: bool = True
    steps: int | None = None
    factors: dict[str, float] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)

    def record(self) -> Record:
        return asdict(self)
