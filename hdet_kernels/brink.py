"""Where a learning rate comes near to what breaks training.

Past the turn a smaller learning rate always looks better, so signs say no more; what a larger one would cost does.
Where that is a good part of all that was gained, cycle after cycle, training breaks not much above. So the peak is held
near where that was seen first.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

#: What an e-fold more would cost in a cycle, over all that was gained, in the mean of so many; and how sure it must be
#: that it costs something.
COSTS, CYCLES, SURELY = 0.15, 4, 0.5

#: What the peak may be over the learning rate at which that was seen.
ABOVE = 1.5

#: A larger one that would have been better by as much as this says ends it.
BETTER = -0.25


@dataclass(frozen=True)
class Brink:
    """What was seen: the level of the losses when it was first known, what more would have cost in the last cycles over
    all that was gained, and the learning rate that was near the brink, if any was."""

    first: float
    costs: tuple[float, ...] = ()
    value: float | None = None

    def after(self, level: float, slope: float, said: float, value: float, *, early: bool) -> Brink:
        """After a cycle with learning rate ``value`` that came to this level, with this slope of the losses, of which
        this was ``said`` (see :func:`.belief.heard`). ``early``: too early to hold anything, as little was gained."""
        gained = self.first - level
        costs = (*self.costs, slope / gained if gained > 0 else 0.0)[-CYCLES:]
        near = not early and said > SURELY and len(costs) == CYCLES and sum(costs) > CYCLES * COSTS
        at = value if near and self.value is None else self.value
        return replace(self, costs=costs, value=None if said < BETTER else at)

    @property
    def highest(self) -> float:
        """What the peak may be."""
        return float("inf") if self.value is None else ABOVE * self.value

    def state_dict(self) -> dict[str, Any]:
        return {**asdict(self), "costs": list(self.costs)}

    @staticmethod
    def of(state: dict[str, Any]) -> Brink:
        return Brink(**{**state, "costs": tuple(state["costs"])})
