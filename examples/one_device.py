"""HDET on one device: eight stacked replicas of a byte-level transformer learn the standard library's source.

    pip install -c constraints.txt torch numpy 'setuptools>=77'
    pip install -c constraints.txt --no-build-isolation '.[demo]'
    python examples/one_device.py                             # a GPU if there is one, else the CPU
    python examples/one_device.py --gradients local           # one gradient per replica instead of a shared one
    python examples/one_device.py --spread 0 --out plain      # plain OneCycleLR

The learning rate is about ten times too high. HDET lowers it, and says so in the log. At the end the script prints the
held-out loss of the averaged model, and writes two plots: the losses, and the learning rate of every replica. Interrupt
it and start it again with the same arguments: it continues from the last checkpoint.
"""

from __future__ import annotations

import argparse
import logging
import os
from pathlib import Path

import torch

import hdet_kernels as hk
from hdet_kernels.demo.tasks import Batch, TextTask, loss_of


def train(given: argparse.Namespace) -> tuple[float, hk.HDETOneCycleLR]:
    """Train a stack; return the held-out loss of the averaged model, and the scheduler."""
    task, device, replicas = TextTask(), torch.device(given.device), given.replicas
    torch.manual_seed(0)
    stack = hk.ReplicaStack(task.model().to(device), replicas, gradients=given.gradients)
    optimizer = hk.FusedAdamW(stack.parameters(), lr=given.max_lr)

    def move(batch: Batch) -> Batch:
        return batch[0].to(device), batch[1].to(device)

    # The probe: the loss of each replica on one batch, the same for all replicas.
    probe = move(task.probe(torch.Generator().manual_seed(12345)))
    scheduler = hk.HDETOneCycleLR(
        optimizer,
        given.max_lr,
        total_steps=given.steps,
        spread=given.spread,
        ensemble=stack.ensemble,
        probe=lambda: stack.losses(loss_of, probe, same_batch=True),
    )
    parts_of_state = {"stack": stack, "optimizer": optimizer, "scheduler": scheduler}
    checkpoint, first = given.out / "checkpoint.pt", 0
    if checkpoint.exists():
        saved = torch.load(checkpoint, map_location=device, weights_only=True)
        for name, part in parts_of_state.items():
            part.load_state_dict(saved[name])
        first = saved["step"]
    for step in range(first + 1, (given.stop_after or given.steps) + 1):
        # One batch for the whole stack: replica r trains on the r-th of `replicas` equal parts. It depends on the step
        # only, so that a resumed run trains on the same batches.
        order = torch.Generator().manual_seed(step)
        parts = [task.batch(order) for _ in range(replicas)]
        batch = move((torch.cat([inputs for inputs, _ in parts]), torch.cat([targets for _, targets in parts])))
        losses = stack.backward(loss_of, batch)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step(losses)
        if step % scheduler.sync_every == 0:
            # All replicas are in this process: its file resumes between two syncs as well.
            states = {name: part.state_dict() for name, part in parts_of_state.items()}
            torch.save({**states, "step": step}, checkpoint.with_suffix(".tmp"))
            os.replace(checkpoint.with_suffix(".tmp"), checkpoint)  # an interrupt leaves the previous one intact
    with torch.no_grad():
        held_out = loss_of(stack.module(), move(task.held_out()))
    return float(held_out), scheduler


def main() -> None:
    parser = argparse.ArgumentParser(description="HDET with a stack of replicas on one device")
    parser.add_argument("--replicas", type=int, default=8)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--max-lr", type=float, default=TextTask.poor_lr, help="about ten times too high by default")
    parser.add_argument("--spread", type=float, default=0.3, help="0: plain OneCycleLR, to compare with")
    parser.add_argument("--gradients", choices=("shared", "local"), default="shared")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=Path("one-device-out"), help="folder for checkpoint and plots")
    parser.add_argument("--stop-after", type=int, help="end after this step, as an interrupt would")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    logging.basicConfig(format="%(name)s: %(message)s")
    logging.getLogger("hdet_kernels").setLevel(logging.INFO)  # what the controller does, and why
    held_out, scheduler = train(given)
    print(scheduler.history_summary)
    print(f"held-out loss of the averaged model: {held_out:.3f}")
    hk.report.plot_losses(scheduler.history, given.out / "losses.png")
    hk.report.plot_values(scheduler.history, given.out / "learning_rates.png")
    print(f"plots: {given.out / 'losses.png'}, {given.out / 'learning_rates.png'}")


if __name__ == "__main__":
    main()
