"""Noticing what frameworks and loops do wrong.

``wrapped.py`` finds an optimizer inside its wrappers. ``late_ensemble.py`` takes a process group that is initialised
after the scheduler was built, ``step_count.py`` notices steps of the scheduler without one of the optimizer, and
``equal_losses.py`` losses that were averaged before they came here.
"""
