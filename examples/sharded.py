"""Replicas that are sharded over some processes each, with HDETOneCycleLR: HSDP, or FSDP2 within every replica.

    pip install -c constraints.txt torch numpy 'setuptools>=77'
    pip install -c constraints.txt --no-build-isolation .
    torchrun --nproc-per-node 4 examples/sharded.py                                  # HSDP: 2 replicas of 2 processes
    torchrun --nproc-per-node 4 examples/sharded.py --gradients local                # FSDP2: they meet at syncs only
    torchrun --nproc-per-node 4 examples/sharded.py --spread 0 --checkpoint plain    # plain OneCycleLR

A byte-level transformer learns the source of Python's standard library, from a learning rate that is about ten times
too high. Interrupt it and start it again with the same arguments: it continues from the last checkpoint. What is
different from plain HSDP is marked (1) to (4). FSDP2 over all processes is one replica, and there is nothing to spread:
a run needs two replicas at least.
"""

from __future__ import annotations

import argparse
import logging
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


def train(given: argparse.Namespace, device: torch.device) -> None:
    """Train as one process of the default process group, and print the outcome in the first."""
    rank, size = dist.get_rank(), dist.get_world_size()
    if size % given.shard:
        raise ValueError(f"{size} processes cannot be divided into replicas of {given.shard}: choose another --shard")
    mesh = init_device_mesh(device.type, (size // given.shard, given.shard), mesh_dim_names=("replicate", "shard"))
    task = TextTask()
    torch.manual_seed(0)
    model = task.model().to(device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32  # many CPUs are slow in bf16
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    # Over both dimensions gradients are averaged over the replicas, too; within the replica they are its own.
    averaged_over = mesh if given.gradients == "shared" else mesh["shard"]
    for block in (*model.blocks, model):
        fully_shard(block, mesh=averaged_over, mp_policy=policy)
    optimizer = hk.FusedAdamW(model.parameters(), lr=given.max_lr, max_grad_norm=1.0)

    def move(batch: Batch) -> Batch:
        return batch[0].to(device), batch[1].to(device)

    probe = move(task.probe(torch.Generator().manual_seed(12345)))  # the same batch for all replicas
    # (1) the scheduler; (2) the mesh tells it who the replicas are.
    scheduler = hk.HDETOneCycleLR(
        optimizer,
        given.max_lr,
        total_steps=given.steps,
        spread=given.spread,
        ensemble=hk.ProcessEnsemble(mesh),
        gradients=given.gradients,
        probe=lambda: loss_of(model, probe),
    )
    for step in range(load(given.checkpoint, model, optimizer, scheduler), given.stop_after or given.steps):
        # A batch depends on step and rank only, so that a resumed run trains on the same batches.
        loss = loss_of(model, move(task.batch(torch.Generator().manual_seed(step * size + rank))))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step(loss)  # (3) the loss of this process; that of a replica is the mean over its processes
        if (step + 1) % scheduler.sync_every == 0:
            save(given.checkpoint, model, optimizer, scheduler, step + 1)  # (4) after a sync all replicas are equal
    with scheduler.consensus(), torch.no_grad():  # the average, also where the run was stopped between two syncs
        inputs, targets = task.held_out()
        held_out = loss_of(model, move((inputs[:128], targets[:128])))
    if rank == 0:
        print(scheduler.history_summary)
        print(f"held-out loss of the averaged model: {float(held_out):.3f}")


def save(
    parent: Path, model: torch.nn.Module, optimizer: hk.FusedAdamW, scheduler: hk.HDETOneCycleLR, step: int
) -> None:
    """Write a checkpoint to a folder of its own."""
    folder, rank = parent / f"step-{step}", dist.get_rank()
    of_model, of_optimizer = get_state_dict(model, optimizer)
    dcp.save({"model": of_model, "optimizer": of_optimizer}, checkpoint_id=folder)
    # The scheduler's state has shards of this process: every process saves its own.
    torch.save(scheduler.state_dict(), folder / f"scheduler-{rank}.pt")
    dist.barrier()
    if rank == 0:
        (parent / "latest").write_text(str(step))  # only now it is complete


def load(parent: Path, model: torch.nn.Module, optimizer: hk.FusedAdamW, scheduler: hk.HDETOneCycleLR) -> int:
    """Load the last checkpoint, if there is one, and return its step."""
    if not (parent / "latest").exists():
        return 0
    step = int((parent / "latest").read_text())
    folder = parent / f"step-{step}"
    of_model, of_optimizer = get_state_dict(model, optimizer)
    dcp.load({"model": of_model, "optimizer": of_optimizer}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=of_model, optim_state_dict=of_optimizer)
    scheduler.load_state_dict(torch.load(folder / f"scheduler-{dist.get_rank()}.pt", weights_only=True))
    return step


def main() -> None:
    parser = argparse.ArgumentParser(description="HSDP or FSDP2 with HDETOneCycleLR; start it with torchrun")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--max-lr", type=float, default=TextTask.poor_lr, help="about ten times too high by default")
    parser.add_argument("--shard", type=int, default=2, help="processes of a replica")
    parser.add_argument("--gradients", choices=("shared", "local"), default="shared", help="by all replicas, or not")
    parser.add_argument("--spread", type=float, default=0.3, help="0: plain OneCycleLR, to compare with")
    parser.add_argument("--checkpoint", type=Path, default=Path("sharded-checkpoint"), help="folder")
    parser.add_argument("--stop-after", type=int, help="end after this step, as an interrupt would")
    given = parser.parse_args()
    nccl = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if nccl else torch.device("cpu")
    if nccl:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    dist.init_process_group("nccl" if nccl else "gloo")
    logging.basicConfig(format="%(name)s: %(message)s")
    logging.getLogger("hdet_kernels").setLevel(logging.INFO)  # what the controller does, and why
    train(given, device)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
