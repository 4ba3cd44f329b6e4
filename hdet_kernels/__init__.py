"""Hyperparameter-Divergent Ensemble Training (HDET): find the learning rate while training."""

from hdet_kernels import compat, frontend, report
from hdet_kernels.buckets import Buckets
from hdet_kernels.controller.softmax import paper_settings
from hdet_kernels.converge.outer import Outer
from hdet_kernels.frontend import (
    AverageRequest,
    Controller,
    Converger,
    Displacement,
    Ensemble,
    Explore,
    HypergradientController,
    LossWindow,
    MeasuredSlopes,
    NoneSound,
    Observation,
    Outcome,
    OverlappedAverage,
    Placement,
    ProcessEnsemble,
    RegressionController,
    Report,
    Run,
    SoftmaxController,
    Spread,
    SyncRecord,
    Undoing,
    UndoingController,
    converger_of,
    default_ensemble,
    fingerprint,
    multipliers,
    permutation,
    release,
    run_probe,
)
from hdet_kernels.initialise import warm_noisy_init_
from hdet_kernels.ops.backends import backends, use_backend
from hdet_kernels.optim import FusedAdagrad, FusedAdam, FusedAdamW, FusedLion, FusedSGD
from hdet_kernels.schedule.schedulers import HDETOneCycleLR, HDETScheduler
from hdet_kernels.scout.settings import ScoutSettings
from hdet_kernels.stack import ReplicaStack
from hdet_kernels.stack.parameter import StackedParameter
from hdet_kernels.version import __version__ as __version__

__all__ = [
    "AverageRequest",
    "Buckets",
    "Controller",
    "Converger",
    "Displacement",
    "Ensemble",
    "Explore",
    "FusedAdagrad",
    "FusedAdam",
    "FusedAdamW",
    "FusedLion",
    "FusedSGD",
    "HDETOneCycleLR",
    "HDETScheduler",
    "HypergradientController",
    "LossWindow",
    "MeasuredSlopes",
    "NoneSound",
    "Observation",
    "Outcome",
    "Outer",
    "OverlappedAverage",
    "Placement",
    "ProcessEnsemble",
    "RegressionController",
    "ReplicaStack",
    "Report",
    "Run",
    "ScoutSettings",
    "SoftmaxController",
    "Spread",
    "StackedParameter",
    "SyncRecord",
    "Undoing",
    "UndoingController",
    "backends",
    "compat",
    "converger_of",
    "default_ensemble",
    "fingerprint",
    "frontend",
    "multipliers",
    "paper_settings",
    "permutation",
    "release",
    "report",
    "run_probe",
    "use_backend",
    "warm_noisy_init_",
]
