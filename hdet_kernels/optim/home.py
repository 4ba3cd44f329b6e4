"""One flat buffer of parameters with everything a step on it needs: state, step counts, and the tables."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hdet_kernels.buckets import Buckets, Slot
from hdet_kernels.ops import STATES
from hdet_kernels.ops.chunks import ChunkTable, Gradients
from hdet_kernels.ops.table import HyperTable


class Home:
    """``residents[i]`` are the parameters of slot ``i``: one, or several that are tied by sharing their memory."""

    def __init__(
        self, rule: str, flat: Tensor, residents: list[list[Tensor]], chunks: ChunkTable, table: HyperTable
    ) -> None:
        self.flat = flat
        self.residents = residents
        self.chunks = chunks
        self.table = table
        self.steps = torch.zeros(len(residents), dtype=torch.float32, device=flat.device)
        #: Flat state buffers by their name in torch.optim; None until one is needed.
        self.states: dict[str, Tensor | None] = dict.fromkeys(STATES[rule])
        #: Slots whose state is not yet to be seen in ``optimizer.state``.
        self.unpublished: set[int] = set(range(len(residents)))
        self._single = [tied[0] for tied in residents]
        self._tied = [index for index, tied in enumerate(residents) if len(tied) > 1]

    def ensure(self, name: str) -> Tensor:
        """The flat buffer of state ``name``, made of zeros when first asked for."""
        flat = self.states[name]
        if flat is None:
            flat = self.states[name] = torch.zeros_like(self.flat)
        return flat

    def view(self, name: str, index: int) -> Tensor:
        """The state ``name`` of slot ``index``, with the shape and strides of its parameter."""
        slot = self.chunks.entries[index]
        return torch.as_strided(self.ensure(name), slot.shape, slot.stride, slot.offset)

    def gradients(self) -> Gradients:
        grads = [param.grad for param in self._single]
        for index in self._tied:
            # The gradient of memory that several parameters share is the sum of theirs.
            parts = [param.grad for param in self.residents[index] if param.grad is not None]
            grads[index] = sum(parts[1:], start=parts[0]) if parts else None
        return self.chunks.match(grads)


def homes_of(rule: str, buckets: Buckets, rows: Sequence[int], row_count: int) -> list[Home]:
    """A home for each flat buffer. ``rows[i]`` is the hyperparameter row of ``buckets.params[i]``; the homes on one
    device share one table of ``row_count`` rows."""
    tables: dict[torch.device, HyperTable] = {}
    homes: list[Home] = []
    for number, flat in enumerate(buckets.flats):
        # Tied parameters have one and the same Slot object; two empty ones may have equal slots and are not tied.
        tied: dict[int, list[int]] = {}
        for index, slot in enumerate(buckets.slots):
            if slot.flat == number:
                tied.setdefault(id(slot), []).append(index)
        first = [members[0] for members in tied.values()]
        slots: list[Slot] = [buckets.slots[index] for index in first]
        if flat.device not in tables:
            tables[flat.device] = HyperTable(row_count, flat.device)
        chunks = ChunkTable(slots, [rows[index] for index in first], flat.device, flat.dtype)
        residents = [[buckets.params[index] for index in members] for members in tied.values()]
        homes.append(Home(rule, flat, residents, chunks, tables[flat.device]))
    return homes
