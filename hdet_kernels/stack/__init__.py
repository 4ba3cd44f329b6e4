"""R replicas of a module on one device, trained together.

The flow, and the file of each step::

    module ──► template ──► rows ──► vmap losses ──► gradients ──► optimizer
                              ▲                                        │
                              └──────────── ensemble ◄─────────────────┘

- ``template``: choose the tensors of the module that get one row per replica, and refuse those that cannot.
- ``parameter``: a parameter of all replicas, [R, *shape], as the optimizers know it.
- ``replica_stack``: :class:`ReplicaStack`, the public class; it holds the rows and calls the parts below.
- ``batch``, ``hyper``: cut the batch into one slice per replica; hold the explored scalars that act in the loss.
- ``losses``: compute all losses in one forward pass under ``torch.func.vmap``, or one replica after another.
  ``vmap`` corrects what differs under it and folds the replicas into the batch of attention,
  ``side_effects`` handles what a forward pass leaves in the module, ``rollback`` restores buffers and random numbers
  after a failure, ``finite`` checks the first gradients, ``graph`` replays a pass as a CUDA graph.
- ``gradients``: collect gradients as autograd produces them, and add them to ``grad`` of the stacked parameters.
- ``state``: ``state_dict`` of a stack, and plain copies of its module.

An optimizer steps the stacked parameters. At a sync the scheduler averages the rows through :class:`StackEnsemble`.
"""

from hdet_kernels.stack.parameter import StackedParameter
from hdet_kernels.stack.replica_stack import ReplicaStack, StackEnsemble

__all__ = ["ReplicaStack", "StackEnsemble", "StackedParameter"]
