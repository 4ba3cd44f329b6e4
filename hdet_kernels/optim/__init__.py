"""Fused optimizers with the semantics and the checkpoints of torch.optim, and one kernel launch for all parameters.

A step flows through the files of this folder:

1. ``param_groups`` hold the hyperparameters, for each replica of a stack where they differ (:mod:`.group_entries`). An
   optimizer (:mod:`.rules`, :mod:`.muon`) maps a group to a row of the hyperparameter table.
2. :mod:`.base` writes that table to the device when a number changed, and ties everything together.
3. :mod:`.watch` notices parameters and gradients that were changed between steps.
4. :mod:`.flat_group` holds a flat buffer of parameters with its state and step counts, and calls ``ops.Step`` on it:
   at once, or in the parts that :mod:`.in_backward` steps during the backward pass.
5. :mod:`.state_views` shows the flat state as ``optimizer.state``, as torch.optim does; :mod:`.loading` checks a
   ``state_dict`` before it gets there. :mod:`.coded_state` has the entries of state in 8 bits.

:mod:`.options` has the options that all optimizers share. :mod:`.rowwise_adagrad` has flat groups of its own, as
:mod:`.muon` has: their state is a number a row, and their gradients are sparse.

The folder depends on :mod:`hdet_kernels.ops`, ``buckets``, ``ddp_hook``, ``sharded`` and ``tensors`` alone.
"""

from hdet_kernels.optim.base import FusedOptimizer
from hdet_kernels.optim.coded_state import decoded_state_dict
from hdet_kernels.optim.muon import FusedMuon
from hdet_kernels.optim.options import InBackward
from hdet_kernels.optim.rowwise_adagrad import FusedRowWiseAdagrad
from hdet_kernels.optim.rules import FusedAdagrad, FusedAdam, FusedAdamW, FusedLion, FusedSGD

__all__ = [
    "FusedAdagrad",
    "FusedAdam",
    "FusedAdamW",
    "FusedLion",
    "FusedMuon",
    "FusedOptimizer",
    "FusedRowWiseAdagrad",
    "FusedSGD",
    "InBackward",
    "decoded_state_dict",
]
