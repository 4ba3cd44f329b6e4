"""What the losses say of the terrain that a learning rate climbs in: a brink ahead, one that was passed, or a plateau.

Past the turn a smaller learning rate always looks better, so signs say no more; what a larger one would cost does.
Where that is a good part of all that was gained, cycle after cycle, training breaks not much above: the peak is held
near where that was seen first. Where much is lost at once it is breaking, and the peak is lowered. Where a larger one
costs little, and nothing is gained either, the task has learned what is learned fast, and not begun with the rest: what
looked like the turn was the end of the former.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

#: What an e-fold more would cost in a cycle, over all that was gained, in the median of so many; and how sure it must
#: be that a smaller one is better, for this and all else.
COSTS, CYCLES, SURELY = 0.15, 4, 0.5

#: What the peak may be over the learning rate at which that was seen.
ABOVE = 1.5

#: A larger one that would have been better by as much as this says ends it.
BETTER = -0.25

#: What was lost at once, over all that was gained, where training begins to break; and what the peak may be over the
#: learning rate at which it did.
BREAKS, BELOW = 0.2, 0.5

#: A plateau: all cycles in this share of the run came lower by less than the second of all that was gained, and lost
#: less than the third; and in the mean of the last ``CYCLES`` an e-fold more would have cost less than the fourth.
SPAN, STILL, LOST, CHEAP = 0.1, 0.0075, 0.05, 0.1

#: What was gained is more than chance, over the standard deviation of the noise of a loss.
REAL = 5.0


@dataclass(frozen=True)
class Terrain:
    """What was seen: the level of the losses when it was first known, what more would have cost in the last cycles over
    all that was gained, the learning rate that was near the brink, if any was, and the lowest that broke something; the
    levels of the last cycles, and the lowest one before them. ``flat``: whether the last cycle was on a plateau, which
    is known when it was seen and not kept."""

    first: float
    costs: tuple[float, ...] = ()
    near: float | None = None
    broke: float | None = None
    levels: tuple[float, ...] = ()
    lowest: float | None = None
    flat: bool = field(default=False, compare=False)

    def after(
        self, level: float, slope: float, said: float, value: float, *, early: bool, span: int, noise: float = 0.0
    ) -> Terrain:
        """After a cycle with learning rate ``value`` that came to this level, with this slope of the losses, of which
        this was ``said`` (see :func:`.belief.heard`). ``early``: too early to tell, as little was gained. ``span``: how
        many cycles make a plateau. ``noise``: of a loss."""
        gained = self.first - level
        costs = (*self.costs, slope / gained if gained > 0 else 0.0)[-CYCLES:]
        levels, lowest = (*self.levels, level), self.lowest
        for left in levels[:-span]:
            lowest = left if lowest is None else min(lowest, left)
        near, broke, flat = self.near, self.broke, False
        if said > SURELY and not early and len(costs) == CYCLES:
            if near is None and median(costs) > COSTS:
                near = value
            if self.first - self._lowest > REAL * noise:
                if level - self._lowest > BREAKS * (self.first - self._lowest):
                    broke = value if broke is None else min(broke, value)
                flat = lowest is not None and sum(costs) < CYCLES * CHEAP and self._still(levels[-span:], lowest)
        return Terrain(self.first, costs, None if said < BETTER else near, broke, levels[-span:], lowest, flat)

    @property
    def _lowest(self) -> float:
        """The lowest level so far."""
        return min(*self.levels, self.first, self.first if self.lowest is None else self.lowest)

    def _still(self, levels: tuple[float, ...], lowest: float) -> bool:
        came, gained = lowest - min(levels), self.first - min(lowest, *levels)
        return -LOST * gained < came < STILL * gained

    @property
    def highest(self) -> float:
        """What the peak may be."""
        near = math.inf if self.near is None else ABOVE * self.near
        return near if self.broke is None else min(near, BELOW * self.broke)

    def state_dict(self) -> dict[str, Any]:
        kept = {name: value for name, value in asdict(self).items() if name != "flat"}
        return kept | {"costs": list(self.costs), "levels": list(self.levels)}

    @staticmethod
    def of(state: dict[str, Any]) -> Terrain:
        return Terrain(**{**state, "costs": tuple(state["costs"]), "levels": tuple(state["levels"])})
