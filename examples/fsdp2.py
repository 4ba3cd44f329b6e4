"""FSDP2 within every replica, which trains on gradients of its own: replicas communicate at syncs only.

    torchrun --nproc-per-node 4 examples/fsdp2.py --shard 2 --steps 200     # 2 replicas of 2 processes each
    torchrun --nproc-per-node 2 examples/fsdp2.py --shard 1                 # a replica in each process

FSDP2 over all processes is one replica, and there is nothing to spread: a run needs two replicas at least. See hsdp.py
for gradients that are averaged over the replicas at every step. The task and the checkpoints are the same.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import hdet_kernels as hk
from hdet_kernels.demo.tasks import Batch, TextTask, loss_of


def train(steps: int, max_lr: float, shard: int, folder: Path, stop_after: int, device: torch.device) -> None:
    """Train as one process of the default process group, and print a table in the first."""
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh(device.type, (size // shard, shard), mesh_dim_names=("replicate", "shard"))
    task = TextTask()
    torch.manual_seed(0)
    model = task.model().to(device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32  # many CPUs are slow in bf16
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for block in (*model.blocks, model):
        fully_shard(block, mesh=mesh["shard"], mp_policy=policy)  # within the replica: its gradients are its own
    optimizer = hk.FusedAdamW(model.parameters(), lr=max_lr, max_grad_norm=1.0)

    def move(batch: Batch) -> Batch:
        return batch[0].to(device), batch[1].to(device)

    probe = move(task.probe(torch.Generator().manual_seed(12345)))  # the same batch for all replicas
    scheduler = hk.HDETOneCycleLR(
        optimizer,
        max_lr,
        total_steps=steps,
        sync_every=max(2, steps // 20),
        ensemble=hk.ProcessEnsemble(mesh),
        gradients="local",
        probe=lambda: loss_of(model, probe),
    )
    first = load(folder, model, optimizer, scheduler)
    for step in range(first, stop_after):
        # A batch depends on step and rank only, so that a resumed run trains on the same batches.
        loss = loss_of(model, move(task.batch(torch.Generator().manual_seed(step * size + rank))))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step(loss)  # the loss of this process; that of a replica is the mean over its processes
        if (step + 1) % scheduler.sync_every == 0:
            save(folder, model, optimizer, scheduler, step + 1)  # right after a sync all replicas are equal
    with scheduler.consensus(), torch.no_grad():  # the average, also where the run was stopped between two syncs
        inputs, targets = task.held_out()
        held_out = loss_of(model, move((inputs[:128], targets[:128])))
    if rank == 0:
        print(hk.report.table(scheduler.history))
        print(f"\nheld-out loss of the averaged model: {float(held_out):.3f}")


def save(
    folder: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, scheduler: hk.HDETOneCycleLR, step: int
) -> None:
    """Write a checkpoint to a folder of its own."""
    target, rank = folder / f"step-{step}", dist.get_rank()
    of_model, of_optimizer = get_state_dict(model, optimizer)
    dcp.save({"model": of_model, "optimizer": of_optimizer}, checkpoint_id=target)
    # The scheduler's state has shards of this process: every process saves its own.
    torch.save(scheduler.state_dict(), target / f"scheduler-{rank}.pt")
    dist.barrier()
    if rank == 0:
        (folder / "latest").write_text(str(step))  # only now it is complete


def load(folder: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, scheduler: hk.HDETOneCycleLR) -> int:
    """Load the last checkpoint, if there is one, and return its step."""
    if not (folder / "latest").exists():
        return 0
    step = int((folder / "latest").read_text())
    of_model, of_optimizer = get_state_dict(model, optimizer)
    dcp.load({"model": of_model, "optimizer": of_optimizer}, checkpoint_id=folder / f"step-{step}")
    set_state_dict(model, optimizer, model_state_dict=of_model, optim_state_dict=of_optimizer)
    own = folder / f"step-{step}" / f"scheduler-{dist.get_rank()}.pt"
    scheduler.load_state_dict(torch.load(own, weights_only=True))
    return step


def main() -> None:
    parser = argparse.ArgumentParser(description="FSDP2 within every replica; start it with torchrun")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--max-lr", type=float, default=0.02)
    parser.add_argument("--shard", type=int, default=2, help="processes of a replica")
    parser.add_argument("--checkpoint", type=Path, default=Path("fsdp2-checkpoint"), help="folder")
    parser.add_argument("--stop-after", type=int, help="end after this step, as an interrupt would")
    given = parser.parse_args()
    nccl = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if nccl else torch.device("cpu")
    if nccl:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    dist.init_process_group("nccl" if nccl else "gloo")
    train(given.steps, given.max_lr, given.shard, given.checkpoint, given.stop_after or given.steps, device)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
