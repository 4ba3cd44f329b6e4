"""Hyperparameter-Divergent Ensemble Training (HDET): find the learning rate while training."""

from . import compat, report
from .buckets import Buckets
from .converge import Converger
from .ensemble import ProcessEnsemble
from .explore import Explore
from .fanout import multipliers, permutation
from .history import SyncRecord
from .initialise import warm_noisy_init_
from .ops.backends import backends, use_backend
from .optim import FusedAdagrad, FusedAdam, FusedAdamW, FusedLion, FusedSGD
from .outer import Outer
from .regression_controller import RegressionController
from .schedule import HDETOneCycleLR, HDETScheduler
from .slopes import HypergradientController
from .softmax import SoftmaxController, paper_settings
from .stack import ReplicaStack
from .stacked import StackedParameter

__version__ = "0.1.0"

__all__ = [
    "Buckets",
    "Converger",
    "Explore",
    "FusedAdagrad",
    "FusedAdam",
    "FusedAdamW",
    "FusedLion",
    "FusedSGD",
    "HDETOneCycleLR",
    "HDETScheduler",
    "HypergradientController",
    "Outer",
    "ProcessEnsemble",
    "RegressionController",
    "ReplicaStack",
    "SoftmaxController",
    "StackedParameter",
    "SyncRecord",
    "backends",
    "compat",
    "multipliers",
    "paper_settings",
    "permutation",
    "report",
    "use_backend",
    "warm_noisy_init_",
]
