"""Notice losses that are equal to the last bit on replicas that differ: somebody averaged them before they came here.

A controller that compares replicas by such losses learns nothing, and would stay silent about it.
"""

from __future__ import annotations

import logging

import numpy as np
from numpy.typing import NDArray

log = logging.getLogger("hdet_kernels")

#: Syncs in a row at which losses are equal before it is said. One may be a coincidence of rounded losses.
SYNCS = 2


class EqualLosses:
    """Counts the syncs in a row at which all replicas had the same loss although their values differ."""

    def __init__(self) -> None:
        self._syncs = 0
        self._step = 0
        self._warned = False

    def look(self, step: int, losses: NDArray[np.float64], values: NDArray[np.float64], what: str) -> None:
        """Look at the losses of a sync, and warn once if they were equal at two in a row.

        Args:
            step: of the sync.
            losses: [N] that the controller compares; those that are not finite are left out.
            values: [J, N] of the hyperparameters.
            what: name of the losses in the message.
        """
        finite = losses[np.isfinite(losses)]
        # After a single step the losses are those of the average, from which all replicas began.
        long = step - self._step > 1
        self._step = step
        if len(finite) < 2 or not long or not (values != values[:, :1]).any():
            return
        if (finite != finite[0]).any():
            self._syncs = 0
            return
        self._syncs += 1
        if self._syncs >= SYNCS and not self._warned:
            self._warned = True
            log.warning(
                "step %d: %s of all %d replicas are equal to the last bit (%.6g), at %d syncs in a row, although the "
                "replicas train with different values: the loss was averaged over the processes before it was recorded "
                "(as by Lightning's sync_dist=True), and nothing can be learned from it. Record the loss of this "
                "process, before it is reduced",
                *(step, what, len(finite), finite[0], SYNCS),
            )
