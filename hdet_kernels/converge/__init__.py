"""Converge: average the replicas, at every sync and on request.

One sync, in the order in which it happens; :mod:`.converger` calls all of it, top to bottom:

:mod:`.settings` has the keywords of an average and their checks.

1. :mod:`.payload` collects what is averaged: parameters, buffers, optimizer state and step counts
   (:mod:`.optimizer_state` finds the last two in any optimizer), as flat tensors of this process (:mod:`.flat_views`).
   What holds until a tensor is replaced, such as names (:mod:`.labels`), ties and layouts, is found once
   (:mod:`.survey`).
2. :mod:`.summary` reduces them to a few numbers: layout hashes, checksums, and where buffers are not finite
   (:mod:`.nonfinite`).
3. :mod:`.handshake` gathers one row of such numbers from every replica. Replicas that disagree on step, layout or
   settings get an error that names them. :mod:`.agreement` draws the conclusions: a replica with non-finite values is
   marked as unhealthy. If a rank does not come, :mod:`.attendance` names it, by the
   :mod:`.notices` that the ranks leave for each other.
4. :mod:`.plan` decides from the gathered rows alone, on every process alike, what is averaged over whom.
5. :mod:`.averaging` carries the plan out: :mod:`.transport` averages bucket by bucket, one collective each;
   :mod:`.compress` sends the parameters as rounded differences to the last consensus instead. If a collective fails,
   everything is restored. CPU tensors over gloo are averaged beside the model by :mod:`.trade`, and written when all of
   them have arrived. :mod:`.split_masters` joins split masters for that, one bucket at a time.
6. :mod:`.distance` tells how far apart the replicas were.
7. :mod:`.outer` moves the parameters from the last consensus towards the mean by a step of an outer SGD, if asked.
8. The payload is settled: copies go back to the tensors that they were made of, parameters are rounded from their
   master weights.

:mod:`.of_optimizer` builds the converger of an optimizer; :mod:`.memory` saves what it remembers from one average to
the next. :mod:`.overlap` runs steps 1 to 6 on a copy, in a thread,
while training goes on, and applies the difference later.
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
