"""R replicas of a module on one device, trained together.

The flow, and the file of each step::

    module ──► template ──► rows ──► vmap losses ──► gradients ──► optimizer
                              ▲                                        │
                              └──────────── ensemble ◄─────────────────┘

- ``replica_stack``: :class:`ReplicaStack`, the public class; it holds the rows and calls the parts below.
- ``template``: choose the tensors of the module that get one row per replica, and refuse those that cannot; call the
  module with the tensors of one replica. :class:`StackedParameter`: a parameter of all replicas, [R, *shape].
- ``inputs``: cut the batch into one slice per replica; hold the explored scalars that act in the loss.
- ``losses``: compute all losses in one forward pass under ``torch.func.vmap``, or one replica after another; replay a
  pass as a CUDA graph. ``vmap`` corrects functions that differ there, and computes attention as one call.
- ``gradients``: collect gradients as autograd produces them, and add them to ``grad`` of the stacked parameters.

An optimizer steps the stacked parameters. At a sync the scheduler averages the rows through :class:`StackEnsemble`.
"""

from hdet_kernels.stack.replica_stack import ReplicaStack, StackEnsemble
from hdet_kernels.stack.template import StackedParameter

__all__ = ["ReplicaStack", "StackEnsemble", "StackedParameter"]
