"""HDET on one device: eight stacked replicas of a byte-level transformer learn the standard library's source.

    python examples/one_device.py                       # a GPU if there is one, else the CPU
    python examples/one_device.py --gradients local     # one gradient per replica instead of a shared one

The given learning rate is about ten times too low, and HDET raises it while training. At the end the script prints a
table of the syncs and the held-out loss of the averaged model, and writes two plots: the losses, and the learning rate
of every replica.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

import hdet_kernels as hk
from hdet_kernels.demo.tasks import Batch, TextTask, loss_of


def train(
    replicas: int, steps: int, max_lr: float, gradients: str, device: torch.device
) -> tuple[float, list[hk.SyncRecord]]:
    """Train a stack; return the held-out loss of the averaged model, and a record of every sync."""
    task = TextTask()
    torch.manual_seed(0)
    stack = hk.ReplicaStack(task.model().to(device), replicas, gradients=gradients)
    optimizer = hk.FusedAdamW(stack.parameters(), lr=max_lr)

    def move(batch: Batch) -> Batch:
        return batch[0].to(device), batch[1].to(device)

    # The probe: the loss of each replica on one batch, the same for all replicas.
    probe = move(task.probe(torch.Generator().manual_seed(12345)))
    scheduler = hk.HDETOneCycleLR(
        optimizer,
        max_lr,
        total_steps=steps,
        ensemble=stack.ensemble,
        probe=lambda: stack.losses(loss_of, probe, same_batch=True),
    )
    order = torch.Generator().manual_seed(0)
    for step in range(1, steps + 1):
        # One batch for the whole stack: replica r trains on the r-th of `replicas` equal parts.
        parts = [task.batch(order) for _ in range(replicas)]
        batch = move((torch.cat([inputs for inputs, _ in parts]), torch.cat([targets for _, targets in parts])))
        losses = stack.backward(loss_of, batch)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step(losses)
        if step % (4 * scheduler.sync_every) == 0:
            print(f"step {step}/{steps}  loss {losses.mean():.3f}  base lr {float(scheduler.get_base_lr()[0]):.2e}")
    with torch.no_grad():
        held_out = loss_of(stack.module(), move(task.held_out()))
    return float(held_out), scheduler.history


def main() -> None:
    parser = argparse.ArgumentParser(description="HDET with a stack of replicas on one device")
    parser.add_argument("--replicas", type=int, default=8)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--max-lr", type=float, default=TextTask.poor_lr, help="deliberately too low by default")
    parser.add_argument("--gradients", choices=("shared", "local"), default="shared")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=Path("one-device-out"), help="folder for the plots")
    given = parser.parse_args()
    held_out, history = train(given.replicas, given.steps, given.max_lr, given.gradients, torch.device(given.device))
    print(hk.report.table(history))
    print(f"\nheld-out loss of the averaged model: {held_out:.3f}")
    given.out.mkdir(parents=True, exist_ok=True)
    hk.report.plot_losses(history, given.out / "losses.png")
    hk.report.plot_values(history, given.out / "learning_rates.png")
    print(f"plots: {given.out / 'losses.png'}, {given.out / 'learning_rates.png'}")


if __name__ == "__main__":
    main()
