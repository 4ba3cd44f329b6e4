"""Saving and restoring a run.

``saving.py`` saves and restores a cycle; ``packed.py`` makes one object of its state, which distributed checkpoints
save whole. ``formats.py`` converts what earlier versions saved, and ``checked_state.py`` checks what is loaded by
``state_schema.py``, the schema of a checkpoint in the terms of ``schema.py``.
"""
