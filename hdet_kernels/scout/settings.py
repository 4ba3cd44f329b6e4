"""Every constant of the scouting phase."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from hdet_kernels.checks import check_number, check_steps, keep_plain


@dataclass(frozen=True)
class ScoutSettings:
    """The constants of the scouting phase of a run with ``max_lr=None``.

    Args:
        share: share of the steps of the run that all rounds together take.
        lowest, highest: the range of learning rates that the first round covers.
        first: share of the scouting steps that the first round takes where there are two. The last of several takes
            ``(1 - first) / first`` times the steps of the first, and those between grow evenly.
        factor: rounds go on until neighbouring candidates differ by this factor at most, if there are enough steps.
        fewest: fewest steps of a round.
        tail: share of a round, at its end, whose mean training loss is compared.
        flat: candidates whose losses differ by less than this share of the loss count as equal.
        deviations: so do those that differ by less than this many standard errors.
        depth: candidates whose loss fell by at least ``1 - depth`` of what the best one's fell enter the parabola
            whose minimum is chosen.
        reach: so do those whose learning rate is within ``exp(reach)`` of the best one's.
        shift: the logarithm of the chosen learning rate is raised by ``shift * log(replicas)``: a replica sees only its
            share of the batch in this phase, and a smaller batch asks for a smaller learning rate.
    """

    share: float = 0.15
    lowest: float = 1e-5
    highest: float = 10.0
    first: float = 0.25
    factor: float = 3.1
    fewest: int = 10
    tail: float = 0.2
    flat: float = 0.001
    deviations: float = 1.5
    depth: float = 0.3
    reach: float = 1.0
    shift: float = 0.0

    def __post_init__(self) -> None:
        """Raise TypeError or ValueError for a constant with which no phase can be planned."""
        within: tuple[tuple[tuple[str, ...], dict[str, Any]], ...] = (
            (("share", "first", "tail", "depth"), {"above": 0, "below": 1}),
            (("lowest", "highest", "reach"), {"above": 0}),
            (("flat", "deviations"), {"at_least": 0}),
            (("factor",), {"above": 1}),
            (("shift",), {}),
        )
        for names, bounds in within:
            for name in names:
                keep_plain(self, **{name: check_number(f"ScoutSettings.{name}", getattr(self, name), **bounds)})
        keep_plain(self, fewest=check_steps("ScoutSettings.fewest", self.fewest))
        if self.fewest < 4:
            raise ValueError(
                f"ScoutSettings.fewest must be at least 4, got {self.fewest}: a miniature needs some steps"
            )
        if self.share > 0.5:
            raise ValueError(
                f"ScoutSettings.share must be at most 0.5, got {self.share}: the rest of the steps is the run"
            )
        if self.lowest >= self.highest:
            raise ValueError(
                f"ScoutSettings.lowest must be below highest, got {self.lowest} and {self.highest}: they are the range "
                "of learning rates"
            )

    def to_dict(self) -> dict[str, Any]:
        """Return the constants by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}
