"""One flat buffer of parameters with everything a step on it needs: state, step counts, gradients and the tables."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hdet_kernels import ops
from hdet_kernels.buckets import Buckets, Slot
from hdet_kernels.ops.backends import chosen
from hdet_kernels.ops.chunks import ChunkTable, Gradients
from hdet_kernels.ops.table import HyperTable
from hdet_kernels.optim.options import Options


class Home:
    """``residents[i]`` are the parameters of slot ``i``: one, or several that are tied by sharing their memory."""

    def __init__(
        self,
        rule: str,
        flat: Tensor,
        master: Tensor | None,
        residents: list[list[Tensor]],
        chunks: ChunkTable,
        table: HyperTable,
        options: Options,
    ) -> None:
        self.rule, self.options = rule, options
        self.flat, self.master = flat, master
        self.residents = residents
        self.chunks = chunks
        self.table = table
        self.steps = torch.zeros(len(residents), dtype=torch.float32, device=flat.device)
        #: Flat state buffers by their name in torch.optim; None until one is needed.
        self.states: dict[str, Tensor | None] = dict.fromkeys(ops.STATES[rule])
        #: Slots whose state is not yet to be seen in ``optimizer.state``.
        self.unpublished: set[int] = set(range(len(residents)))
        self._single = [tied[0] for tied in residents]
        self._tied = [index for index, tied in enumerate(residents) if len(tied) > 1]
        self._step: ops.Step | None = None
        self._chosen: str | None = None

    def ensure(self, name: str) -> Tensor:
        """The flat buffer of state ``name``, made of zeros when first asked for."""
        flat = self.states[name]
        if flat is None:
            dtype = self.options.state_dtype_for(self.flat.dtype)
            flat = self.states[name] = torch.zeros_like(self.flat, dtype=dtype)
            self._step = None
        return flat

    def view(self, flat: Tensor, index: int) -> Tensor:
        """Slot ``index`` of a buffer laid out like the parameters, with the shape and strides of its parameter."""
        return self.chunks.entries[index].view(flat)

    def gradients(self) -> Gradients:
        grads = [param.grad for param in self._single]
        for index in self._tied:
            # The gradient of memory that several parameters share is the sum of theirs.
            parts = [param.grad.detach() for param in self.residents[index] if param.grad is not None]
            grads[index] = sum(parts[1:], start=parts[0]) if parts else None
        return self.chunks.match(grads)

    def step(self, grads: Gradients, scalars: ops.Scalars) -> None:
        if self._step is None or self._chosen != chosen():
            self._chosen = chosen()
            self._step = ops.Step(
                self.rule,
                self.flat,
                list(self.states.values()),
                self.steps,
                self.table.tensor,
                self.chunks,
                master=self.master,
                stochastic_rounding=self.options.stochastic_rounding,
                backend=self.options.backend,
            )
        self._step(grads, scalars.on(self.flat.device))


def homes_of(rule: str, buckets: Buckets, rows: Sequence[int], row_count: int, options: Options) -> list[Home]:
    """A home for each flat buffer. ``rows[i]`` is the hyperparameter row of ``buckets.params[i]``; the homes on one
    device share one table of ``row_count`` rows."""
    tables: dict[torch.device, HyperTable] = {}
    homes: list[Home] = []
    for number, (flat, master) in enumerate(zip(buckets.flats, buckets.masters, strict=True)):
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
        homes.append(Home(rule, flat, master, residents, chunks, tables[flat.device], options))
    return homes
