"""The ``torch`` backend: every operation in plain torch, which runs anywhere and is the reference for other backends.

A newcomer begins with :mod:`.rules`, which has the update rules beside their equations. A module has the name of its
operation in :mod:`hdet_kernels.ops`, which says what the arguments are::

    rules          the update rules, each beside its equations
    step           reading, rounding and writing around a rule, for all parameters
    reduce         the norm of all gradients
    pack           tensors into one buffer and back
    wire           a compressed average
    rowwise        row-wise Adagrad
    newton_schulz  Muon's orthogonalisation
    companding     optimizer state in 8 bits
    rounding       stochastic rounding
"""
