"""Runs of the trainers with optimizers that step in the backward pass. Imported in the ranks: imports take seconds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils import set_seed
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
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

#: The steps between two syncs, and the sync after which runs are saved and resumed.
EVERY, SAVED = 2, 2

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


def optimizer_of(model: nn.Module, on: bool, clip: float | None = None) -> Any:
    early = on and hk.InBackward("previous" if clip else None, None, PART)
    return hk.FusedAdamW(model.parameters(), lr=0.01, max_grad_norm=clip, in_backward=early)


class Module(LightningModule):
    def __init__(self, on: bool, clip: float | None = None) -> None:
        super().__init__()
        self.net, self.on, self.clip = Net(), on, clip

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.net(batch[0])["loss"]  # type: ignore[no-any-return]

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        pass

    def configure_optimizers(self) -> Any:
        optimizer = optimizer_of(self, self.on, self.clip)
        scheduler = hk.HDETOneCycleLR(optimizer, 0.01, STEPS, sync_every=EVERY, model=self.trainer.model)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def lightning_trainer(**options: Any) -> Trainer:
    several = {"plugins": [World()], "devices": 2, "strategy": DDPStrategy(process_group_backend="gloo")}
    given = {"callbacks": [HDET()], "enable_checkpointing": False, **options}
    return Trainer(
        max_steps=STEPS,
        accelerator="cpu",
        accumulate_grad_batches=MICRO,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        **{**(several if dist.get_world_size() > 1 else {"devices": 1}), **given},
    )


def with_lightning(rank: int, on: bool, **options: Any) -> Tensor:
    trainer, module = lightning_trainer(**options), Module(on)
    trainer.fit(module, DataLoader(TensorDataset(rows(rank)), batch_size=4))
    return flat(module)


class AccelerateRun:
    """The objects that a user prepares, and the loop over them."""

    def __init__(self, rank: int, on: bool, clip: float | None = None) -> None:
        self.accelerator = make_accelerator(rank, gradient_accumulation_steps=MICRO)
        set_seed(0)
        self.model: Any = Net()
        self.optimizer: Any = optimizer_of(self.model, on, clip)
        self.scheduler: Any = hk.HDETOneCycleLR(self.optimizer, 0.01, STEPS, sync_every=EVERY)
        objects = self.model, self.optimizer, self.scheduler
        self.model, self.optimizer, self.scheduler = prepare(self.accelerator, *objects)
        self.batches = rows(rank).split(4)

    def train(self, first: int, end: int) -> None:
        """Take the steps from ``first`` on, to before ``end``."""
        for batch in self.batches[first * MICRO : end * MICRO]:
            with self.accelerator.accumulate(self.model):
                loss = self.model(batch)["loss"]
                self.accelerator.backward(loss)
                self.optimizer.step()
                self.scheduler.step(loss)
                self.optimizer.zero_grad()

    def end(self) -> Tensor:
        self.scheduler.end()
        return flat(self.accelerator.unwrap_model(self.model))


def with_accelerate(rank: int, on: bool, **options: Any) -> Tensor:
    run = AccelerateRun(rank, on)
    run.train(0, STEPS)
    return run.end()


def transformers_trainer(folder: str, on: bool, clip: float | None = None, **options: Any) -> HDETTrainer:
    model = Net()
    given = {"max_grad_norm": 0, "gradient_accumulation_steps": MICRO, "max_steps": STEPS, **options}
    given["ddp_find_unused_parameters"] = False  # transformers' default is True, with which step() does everything
    return HDETTrainer(
        model,
        tiny.arguments(folder, **given),
        train_dataset=[{"inputs": row} for row in rows(0)],
        optimizers=(optimizer_of(model, on, clip), None),
        hdet={"sync_every": EVERY},
    )


def with_transformers(rank: int, on: bool, **options: Any) -> Tensor:
    with tiny.shared_folder(rank) as folder:
        trainer = transformers_trainer(folder, on, **options)
        trainer.train()
    return flat(trainer.model)


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


# Runs that are saved in their middle by the trainer's own saver, and resumed

#: Every step but the first is clipped by the norm of the step before, so the checkpoint has to have it.
CLIP = 0.1


def resumed_by_lightning(rank: int, folder: Path) -> list[Tensor]:
    """Lightning resumes with the first batch of an epoch, so an epoch ends where the run is saved. It validates:
    from a checkpoint of an epoch without, Lightning 2.6 resumes with one batch of that epoch too many, whatever trains.
    """
    epoch, found = TensorDataset(rows(rank)[: SAVED * MICRO * 4]), []
    for path in (None, folder / "epoch=0.ckpt"):
        keep = [] if path else [ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)]
        trainer = lightning_trainer(callbacks=[HDET(), *keep], enable_checkpointing=not path)
        module, loader = Module(True, CLIP), DataLoader(epoch, batch_size=4)
        watch()
        trainer.fit(module, loader, loader, ckpt_path=path, weights_only=True)
        found.append(flat(module))
    return found


def resumed_by_accelerate(rank: int, folder: Path) -> list[Tensor]:
    whole = AccelerateRun(rank, True, CLIP)
    whole.train(0, SAVED)
    whole.accelerator.save_state(str(folder))
    whole.train(SAVED, STEPS)
    found = [whole.end()]
    again = AccelerateRun(rank, True, CLIP)
    again.accelerator.load_state(str(folder))
    watch()
    again.train(SAVED, STEPS)
    return [*found, again.end()]


def resumed_by_transformers(rank: int, folder: Path) -> list[Tensor]:
    found = []
    with tiny.shared_folder(rank):
        for path in (None, folder / f"checkpoint-{SAVED}"):
            saves = {"save_strategy": "no" if path else "steps", "save_steps": SAVED}
            trainer = transformers_trainer(str(folder), True, CLIP, **saves)
            watch()
            trainer.train(resume_from_checkpoint=path and str(path))
            found.append(flat(trainer.model))
    return found


RESUMED = {
    "lightning": resumed_by_lightning,
    "accelerate": resumed_by_accelerate,
    "transformers": resumed_by_transformers,
}


def resumed(rank: int, trainer: str, folder: Path) -> tuple[bool, int, list[str]]:
    """Return whether a resumed run ends as the uninterrupted one, how many parameters were stepped early in it, and
    the files of its checkpoint."""
    whole, again = RESUMED[trainer](rank, folder)
    return torch.equal(whole, again), stepped[0], [path.name for path in folder.rglob("*")]
