"""A training script as torchrun starts it: it resumes from its last checkpoint, and one rank dies once on the way.

torchrun --nproc-per-node=2 --max-restarts=1 restart_script.py FOLDER
"""

from __future__ import annotations

import os
import signal
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import hdet_kernels as hk
from hdet_kernels.optim import FusedAdamW
from tests.training import Trainer

TOTAL, SYNC = 16, 4
#: Rank 1 dies here, in the first attempt, before the step is made.
DEATH = 11
#: The controller acts at every sync. The spread is wide, so that a wrong multiplier shows.
SETTINGS: dict[str, Any] = {
    "total_steps": TOTAL,
    "sync_every": SYNC,
    "spread": 0.5,
    "auto_lr": hk.SoftmaxController(warmup_steps=SYNC),
}
#: Every rank saves its own file, within a cycle.
SAVE_EVERY = 6


def run(rank: int, folder: Path, marker: Path | None) -> dict[str, Any]:
    """Train to the end, from the checkpoint if there is one. Rank 1 dies unless ``marker`` is there or None."""
    trainer = Trainer(rank, ddp=False, make_optimizer=FusedAdamW, **SETTINGS)
    parts: list[Any] = [trainer.module, trainer.optimizer, trainer.scheduler]
    path = folder / f"rank{rank}.pt"
    if path.exists():
        for part, state in zip(parts, torch.load(path, weights_only=True), strict=True):
            part.load_state_dict(state)
    resumed_at = trainer.step
    while trainer.step < TOTAL:
        if marker is not None and rank == 1 and trainer.step == DEATH and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        trainer.train(1)
        if trainer.step % SAVE_EVERY == 0:
            unfinished = path.with_suffix(".unfinished")
            torch.save([part.state_dict() for part in parts], unfinished)
            os.replace(unfinished, path)
    history = [{**record.to_dict(), "seconds": 0.0} for record in trainer.scheduler.history]
    return {
        "parameters": trainer.parameters(),
        "moments": trainer.moments(),
        "base": trainer.scheduler.get_base_lr(),
        "rates": trainer.scheduler.get_last_lr(),
        "history": history,
        "resumed at": resumed_at,
    }


def main() -> None:
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    rank = dist.get_rank()
    found = run(rank, folder, folder / "died")
    torch.save(found | {"attempt": int(os.environ["TORCHELASTIC_RESTART_COUNT"])}, folder / f"result{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
