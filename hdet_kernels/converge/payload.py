"""What is averaged at a sync: parameters, buffers, optimizer state and step counts, as flat tensors of this process."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hdet_kernels import ops
from hdet_kernels.ensemble import Ensemble, ProcessEnsemble
from hdet_kernels.ops.chunks import ChunkTable
from hdet_kernels.ops.stacked_chunks import StackedTable
from hdet_kernels.tensors import Slot, flat_view, has_overlap, is_dense, local, wide_dtype


@dataclass(frozen=True)
class Content:
    """Flat tensors: 1-D, or [rows, n] where the process holds several replicas.

    params: regions of parameters; those of one region may travel together. buffers, state: floating-point ones,
    state by name. integers: buffers that have no mean. counts: the optimizer's step counts.
    gapped: contiguous copies of tensors that have gaps in memory, and what they have to be copied back to.
    tensors: parameters, masters and buffers as the model has them, or the parts of them that are here.
    device: of the first parameter.
    """

    params: list[list[Tensor]]
    buffers: list[Tensor]
    state: dict[str, Tensor]
    integers: list[Tensor]
    counts: Tensor | None
    gapped: list[tuple[Tensor, Tensor]]
    tensors: list[Tensor]
    device: torch.device

    @property
    def all_params(self) -> list[Tensor]:
        return list(itertools.chain.from_iterable(self.params))

    def copy(self) -> Content:
        """The same values in memory of their own; the layout is still that of the model's tensors."""
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
        """Write the copies of tensors with gaps to where they came from."""
        for flat, tensor in self.gapped:
            tensor.copy_(flat.view(tensor.shape))


def flattener(rows: int, gapped: list[tuple[Tensor, Tensor]]) -> Callable[[Tensor], Tensor]:
    """A function that gives the elements of a tensor of this process as a flat view, or notes the copy that it had
    to make in ``gapped``."""

    def flat(tensor: Tensor) -> Tensor:
        own = local(tensor)
        if rows > 1:
            if own.dim() == 0 or own.shape[0] != rows:
                raise ValueError(f"{rows} replicas are the rows of tensors [{rows}, …], got shape {tuple(own.shape)}")
            real = torch.view_as_real(own) if own.is_complex() else own
            if real.is_contiguous():
                return real.view(rows, -1)
            copied = real.reshape(rows, -1).contiguous()
            gapped.append((copied, real))
            return copied
        if is_dense(own) or has_overlap(own):
            return flat_view(own)  # which refuses overlaps
        real = torch.view_as_real(own) if own.is_complex() else own
        copied = real.contiguous().view(-1)
        gapped.append((copied, real))
        return copied

    return flat


def described(tensors: Iterable[Tensor], names: Iterable[str] | None = None) -> dict[str, Any]:
    """What the tensors are, by name; first how many and how large."""
    tensors = list(tensors)
    names = [f"tensor {number}" for number in range(len(tensors))] if names is None else list(names)
    return {
        "tensors": len(tensors),
        "elements": sum(tensor.numel() for tensor in tensors),
        **{
            name: f"{str(t.dtype).removeprefix('torch.')} {tuple(t.shape)} with strides {t.stride()}"
            for name, t in zip(names, tensors, strict=True)
        },
    }


class Checksum:
    """A number that is finite exactly if all elements are, and differs, but for luck, where the elements do: the norm
    of all tensors, in fp64. One launch, whatever their number."""

    def __init__(self, rows: int, backend: str | None) -> None:
        self.rows, self.backend = rows, backend
        self._tables: dict[object, ChunkTable] = {}

    def __call__(self, tensors: Iterable[Tensor], device: torch.device) -> Tensor:
        """[rows], on ``device``."""
        kinds: dict[tuple[torch.device, bool], list[Tensor]] = {}
        for tensor in tensors:
            if tensor.numel():
                kinds.setdefault((tensor.device, tensor.dtype == torch.float64), []).append(tensor)
        total = torch.zeros(self.rows, dtype=wide_dtype(device), device=device)
        for weight, (_, alike) in enumerate(sorted(kinds.items(), key=lambda item: str(item[0])), start=1):
            total += weight * self._norm(alike).to(device)
        return total

    def _norm(self, tensors: Sequence[Tensor]) -> Tensor:
        sizes = tuple(tensor.numel() // self.rows for tensor in tensors)
        device, wide_elements = tensors[0].device, tensors[0].dtype == torch.float64
        key = (device, wide_elements, sizes)
        if key not in self._tables:
            *starts, end = itertools.accumulate(sizes, initial=0)
            slots = [Slot(0, start, size, (size,), (1,)) for start, size in zip(starts, sizes, strict=True)]
            dtype = torch.float64 if wide_elements else torch.float32
            rows = [0] * len(slots)  # nothing here has hyperparameters
            self._tables[key] = (
                ChunkTable(slots, rows, device, dtype)
                if self.rows == 1
                else StackedTable(
                    slots,
                    rows,
                    device,
                    dtype,
                    replicas=self.rows,
                    row_stride=end,
                    table_rows_per_replica=0,
                    shares_state=False,
                )
            )
        table = self._tables[key]
        return ops.grad_norm(table, table.match(tensors), rows=self.rows, backend=self.backend)


#: Large odd numbers without a pattern, within 64 bits.
_ODD = (0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9, 0x14D049BB133111EB)


def integer_hash(tensors: Sequence[Tensor], rows: int, device: torch.device) -> Tensor:
    """[rows], on ``device``: 48 bits of the values, which differ, but for luck, where one value does."""
    total = torch.zeros(rows, dtype=torch.int64, device=device)
    for number, tensor in enumerate(tensors):
        values = tensor.reshape(rows, -1).to(torch.int64)
        # Value and place are mixed before they are added, or changes at several places could make up for each other.
        places = torch.arange(number, number + values.shape[1], device=values.device)
        mixed = (values + places * _ODD[0]) * _ODD[1]
        mixed = (mixed ^ (mixed >> 31)) * _ODD[2]
        total += (mixed ^ (mixed >> 29)).sum(dim=1).to(device)
    return total % 2**48


def check_tensor(tensor: Tensor, ensemble: Ensemble) -> None:
    """Raise if ``tensor`` cannot be averaged."""
    what = f"a {str(tensor.dtype).removeprefix('torch.')} tensor of shape {tuple(tensor.shape)}"
    if tensor.layout is not torch.strided:
        raise TypeError(f"{what} has layout {tensor.layout}; only dense tensors are averaged")
    if tensor.is_floating_point() and tensor.dtype not in _AVERAGED:
        raise TypeError(f"{what} cannot be averaged; floating-point tensors must be one of {_AVERAGED}")
    if ensemble.talks and not ensemble.serves(tensor.device):
        raise ValueError(
            f"{what} is on {tensor.device}, where {ensemble} cannot carry it: move it, or initialise the process group "
            "with a backend for each device, as in init_process_group('cpu:gloo,cuda:nccl')"
        )


#: Floating-point dtypes that kernels and collectives know.
_AVERAGED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_shards(index: int, param: Tensor, ensemble: Ensemble) -> None:
    """The processes that average a part of a distributed tensor must hold the same part."""
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
