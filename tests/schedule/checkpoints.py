"""Save and load a small run, for the tests of checkpoints."""

from __future__ import annotations

import io
import logging
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import hdet_kernels as hk
from tests.training import Trainer

TOTAL, SYNC = 40, 5


#: The controller acts at steps 5, 10, 15 and 20. The spread is wide, so that a wrong multiplier shows.
SETTINGS: dict[str, Any] = {
    "total_steps": TOTAL,
    "sync_every": SYNC,
    "spread": 0.5,
    "auto_lr": hk.RegressionController(start_at=0.1, stop_at=0.5),
    "groups": True,
}


def result(trainer: Trainer) -> dict[str, Any]:
    history = [{**r.to_dict(), "seconds": 0.0} for r in trainer.scheduler.history]
    groups = [{k: v for k, v in g.items() if k != "params"} for g in trainer.optimizer.param_groups]
    return {
        "parameters": trainer.parameters(), "moments": trainer.moments(), "rates": trainer.rates, "history": history,
        "groups": groups, "last_lr": trainer.scheduler.get_last_lr(),
        "controller": trainer.scheduler.cycle.spread.controller_state,
    }  # fmt: skip


def save(trainer: Trainer, path: Path | io.BytesIO) -> None:
    parts = (trainer.module, trainer.optimizer, trainer.scheduler)
    torch.save([part.state_dict() for part in parts], path)


def load(trainer: Trainer, path: Path | io.BytesIO, scheduler_first: bool = False) -> Trainer:
    model, optimizer, scheduler = torch.load(path, weights_only=True)
    trainer.module.load_state_dict(model)
    if scheduler_first:
        trainer.scheduler.load_state_dict(scheduler)
    trainer.optimizer.load_state_dict(optimizer)
    if not scheduler_first:
        trainer.scheduler.load_state_dict(scheduler)
    return trainer


def single(**options: Any) -> hk.HDETOneCycleLR:
    model = torch.nn.Linear(6, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return hk.HDETOneCycleLR(optimizer, **{"max_lr": 0.1, "total_steps": 20, **options})


# By torch.distributed.checkpoint, as torch advises


def entries(run: Any) -> dict[str, Any]:
    """Return model and optimizer as torch advises to save them, and the scheduler itself, which DCP asks for both."""
    model, optimizer = get_state_dict(run.module, run.optimizer)
    return {"model": model, "optimizer": optimizer, "scheduler": run.scheduler}


def loaded(run: Any, folder: Path) -> Any:
    """Load into a run that is built anew."""
    state = entries(run)
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(run.module, run.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return run


class Logged(logging.Handler):
    """The messages that the package logs, from warnings on, but for the one that these short runs have few syncs."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if not record.getMessage().startswith("sync_every="):
            self.texts.append(record.getMessage())

    def __enter__(self) -> list[str]:
        logging.getLogger("hdet_kernels").addHandler(self)
        return self.texts

    def __exit__(self, *_: object) -> None:
        logging.getLogger("hdet_kernels").removeHandler(self)
