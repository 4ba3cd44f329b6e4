"""DDP with gradient accumulation, mixed precision, gradient clipping and checkpoints of the averaged model.

    pip install -c constraints.txt torch numpy 'setuptools>=77'
    pip install -c constraints.txt --no-build-isolation . scikit-learn
    torchrun --nproc-per-node 2 examples/accumulation_amp.py
    torchrun --nproc-per-node 2 examples/accumulation_amp.py --dtype fp16     # with a gradient scaler
    torchrun --nproc-per-node 2 examples/accumulation_amp.py --spread 0 --checkpoint plain.pt    # plain OneCycleLR

A small network learns scikit-learn's digits, from a learning rate that is about fifty times too high. HDET lowers it,
and says so in the log. Interrupt it and start it again with the same arguments: it continues from the last checkpoint.
What is different from a script with plain OneCycleLR is marked (1) to (4).
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import hdet_kernels as hk
from hdet_kernels.demo.tasks import DigitsTask, loss_of

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SAVE_EVERY = 25


def train(given: argparse.Namespace, device: torch.device) -> None:
    """Train as one process of the default process group, and print the outcome in the first."""
    rank, size = dist.get_rank(), dist.get_world_size()
    dtype = DTYPES[given.dtype or ("bf16" if device.type == "cuda" else "fp32")]
    task = DigitsTask()
    torch.manual_seed(0)
    model = task.model().to(device)
    replicated = DistributedDataParallel(model)
    optimizer = hk.FusedAdamW(model.parameters(), lr=given.max_lr)
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
    # (1) the scheduler. A step is one of the optimizer, not one of the accumulated batches.
    scheduler = hk.HDETOneCycleLR(optimizer, given.max_lr, total_steps=given.steps, spread=given.spread, model=model)
    parts = {"model": model, "optimizer": optimizer, "scaler": scaler, "scheduler": scheduler}
    first = 0
    if given.checkpoint.exists():
        saved = torch.load(given.checkpoint, map_location=device, weights_only=True)
        for name, part in parts.items():
            part.load_state_dict(saved[name])
        first = saved["step"]

    for step in range(first, given.stop_after or given.steps):
        for micro in range(given.accumulate):
            # A batch depends on step and rank only, so that a resumed run trains on the same batches.
            seed = (step * given.accumulate + micro) * size + rank
            inputs, targets = task.batch(torch.Generator().manual_seed(seed))
            last = micro == given.accumulate - 1
            # DDP averages the gradients over the processes with the last batch of a step.
            with contextlib.nullcontext() if last else replicated.no_sync():
                with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
                    loss = loss_of(replicated, (inputs.to(device), targets.to(device)))
                scaler.scale(loss / given.accumulate).backward()
            scheduler.record_loss(loss)  # (2) every loss, not divided
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scheduler.step()  # (3) for a step that the scaler skipped, too: no replica may miss a sync
        if (step + 1) % SAVE_EVERY == 0:
            # (4) between two syncs the replicas differ: all enter the block, and the first saves the average.
            with contextlib.nullcontext() if scheduler.in_sync else scheduler.consensus():
                if rank == 0:
                    save(given.checkpoint, {name: part.state_dict() for name, part in parts.items()}, step + 1)
            dist.barrier()

    with scheduler.consensus(), torch.no_grad():
        inputs, targets = (part.to(device) for part in task.held_out())
        accuracy = (model(inputs).argmax(1) == targets).float().mean()
    if rank == 0:
        print(scheduler.history_summary)
        print(f"accuracy of the averaged model on held-out digits: {float(accuracy):.3f}")


def save(path: Path, states: dict[str, object], step: int) -> None:
    """Write a checkpoint to ``path``. An interrupt leaves the previous one intact."""
    unfinished = path.with_name(path.name + ".tmp")
    torch.save({**states, "step": step}, unfinished)
    os.replace(unfinished, path)


def main() -> None:
    parser = argparse.ArgumentParser(description="gradient accumulation with AMP; start it with torchrun")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--max-lr", type=float, default=0.5, help="about fifty times too high by default")
    parser.add_argument("--accumulate", type=int, default=4, help="batches of a step")
    parser.add_argument("--dtype", choices=DTYPES, help="bf16 on GPUs by default, fp32 on CPUs: many are slow in bf16")
    parser.add_argument("--spread", type=float, default=0.3, help="0: plain OneCycleLR, to compare with")
    parser.add_argument("--checkpoint", type=Path, default=Path("accumulation_amp.pt"))
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
