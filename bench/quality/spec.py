"""Description of one run."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

Record = dict[str, Any]


@dataclass(frozen=True)
class Spec:
    """A run.

    Args:
        task: Name of the task.
        method: "plain", a configuration of HDET, or a peer (``methods.py``).
        lr: Peak learning rate at the start; None for the method "scout", which finds one.
        seed: Seed of the model and of the data order.
        schedule: "onecycle", "cosine" or "constant".
        probe: Whether the controller reads a probe instead of training losses.
        steps: Number of steps; None for the task's own.
        factors: Factors of the learning rates of parameter groups; without any there is one group.
        options: Constants of the controller.
    """

    task: str
    method: str
    lr: float | None
    seed: int
    schedule: str = "onecycle"
    probe: bool = True
    steps: int | None = None
    factors: dict[str, float] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)

    def record(self) -> Record:
        """Return the fields as a dict."""
        return asdict(self)
