"""Ensembles: which process holds which replica, and the collectives between them.

An ensemble has N replicas. A process holds one replica, or several as the rows of its tensors (``rows.py``). Or several
processes hold one replica together, each a shard of its parameters. The processes that hold the same part of different
replicas communicate through a ``torch.distributed`` group (``processes.py``). ``row_gather.py`` gathers a row of
numbers from each of them in a logarithmic number of hops. ``single.py`` is one replica alone.

``protocol.py`` says what every ensemble has, ``started.py`` what its collectives return, and ``default.py`` which
ensemble is taken where none is given.
"""

from hdet_kernels.ensemble.default import announced_size, default_ensemble, settled_ensemble
from hdet_kernels.ensemble.processes import ProcessEnsemble
from hdet_kernels.ensemble.protocol import Collective, Ensemble, Trading, check_ensemble, held
from hdet_kernels.ensemble.rows import RowEnsemble
from hdet_kernels.ensemble.single import SingleReplica

__all__ = [
    "Collective",
    "Ensemble",
    "ProcessEnsemble",
    "RowEnsemble",
    "SingleReplica",
    "Trading",
    "announced_size",
    "check_ensemble",
    "default_ensemble",
    "held",
    "settled_ensemble",
]
