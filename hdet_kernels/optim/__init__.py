"""Optimizers with the semantics and the checkpoints of torch.optim, and one launch for all parameters."""

from hdet_kernels.optim.adagrad import FusedAdagrad
from hdet_kernels.optim.adam import FusedAdam, FusedAdamW
from hdet_kernels.optim.base import FusedOptimizer
from hdet_kernels.optim.lion import FusedLion
from hdet_kernels.optim.sgd import FusedSGD

__all__ = ["FusedAdagrad", "FusedAdam", "FusedAdamW", "FusedLion", "FusedOptimizer", "FusedSGD"]
