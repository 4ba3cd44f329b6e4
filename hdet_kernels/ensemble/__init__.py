"""Ensembles: which process holds which replica, and the collectives between them.

An ensemble has N replicas; ``protocol.py`` says what it has to offer. A process holds one replica (``SingleReplica``),
or several as the rows of its tensors (``RowEnsemble``, ``rows.py``). Or several processes hold one replica together,
each a shard of its parameters. The processes that hold the same part of different replicas communicate through a
``torch.distributed`` group (``ProcessEnsemble``, ``processes.py``, which also has the ensemble where none is given).
"""

from hdet_kernels.ensemble.processes import ProcessEnsemble, announced_size, default_ensemble, settled_ensemble
from hdet_kernels.ensemble.protocol import Collective, Ensemble, check_ensemble, held
from hdet_kernels.ensemble.rows import RowEnsemble, SingleReplica

__all__ = [
    "Collective",
    "Ensemble",
    "ProcessEnsemble",
    "RowEnsemble",
    "SingleReplica",
    "announced_size",
    "check_ensemble",
    "default_ensemble",
    "held",
    "settled_ensemble",
]
