"""The schedulers that a training loop steps, and the cycle of HDET that they drive.

``schedulers.py`` has the two classes; ``options.py`` their keywords, each written once. ``with_cycle.py`` has the
methods that both have, ``one_cycle.py`` the steps of the first. ``arguments.py`` checks the keywords, ``replicas.py``
finds out who the replicas are, and ``build.py`` puts a cycle together; for a schedule that does not tell its peak,
``rehearsal.py`` plays a copy of it. If any of that raises, ``untouched.py`` leaves the optimizer as it was.

``cycle.py`` is the method: after every step the loss goes into ``loss_window.py``; every T steps comes a sync. A sync
(``syncing.py``) reports on the replicas held here (``gradient_hooks.py`` tells whether gradients are shared, and
measures the hypergradient), averages them with the others (folder ``converge/``), lets the controller (folder
``controller/``) move the base values, and notes it in folder ``history/``. Folder ``fanout/`` then spreads the base
values over the replicas of the next cycle. ``overlapping.py`` is an average that runs beside the training.
``attachment.py`` hooks a cycle to its optimizer, and takes the one before off it.

Folders: ``scouting/`` is what comes before the first cycle with ``max_lr=None``; ``undo/`` returns all replicas to the
last sound average where training broke; ``history/`` has the records of syncs and who is told; ``checkpoint/`` saves
and restores all of it; ``guards/`` notices what frameworks do wrong.
"""

from hdet_kernels.schedule.attachment import release
from hdet_kernels.schedule.history.records import HistorySummary, SyncRecord
from hdet_kernels.schedule.schedulers import HDETOneCycleLR, HDETScheduler

__all__ = ["HDETOneCycleLR", "HDETScheduler", "HistorySummary", "SyncRecord", "release"]
