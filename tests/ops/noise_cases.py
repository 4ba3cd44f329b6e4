"""Cases of noise: tensors with marked memory around them, and numbers drawn from given keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hdet_kernels.buckets import Slot
from hdet_kernels.ops.chunks import CHUNK, ChunkTable
from hdet_kernels.ops.noise import add_noise_
from tests.ops.cases import BF16, FP16, FP32, FP64, SENTINEL

DTYPES = {
    "fp32": (FP32,),
    "fp64": (FP64,),
    "bf16": (BF16,),
    "fp16": (FP16,),
    "mixed": (FP32, BF16, FP16),
}
# Whole blocks at an address that allows vectors and at one that does not, one element, none, odd tails.
SIZES = (CHUNK + 1, CHUNK + 1025, 0, 1, 3, CHUNK - 1)
GAP = 8
# Neighbouring keys, their complements, and keys that differ in the upper word alone.
KEYS = (0, 1, 2, -1, 2**32, -(2**63), 2**63 - 1)


def table_of(sizes: Sequence[int], dtype: torch.dtype, device: str) -> ChunkTable:
    slots = [Slot(0, sum(sizes[:index]), size, (size,), (1,)) for index, size in enumerate(sizes)]
    return ChunkTable(slots, [0] * len(slots), torch.empty(0, device=device).device, dtype)


def keys_and_scales(count: int, device: str) -> tuple[Tensor, Tensor]:
    keys = torch.tensor([KEYS[index % len(KEYS)] for index in range(count)], dtype=torch.int64)
    return keys.to(device), torch.linspace(0.01, 2, count, dtype=FP64).to(device)


@dataclass
class Case:
    """Tensors inside larger memory full of a sentinel, every other one at an address that is no multiple of 16."""

    tensors: list[Tensor | None]
    around: list[Tensor]
    table: ChunkTable
    keys: Tensor
    scales: Tensor

    def add_noise_(self, backend: str) -> None:
        add_noise_(self.table, self.table.match(self.tensors), self.keys, self.scales, backend=backend)

    def assert_neighbours_untouched(self) -> None:
        for index, (size, outer) in enumerate(zip(self.sizes, self.around, strict=True)):
            start = GAP + index % 2
            beside = torch.cat([outer[:start], outer[start + size :]])
            assert (beside == SENTINEL).all(), "something was written beside a tensor"

    @property
    def sizes(self) -> list[int]:
        return [slot.numel for slot in self.table.entries]


def make_case(kinds: Sequence[torch.dtype], device: str, sizes: Sequence[int] = SIZES) -> Case:
    generator = torch.Generator().manual_seed(sum(sizes))
    tensors: list[Tensor | None] = []
    around = []
    for index, size in enumerate(sizes):
        outer = torch.full((size + 2 * GAP + 1,), SENTINEL, dtype=kinds[index % len(kinds)], device=device)
        inner = outer[GAP + index % 2 :][:size]
        inner.copy_(torch.randn(size, generator=generator, dtype=FP64))
        tensors.append(inner)
        around.append(outer)
    return Case(tensors, around, table_of(sizes, kinds[0], device), *keys_and_scales(len(sizes), device))


def drawn(keys: Sequence[int], count: int, backend: str = "torch", device: str = "cpu") -> Tensor:
    """Return normal numbers [keys, count], as float64 on the CPU."""
    tensors = [torch.zeros(count, device=device) for _ in keys]
    table = table_of([count] * len(keys), FP32, device)
    ones = torch.ones(len(keys), dtype=FP64, device=device)
    add_noise_(table, table.match(tensors), torch.tensor(keys, device=device), ones, backend=backend)
    return torch.stack(tensors).cpu().double()
