"""Checkpoints of each release, with the continuation of the run as that release computed it.

``python -m tests.golden`` writes those of the current version to ``tests/golden/<version>/``, one file for each case of
``cases.py``. A later version must load them and go on alike (``test_golden.py``): the files of a release are never
written again, and no case is removed or changed.
"""
