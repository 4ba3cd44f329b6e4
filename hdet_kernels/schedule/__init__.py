"""The schedulers that a training loop steps, and the cycle of HDET that they drive.

``schedulers.py`` has the two classes; ``options.py`` their keywords, each written once. ``with_cycle.py`` has the
methods that both have, ``one_cycle.py`` the steps of the first. ``build.py`` checks the keywords and puts a cycle
together; for a schedule that does not tell its peak, ``rehearsal.py`` plays a copy of it.

``cycle.py`` is the method: after every step the loss goes into ``loss_window.py``; every T steps a sync reports on the
replicas held here (``gradient_hooks.py`` tells whether gradients are shared, and measures the hypergradient), averages
them with the others (folder ``converge/``), notes the sync in ``history.py``, and lets the controller (folder
``controller/``) move the base values that folder ``fanout/`` spreads over the replicas of the next cycle.
``undoing.py`` returns all replicas to the last sound average where training broke; ``last_sound.py`` is the copy of it,
with the optimizer's state by ``optimizer_copy.py``, in the memory of ``kept_tensors.py``.
With ``max_lr=None``, ``scouting.py`` comes before the first cycle: rounds in which every replica tries a learning rate
(folder ``scout/`` plans and chooses), with their losses in ``round_losses.py``, compared by ``scout_round.py``.
``scouted.py`` is what remains of it, ``scout_state.py`` its part of a checkpoint.
``overlapping.py`` is an average that runs beside the training. ``history_file.py`` writes every record to a file.
``sync_callbacks.py`` calls the user's functions with it, and ``metrics.py`` gives its numbers flat names for loggers.

``checkpoint.py`` saves and restores all of it; ``packed.py`` makes one object of it, which distributed checkpoints save
whole. ``formats.py`` converts what earlier versions saved, and ``checked_state.py`` checks it by ``state_schema.py``,
the schema of a checkpoint in the terms of ``schema.py``.
``attachment.py`` hooks a cycle to its optimizer, which ``wrapped.py`` finds inside its wrappers, and takes the one
before off it. ``sync_callbacks.py`` has what the user wants to be called after a sync, ``metrics.py`` names for
loggers. Three files notice what frameworks do wrong: ``late_ensemble.py`` a process group that is initialised after the
scheduler was built, ``step_count.py`` steps of the scheduler without one of the optimizer, ``equal_losses.py`` losses
that were averaged before they came here.
"""

from hdet_kernels.schedule.attachment import release
from hdet_kernels.schedule.history import HistorySummary, SyncRecord
from hdet_kernels.schedule.schedulers import HDETOneCycleLR, HDETScheduler

__all__ = ["HDETOneCycleLR", "HDETScheduler", "HistorySummary", "SyncRecord", "release"]
