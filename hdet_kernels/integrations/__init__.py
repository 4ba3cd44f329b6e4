"""HDET in the frameworks that people train with. Each module needs an extra of its own.

``lightning.py`` is a callback of Lightning's Trainer.
"""
