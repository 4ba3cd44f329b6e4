"""The contract for other frontends: the pieces of a cycle, for schedulers and trainers that drive it themselves.

``__all__`` is the contract. Its names, their public attributes and the order in which ``docs/frontend.md`` calls them
change by the rules that are written there. The top level has the few of them that users write too.

One cycle, in their terms: a :class:`Spread` gives every replica its values. After T steps a :class:`Report` goes into
:meth:`Converger.converge`, which returns an :class:`Outcome`: the losses, gathered before the average. From an
:class:`Observation` of them the :class:`Controller` moves the base values, and the next cycle begins.
"""

from hdet_kernels.controller.hypergradient import HypergradientController
from hdet_kernels.controller.protocol import (
    Controller,
    MeasuredSlopes,
    Observation,
    Run,
    TryingController,
    UndoingController,
)
from hdet_kernels.controller.regression import RegressionController
from hdet_kernels.controller.softmax import SoftmaxController
from hdet_kernels.converge import AverageRequest, Converger, NoneSound, Outcome, OverlappedAverage, Report, converger_of
from hdet_kernels.ensemble import Ensemble, ProcessEnsemble, announced_size, default_ensemble
from hdet_kernels.fanout.explore import Explore
from hdet_kernels.fanout.multipliers import multipliers, permutation
from hdet_kernels.fanout.spread import Placement, Spread
from hdet_kernels.schedule.acts import Progress
from hdet_kernels.schedule.attachment import release
from hdet_kernels.schedule.gradients import Displacement, fingerprint, look_at_gradients
from hdet_kernels.schedule.history import SyncCallbacks, SyncRecord
from hdet_kernels.schedule.losses import LossWindow, run_probe
from hdet_kernels.schedule.undo.undoing import Undoing

__all__ = [
    "AverageRequest",
    "Controller",
    "Converger",
    "Displacement",
    "Ensemble",
    "Explore",
    "HypergradientController",
    "LossWindow",
    "MeasuredSlopes",
    "NoneSound",
    "Observation",
    "Outcome",
    "OverlappedAverage",
    "Placement",
    "ProcessEnsemble",
    "Progress",
    "RegressionController",
    "Report",
    "Run",
    "SoftmaxController",
    "Spread",
    "SyncCallbacks",
    "SyncRecord",
    "TryingController",
    "Undoing",
    "UndoingController",
    "announced_size",
    "converger_of",
    "default_ensemble",
    "fingerprint",
    "look_at_gradients",
    "multipliers",
    "permutation",
    "release",
    "run_probe",
]
