"""Properties of any sequence of operations: optimizers against torch.optim, schedulers against the equations.

``optimizer_twins.py`` and ``scheduler_twins.py`` apply each operation to the real thing and to its reference;
hypothesis draws the sequences in ``test_optimizers.py`` and ``test_schedulers.py``. ``reference.py`` is the method,
written from its equations.
"""
