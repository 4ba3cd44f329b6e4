"""Scouting: find the peak learning rate in the first steps of a run (``max_lr=None``).

For the first share of the steps every replica trains a miniature of the schedule, warm-up and annealing included, with
a learning rate of its own and on its own gradients. A round ends when all miniatures end. Their losses narrow the range
of learning rates, everything returns to the start of the run, and the next round begins. After the last round the
learning rate is chosen, everything returns to the start once more, and the rest of the steps is the run.

- ``settings``: every constant, once.
- ``plan``: the lengths of the rounds, and the candidates of a round. Pure functions of numbers.
- ``choice``: from the losses of the candidates to a narrower range, and to the learning rate. Pure functions too.
- ``own_gradients``: let the replicas train on their own gradients for a while, and find out whether they do.

The phase itself, which a scheduler steps, is ``hdet_kernels/schedule/scouting/phase.py``.
"""

from hdet_kernels.scout.choice import Comparison, Verdict, choose, narrow
from hdet_kernels.scout.own_gradients import OwnGradients
from hdet_kernels.scout.plan import Plan, candidates, make_plan
from hdet_kernels.scout.settings import ScoutSettings

__all__ = [
    "Comparison",
    "OwnGradients",
    "Plan",
    "ScoutSettings",
    "Verdict",
    "candidates",
    "choose",
    "make_plan",
    "narrow",
]
