"""The schedulers that a training loop steps, and the cycle of HDET that they drive.

``schedulers.py`` has the two classes. ``arguments.py`` checks their arguments, ``build.py`` finds out who the replicas
are and puts a cycle together, and ``attachment.py`` hooks it to optimizer and model.

``cycle.py`` is the method: after every step the loss goes into ``losses.py``; every T steps comes a sync. A sync
reports on the replicas held here (``gradients.py`` tells whether gradients are shared, and measures the
hypergradient), averages them with the others (folder ``converge/``), lets the controller (folder ``controller/``) move
the base values, and records it in ``history.py``. Folder ``fanout/`` then spreads the base values over the replicas of
the next cycle.

``checkpoint.py`` saves and restores all of it, after ``checkpoint_checks.py`` has compared it with the run;
``guards.py`` notices what frameworks do wrong. Folders: ``undo/`` returns all replicas to the start where training
broke; ``scout/`` is what comes before the first cycle with ``max_lr=None``.
"""

from hdet_kernels.schedule.history import HistorySummary, SyncRecord
from hdet_kernels.schedule.schedulers import HDETOneCycleLR, HDETScheduler

__all__ = ["HDETOneCycleLR", "HDETScheduler", "HistorySummary", "SyncRecord"]
