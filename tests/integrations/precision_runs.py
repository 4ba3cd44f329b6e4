"""Runs of trainers with 8-bit state, split masters and Muon, each interrupted and resumed.

Imported in the ranks only: the imports of the trainers take seconds.
"""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import MixedPrecision
from torch import nn

import hdet_kernels as hk
from hdet_kernels.integrations.transformers import HDETTrainer
from tests.integrations import tiny
from tests.integrations.accelerate_runs import Loop
from tests.integrations.lightning_runs import CLIP, Net, T, data, trainer

BF16 = torch.bfloat16

#: By name: the optimizer, its options besides the learning rate, and the precision that Lightning trains in.
KINDS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "int8": (hk.FusedAdamW, {"state_dtype": "int8"}, "16-mixed"),
    "split, int8": (hk.FusedAdamW, {"master_weights": "split", "state_dtype": "int8"}, "bf16-true"),
    "rounded, int8": (hk.FusedAdamW, {"stochastic_rounding": True, "state_dtype": "int8"}, "bf16-true"),
    "muon": (hk.FusedMuon, {}, "bf16-mixed"),
    "muon, split": (hk.FusedMuon, {"normuon": True, "master_weights": "split"}, "bf16-true"),
}


def everything(module: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    return copy.deepcopy([module.state_dict(), optimizer.state_dict()])


def with_lightning(kind: str, folder: Path) -> dict[str, Any]:
    """Train 4 epochs that end at a sync, with clipping, and again from the checkpoint of the second.

    ``"norms"`` are those of the gradients, as parts of what they were clipped to.
    """
    make, options, precision = KINDS[kind]
    found, losses = [], []
    for again in (False, True):
        net = Net(steps=4 * T, optimizer=partial(make, **options))
        keep = [] if again else [ModelCheckpoint(folder / kind, filename="{epoch}", save_top_k=-1)]
        given = {"plugins": MixedPrecision("16-mixed", "cpu")} if precision == "16-mixed" else {"precision": precision}
        fit = trainer(*keep, max_epochs=4, gradient_clip_val=CLIP, **given)
        path = folder / kind / "epoch=1.ckpt" if again else None
        fit.fit(net, data(T), data(2, seed=1), ckpt_path=path, weights_only=True)
        found.append(everything(net, fit.optimizers[0]))
        losses.append(net.losses)
    return {"whole": found[0], "resumed": found[1], "losses": losses, "norms": [norm / CLIP for norm in net.norms]}


def with_accelerate(rank: int, kind: str, folder: Path) -> dict[str, Any]:
    """Train 8 accumulated steps in bf16, and again from the state saved after the fourth, which is a sync."""
    make, options, _ = KINDS[kind]
    settings = {"mixed_precision": "bf16", "gradient_accumulation_steps": 2}
    found, losses = [], []
    for again in (False, True):
        loop = Loop(rank, steps=8, make_optimizer=partial(make, **options), accelerator=settings, auto_lr=False)
        if again:
            loop.accelerator.load_state(str(folder / kind))
        else:
            loop.train(8, clip=0.5)
            loop.accelerator.save_state(str(folder / kind))
        loop.train(8, skip=8, clip=0.5)
        found.append(everything(loop.model, loop.optimizer.optimizer))
        losses.append(loop.losses)
    return {"whole": found[0], "resumed": found[1], "losses": losses, "norms": [after / 0.5 for _, after in loop.norms]}


def with_transformers(kind: str, folder: Path) -> dict[str, Any]:
    """Train 8 accumulated steps of a language model, and again from the checkpoint of the fourth, which is a sync."""
    make, options, precision = KINDS[kind]
    found, losses = [], []
    for again in (False, True):
        arguments = {"max_steps": 8, "gradient_accumulation_steps": 2, "save_strategy": "steps", "save_steps": 4}
        fit = HDETTrainer(
            tiny.model().to(BF16 if precision == "bf16-true" else torch.float32),
            tiny.arguments(str(folder / kind), **arguments, bf16=precision == "bf16-mixed"),
            train_dataset=tiny.rows(64),
            optimizer_cls_and_kwargs=(make, {"lr": 1e-2, **options}),
            hdet={"sync_every": 2, "auto_lr": False},
        )
        fit.train(resume_from_checkpoint=str(folder / kind / "checkpoint-4") if again else None)
        found.append(everything(fit.model, fit.optimizer))
        losses.append([logs["loss"] for logs in fit.state.log_history if "loss" in logs][-4 if again else 0 :])
    return {"whole": found[0], "resumed": found[1], "losses": losses, "norms": []}


def run_all(rank: int, folder: Path) -> dict[str, Any]:
    """Run everything in one group of ranks: a start costs seconds."""
    in_float32 = [kind for kind, (_, _, precision) in KINDS.items() if precision != "bf16-true"]
    found = {f"lightning, {kind}": with_lightning(kind, folder / "lightning") for kind in KINDS}
    with tiny.shared_folder(rank):
        found |= {f"accelerate, {kind}": with_accelerate(rank, kind, folder / "accelerate") for kind in in_float32}
        for kind in ("split, int8", "muon"):
            found[f"transformers, {kind}"] = with_transformers(kind, folder / "transformers")
    return found
