"""Hugging Face Accelerate with HDETOneCycleLR: accumulation, mixed precision, clipping, evaluation, save and resume.

    pip install -c constraints.txt torch numpy 'setuptools>=77'
    pip install -c constraints.txt --no-build-isolation '.[accelerate]' scikit-learn
    accelerate launch --num_processes 2 examples/accelerate_loop.py     # on GPUs
    torchrun --nproc-per-node 2 examples/accelerate_loop.py             # on CPUs: accelerate launch --cpu starts one
    torchrun --nproc-per-node 2 examples/accelerate_loop.py --spread 0 --checkpoint plain    # plain OneCycleLR

A small network learns scikit-learn's digits, from a learning rate that is about fifty times too high. HDET lowers it,
and says so in the log. Start it again with the same arguments after an interrupt: it continues from the last
checkpoint. What is different from a loop of Accelerate with plain OneCycleLR is marked (1) to (4).
"""

from __future__ import annotations

import argparse
import logging
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

import hdet_kernels as hk
from hdet_kernels.demo.tasks import DigitsTask
from hdet_kernels.integrations.accelerate import prepare


def train(given: argparse.Namespace) -> None:
    """Train in every process that Accelerate started, and print the outcome in the first."""
    cpu = not torch.cuda.is_available()  # Accelerate uses several processes on CPUs only where it is told to
    accelerator = Accelerator(cpu=cpu, gradient_accumulation_steps=2, mixed_precision=given.mixed_precision)
    task = DigitsTask()
    torch.manual_seed(0)
    model = task.model().to(accelerator.device)
    optimizer = hk.FusedAdamW(model.parameters(), lr=given.max_lr)
    loader, unseen = (
        accelerator.prepare(DataLoader(TensorDataset(*data), batch_size=task.batch_size))
        for data in (task.train, task.unseen)
    )
    # (1) the scheduler, for steps of the optimizer: the prepared loader has this process's batches only.
    of_epoch = math.ceil(len(loader) / accelerator.gradient_accumulation_steps)
    steps = given.epochs * of_epoch
    scheduler = hk.HDETOneCycleLR(optimizer, given.max_lr, total_steps=steps, spread=given.spread, model=model)
    model, optimizer, scheduler = prepare(accelerator, model, optimizer, scheduler)  # (2) not accelerator.prepare

    saved = sorted(given.checkpoint.glob("epoch-*"))
    if saved:
        accelerator.load_state(str(saved[-1]))
    for epoch in range(len(saved), given.epochs):
        model.train()
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(inputs), targets)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step(loss)  # (3) the loss, for every batch
                optimizer.zero_grad()
        # (4) between two syncs the replicas differ: evaluate their average. save_state saves it by itself.
        with scheduler.consensus(), torch.no_grad():
            model.eval()
            pairs = [accelerator.gather_for_metrics((model(inputs).argmax(1), targets)) for inputs, targets in unseen]
        right = torch.cat([guess == target for guess, target in pairs]).float().mean()
        accelerator.print(f"epoch {epoch + 1}/{given.epochs}  accuracy of the averaged model: {float(right):.3f}")
        accelerator.save_state(str(given.checkpoint / f"epoch-{epoch:04d}"))
    scheduler.end()  # one model, also after a loop that ends early
    accelerator.save_model(model, str(given.checkpoint / "model"))
    accelerator.print(scheduler.history_summary)
    accelerator.end_training()


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Accelerate with HDETOneCycleLR; start it with torchrun or accelerate launch"
    )
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--max-lr", type=float, default=0.5, help="about fifty times too high by default")
    parser.add_argument("--spread", type=float, default=0.3, help="0: plain OneCycleLR, to compare with")
    parser.add_argument("--mixed-precision", choices=("no", "bf16", "fp16"), default="no")
    parser.add_argument("--checkpoint", type=Path, default=Path("accelerate-checkpoint"), help="folder")
    logging.basicConfig(format="%(name)s: %(message)s")
    logging.getLogger("hdet_kernels").setLevel(logging.INFO)  # what the controller does, and why
    train(parser.parse_args())


if __name__ == "__main__":
    main()
