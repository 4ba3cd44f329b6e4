"""The names that code blocks of the documentation may use without defining them: a small training set-up.

A block shows the lines that matter; ``model``, ``loader`` and the like are the reader's own. Here they are a small
model on random data, so that every block runs in milliseconds.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR

import hdet_kernels as hk

BATCH, WIDTH, CLASSES = 16, 8, 4


def build_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Dropout(0.1), nn.Linear(16, CLASSES))


def batches(count: int, device: str) -> list[tuple[Tensor, Tensor]]:
    """Return ``count`` batches of inputs and labels; the label is where the first inputs are largest."""
    generator = torch.Generator().manual_seed(dist.get_rank() if dist.is_initialized() else 0)
    inputs = torch.randn(count, BATCH, WIDTH, generator=generator)
    return [(x.to(device), x[:, :CLASSES].argmax(1).to(device)) for x in inputs]


def loss_fn(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(model(inputs), targets)


def validate(model: nn.Module) -> float:
    """Return the loss on one batch."""
    with torch.no_grad():
        return float(loss_fn(model, *batches(1, str(next(model.parameters()).device))[0]))


def namespace(folder: Path, device: str = "cpu") -> dict[str, Any]:
    """Return fresh names for one page; files are written to ``folder``."""
    model = build_model().to(device)
    (held_out,) = batches(1, device)
    return {
        "__name__": "__main__",
        "torch": torch,
        "nn": nn,
        "dist": dist,
        "F": F,
        "DDP": DistributedDataParallel,
        "OneCycleLR": OneCycleLR,
        "CosineAnnealingLR": CosineAnnealingLR,
        "LambdaLR": LambdaLR,
        "hk": hk,
        "build_model": build_model,
        "model": model,
        "optimizer": hk.FusedAdamW(model.parameters(), lr=1e-3),
        "loader": batches(30, device),
        "held_out": held_out,
        "loss_fn": loss_fn,
        "validate": validate,
        "device": device,
        "path": folder / "checkpoint.pt",
    }
