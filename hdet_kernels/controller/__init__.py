"""Controllers: from the losses and values of all replicas at a sync to the base values of the next cycle.

``protocol.py`` is the interface to the scheduler: a description of the run, an observation, and the methods of a
controller. Three controllers implement it:

- ``regression.py``, the default: the losses regressed on the log multipliers (``least_squares.py``); the signs and the
  sizes of the slopes as evidence on the right peak (``peak_posterior.py``) and on stability (``soundness.py``).
- ``hypergradient.py``: the next gradient times the last displacement. It needs no spread and no second replica.
- ``softmax.py``: the paper's.

The first two share ``slopes.py``, which moves a hyperparameter against a slope, and ``warmup.py``, which caps learning
rates under schedules without a warm-up. ``findings.py`` has slopes and posteriors of a sync, for its record.
``settings.py`` has every constant. All of this is pure: functions of numbers, without tensors, process groups or
clocks.
"""

from hdet_kernels.controller.hypergradient import HypergradientController
from hdet_kernels.controller.protocol import Controller, Observation, Run
from hdet_kernels.controller.regression import RegressionController
from hdet_kernels.controller.settings import RegressionSettings, SlopeSettings, SoftmaxSettings
from hdet_kernels.controller.softmax import SoftmaxController, paper_settings

__all__ = [
    "Controller",
    "HypergradientController",
    "Observation",
    "RegressionController",
    "RegressionSettings",
    "Run",
    "SlopeSettings",
    "SoftmaxController",
    "SoftmaxSettings",
    "paper_settings",
]
