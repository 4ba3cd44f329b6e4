"""The payload of a sync: parameters, buffers, optimizer state and step counts, as flat tensors of this process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from hdet_kernels.buckets import Buckets
from hdet_kernels.converge.handshake import short_hash
from hdet_kernels.converge.plan import Plan
from hdet_kernels.converge.split_masters import Region, SplitRegion, outline
from hdet_kernels.converge.summary import (
    Checksum,
    TensorSummary,
    begins_nonfinite,
    bit_hash,
    describe_layout,
    fingerprints,
    finite_part,
    integer_hash,
    names_of_nonfinite,
    pattern,
)
from hdet_kernels.ensemble import Ensemble, ProcessEnsemble
from hdet_kernels.sharded import drop_gathered, is_distributed, parts_of
from hdet_kernels.tensors import distinct, flat_view, has_overlap, is_dense, layout_hash, local, unique

# Floating-point dtypes that kernels and collectives support.
AVERAGED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

#: Returns names of parameters and buffers, as ``module.named_parameters()`` does. A tied tensor may have several.
Names = Callable[[], Iterable[tuple[str, Tensor]]]

#: For tensors with gaps in memory, a contiguous copy and the tensor that it is written back to.
Gapped = list[tuple[Tensor, Tensor]]


class Counts(Protocol):
    """Access to the step counts of an optimizer (:class:`.of_optimizer.StepCounts`)."""

    def read(self) -> Tensor:
        """Return a copy of the counts."""

    def write(self, counts: Tensor) -> None:
        """Replace the counts."""


@dataclass(frozen=True)
class NoMean:
    """The optimizer state, if a part of it has no mean: it is compared between the replicas, and never averaged."""

    tensors: Sequence[Tensor]
    why: str  # which part, why, and what to do


@dataclass(frozen=True)
class StateNumbers:
    """The numbers about the optimizer state that go into the handshake; see :class:`.summary.TensorSummary`."""

    layout: int
    moments: Tensor
    coded: Tensor


@dataclass(frozen=True)
class Payload:
    """Flat tensors, 1-D, or [rows, n] where the process holds several replicas. They share the model's memory.

    Attributes:
        params: regions of parameters: one for each buffer of :class:`Buckets`, or one of all loose parameters.
        buffers: floating-point buffers.
        masks: floating-point buffers that were not finite at the start. They move only if one has changed since.
        masks_changed: whether one of these has changed here.
        state: floating-point optimizer state, by name.
        integers: integer buffers, which have no mean.
        counts: a copy of the optimizer's step counts.
        gapped: for tensors with gaps in memory, a contiguous copy and the tensor that it is written back to.
        inventory: names and layouts of parameters, master weights and buffers.
        no_mean: the optimizer state, where it cannot be averaged; ``state`` is empty then.
        numbers: about the state as it was, where it is not in this payload any more.
    """

    params: list[Region]
    buffers: list[Tensor]
    masks: list[Tensor]
    masks_changed: bool
    state: dict[str, Tensor]
    integers: list[Tensor]
    counts: Tensor | None
    gapped: Gapped
    inventory: Inventory
    no_mean: NoMean | None = None
    numbers: StateNumbers | None = None

    @property
    def device(self) -> torch.device:
        """The device of the first parameter."""
        return self.inventory.tensors[0].device

    @property
    def outlines(self) -> list[Tensor]:
        """Tensors with the shapes of all parameters, in the order of ``params``: those of split masters are bf16."""
        return [tensor for region in self.params for tensor in outline(region)]

    @property
    def plain_params(self) -> list[Tensor]:
        """The parameters that are not halves of split masters."""
        return [tensor for region in self.params if not isinstance(region, SplitRegion) for tensor in region]

    @property
    def all_buffers(self) -> list[Tensor]:
        return [*self.buffers, *self.masks]

    @property
    def compressible(self) -> list[Region]:
        """The regions of parameters without fp64 tensors: a difference sent as fp32 would lose their last digits."""
        return [
            region
            if isinstance(region, SplitRegion)
            else [tensor for tensor in region if tensor.dtype != torch.float64]
            for region in self.params
        ]

    def regions_in_full(self, plan: Plan) -> list[Region]:
        """Return the regions that ``plan`` averages without compression, those of parameters first."""
        others = [*self.buffers, *(self.masks if plan.masks else ()), *(self.state.values() if plan.state else ())]
        if not plan.params:
            return [others]
        if plan.compressed:
            return [[*(tensor for tensor in self.plain_params if tensor.dtype == torch.float64), *others]]
        if self.inventory.in_buckets:
            return [*self.params, others]
        return [[*self.plain_params, *others]]  # loose tensors are packed, all into the same buckets

    def summary(
        self,
        checksum: Checksum,
        *,
        consensus: Tensor | float,
        outer: Tensor | float,
        bucket_bytes: int,
        norm: Tensor | None = None,
    ) -> TensorSummary:
        """Return the numbers about these tensors that go into the handshake. ``norm``: of the parameters, if known."""
        rows, device, inventory = checksum.rows, self.device, self.inventory
        state = self.state_numbers(checksum)
        buffers = checksum(self.buffers, device)
        nonfinite = torch.zeros(rows, device=device, dtype=torch.int64)
        if self.buffers and not bool(buffers.isfinite().all()):
            buffers = checksum(map(finite_part, self.buffers), device)
            nonfinite = pattern(self.buffers, rows, device)

        def describe(what: str) -> Mapping[str, Any]:
            if what == "layout":
                return describe_layout(map(local, inventory.tensors), labels=inventory.noted)
            labelled = [
                *zip(inventory.labels, map(local, inventory.tensors), strict=True),
                *((f"state {key}", v) for key, v in self.state.items()),
            ]
            return names_of_nonfinite([pair for pair in labelled if pair[0] not in inventory.excused], rows)

        return TensorSummary(
            layout=inventory.layout,
            state=state.layout,
            moments=state.moments,
            coded=state.coded,
            counts=0 if self.counts is None else short_hash(self.counts.tolist()),
            integers=integer_hash(self.integers, rows, device),
            checksum=self.checksum_of_params(checksum, bucket_bytes) if norm is None else norm,
            rest=state.moments + buffers,
            nonfinite=nonfinite,
            masks=self.masks_changed,
            consensus=consensus,
            outer=outer,
            describe=describe,
        )

    def state_numbers(self, checksum: Checksum) -> StateNumbers:
        """Return the numbers about the optimizer state."""
        return self.numbers or StateNumbers(
            layout=layout_hash(self.state.values(), self.state) if self.state else 0,
            moments=checksum(self.state.values(), self.device),
            coded=bit_hash(() if self.no_mean is None else self.no_mean.tensors, self.device),
        )

    def without_state(self, checksum: Checksum) -> Payload:
        """Return the same payload without optimizer state and step counts, with the numbers about the state."""
        no_mean = None if self.no_mean is None else replace(self.no_mean, tensors=())
        return replace(self, state={}, counts=None, no_mean=no_mean, numbers=self.state_numbers(checksum))

    def checksum_of_params(self, checksum: Checksum, bucket_bytes: int) -> Tensor:
        """Return the norm of every row of the parameters, [rows]; see :class:`.summary.Checksum`."""
        total = checksum(self.plain_params, self.device)
        for region in self.params:
            if isinstance(region, SplitRegion):
                for part in region.parts(bucket_bytes):
                    total = torch.hypot(total, checksum([part], self.device))
        return total

    def copy(self) -> Payload:
        """Return the same values in memory of their own, with split masters joined."""

        def own(region: Region) -> list[Tensor]:
            return [region.read()] if isinstance(region, SplitRegion) else [tensor.clone() for tensor in region]

        with torch.inference_mode(False):
            return replace(
                self,
                params=list(map(own, self.params)),
                buffers=[tensor.clone() for tensor in self.buffers],
                masks=[tensor.clone() for tensor in self.masks],
                state={name: tensor.clone() for name, tensor in self.state.items()},
                integers=[tensor.clone() for tensor in self.integers],
                counts=None if self.counts is None else self.counts.clone(),
                gapped=[],
            )


class ModelTensors:
    """The tensors of a model and its optimizer that are averaged, found anew at every sync.

    The arguments are those of :class:`.converger.Converger`. The constructor raises if something cannot be averaged.
    """

    def __init__(
        self,
        params: Buckets | Iterable[Tensor],
        ensemble: Ensemble,
        state: Callable[[], Mapping[str, Tensor]],
        counts: Counts | None,
        buffers: Callable[[], Sequence[Tensor]],
        names: Names = tuple,
        write_state: Callable[[Mapping[str, Tensor]], None] | None = None,
        backend: str | None = None,
        no_mean: Callable[[], NoMean | None] = lambda: None,
    ) -> None:
        self.write_state, self.backend, self.no_mean = write_state, backend, no_mean
        self.buckets = params if isinstance(params, Buckets) else None
        given = params.params if isinstance(params, Buckets) else unique(params)
        # Integers (quantised frozen weights) have no mean and do not diverge.
        self.params = tuple(param for param in given if param.is_floating_point() or param.is_complex())
        if not self.params:
            raise ValueError("there are no parameters to average: the optimizer's parameter groups are empty")
        self._distributed = [param for param in self.params if is_distributed(param)]
        for index, param in enumerate(self.params):
            check_shards(index, param, ensemble)
        for tensor in (*self.params, *buffers()):
            check_tensor(tensor, ensemble)
        self.state, self.counts, self.buffers, self.names = state, counts, buffers, names
        self.rows = ensemble.rows
        self._inventory: tuple[list[object], Inventory] | None = None
        # Numbers of the buffers that are not finite from the start, with their fingerprints: attention masks, which
        # are constants, or statistics that start at infinity. Not damage.
        began = {number: buffer for number, buffer in enumerate(buffers()) if begins_nonfinite(buffer)}
        self.masks = dict(zip(began, fingerprints(began.values()), strict=True))
        self.payload(include_state=False, reads=True)  # raises now, not after T steps, if one cannot be flattened

    def payload(self, *, include_state: bool, reads: bool = False) -> Payload:
        """Return the tensors as they are now.

        Args:
            include_state: whether optimizer state and step counts are wanted.
            reads: whether the payload is only read, so that masters must stay as they are. A checkpoint may be loaded
                in parts, and masters that do not fit the parameters now will fit those that are loaded next.
        """
        present = list(self.buffers())
        began = {number: present[number] for number in self.masks if number < len(present)}
        inventory = self._take_inventory(present, began.values())
        gapped: Gapped = []

        def flat(tensors: Iterable[Tensor]) -> list[Tensor]:
            return [flattened(local(tensor), self.rows, gapped) for tensor in tensors]

        params: list[Region]
        if self.buckets is None:
            params = [flat(inventory.params)]
        else:
            if not reads:
                self.buckets.refresh_masters()
            split = self.buckets.split_masters
            full = enumerate(self.buckets.unsplit(fresh=reads))
            params = [
                SplitRegion(*flat(split[number]), backend=self.backend) if each is None else flat([each])
                for number, each in full
                if each is None or each.numel()
            ]
        no_mean = self.no_mean() if include_state else None
        state = dict(self.state()) if include_state and no_mean is None else {}
        return Payload(
            params=params,
            buffers=flat(inventory.buffers),
            masks=flat(inventory.masks),
            masks_changed=fingerprints(began.values()) != [self.masks[number] for number in began],
            state=dict(zip(state, flat(state.values()), strict=True)),
            integers=[local(buffer) for buffer in inventory.integers],
            counts=self.counts.read() if include_state and self.counts is not None else None,
            gapped=gapped,
            inventory=inventory,
            no_mean=no_mean,
        )

    def _take_inventory(self, present: Sequence[Tensor], masks: Iterable[Tensor]) -> Inventory:
        """Return the inventory of the parameters and the ``present`` buffers, the last one if no layout has changed.

        Parameters that were moved away are brought back into their buckets.
        """
        given = self.params if self.buckets is None else self.buckets.params
        watched = [*given, *self._masters(), *present]
        layouts = _layouts(watched)
        if self._inventory is None or self._inventory[0] != layouts:
            if self.buckets is not None and self.buckets.rehome():
                layouts = _layouts(watched)
            self._inventory = layouts, take_inventory(self._kinds(present), masks, self.names, self.buckets is not None)
        return self._inventory[1]

    def covered(self) -> list[Tensor]:
        """Return the parameters, their master weights and the buffers; of distributed tensors the local part."""
        return [local(tensor) for tensors in self._kinds(self.buffers()).values() for tensor in tensors]

    def _kinds(self, buffers: Sequence[Tensor]) -> dict[str, Sequence[Tensor]]:
        return {"parameter": self.params, "master": self._masters(), "buffer": unique(buffers, "buffers")}

    def _masters(self) -> list[Tensor]:
        return [master for master in self.buckets.masters if master is not None] if self.buckets else []

    def write_back(self, payload: Payload, *, counts: bool) -> None:
        """Write averaged copies back, round the parameters from their masters and, if asked, write the step counts."""
        for flat, tensor in payload.gapped:
            tensor.copy_(flat.view(tensor.shape))
        if self.write_state is not None and payload.state:
            self.write_state(payload.state)
        if self.buckets is not None:
            self.buckets.write_full(self.buckets.unsplit())
        self.written()
        if counts and payload.counts is not None and self.counts is not None:
            self.counts.write(payload.counts)

    def written(self) -> None:
        """Let autograd know that parameters were written, and FSDP, which may still have the ones before gathered."""
        if self.buckets is not None:
            self.buckets.advance_versions()
        drop_gathered(self._distributed)


@dataclass(frozen=True)
class Inventory:
    """The tensors of a model by kind, and their names and layouts. Each memory is in one kind only.

    Attributes:
        params: parameters that have elements.
        buffers: floating-point buffers.
        masks: floating-point buffers that were not finite at the start.
        integers: integer buffers.
        tensors: all of them, of all kinds, as the model has them.
        labels: kind and name, or number, for each of these.
        noted: the same, with the ties between them.
        layout: a hash of labels, ties and layouts.
        excused: the labels of the masks.
        in_buckets: whether the parameters are in :class:`Buckets`.
    """

    params: list[Tensor]
    buffers: list[Tensor]
    masks: list[Tensor]
    integers: list[Tensor]
    tensors: list[Tensor]
    labels: list[str]
    noted: list[str]
    layout: int
    excused: frozenset[str]
    in_buckets: bool


def take_inventory(
    kinds: Mapping[str, Sequence[Tensor]], masks: Iterable[Tensor], names: Names, in_buckets: bool = False
) -> Inventory:
    """Sort all tensors and label them.

    Args:
        kinds: the tensors by kind, among them ``"parameter"`` and ``"buffer"``.
        masks: the buffers that were not finite at the start.
        names: see :func:`labels_of`.
        in_buckets: whether the parameters are in :class:`Buckets`.

    Raises:
        ValueError: if two tensors share a part of their memory.
    """
    # A buffer may be a view of a parameter, and two buffers may share their memory.
    pairs = [(tensor, local(tensor)) for kind in ("parameter", "buffer") for tensor in kinds[kind]]
    given = {id(part): tensor for tensor, part in pairs}
    own = {local(param).data_ptr() for param in kinds["parameter"]}
    constant = {local(mask).data_ptr() for mask in masks} - own
    sorted_: dict[str, list[Tensor]] = {"params": [], "masks": [], "buffers": [], "integers": []}
    for part in distinct(part for _, part in pairs):
        if part.numel():
            address, has_mean = part.data_ptr(), part.is_floating_point() or part.is_complex()
            others = "masks" if address in constant else "buffers" if has_mean else "integers"
            sorted_["params" if address in own else others].append(given[id(part)])
    tensors = [tensor for each in kinds.values() for tensor in each]
    covered = [local(tensor) for tensor in tensors]
    labels = labels_of(kinds, names())
    noted = with_ties(labels, covered)
    return Inventory(
        **sorted_,
        tensors=tensors,
        labels=labels,
        noted=noted,
        layout=layout_hash(covered, noted),
        excused=frozenset(label for label, t in zip(labels, covered, strict=True) if t.data_ptr() in constant),
        in_buckets=in_buckets,
    )


def flattened(tensor: Tensor, rows: int, gapped: Gapped) -> Tensor:
    """Return the elements as a flat view; of a tensor with gaps a copy, which is appended to ``gapped``.

    Raises:
        ValueError: if elements overlap in memory, or the first dimension is not the rows.
    """
    if rows == 1 and tensor.is_contiguous() and not tensor.is_complex():  # by far the most
        return tensor if tensor.dim() == 1 else tensor.view(-1)
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    if rows > 1:
        if tensor.dim() == 0 or tensor.shape[0] != rows:
            raise ValueError(f"{rows} replicas are the rows of tensors [{rows}, …], got shape {tuple(tensor.shape)}")
        if real.is_contiguous():
            return real.view(rows, -1)
        copied = real.reshape(rows, -1).contiguous()
        gapped.append((copied, real))
        return copied
    if is_dense(tensor) or has_overlap(tensor):
        return flat_view(tensor)  # raises for overlaps
    copied = real.contiguous().view(-1)
    gapped.append((copied, real))
    return copied


def _layouts(tensors: Sequence[Tensor]) -> list[object]:
    """Return of all tensors which objects they are, where their elements are and how they lie there.

    Strides are asked only of those that are not contiguous: it takes as long as all else.
    """
    parts = list(parts_of(tensors)(tensors))
    contiguous = list(map(Tensor.is_contiguous, parts))
    return [
        *(list(map(id, tensors)), list(map(Tensor.data_ptr, parts)), list(map(_shape_of, parts))),
        *(list(map(_dtype_of, parts)), list(map(_device_of, parts)), contiguous),
        [part.stride() for part, plain in zip(parts, contiguous, strict=True) if not plain],
    ]


_shape_of, _dtype_of, _device_of = map(attrgetter, ("shape", "dtype", "device"))

# Parts of a name that a wrapper adds. A replica may be wrapped on one rank and not on another.
_WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


def labels_of(kinds: Mapping[str, Sequence[Tensor]], names: Iterable[tuple[str, Tensor]]) -> list[str]:
    """Return a label for every tensor: its kind and all of its names, or else its number, such as ``"buffer 2"``.

    Args:
        kinds: the tensors by kind.
        names: the names that are known.
    """
    known: dict[int, list[str]] = {}
    for name, tensor in names:
        own = known.setdefault(id(tensor), [])
        if (plain := plain_name(name)) not in own:
            own.append(plain)
    return [
        f"{kind} {' = '.join(known.get(id(tensor), ())) or number}"
        for kind, tensors in kinds.items()
        for number, tensor in enumerate(tensors)
    ]


def plain_name(name: str) -> str:
    """Return the name without what DDP, FSDP, ``torch.compile`` and activation checkpointing add to it."""
    parts = [part for part in name.split(".") if part not in _WRAPPERS]
    return ".".join(parts[1:] if parts[0] == "module" and len(parts) > 1 else parts)


def with_ties(labels: Sequence[str], tensors: Sequence[Tensor]) -> list[str]:
    """Return the labels, with a note at every tensor that starts at the memory of an earlier one."""
    first: dict[object, str] = {}
    noted = []
    for label, tensor in zip(labels, tensors, strict=True):
        owner = first.setdefault((tensor.device, tensor.data_ptr()), label) if tensor.numel() else label
        noted.append(label if owner == label else f"{label} tied to {owner}")
    return noted


def all_names(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield every name of every parameter and buffer of a module, or of another model with the same two methods."""
    every = {"remove_duplicate": False} if isinstance(model, nn.Module) else {}
    yield from model.named_parameters(**every)
    yield from model.named_buffers(**every)


def check_tensor(tensor: Tensor, ensemble: Ensemble) -> None:
    """Raise TypeError or ValueError if ``tensor`` cannot be averaged over ``ensemble``."""
    what = f"a {str(tensor.dtype).removeprefix('torch.')} tensor of shape {tuple(tensor.shape)}"
    if tensor.is_meta:
        raise ValueError(f"{what} is on the meta device and has no values yet: materialise the model first")
    if tensor.layout is not torch.strided:
        raise TypeError(f"{what} has layout {tensor.layout}; only dense tensors are averaged")
    if tensor.is_floating_point() and tensor.dtype not in AVERAGED:
        raise TypeError(f"{what} cannot be averaged; floating-point tensors must be one of {AVERAGED}")
    if ensemble.talks and not ensemble.serves(tensor.device):
        raise ValueError(
            f"{what} is on {tensor.device}, for which {ensemble} has no backend: move the tensor, or initialise the "
            "process group with a backend for each device, as in init_process_group('cpu:gloo,cuda:nccl')"
        )


def check_shards(index: int, param: Tensor, ensemble: Ensemble) -> None:
    """Raise ValueError if processes that average with each other hold different shards of a distributed parameter."""
    mesh, placements = getattr(param, "device_mesh", None), getattr(param, "placements", ())
    if mesh is None or ensemble.size == 1:
        return
    ranks = set(ensemble.ranks()) if isinstance(ensemble, ProcessEnsemble) else set()
    for dimension, placement in enumerate(placements):
        along = mesh.get_group(dimension)
        others = ranks & set(torch.distributed.get_process_group_ranks(along)) - {torch.distributed.get_rank()}
        if placement.is_replicate() or not others:
            continue
        raise ValueError(
            f"parameter {index} is sharded over ranks that the ensemble takes for replicas of each other (this one and "
            f"{sorted(others)}): pass ensemble=hdet_kernels.ProcessEnsemble(mesh) with a mesh (replicate, shard)"
        )
