"""Properties of any sequence of operations: optimizers against torch.optim, schedulers against the equations.

Hypothesis draws the sequences; each operation is applied to the real thing and to its reference. ``reference.py`` is
the method, written from its equations.
"""
