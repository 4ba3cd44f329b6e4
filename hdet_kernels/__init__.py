"""Hyperparameter-Divergent Ensemble Training (HDET): find the learning rate while training.

These are the names that users write. The pieces for frontends of other projects are in :mod:`hdet_kernels.frontend`.
"""

from hdet_kernels import compat, frontend, report
from hdet_kernels.buckets import Buckets
from hdet_kernels.controller.softmax import paper_settings
from hdet_kernels.converge.settings import Averaging, Outer
from hdet_kernels.frontend import (
    Converger,
    Explore,
    HypergradientController,
    ProcessEnsemble,
    RegressionController,
    SoftmaxController,
    SyncRecord,
    multipliers,
    permutation,
    release,
)
from hdet_kernels.initialise import warm_noisy_init_
from hdet_kernels.ops.backends import backends, use_backend
from hdet_kernels.optim import (
    FusedAdagrad,
    FusedAdam,
    FusedAdamW,
    FusedLion,
    FusedMuon,
    FusedRowWiseAdagrad,
    FusedSGD,
    InBackward,
)
from hdet_kernels.schedule.schedulers import HDETOneCycleLR, HDETScheduler
from hdet_kernels.schedule.scout.rounds import ScoutSettings
from hdet_kernels.stack import ReplicaStack, StackedParameter
from hdet_kernels.version import __version__ as __version__

__all__ = [
    "Averaging",
    "Buckets",
    "Converger",
    "Explore",
    "FusedAdagrad",
    "FusedAdam",
    "FusedAdamW",
    "FusedLion",
    "FusedMuon",
    "FusedRowWiseAdagrad",
    "FusedSGD",
    "HDETOneCycleLR",
    "HDETScheduler",
    "HypergradientController",
    "InBackward",
    "Outer",
    "ProcessEnsemble",
    "RegressionController",
    "ReplicaStack",
    "ScoutSettings",
    "SoftmaxController",
    "StackedParameter",
    "SyncRecord",
    "backends",
    "compat",
    "frontend",
    "multipliers",
    "paper_settings",
    "permutation",
    "release",
    "report",
    "use_backend",
    "warm_noisy_init_",
]
