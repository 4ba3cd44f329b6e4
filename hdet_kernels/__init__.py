"""Hyperparameter-Divergent Ensemble Training (HDET): find the learning rate while training."""

from . import compat
from .buckets import Buckets
from .controller import (
    HypergradientController,
    RegressionController,
    SoftmaxController,
    paper_settings,
)
from .converge import Converger
from .ensemble import ProcessEnsemble
from .explore import Explore
from .fanout import multipliers, permutation
from .history import SyncRecord
from .initialise import warm_noisy_init_
from .schedule import HDETOneCycleLR, HDETScheduler

__version__ = "0.1.0"

__all__ = [
    "Buckets",
    "Converger",
    "Explore",
    "HDETOneCycleLR",
    "HDETScheduler",
    "HypergradientController",
    "ProcessEnsemble",
    "RegressionController",
    "SoftmaxController",
    "SyncRecord",
    "compat",
    "multipliers",
    "paper_settings",
    "permutation",
    "warm_noisy_init_",
]
