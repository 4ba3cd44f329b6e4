"""Controllers: from the losses and values of all replicas at a sync to the base values of the next cycle.

``protocol.py`` is the interface to the scheduler: a description of the run, an observation, the methods of a
controller, and what it found, for records. Three controllers implement it:

- ``regression.py``, the default: signs and sizes of slopes as evidence on the right peak and on stability. Where
  gradients are not shared, the slopes come from the losses by ``least_squares.py``.
- ``hypergradient.py``: the next gradient times the last displacement. It needs no spread and no second replica. Its
  base class, which moves a hyperparameter against a slope and caps learning rates under schedules without a warm-up, is
  that of the regression controller too.
- ``softmax.py``: the paper's.

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
