"""One flat buffer of parameters with everything a step on it needs: state, step counts, gradients and the tables."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hdet_kernels import ops
from hdet_kernels.buckets import Buckets
from hdet_kernels.ops.backends import chosen
from hdet_kernels.ops.chunks import ChunkTable, MatchedGradients
from hdet_kernels.ops.stacked_chunks import StackedTable
from hdet_kernels.ops.table import HyperTable
from hdet_kernels.optim.options import Options
from hdet_kernels.tensors import Slot


class Home:
    """``residents[i]`` are the parameters of slot ``i``: one, or several that are tied by sharing their memory.
    ``groups[i]`` is the number of its parameter group.

    Of stacked parameters ``flat`` is [replicas, n]. As long as their replicas have one gradient and one rule for the
    moments (``shares_state``) the state is [n]; otherwise, and once :meth:`part_state` was called, every replica has
    its own, [replicas, n].
    """

    def __init__(
        self,
        rule: str,
        flat: Tensor,
        master: Tensor | None,
        residents: list[list[Tensor]],
        slots: Sequence[Slot],
        groups: Sequence[int],
        table: HyperTable,
        options: Options,
        *,
        shares_state: bool,
    ) -> None:
        self.rule, self.options = rule, options
        self.flat, self.master = flat, master
        self.residents = residents
        self.slots, self.groups = tuple(slots), tuple(groups)
        self.table = table
        #: None for plain parameters.
        self.replicas = flat.shape[0] if flat.dim() == 2 else None
        #: Slots whose state is not yet to be seen in ``optimizer.state``.
        self.unpublished: set[int] = set(range(len(residents)))
        self._single = [tied[0] for tied in residents]
        self._tied = [index for index, tied in enumerate(residents) if len(tied) > 1]
        self._chosen: str | None = None
        self._lay_out(shares_state)

    def _lay_out(self, shares_state: bool) -> None:
        self.shares_state = shares_state
        flat, slots, groups = self.flat, self.slots, self.groups
        self.chunks: ChunkTable
        if self.replicas is None:
            self.chunks = ChunkTable(slots, groups, flat.device, flat.dtype)
        else:
            self.chunks = StackedTable(
                slots,
                groups,
                flat.device,
                flat.dtype,
                replicas=self.replicas,
                row_stride=flat.shape[1],
                table_rows_per_replica=self.table.tensor.shape[0] // self.replicas,
                shares_state=shares_state,
            )
        self.steps = torch.zeros(len(self.chunks.entries), dtype=torch.float32, device=flat.device)
        #: Flat state buffers by their name in torch.optim; None until one is needed.
        self.states: dict[str, Tensor | None] = dict.fromkeys(ops.STATES[self.rule])
        self._step: ops.Step | None = None

    def part_state(self) -> None:
        """Give every replica its own state, empty at first: it is to be filled with what they shared."""
        self._lay_out(shares_state=False)

    def ensure(self, name: str) -> Tensor:
        """The flat buffer of state ``name``, made of zeros when first asked for."""
        flat = self.states[name]
        if flat is None:
            dtype = self.options.state_dtype_for(self.flat.dtype)
            like = self.flat[0] if self.shares_state else self.flat
            flat = self.states[name] = torch.zeros_like(like, dtype=dtype)
            self._step = None
        return flat

    def view(self, flat: Tensor, index: int) -> Tensor:
        """Slot ``index`` of a buffer laid out like the parameters, with the shape and strides of its parameter."""
        return self.slots[index].view(flat)

    def count(self, index: int) -> Tensor:
        """The step count of slot ``index``: of all replicas, or [replicas] where each has its own state."""
        return self.steps.view(-1, len(self.slots))[:, index] if self._is_parted else self.steps[index]

    @property
    def _is_parted(self) -> bool:
        return self.replicas is not None and not self.shares_state

    def gradients(self) -> MatchedGradients:
        grads = [param.grad for param in self._single]
        for index in self._tied:
            # The gradient of memory that several parameters share is the sum of theirs.
            parts = [param.grad.detach() for param in self.residents[index] if param.grad is not None]
            grads[index] = sum(parts[1:], start=parts[0]) if parts else None
        return self.chunks.match(grads)

    def norm(self, grads: MatchedGradients) -> Tensor:
        """The norm of all gradients as they are stored: one number, or [replicas] where each has its own state."""
        rows = self.replicas if self._is_parted else None
        return ops.grad_norm(self.chunks, grads, rows=rows, backend=self.options.backend)

    def step(self, grads: MatchedGradients, scalars: ops.Scalars) -> None:
        if self._step is None or self._chosen != chosen():
            self._chosen = chosen()
            # A parted stack is stepped as one long row of parameters: its tables say which replica each belongs to.
            flats = (self.flat, self.master, *self.states.values())
            if self._is_parted or self.replicas == 1:
                flats = tuple(None if flat is None else flat.view(-1) for flat in flats)
            param, master, *states = flats
            assert param is not None
            self._step = ops.Step(
                self.rule,
                param,
                states,
                self.steps,
                self.table.tensor,
                self.chunks,
                master=master,
                stochastic_rounding=self.options.stochastic_rounding,
                backend=self.options.backend,
                rows=param.shape[0] if param.dim() == 2 else 1,
            )
        self._step(grads, scalars.on(self.flat.device))


def homes_of(
    rule: str, buckets: Buckets, groups: Sequence[int], group_count: int, options: Options, *, shares_state: bool
) -> list[Home]:
    """A home for each flat buffer. ``groups[i]`` is the parameter group of ``buckets.params[i]``; the homes on one
    device share one table with a row for each replica and group."""
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
            tables[flat.device] = HyperTable((buckets.replicas or 1) * group_count, flat.device)
        own_groups = [groups[index] for index in first]
        residents = [[buckets.params[index] for index in members] for members in tied.values()]
        table = tables[flat.device]
        homes.append(Home(rule, flat, master, residents, slots, own_groups, table, options, shares_state=shares_state))
    return homes
