"""Save and load a run by torch.distributed.checkpoint, as torch advises."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict


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
    """The messages that the package logs, from warnings on."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())

    def __enter__(self) -> list[str]:
        logging.getLogger("hdet_kernels").addHandler(self)
        return self.texts

    def __exit__(self, *_: object) -> None:
        logging.getLogger("hdet_kernels").removeHandler(self)
