"""Returning all replicas to the last sound average where training broke.

``undoing.py`` decides and returns. ``last_sound.py`` is the copy of that average, with the optimizer's state by
``optimizer_copy.py``, in the memory of ``kept_tensors.py``.
"""
