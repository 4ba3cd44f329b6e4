"""The hypergradient controller: the next gradient times the last cycle's displacement. It needs no spread."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import numpy as np

from hdet_kernels.controller.protocol import Observation, Run, State
from hdet_kernels.controller.slopes import SlopeController, usable_slopes


@dataclass(frozen=True)
class HypergradientController(SlopeController):
    """Moves learning rates by b_j = ⟨ḡ, θ̄(kT) − θ̄((k−1)T)⟩ over the parameters of group j.

    ḡ is the mean of the first gradients of the new cycle. It works with a single replica; several need shared
    gradients. It keeps up to two copies of the parameters. The arguments are those of :class:`SlopeController`.
    """

    reads: ClassVar[Literal["slopes"]] = "slopes"

    def prepare(self, run: Run) -> Run:
        """Return ``run`` with the wish for slopes."""
        return replace(super().prepare(run), slopes=True)

    def update(self, run: Run, state: State, seen: Observation) -> State:
        """Return the state after a sync; the first cycle has no displacement before it, so only the caps move."""
        if seen.slopes is None:
            return {**state, "caps": self._next_caps(run, seen.step)}
        slopes = usable_slopes(seen.slopes, self.settings)
        # The error of a hypergradient is not known: every one that is not 0 counts as significant.
        significance = np.where(slopes != 0, self.settings.largest_significance, 0.0)
        return self._moved(run, state, slopes, significance, np.ones(len(slopes), bool), seen)
