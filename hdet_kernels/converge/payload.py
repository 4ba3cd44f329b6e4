"""The payload of a sync: parameters, buffers, optimizer state and step counts, as flat tensors of this process."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from hdet_kernels.buckets import BUCKET_BYTES, Buckets
from hdet_kernels.converge.flat_views import FlatViews, Gapped, flattened
from hdet_kernels.converge.handshake import short_hash
from hdet_kernels.converge.labels import Names
from hdet_kernels.converge.nonfinite import begins_nonfinite, fingerprints, finite_part, names_of_nonfinite, pattern
from hdet_kernels.converge.plan import Plan
from hdet_kernels.converge.split_masters import SplitMasters
from hdet_kernels.converge.split_region import Region, SplitRegion
from hdet_kernels.converge.summary import Checksum, TensorSummary, describe_layout, integer_hash
from hdet_kernels.converge.survey import Survey, take_survey
from hdet_kernels.ensemble import Ensemble, ProcessEnsemble
from hdet_kernels.ops.live_layouts import LiveLayouts
from hdet_kernels.sharded.fsdp import drop_gathered
from hdet_kernels.tensors import layout_hash, local, unique

# Floating-point dtypes that kernels and collectives support.
_AVERAGED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class Counts(Protocol):
    """Access to the step counts of an optimizer (:class:`.optimizer_state.StepCounts`)."""

    def read(self) -> Tensor:
        """Return a copy of the counts."""

    def write(self, counts: Tensor) -> None:
        """Replace the counts."""


@dataclass(frozen=True)
class Payload:
    """Flat tensors, 1-D, or [rows, n] where the process holds several replicas. They share the model's memory.

    Attributes:
        params: regions of parameters. Tensors of one region may share a bucket.
        buffers: floating-point buffers.
        masks: floating-point buffers that were not finite at the start. They move only if one has changed since.
        masks_changed: whether one of these has changed here.
        state: floating-point optimizer state, by name.
        integers: integer buffers, which have no mean.
        counts: a copy of the optimizer's step counts.
        gapped: for tensors with gaps in memory, a contiguous copy and the tensor that it is written back to.
        survey: names and layouts of parameters, master weights and buffers.
        state_layout: a hash of names and layouts of the state; 0 if there is none.
        homed: whether the parameters live in :class:`Buckets`. Each region is then averaged in place.
        device: device of the first parameter.
        full: :attr:`.Buckets.full`, of which ``params`` are views, if the parameters live there. None for masters that
            are in ``split``.
        joined: the addresses of those that are copies, of split masters. They are written back by ``settle``.
        split: split masters that are not in ``params``, and are joined part by part.
    """

    params: list[list[Tensor]]
    buffers: list[Tensor]
    masks: list[Tensor]
    masks_changed: bool
    state: dict[str, Tensor]
    integers: list[Tensor]
    counts: Tensor | None
    gapped: Gapped
    survey: Survey
    state_layout: int
    homed: bool
    device: torch.device
    full: tuple[Tensor | None, ...] = ()
    joined: frozenset[int] = frozenset()
    split: SplitMasters = field(default_factory=SplitMasters)

    @property
    def tensors(self) -> list[Tensor]:
        """Parameters, master weights and buffers as the model has them; of distributed tensors the local part."""
        return [local(tensor) for tensor in self.survey.tensors]

    @property
    def all_params(self) -> list[Tensor]:
        return list(itertools.chain.from_iterable(self.params))

    @property
    def all_buffers(self) -> list[Tensor]:
        return [*self.buffers, *self.masks]

    @property
    def regions(self) -> Sequence[Region]:
        """The regions of all parameters, in the order of their buckets, whether split masters are joined or not."""
        if not self.split.halves:
            return self.params
        plain, split = iter(self.params), iter(self.split.regions)
        present = (each for each in self.full if each is None or each.numel())
        return [next(split) if each is None else next(plain) for each in present]

    @property
    def outlines(self) -> list[Tensor]:
        """Tensors with the shapes of all parameters, in the order of ``regions``: those of split masters are bf16."""
        each = ([region.param] if isinstance(region, SplitRegion) else region for region in self.regions)
        return list(itertools.chain.from_iterable(each))

    @property
    def compressible(self) -> list[Region]:
        """The regions of parameters without fp64 tensors: a difference sent as fp32 would lose their last digits."""
        return [
            region
            if isinstance(region, SplitRegion)
            else [tensor for tensor in region if tensor.dtype != torch.float64]
            for region in self.regions
        ]

    def regions_in_full(self, plan: Plan) -> list[list[Tensor]]:
        """Return the regions that ``plan`` averages without compression. Tensors of one region may share a bucket."""
        others = [*self.buffers, *(self.masks if plan.masks else ()), *(self.state.values() if plan.state else ())]
        if not plan.params:
            return [others]
        if plan.compressed:
            return [[*(tensor for tensor in self.all_params if tensor.dtype == torch.float64), *others]]
        if self.homed:  # regions of their own: alone in a bucket they are averaged in place
            return [*self.params, others]
        return [[*self.all_params, *others]]

    @contextlib.contextmanager
    def restore_on_failure(self, plan: Plan, *, written_last: bool) -> Iterator[None]:
        """Restore the tensors that are averaged in full, and the integers, if the block raises.

        What is written after the last collective needs no copy: compressed parameters, split masters, and with
        ``written_last`` all that is averaged in full.
        """
        in_full = () if written_last else itertools.chain.from_iterable(self.regions_in_full(plan))
        changed = [*in_full, *(self.integers if plan.integers else ())]
        backups = [tensor.clone() for tensor in changed]
        try:
            yield
        except BaseException:
            for tensor, backup in zip(changed, backups, strict=True):
                tensor.copy_(backup)
            raise

    def summary(self, checksum: Checksum, *, consensus: Tensor | float, outer: Tensor | float) -> TensorSummary:
        """Return the numbers about these tensors that go into the handshake."""
        survey, rows = self.survey, checksum.rows
        buffers, nonfinite = (
            checksum(self.buffers, self.device),
            torch.zeros(rows, device=self.device, dtype=torch.int64),
        )
        if self.buffers and not bool(buffers.isfinite().all()):
            buffers = checksum(map(finite_part, self.buffers), self.device)
            nonfinite = pattern(self.buffers, rows, self.device)

        def describe(what: str) -> Mapping[str, Any]:
            if what == "layout":
                return describe_layout(self.tensors, labels=survey.noted)
            if what == "state":
                return describe_layout(self.state.values(), self.state.keys())
            own = [
                *zip(survey.labels, self.tensors, strict=True),
                *((f"state {key}", v) for key, v in self.state.items()),
            ]
            return names_of_nonfinite([pair for pair in own if pair[0] not in survey.excused], rows)

        return TensorSummary(
            layout=survey.layout,
            state=self.state_layout,
            counts=0 if self.counts is None else short_hash(self.counts.tolist()),
            integers=integer_hash(self.integers, checksum.rows, self.device),
            checksum=self.checksum_of_params(checksum),
            rest=checksum(self.state.values(), self.device) + buffers,
            nonfinite=nonfinite,
            masks=self.masks_changed,
            consensus=consensus,
            outer=outer,
            describe=describe,
        )

    def checksum_of_params(self, checksum: Checksum) -> Tensor:
        """Return the norm of every row of the parameters, [rows]; see :class:`.summary.Checksum`."""
        others = checksum(self.all_params, self.device)
        return torch.hypot(others, self.split.checksum(checksum, self.device)) if self.split.halves else others

    def copy(self, *, takes_joined: bool = False) -> Payload:
        """Return the same values in memory of their own. ``tensors`` are still those of the model.

        With ``takes_joined`` joined masters, which are copies, are taken over: nothing else may use this payload then.
        """

        def own(param: Tensor) -> Tensor:
            taken = takes_joined and param.data_ptr() in self.joined and not param.is_inference()
            return param if taken else param.clone()

        with torch.inference_mode(False):
            return replace(
                self,
                params=[[own(tensor) for tensor in region] for region in self.params],
                buffers=[tensor.clone() for tensor in self.buffers],
                masks=[tensor.clone() for tensor in self.masks],
                state={name: tensor.clone() for name, tensor in self.state.items()},
                integers=[tensor.clone() for tensor in self.integers],
                counts=None if self.counts is None else self.counts.clone(),
                gapped=[],
                full=(),
                joined=frozenset(),
            )

    def put_back(self) -> None:
        """Write the copies of tensors with gaps back to these tensors."""
        for flat, tensor in self.gapped:
            tensor.copy_(flat.view(tensor.shape))


class ModelTensors:
    """The tensors of a model and its optimizer that are averaged, looked up anew at every sync.

    What depends on their layouts alone is found again only when one of these has changed.

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
    ) -> None:
        self.write_state, self.backend = write_state, backend
        self.buckets = params if isinstance(params, Buckets) else None
        given = params.params if isinstance(params, Buckets) else unique(params)
        # Integers (quantised frozen weights) have no mean and do not diverge.
        self.params = tuple(param for param in given if param.is_floating_point() or param.is_complex())
        if not self.params:
            raise ValueError("there are no parameters to average: the optimizer's parameter groups are empty")
        for index, param in enumerate(self.params):
            check_shards(index, param, ensemble)
        for tensor in (*self.params, *buffers()):
            check_tensor(tensor, ensemble)
        self.state, self.counts, self.buffers, self.names = state, counts, buffers, names
        self.rows = ensemble.rows
        self._survey: Survey | None = None
        self._surveyed, self._state_seen = LiveLayouts(), LiveLayouts()
        self._flat_params, self._flat_buffers, self._flat_state = (FlatViews(ensemble.rows) for _ in range(3))
        self._state_layout: tuple[list[str], int] = ([], 0)
        # Numbers of the buffers that are not finite from the start, with their fingerprints: attention masks, which
        # are constants, or statistics that start at infinity. Not damage.
        began = {number: buffer for number, buffer in enumerate(buffers()) if begins_nonfinite(buffer)}
        self.masks = dict(zip(began, fingerprints(began.values()), strict=True))
        self.payload(
            include_state=False, reads=True, bucket_bytes=BUCKET_BYTES
        )  # raises now, not after T steps, if one cannot be flattened

    def payload(self, *, include_state: bool, reads: bool = False, bucket_bytes: int | None = None) -> Payload:
        """Return the tensors as they are now.

        Args:
            include_state: whether optimizer state and step counts are wanted.
            reads: whether the payload is only read, so that masters must stay as they are. A checkpoint may be loaded
                in parts, and masters that do not fit the parameters now will fit those that are loaded next.
            bucket_bytes: the most bytes of split masters that are joined at a time. Default: all of them, in a copy.
        """
        present = list(self.buffers())
        began = {number: present[number] for number in self.masks if number < len(present)}
        survey = self._look(present, began.values())
        if self.buckets is not None and not reads:
            self.buckets.refresh_masters()
        gapped: Gapped = []
        params: list[list[Tensor]] | None = None
        full: tuple[Tensor | None, ...] = ()
        in_use: set[int] = set()
        split = SplitMasters()
        if self.buckets is not None:
            in_use = {each.data_ptr() for each in (*self.buckets.flats, *self.buckets.masters) if each is not None}
            if bucket_bytes is None:
                full = self.buckets.read_full() if reads else self.buckets.full
            else:
                full = self.buckets.unsplit(fresh=reads)
                pairs = self.buckets.split_masters.values()
                flat = [[flattened(half, self.rows, gapped) for half in pair] for pair in pairs]
                split = SplitMasters([(param, low) for param, low in flat], bucket_bytes, self.backend)
            params = [[flattened(each, self.rows, gapped)] for each in full if each is not None and each.numel()]
        state = dict(self.state()) if include_state else {}
        flat_state, state_layout = self._flat(state, gapped)
        return Payload(
            params=[self._flat_params.of(survey.params, gapped)] if params is None else params,
            buffers=self._flat_buffers.of(survey.buffers, gapped),
            masks=[flattened(local(mask), self.rows, gapped) for mask in survey.masks],
            masks_changed=fingerprints(began.values()) != [self.masks[number] for number in began],
            state=flat_state,
            integers=[local(buffer) for buffer in survey.integers],
            counts=self.counts.read() if include_state and self.counts is not None else None,
            gapped=gapped,
            survey=survey,
            state_layout=state_layout,
            homed=params is not None,
            device=self.params[0].device,
            full=full,
            joined=frozenset(each.data_ptr() for each in full if each is not None) - in_use,
            split=split,
        )

    def _look(self, present: Sequence[Tensor], masks: Iterable[Tensor]) -> Survey:
        """Return the survey of the parameters and the ``present`` buffers; bring parameters back into their buckets."""
        given = self.params if self.buckets is None else self.buckets.params
        watched = [*given, *self._masters(), *present]
        if self._survey is None or not self._surveyed.match(watched):
            self._survey = None
            self._flat_params.forget()
            self._flat_buffers.forget()
            if self.buckets is not None:
                self.buckets.rehome()
            self._survey = take_survey(self._kinds(present), masks, self.names)
            self._surveyed.remember(watched)
        return self._survey

    def _flat(self, state: Mapping[str, Tensor], gapped: Gapped) -> tuple[dict[str, Tensor], int]:
        """Return the state as flat views, by name, and the hash of its layout."""
        names, tensors = list(state), list(state.values())
        if self.write_state is not None:  # copies, few of them, which must not be kept
            flat = {name: flattened(local(tensor), self.rows, gapped) for name, tensor in state.items()}
            return flat, layout_hash(flat.values(), names) if names else 0
        known = names == self._state_layout[0] and self._state_seen.match(tensors)
        if not known:
            self._flat_state.forget()
        flat = dict(zip(names, self._flat_state.of(tensors, gapped), strict=True))
        if not known:
            self._state_layout = names, layout_hash(flat.values(), names) if names else 0
            self._state_seen.remember(tensors)
        return flat, self._state_layout[1]

    def covered(self) -> list[Tensor]:
        """Return the parameters, their master weights and the buffers; of distributed tensors the local part."""
        return [local(tensor) for tensors in self._kinds(self.buffers()).values() for tensor in tensors]

    def _kinds(self, buffers: Sequence[Tensor]) -> dict[str, Sequence[Tensor]]:
        return {"parameter": self.params, "master": self._masters(), "buffer": unique(buffers)}

    def _masters(self) -> list[Tensor]:
        return [master for master in self.buckets.masters if master is not None] if self.buckets else []

    def settle(self, payload: Payload, *, counts: bool) -> None:
        """Write averaged copies back, round the parameters from their masters and, if asked, write the step counts."""
        payload.put_back()
        payload.split.write_kept()
        if self.write_state is not None and payload.state:
            self.write_state(payload.state)
        if self.buckets is not None:
            self.buckets.write_full(payload.full)
        self.written()
        if counts and payload.counts is not None and self.counts is not None:
            self.counts.write(payload.counts)

    def written(self) -> None:
        """Let autograd know that parameters were written, and FSDP, which may still have the ones before gathered."""
        if self.buckets is not None:
            self.buckets.advance_versions()
        drop_gathered(self.params if self._survey is None else self._survey.distributed)


def check_tensor(tensor: Tensor, ensemble: Ensemble) -> None:
    """Raise TypeError or ValueError if ``tensor`` cannot be averaged over ``ensemble``."""
    what = f"a {str(tensor.dtype).removeprefix('torch.')} tensor of shape {tuple(tensor.shape)}"
    if tensor.is_meta:
        raise ValueError(f"{what} is on the meta device and has no values yet: materialise the model first")
    if tensor.layout is not torch.strided:
        raise TypeError(f"{what} has layout {tensor.layout}; only dense tensors are averaged")
    if tensor.is_floating_point() and tensor.dtype not in _AVERAGED:
        raise TypeError(f"{what} cannot be averaged; floating-point tensors must be one of {_AVERAGED}")
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
