"""Runs of the trainers with optimizers that step in the backward pass. Imported in the ranks: imports take seconds."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils import set_seed
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import hdet_kernels as hk
from hdet_kernels.integrations.accelerate import prepare
from hdet_kernels.integrations.lightning import HDET
from hdet_kernels.integrations.transformers import HDETTrainer
from hdet_kernels.optim.in_backward import BackwardSteps
from tests.integrations import tiny
from tests.integrations.accelerate_runs import make_accelerator
from tests.integrations.lightning_runs import World, flat

STEPS, MICRO, WIDTH, PART = 6, 2, 24, 3_000

#: The most parameters that a backward pass of the run has stepped.
stepped = [0]


def watch() -> None:
    """Note at every step how many parameters its backward passes have stepped."""
    stepped[0] = 0
    check = BackwardSteps.check_untouched

    def noting(self: BackwardSteps) -> None:
        stepped[0] = max(stepped[0], self.stepped)
        check(self)

    BackwardSteps.check_untouched = noting  # type: ignore[method-assign]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(5)))

    def forward(self, inputs: Tensor) -> dict[str, Tensor]:
        return {"loss": (self.layers(inputs) - inputs).square().mean()}


def rows(rank: int) -> Tensor:
    return torch.randn(STEPS * MICRO * 4, WIDTH, generator=torch.Generator().manual_seed(rank))


def early(on: bool, **options: Any) -> Any:
    return hk.InBackward(chunk_bytes=PART, **options) if on else False


class Module(LightningModule):
    def __init__(self, on: bool) -> None:
        super().__init__()
        self.net, self.on = Net(), on

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.net(batch[0])["loss"]  # type: ignore[no-any-return]

    def configure_optimizers(self) -> Any:
        optimizer = hk.FusedAdamW(self.parameters(), lr=0.01, in_backward=early(self.on))
        scheduler = hk.HDETOneCycleLR(optimizer, 0.01, STEPS, sync_every=2, model=self.trainer.model)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def with_lightning(rank: int, on: bool, **options: Any) -> Tensor:
    several = {"plugins": [World()], "devices": 2, "strategy": DDPStrategy(process_group_backend="gloo")}
    trainer = Trainer(
        max_steps=STEPS,
        accelerator="cpu",
        accumulate_grad_batches=MICRO,
        callbacks=[HDET()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        **{**(several if dist.get_world_size() > 1 else {"devices": 1}), **options},
    )
    module = Module(on)
    trainer.fit(module, DataLoader(TensorDataset(rows(rank)), batch_size=4))
    return flat(module)


def with_accelerate(rank: int, on: bool, **options: Any) -> Tensor:
    accelerator = make_accelerator(rank, gradient_accumulation_steps=MICRO)
    set_seed(0)
    model: Any = Net()
    optimizer: Any = hk.FusedAdamW(model.parameters(), lr=0.01, in_backward=early(on))
    scheduler: Any = hk.HDETOneCycleLR(optimizer, 0.01, STEPS, sync_every=2)
    model, optimizer, scheduler = prepare(accelerator, model, optimizer, scheduler)
    for batch in rows(rank).split(4):
        with accelerator.accumulate(model):
            loss = model(batch)["loss"]
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step(loss)
            optimizer.zero_grad()
    scheduler.end()
    return flat(accelerator.unwrap_model(model))


def with_transformers(rank: int, on: bool, **options: Any) -> Tensor:
    model = Net()
    optimizer = hk.FusedAdamW(model.parameters(), lr=0.01, in_backward=early(on))
    with tempfile.TemporaryDirectory() as folder:
        given = {"max_grad_norm": 0, "gradient_accumulation_steps": MICRO, "max_steps": STEPS, **options}
        trainer = HDETTrainer(
            model,
            tiny.arguments(folder, **given),
            train_dataset=[{"inputs": row} for row in rows(0)],
            optimizers=(optimizer, None),
            hdet={"sync_every": 2},
        )
        trainer.train()
    return flat(model)


RUNS = {"lightning": with_lightning, "accelerate": with_accelerate, "transformers": with_transformers}

#: The option by which a trainer clips gradients itself.
CLIPS: dict[str, dict[str, Any]] = {
    "lightning": {"gradient_clip_val": 0.5},
    "transformers": {"max_grad_norm": 1.0},
}


def both(rank: int, trainer: str, folder: Path) -> tuple[bool, int, str]:
    """Return whether both ways train alike, how many parameters were stepped early, and what clipping raises."""
    plain = RUNS[trainer](rank, False)
    watch()
    same = torch.equal(plain, RUNS[trainer](rank, True))
    message = ""
    if trainer in CLIPS:
        try:
            RUNS[trainer](rank, True, **CLIPS[trainer])
        except ValueError as error:
            message = str(error)
    return same, stepped[0], message
