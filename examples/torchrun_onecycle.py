"""DistributedDataParallel with HDETOneCycleLR: train on the demo's text, save checkpoints, resume.

    pip install -c constraints.txt torch numpy 'setuptools>=77'
    pip install -c constraints.txt --no-build-isolation .
    torchrun --nproc-per-node 4 examples/torchrun_onecycle.py
    torchrun --nproc-per-node 4 examples/torchrun_onecycle.py --spread 0 --checkpoint plain.pt    # plain OneCycleLR

The learning rate is about ten times too high. HDET lowers it, and says so in the log. Interrupt it and start it again
with the same arguments: it continues from the last checkpoint. What is different from a script with plain OneCycleLR is
marked (1) to (4).
"""

from __future__ import annotations

import argparse
import logging
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import hdet_kernels as hk
from hdet_kernels.demo.tasks import TextTask, loss_of


def train(given: argparse.Namespace) -> None:
    """Train as one rank of the default process group, and print the outcome in the first."""
    rank, size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
    task = TextTask()
    torch.manual_seed(0)
    model = task.model().to(device)
    replicated = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=given.max_lr)
    # (1) the scheduler; (2) a probe: this replica's loss on a batch that is the same for all replicas.
    inputs, targets = task.probe(torch.Generator().manual_seed(12345))
    same_for_all = inputs.to(device), targets.to(device)
    scheduler = hk.HDETOneCycleLR(
        optimizer,
        given.max_lr,
        total_steps=given.steps,
        spread=given.spread,
        probe=lambda: loss_of(model, same_for_all),
        model=model,
    )

    first = 0
    if given.checkpoint.exists():
        saved = torch.load(given.checkpoint, map_location=device, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        scheduler.load_state_dict(saved["scheduler"])  # one file serves all ranks; each gets its own learning rate
        first = saved["step"]

    for step in range(first, given.stop_after or given.steps):
        # A batch depends on step and rank only, so that a resumed run trains on the same batches.
        inputs, targets = task.batch(torch.Generator().manual_seed(step * size + rank))
        loss = loss_of(replicated, (inputs.to(device), targets.to(device)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step(loss)  # (3) the loss goes to the scheduler
        # (4) save right after a sync: all replicas are equal then, and one file serves them all. Between syncs every
        # rank would have to save a file of its own.
        if (step + 1) % scheduler.sync_every == 0 and rank == 0:
            save(given.checkpoint, model, optimizer, scheduler, step + 1)
    with scheduler.consensus(), torch.no_grad():  # the average, also where the run was stopped between two syncs
        if rank == 0:
            inputs, targets = task.held_out()
            held_out = loss_of(model, (inputs.to(device), targets.to(device)))
            print(scheduler.history_summary)
            print(f"held-out loss of the averaged model: {float(held_out):.3f}")


def save(
    path: Path,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: hk.HDETOneCycleLR,
    step: int,
) -> None:
    """Write a checkpoint to ``path``. An interrupt leaves the previous one intact."""
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "step": step,
    }
    unfinished = path.with_name(path.name + ".tmp")
    torch.save(state, unfinished)
    os.replace(unfinished, path)


def main() -> None:
    parser = argparse.ArgumentParser(description="DDP with HDETOneCycleLR; start it with torchrun")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--max-lr", type=float, default=TextTask.poor_lr, help="about ten times too high by default")
    parser.add_argument("--spread", type=float, default=0.3, help="0: plain OneCycleLR, to compare with")
    parser.add_argument("--checkpoint", type=Path, default=Path("torchrun_onecycle.pt"))
    parser.add_argument("--stop-after", type=int, help="end after this step, as an interrupt would")
    given = parser.parse_args()
    local_rank, local_size = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    if torch.cuda.device_count() >= local_size:
        torch.cuda.set_device(local_rank)
        dist.init_process_group("nccl")
    else:
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
    logging.basicConfig(format="%(name)s: %(message)s")
    logging.getLogger("hdet_kernels").setLevel(logging.INFO)  # what the controller does, and why
    train(given)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
