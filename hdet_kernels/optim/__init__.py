"""Fused optimizers with the semantics and the checkpoints of torch.optim, and one kernel launch for all parameters.

A step flows through the files of this folder:

1. ``param_groups`` hold the hyperparameters (:mod:`.group_entries`; :mod:`.per_replica` where the replicas of a stack
   differ). An optimizer (:mod:`.adam`, :mod:`.sgd`, …) maps a group to a row of the hyperparameter table.
2. :mod:`.hyperparameters` writes that table to the device when a number changed.
3. :mod:`.parameter_watch` and :mod:`.fixed_gradients` notice parameters and gradients that were changed between steps.
4. :mod:`.flat_group` holds a flat buffer of parameters with its state and step counts, and calls ``ops.Step`` on it;
   :mod:`.muon_group` one of matrices, whose updates are orthogonalised between two such steps.
5. :mod:`.state_views` shows the flat state as ``optimizer.state``, as torch.optim does; :mod:`.loading` checks a
   ``state_dict`` before it gets there. :mod:`.coded_state` has the entries of state in 8 bits.

:mod:`.base` ties them together: its class has the methods of :mod:`.rule_contract`, which an update rule overrides, and
of :mod:`.flat_state`, which hand out the state as whole buffers. :mod:`.rowwise_adagrad` stands beside it: its state is
a number a row, and its gradients are sparse.

The folder depends on :mod:`hdet_kernels.ops`, ``buckets`` and ``tensors`` alone.
"""

from hdet_kernels.optim.adagrad import FusedAdagrad
from hdet_kernels.optim.adam import FusedAdam, FusedAdamW
from hdet_kernels.optim.base import FusedOptimizer
from hdet_kernels.optim.coded_state import decoded_state_dict
from hdet_kernels.optim.lion import FusedLion
from hdet_kernels.optim.muon import FusedMuon
from hdet_kernels.optim.rowwise_adagrad import FusedRowWiseAdagrad
from hdet_kernels.optim.sgd import FusedSGD

__all__ = [
    "FusedAdagrad",
    "FusedAdam",
    "FusedAdamW",
    "FusedLion",
    "FusedMuon",
    "FusedOptimizer",
    "FusedRowWiseAdagrad",
    "FusedSGD",
    "decoded_state_dict",
]
