"""One flat buffer of parameters with everything that a step on it needs: state, step counts, gradients and tables.

A :class:`FlatGroup` is stepped in parts, each of them in one launch. Usually there is one. With ``in_backward`` there
are several, which :mod:`.in_backward` steps one after the other while gradients come in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.graph import increment_version

from hdet_kernels import ops
from hdet_kernels.buckets import Buckets
from hdet_kernels.ops.backends import chosen
from hdet_kernels.ops.chunks import NO_GRADIENT, ChunkTable, MatchedGradients, StackedTable
from hdet_kernels.ops.table import HyperTable
from hdet_kernels.ops.torch.companding import BLOCKS_PER_CHUNK, block_count, first_scales
from hdet_kernels.optim.coded_state import CodedSlot, decoded
from hdet_kernels.optim.options import Options
from hdet_kernels.sharded import Divided, divided_along, gradient_parts, norm_over_meshes
from hdet_kernels.tensors import Slot

#: Returns the gradient of a parameter that is to be stepped, or None.
GradientOf = Callable[[Tensor], Tensor | None]

#: Returns ``grad``, in less time than a function that reads it.
GRAD: GradientOf = attrgetter("grad")


@dataclass(eq=False)
class Part:
    """Parameters of a flat buffer that are stepped in one launch: slots that lie side by side.

    Attributes:
        slots: their numbers.
        chunks: their tables.
        steps: where in the step counts of the flat buffer theirs are.
        blocks: where in the scales of 8-bit state theirs are.
        params: the first parameter of each slot.
        tied: the places in ``params`` of those that are tied to others.
        versioned: with their slots, all parameters that have a version: those not made in inference mode.
        bound: their step on the buffers of now.
    """

    slots: range
    chunks: ChunkTable
    steps: slice
    blocks: slice
    params: list[Tensor]
    tied: list[int]
    versioned: tuple[list[int], list[Tensor]]
    bound: ops.Step | None = None
    #: Of the last step without all gradients: their table, and the versioned parameters that it wrote.
    stepped_table: NDArray[np.int64] | None = None
    written: list[Tensor] = field(default_factory=list)


class FlatGroup:
    """The parameters of one flat buffer of :class:`Buckets`, with their optimizer state laid out alike.

    Stacked parameters have a buffer [replicas, n]. Their state is [n] as long as all replicas have the same gradient
    and the same numbers that act on the moments (``shares_state``). Otherwise, and after :meth:`separate_state`, every
    replica has its own state: [replicas, n].

    Args:
        rule: the update rule, a key of ``ops.STATES``.
        flat: the parameters, [n] or [replicas, n].
        master: master weights of a half-precision ``flat``, if there are any: float32, or int16 lower halves.
        params: for each slot its parameters: one, or several that are tied by sharing their memory.
        slots: where in ``flat`` the parameters of each slot are.
        groups: for each slot the number of its parameter group.
        table: the hyperparameter table of the device.
        options: precision, gradients and backend.
        shares_state: whether the replicas of stacked parameters start with one state for all.
    """

    def __init__(
        self,
        rule: str,
        flat: Tensor,
        master: Tensor | None,
        params: list[list[Tensor]],
        slots: Sequence[Slot],
        groups: Sequence[int],
        table: HyperTable,
        options: Options,
        *,
        shares_state: bool,
    ) -> None:
        self.rule, self.options = rule, options
        self.flat, self.master = flat, master
        self.params = params
        self.slots, self.groups = tuple(slots), tuple(groups)
        self.table = table
        #: The number of replicas; None for plain parameters.
        self.replicas = flat.shape[0] if flat.dim() == 2 else None
        #: Along which dimensions of a mesh the parameters are divided; None for parameters that are not distributed.
        self.divided = divided_along(params[0][0])
        #: Slots whose state has no entry in ``optimizer.state`` yet.
        self.slots_without_entry: set[int] = set(range(len(params)))
        self._chosen_backend: str | None = None
        self._lay_out(shares_state)

    def _lay_out(self, shares_state: bool) -> None:
        self.shares_state = shares_state
        self._first_scales = first_scales(slot.numel for slot in self.slots)
        #: What is stepped in one launch each. Their step counts, and their scales, follow each other.
        self.parts: list[Part] = []
        counts = blocks = 0
        for slots in self._cut():
            chunks = self._table_of(slots)
            members = self.params[slots.start : slots.stop]
            versioned = [
                (place, param) for place, tied in enumerate(members) for param in tied if not param.is_inference()
            ]
            part = Part(
                slots,
                chunks,
                slice(counts, counts := counts + len(chunks.entries)),
                slice(blocks, blocks := blocks + BLOCKS_PER_CHUNK * len(chunks.chunks)),
                [tied[0] for tied in members],
                [place for place, tied in enumerate(members) if len(tied) > 1],
                ([place for place, _ in versioned], [param for _, param in versioned]),
            )
            self.parts.append(part)
        self._part_of = [part for part in self.parts for _ in part.slots]
        self._blocks = blocks
        self.steps = torch.zeros(counts, dtype=torch.float32, device=self.flat.device)
        #: Flat state buffers by their name in torch.optim; None until one is needed.
        self.states: dict[str, Tensor | None] = dict.fromkeys(ops.STATES[self.rule])
        #: Of state in 8 bits, the scales of each buffer: 8 for every chunk of every part.
        self.scales: dict[str, Tensor | None] = dict.fromkeys(ops.STATES[self.rule])

    def _cut(self) -> list[range]:
        """Divide the slots into parts: one, or as many as have gradients of ``chunk_bytes`` each."""
        if (early := self.options.early) is None:
            return [range(len(self.slots))]
        held = (self.replicas or 1) if self._has_separate_states else 1
        most, size = early.chunk_bytes, self.flat.element_size() * held
        cuts, used = [len(self.slots)], 0
        for index in reversed(range(len(self.slots))):  # the backward pass begins at the end
            used += self.slots[index].numel * size
            if used > most and index + 1 < cuts[-1]:
                cuts, used = [*cuts, index + 1], self.slots[index].numel * size
        return [range(start, stop) for stop, start in zip(cuts, [*cuts[1:], 0], strict=True)][::-1]

    def _table_of(self, slots: range) -> ChunkTable:
        """Return the tables of the parameters of some slots, of all replicas that have a state of their own."""
        span, flat = slice(slots.start, slots.stop), self.flat
        if self.replicas is None:
            return ChunkTable(self.slots[span], self.groups[span], flat.device, flat.dtype)
        return StackedTable(
            self.slots[span],
            self.groups[span],
            flat.device,
            flat.dtype,
            replicas=self.replicas,
            row_stride=flat.shape[1],
            table_rows_per_replica=self.table.tensor.shape[0] // self.replicas,
            shares_state=self.shares_state,
        )

    @torch.inference_mode(False)
    def separate_state(self) -> None:
        """Give every replica a state of its own. It starts empty; the caller fills it with the shared values."""
        self._lay_out(shares_state=False)

    @torch.inference_mode(False)
    def share_state(self) -> None:
        """Give all replicas one state. It starts empty; the caller fills it."""
        self._lay_out(shares_state=True)

    @torch.inference_mode(False)  # a buffer made in inference mode could not be written outside of it
    def state_buffer(self, name: str) -> Tensor:
        """Return the flat buffer of state ``name``; the first call makes it, filled with zeros."""
        flat = self.states[name]
        if flat is None:
            dtype = self.options.state_dtype_for(self.flat.dtype)
            like = self.flat[0] if self.shares_state else self.flat
            flat = self.states[name] = torch.zeros_like(like, dtype=dtype)
            if dtype == torch.uint8:
                self.scales[name] = torch.zeros(self._blocks, device=flat.device)
            for part in self.parts:
                part.bound = None
        return flat

    def scale_view(self, name: str, index: int) -> Tensor | None:
        """Return the scales of slot ``index`` of state ``name``, [blocks] or [replicas, blocks]; None without any."""
        if (scales := self.scales[name]) is None:
            return None
        part = self._part_of[index]
        of_part = scales[part.blocks]
        if self._has_separate_states:
            of_part = of_part.view(self.replicas or 1, -1)
        first = self._first_scales[index] - self._first_scales[part.slots.start]
        return of_part[..., first : first + block_count(self.slots[index].numel)]

    def write_state(
        self,
        name: str,
        index: int,
        value: Tensor | float,
        scales: Tensor | None = None,
        *,
        decoded_before: bool = True,
    ) -> None:
        """Write a value to slot ``index`` of state ``name``: one number for all elements, numbers, or 8-bit codes.

        Args:
            name: the name of the state.
            index: the number of the slot.
            value: the value.
            scales: of codes, their scales; otherwise None.
            decoded_before: as for :meth:`.CodedSlot.write`.
        """
        view, own_scales = self.view(self.state_buffer(name), index), self.scale_view(name, index)
        if own_scales is not None:
            CodedSlot(self.slots[index], view, own_scales).write(name, value, scales, decoded_before=decoded_before)
        elif isinstance(value, Tensor):
            view.copy_(value if scales is None else decoded(name, value, scales))
        else:
            view.fill_(value)

    @torch.no_grad()
    def read_states(self) -> dict[str, Tensor]:
        """Return the flat state buffers in use by name; of state in 8 bits float32 copies."""
        found = {name: flat for name, flat in self.states.items() if flat is not None}
        for name, codes in found.items():
            if self.scales[name] is None:
                continue
            found[name] = torch.zeros_like(codes, dtype=torch.float32)
            for index in range(len(self.slots)):
                scales = self.scale_view(name, index)
                assert scales is not None
                self.view(found[name], index).copy_(decoded(name, self.view(codes, index), scales))
        return found

    @torch.no_grad()
    def write_states(self, values: Mapping[str, Tensor]) -> None:
        """Encode what :meth:`read_states` copied, rounding to nearest; state that has not changed stays as it is."""
        for name, old in self.read_states().items():
            if self.scales[name] is None or name not in values:
                continue
            new = values[name].view_as(old)
            for index in range(len(self.slots)) if not torch.equal(old, new) else ():
                self.write_state(name, index, self.view(new, index), decoded_before=False)

    def view(self, flat: Tensor, index: int) -> Tensor:
        """Return slot ``index`` of a buffer laid out like the parameters, with the parameter's shape and strides."""
        return self.slots[index].view(flat)

    def state_shape(self, name: str, index: int) -> tuple[int, ...]:
        """Return the shape that state ``name`` of slot ``index`` has for one replica."""
        return self.slots[index].shape

    def step_count(self, index: int) -> Tensor:
        """Return the step count of slot ``index``: one number, or [replicas] where each has its own state."""
        part = self._part_of[index]
        of_part, place = self.steps[part.steps], index - part.slots.start
        return of_part.view(-1, len(part.slots))[:, place] if self._has_separate_states else of_part[place]

    @property
    def _has_separate_states(self) -> bool:
        return self.replicas is not None and not self.shares_state

    def gradients(self, part: Part, gradient_of: GradientOf) -> MatchedGradients:
        """Return the gradients of a part. Those of tied parameters are summed."""
        grads = list(map(gradient_of, part.params))
        for place in part.tied:
            several = map(gradient_of, self.params[part.slots[place]])
            found = [grad.detach() for grad in several if grad is not None]
            grads[place] = sum(found[1:], start=found[0]) if found else None
        return part.chunks.match(grads if self.divided is None else gradient_parts(part.params, grads))

    def norm(self, part: Part, grads: MatchedGradients) -> Tensor:
        """Return the norm of the gradients of a part as stored: one number, or [replicas] with separate states."""
        rows = self.replicas if self._has_separate_states else None
        return ops.grad_norm(part.chunks, grads, rows=rows, backend=self.options.backend)

    def clip_each(self, part: Part, grads: MatchedGradients, limit: float) -> None:
        """Scale every gradient of a part down to the norm ``limit``, in place."""
        present = [grad for grad in grads.tensors if grad is not None]
        if not present:
            return
        dtype = torch.promote_types(self.flat.dtype, torch.float32)
        norms = torch.stack([torch.linalg.vector_norm(grad, dtype=dtype) for grad in present])
        if self.divided:  # all processes have the same parameters
            norms = norm_over_meshes([(norms, self.divided)])
        for grad, factor in zip(present, (limit / (norms + 1e-6)).clamp(max=1.0).unbind(), strict=True):
            grad.mul_(factor)

    def step(self, part: Part, grads: MatchedGradients, scalars: ops.Scalars) -> None:
        """Update the parameters of a part that have a gradient, in one launch."""
        if self._chosen_backend != chosen():
            self._chosen_backend = chosen()
            for each in self.parts:
                each.bound = None
        if part.bound is None:
            part.bound = self._bind(part)
        part.bound(grads, scalars.on(self.flat.device))

    def _bind(self, part: Part) -> ops.Step:
        # Replicas with their own states are stepped as one long buffer; the chunk table knows whose each part is.
        flats = (self.flat, self.master, *self.states.values())
        if self._has_separate_states or self.replicas == 1:
            flats = tuple(None if flat is None else flat.view(-1) for flat in flats)
        param, master, *states = flats
        assert param is not None
        return ops.Step(
            self.rule,
            param,
            states,
            self.steps[part.steps],
            self.table.tensor,
            part.chunks,
            master=master,
            stochastic_rounding=self.options.stochastic_rounding,
            backend=self.options.backend,
            rows=param.shape[0] if param.dim() == 2 else 1,
            scales=tuple(None if scale is None else scale[part.blocks] for scale in self.scales.values()),
        )

    def advance_versions(self, part: Part, grads: MatchedGradients) -> None:
        """Tell autograd that the parameters with a gradient were written, as torch.optim's writes in place do.

        Parameters without a gradient are not written and keep their version.
        """
        places, versioned = part.versioned
        if grads.complete:
            increment_version(versioned)
            return
        # Gradients at the same addresses as at the last step have the same table.
        if grads.table is not part.stepped_table:
            part.stepped_table = grads.table
            there = (grads.table[:, 0] != NO_GRADIENT).tolist()
            part.written = [param for place, param in zip(places, versioned, strict=True) if there[place]]
        increment_version(part.written)


def flat_groups_of(
    make: Callable[..., FlatGroup],
    buckets: Buckets,
    groups: Sequence[int],
    group_count: int,
    options: Options,
    *,
    shares_state: bool,
) -> list[FlatGroup]:
    """Return a :class:`FlatGroup` for each flat buffer. Those on one device share one hyperparameter table.

    Args:
        make: called with the arguments of :class:`FlatGroup` after the rule, makes one.
        buckets: the parameters in their flat buffers.
        groups: the number of the parameter group of each of ``buckets.params``.
        group_count: how many parameter groups there are; the table has a row for each replica and group.
        options: precision, gradients and backend.
        shares_state: whether the replicas of a stack start with one state for all.
    """
    tables: dict[torch.device, HyperTable] = {}
    made: list[FlatGroup] = []
    for number, (flat, master) in enumerate(zip(buckets.flats, buckets.masters, strict=True)):
        # Tied parameters have the same Slot object. Empty parameters can have equal slots without being tied.
        tied: dict[int, list[int]] = {}
        for index, slot in enumerate(buckets.slots):
            if slot.flat == number:
                tied.setdefault(id(slot), []).append(index)
        first = [members[0] for members in tied.values()]
        if flat.device not in tables:
            tables[flat.device] = HyperTable((buckets.replicas or 1) * group_count, flat.device)
        made.append(
            make(
                flat,
                master,
                [[buckets.params[index] for index in members] for members in tied.values()],
                [buckets.slots[index] for index in first],
                [groups[index] for index in first],
                tables[flat.device],
                options,
                shares_state=shares_state,
            )
        )
    return made


def norms_of(found: Sequence[tuple[FlatGroup, Part, MatchedGradients]]) -> list[tuple[Tensor, Divided]]:
    """Return the norms of the gradients of some parts as stored, with the dimensions along which they are divided.

    Each is one number, or [replicas] where each replica has its own state.
    """
    # Divided ones also without a gradient here: other processes may have one.
    return [(flat.norm(part, own), flat.divided) for flat, part, own in found if own.any or flat.divided]


def joint_norm(norms: Sequence[tuple[Tensor, Divided]]) -> Tensor | None:
    """Return the norm of all gradients, given those of :func:`norms_of`, on the device of the first; None without any.

    Of distributed parameters it is the norm of the whole gradients: every process of their mesh must ask for it.
    """
    if any(divided for _, divided in norms):
        return norm_over_meshes(norms)
    if len(norms) < 2:
        return norms[0][0] if norms else None
    gathered = torch.stack([norm.to(norms[0][0].device, non_blocking=True) for norm, _ in norms])
    return torch.linalg.vector_norm(gathered, dim=0)
