"""Matrices and other parameters for the tests of FusedMuon, and their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

import hdet_kernels as hk

#: Wide, tall and square matrices, several of one shape, a row and a column.
MATRICES = ((12, 20), (20, 12), (8, 8), (12, 20), (8, 8), (5, 1), (1, 7))


#: With parameters that AdamW trains, among them.
MIXED = ((12, 20), (7,), (20, 12), (12, 20), (), (8, 8), (2, 3, 4))


LR = 0.02


def parameters(shapes: Sequence[tuple[int, ...]], dtype: torch.dtype = torch.float32, device: str = "cpu") -> list[Any]:
    generator = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(device, dtype)) for shape in shapes]


def give(params: Sequence[Tensor], seed: int, scale: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for param in params:
        param.grad = (scale * torch.randn(param.shape, generator=generator)).to(param)


def run(optimizer: torch.optim.Optimizer, params: Sequence[Tensor], seeds: range) -> None:
    for seed in seeds:
        give(params, seed)
        optimizer.step()


def stepped(optimizer: hk.FusedMuon, seeds: range = range(1)) -> hk.FusedMuon:
    run(optimizer, [param for group in optimizer.param_groups for param in group["params"]], seeds)
    return optimizer
