"""The payload of a sync: parameters, buffers, optimizer state and step counts, as flat tensors of this process."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from hdet_kernels.buckets import Buckets
from hdet_kernels.converge.handshake import short_hash
from hdet_kernels.converge.plan import Plan
from hdet_kernels.converge.summary import Checksum, TensorSummary, describe_layout, integer_hash
from hdet_kernels.ensemble import Ensemble, ProcessEnsemble
from hdet_kernels.tensors import distinct, flat_view, has_overlap, is_dense, layout_hash, local, unique

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
        state: floating-point optimizer state, by name.
        integers: integer buffers, which have no mean.
        counts: a copy of the optimizer's step counts.
        gapped: for tensors with gaps in memory, a contiguous copy and the tensor that it is written back to.
        tensors: parameters, master weights and buffers as the model has them; of distributed tensors the local part.
        homed: whether the parameters live in :class:`Buckets`. Each region is then averaged in place.
        device: device of the first parameter.
    """

    params: list[list[Tensor]]
    buffers: list[Tensor]
    state: dict[str, Tensor]
    integers: list[Tensor]
    counts: Tensor | None
    gapped: list[tuple[Tensor, Tensor]]
    tensors: list[Tensor]
    homed: bool
    device: torch.device

    @property
    def all_params(self) -> list[Tensor]:
        return list(itertools.chain.from_iterable(self.params))

    @property
    def compressible(self) -> list[list[Tensor]]:
        """The regions of parameters without fp64 tensors: a difference sent as fp32 would lose their last digits."""
        return [[tensor for tensor in region if tensor.dtype != torch.float64] for region in self.params]

    def regions_in_full(self, plan: Plan) -> list[list[Tensor]]:
        """Return the regions that ``plan`` averages without compression. Tensors of one region may share a bucket."""
        others = [*self.buffers, *(self.state.values() if plan.state else ())]
        if not plan.params:
            return [others]
        if plan.compressed:
            return [[*(tensor for tensor in self.all_params if tensor.dtype == torch.float64), *others]]
        if self.homed:  # regions of their own: alone in a bucket they are averaged in place
            return [*self.params, others]
        return [[*self.all_params, *others]]

    @contextlib.contextmanager
    def restore_on_failure(self, plan: Plan) -> Iterator[None]:
        """Restore the tensors that are averaged in full, and the integers, if the block raises.

        Compressed parameters need no copy: they are written after the last collective.
        """
        in_full = itertools.chain.from_iterable(self.regions_in_full(plan))
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
        layouts = {"layout": (self.tensors, None), "state": (self.state.values(), self.state.keys())}
        return TensorSummary(
            layout=layout_hash(self.tensors),
            state=layout_hash(self.state.values(), self.state.keys()) if self.state else 0,
            counts=0 if self.counts is None else short_hash(self.counts.tolist()),
            integers=integer_hash(self.integers, checksum.rows, self.device),
            checksum=checksum(self.all_params, self.device),
            rest=checksum([*self.buffers, *self.state.values()], self.device),
            consensus=consensus,
            outer=outer,
            describe=lambda name: describe_layout(*layouts[name]),
        )

    def copy(self) -> Payload:
        """Return the same values in memory of their own. ``tensors`` are still those of the model."""
        with torch.inference_mode(False):
            return replace(
                self,
                params=[[tensor.clone() for tensor in region] for region in self.params],
                buffers=[tensor.clone() for tensor in self.buffers],
                state={name: tensor.clone() for name, tensor in self.state.items()},
                integers=[tensor.clone() for tensor in self.integers],
                counts=None if self.counts is None else self.counts.clone(),
                gapped=[],
            )

    def put_back(self) -> None:
        """Write the copies of tensors with gaps back to these tensors."""
        for flat, tensor in self.gapped:
            tensor.copy_(flat.view(tensor.shape))


class ModelTensors:
    """The tensors of a model and its optimizer that are averaged, looked up anew at every sync.

    The arguments are those of :class:`.converger.Converger`. The constructor raises if something cannot be averaged.
    """

    def __init__(
        self,
        params: Buckets | Iterable[Tensor],
        ensemble: Ensemble,
        state: Callable[[], Mapping[str, Tensor]],
        counts: Counts | None,
        buffers: Callable[[], Sequence[Tensor]],
    ) -> None:
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
        self.state, self.counts, self.buffers = state, counts, buffers
        self.rows = ensemble.rows
        # Numbers of the buffers that have infinities from the start: attention masks, constants and not damage.
        self.masks = [number for number, buffer in enumerate(buffers()) if _is_mask(buffer)]
        self.payload(include_state=False)  # raises now, not after T steps, if a tensor cannot be flattened

    def payload(self, *, include_state: bool) -> Payload:
        """Return the tensors as they are now."""
        gapped: list[tuple[Tensor, Tensor]] = []

        def flat(tensor: Tensor) -> Tensor:
            return _flattened(local(tensor), self.rows, gapped)

        if self.buckets is not None:
            self.buckets.rehome()
            self.buckets.refresh_masters()
        # A buffer may be a view of a parameter, and two buffers may share their memory.
        moving = [buffer for number, buffer in enumerate(self.buffers()) if number not in self.masks]
        parts = distinct(local(tensor) for tensor in (*self.params, *moving))
        own = {local(param).data_ptr() for param in self.params}
        loose = [part for part in parts if part.numel() and part.data_ptr() in own]
        buffers = [part for part in parts if part.numel() and part.data_ptr() not in own]
        floating = [buffer for buffer in buffers if buffer.is_floating_point() or buffer.is_complex()]
        homed = None if self.buckets is None else [[flat(full)] for full in self.buckets.full if full.numel()]
        return Payload(
            params=[[flat(param) for param in loose]] if homed is None else homed,
            buffers=[flat(buffer) for buffer in floating],
            state={name: flat(value) for name, value in (self.state().items() if include_state else ())},
            integers=[buffer for buffer in buffers if not (buffer.is_floating_point() or buffer.is_complex())],
            counts=self.counts.read() if include_state and self.counts is not None else None,
            gapped=gapped,
            tensors=self.covered(),
            homed=homed is not None,
            device=self.params[0].device,
        )

    def covered(self) -> list[Tensor]:
        """Return the parameters, their master weights and the buffers; of distributed tensors the local part."""
        masters = [master for master in self.buckets.masters if master is not None] if self.buckets else []
        return [local(tensor) for tensor in (*self.params, *masters, *unique(self.buffers()))]

    def settle(self, payload: Payload, *, counts: bool) -> None:
        """Write averaged copies back, round the parameters from their masters and, if asked, write the step counts."""
        payload.put_back()
        if self.buckets is not None:
            self.buckets.round_masters()
            self.buckets.advance_versions()
        if counts and payload.counts is not None and self.counts is not None:
            self.counts.write(payload.counts)


def _flattened(tensor: Tensor, rows: int, gapped: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Return the elements as a flat view; of a tensor with gaps a copy, which is appended to ``gapped``."""
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


def _is_mask(buffer: Tensor) -> bool:
    buffer = local(buffer)
    return buffer.is_floating_point() and bool(buffer.isinf().any()) and not bool(buffer.isnan().any())


def check_tensor(tensor: Tensor, ensemble: Ensemble) -> None:
    """Raise TypeError or ValueError if ``tensor`` cannot be averaged over ``ensemble``."""
    what = f"a {str(tensor.dtype).removeprefix('torch.')} tensor of shape {tuple(tensor.shape)}"
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
