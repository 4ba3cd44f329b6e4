"""The parts of an average in two phases: memory for what arrives, the confirmation of all, the writes at the end."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hdet_kernels.ensemble import Trading


class Room:
    """Memory for what arrives from other processes.

    It can be kept from one average to the next: to get it anew from the operating system can take longer than the
    average itself.

    Args:
        keeps: whether the memory is kept.
    """

    def __init__(self, *, keeps: bool) -> None:
        self.keeps = keeps
        self._kept: list[Tensor] = []

    def take(self, sizes: Sequence[tuple[int, torch.dtype]]) -> list[Tensor]:
        """Return a tensor for each number of elements and dtype, out of the kept memory where that fits.

        The memory is not kept any longer: after a failure something might still be written to it.
        """
        found = []
        for size, known in itertools.zip_longest(sizes, self._kept[: len(sizes)]):
            fits = known is not None and (known.numel(), known.dtype) == size
            found.append(known if fits else torch.empty(size[0], dtype=size[1], device="cpu"))
        self._kept = []
        return found

    def keep(self, memory: list[Tensor]) -> None:
        """Keep what :meth:`take` returned for the next average, after a success."""
        if self.keeps:
            self._kept = memory


def confirm(ensemble: Trading, own: float) -> float:
    """Wait until everything has arrived on all processes; return the sum of the ``own`` numbers of all.

    Without that one process might write what another never received.
    """
    sent = torch.tensor([own], dtype=torch.float64, device="cpu")
    received = sent.repeat(ensemble.processes, 1)
    ensemble.trade([sent] * ensemble.processes, list(received)).wait()
    return float(received.sum())


def write_all(steps: Sequence[Callable[[], None]]) -> None:
    """Call all ``steps``, even if that is interrupted; then the interrupt is raised.

    Args:
        steps: they may be called again, completely or after they were interrupted, with the same result.
    """
    missing = list(steps)
    try:
        while missing:
            missing[-1]()
            missing.pop()
    except BaseException:
        for step in missing:
            step()
        raise
