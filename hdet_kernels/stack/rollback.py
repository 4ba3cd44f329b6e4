"""Restore buffers and random number generators after a loss has failed, so that it can be computed again."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Rollback:
    """A copy of the state that computing a loss may change: buffers and, at its first use, random numbers.

    Args:
        buffers: the stacked buffers.
        changing: indices of the buffers that the loss is known to change; None if it is used for the first time and may
            change any.
        device: the device whose random number generator is restored beside the CPU's.
    """

    def __init__(self, buffers: Sequence[Tensor], changing: Sequence[int] | None, device: torch.device) -> None:
        self._buffers, self._device = buffers, device
        indices = range(len(buffers)) if changing is None else changing
        self._copies = {index: buffers[index].clone() for index in indices}
        self._generators: tuple[Tensor, Tensor | None] | None = None
        if changing is None:
            cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
            self._generators = torch.get_rng_state(), cuda

    def changed(self) -> list[int]:
        """Return the indices of the buffers that have changed.

        Values are compared: the version counters of tensors do not count what vmap writes.
        """
        return [index for index, copied in self._copies.items() if not torch.equal(copied, self._buffers[index])]

    @torch.no_grad()
    def restore(self) -> None:
        """Write the copies back."""
        for index, copied in self._copies.items():
            self._buffers[index].copy_(copied)
        if self._generators is not None:
            cpu, cuda = self._generators
            torch.set_rng_state(cpu)
            if cuda is not None:
                torch.cuda.set_rng_state(cuda, self._device)
