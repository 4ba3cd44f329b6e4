"""Where a learning rate has grown beyond what helps: training stands still, and a smaller one would be better.

Past the turn a smaller learning rate always looks better, so signs say no more; how much is still gained does. Where a
few cycles gain next to nothing while it climbs, what is left for the end of the schedule is noise, and not much above
that training breaks. So its peak is held near where that was seen first.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

#: So many cycles that gained less than this share of all that was gained, with a smaller learning rate surely better.
CYCLES, LITTLE, SURELY = 4, 0.005, 0.5

#: What the peak may be over the learning rate at which that was seen.
ABOVE = 1.5

#: A larger one that would have been better by as much as this says ends it.
BETTER = -0.25


@dataclass(frozen=True)
class Stall:
    """What was seen: the level of the losses when it was first known, the lowest up to each of the last cycles, at how
    many syncs in a row a smaller learning rate was surely better, and the one at which training stood still, if any."""

    first: float
    lowest: tuple[float, ...] = ()
    against: int = 0
    value: float | None = None

    def after(self, level: float, said: float, value: float) -> Stall:
        """After a cycle with learning rate ``value`` of which this was ``said`` (see :func:`.belief.heard`)."""
        low = min(self.lowest[-1], level) if self.lowest else level
        lowest = (*self.lowest, low)[-CYCLES - 1 :]
        seen = replace(self, lowest=lowest, against=self.against + 1 if said > SURELY else 0)
        if said < BETTER:
            return replace(seen, value=None)
        return replace(seen, value=value) if self.value is None and seen._stands() else seen

    def _stands(self) -> bool:
        gained = self.first - self.lowest[0]
        return len(self.lowest) > CYCLES <= self.against and self.lowest[0] - self.lowest[-1] < LITTLE * gained

    @property
    def highest(self) -> float:
        """What the peak may be."""
        return float("inf") if self.value is None else ABOVE * self.value

    def state_dict(self) -> dict[str, Any]:
        return {**asdict(self), "lowest": list(self.lowest)}

    @staticmethod
    def of(state: dict[str, Any]) -> Stall:
        return Stall(**{**state, "lowest": tuple(state["lowest"])})
