"""Fault injection over real processes: ``python -m tests.chaos`` or ``make chaos``.

A *fault* of the catalogue (``faults.py`` and ``faults_*.py``) is put into a small training run of one *configuration*
(``configurations.py``), on one rank, at one step, all drawn from a seed (``plan.py``). Ranks are processes in a gloo
group (``group.py``). Each makes the run (``scenario.py``) and records the digests of everything after every step.
``judge.py`` compares the records with those of an undisturbed run and lists every broken promise:

- healthy ranks are equal, bit for bit, after every sync;
- model, optimizer and scheduler are as before a sync or as after it, never between;
- the error names the rank and the cause;
- the resumed run equals the undisturbed one, bit for bit.
"""
