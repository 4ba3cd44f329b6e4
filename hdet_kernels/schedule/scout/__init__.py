"""Scouting: find the peak learning rate in the first steps of a run (``max_lr=None``).

For the first share of the steps every replica trains a miniature of the schedule, warm-up and annealing included, with
a learning rate of its own and on its own gradients. A round ends when all miniatures end. Their losses narrow the range
of learning rates, everything returns to the start of the run, and the next round begins. In the last rounds there are
two learning rates, each for a team of replicas that share their gradients. After the last round the learning rate is
chosen, everything returns to the start once more, and the rest of the steps is the run.

- ``rounds.py``: every constant; the lengths of the rounds, the candidates of a round, and the choice. Pure functions.
- ``own_gradients.py``: let the replicas train on their own gradients for a while, or on those of a team.
- ``comparison.py``: the losses of a round, and its record.
- ``phase.py``: the phase itself, which a scheduler steps in the place of a cycle.
"""
