"""Converge: average the replicas, at every sync and on request.

One sync, in the order in which it happens; :mod:`.converger` calls all of it, top to bottom:

1. :mod:`.payload` collects what is averaged: parameters, buffers, optimizer state and step counts (:mod:`.of_optimizer`
   finds the last two in any optimizer), as flat tensors of this process. :mod:`.split_masters` reads and writes masters
   that are split into halves.
2. :mod:`.summary` reduces them to a few numbers: layout hashes, checksums, and where buffers are not finite.
3. :mod:`.handshake` gathers one row of such numbers from every replica. Replicas that disagree on step, layout or
   settings get an error that names them. :mod:`.agreement` draws the conclusions: a replica with non-finite values is
   marked as unhealthy. If a rank does not come, :mod:`.attendance` names it.
4. :mod:`.plan` decides from the gathered rows alone, on every process alike, what is averaged over whom.
5. :mod:`.transport` averages bucket by bucket, one all-reduce each, beside the tensors; :mod:`.compress` sends the
   parameters as rounded differences to the last consensus instead.
6. A second gather confirms that everything arrived on all processes, and only then is anything written. If a collective
   fails, everything is as it was. :mod:`.outcome` has the result, and how far apart the replicas were.
7. :mod:`.outer` moves the parameters from the last consensus towards the mean by a step of an outer SGD, if asked.
8. Copies go back to the tensors that they were made of, parameters are rounded from their master weights.

:mod:`.settings` has the options of all this. :mod:`.overlap` runs steps 1 to 6 on a copy, in a thread, while training
goes on, and applies the difference later.
"""

from hdet_kernels.converge.agreement import NoneSound
from hdet_kernels.converge.converger import Converger
from hdet_kernels.converge.handshake import Report
from hdet_kernels.converge.of_optimizer import converger_of
from hdet_kernels.converge.outcome import Outcome
from hdet_kernels.converge.overlap import Correction, OverlappedAverage
from hdet_kernels.converge.plan import AverageRequest
from hdet_kernels.converge.settings import AverageState, Averaging, Format, Merge, Outer

__all__ = [
    "AverageRequest",
    "AverageState",
    "Averaging",
    "Converger",
    "Correction",
    "Format",
    "Merge",
    "NoneSound",
    "Outcome",
    "Outer",
    "OverlappedAverage",
    "Report",
    "converger_of",
]
