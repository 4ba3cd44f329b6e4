"""HDET where people already train: one module for each framework, imported only where it is used.

``lightning.py`` is a callback of Lightning's Trainer, ``transformers.py`` a callback and a mixin for transformers'
Trainer. ``accelerate.py`` prepares an HDET scheduler for an Accelerator. ``loggers.py`` writes every sync to
TensorBoard or anything that takes a dict. ``probe.py`` makes a probe of one stored batch, for all of them and for plain
loops.
"""
