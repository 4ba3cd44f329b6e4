"""R replicas of a module on one device: their parameters in rows, their losses and gradients computed together."""

from hdet_kernels.stack.replica_stack import ReplicaStack as ReplicaStack
from hdet_kernels.stack.replica_stack import StackEnsemble as StackEnsemble
