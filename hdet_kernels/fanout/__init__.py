"""Fan-out: the values that each replica trains with in a cycle.

``multipliers.py`` has the multipliers ρ, symmetric around 1, and the permutations π that deal them to the replicas.
``explore.py`` says which scalars are explored: the learning rates of the parameter groups or of groups that are tied,
and what the user adds with ``Explore``. ``spread.py`` multiplies the base values, as the controller moved them, with
the multipliers, and writes the results to the optimizer.
"""

from hdet_kernels.fanout.explore import Explore
from hdet_kernels.fanout.multipliers import multipliers, permutation

__all__ = ["Explore", "multipliers", "permutation"]
