"""Draw how_it_works.svg: the learning rates of four replicas, computed by the library's fan-out and controller.

python docs/how_it_works.py
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure

import hdet_kernels as hk
from hdet_kernels.controller.peak_posterior import turning_length
from hdet_kernels.controller.protocol import Observation, Run

REPLICAS, TOTAL, SYNC, SPREAD = 4, 640, 16, 0.3
# Best peak learning rate of the simulated run, and the one that it starts with.
BEST, START = 6.0, 1.0


def schedule() -> list[float]:
    """Return the learning rates of the plain OneCycleLR."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, START, TOTAL, cycle_momentum=False)
    rates = []
    for _ in range(TOTAL):
        rates.append(float(scheduler.get_last_lr()[0]))
        optimizer.step()
        scheduler.step()
    return rates


def replica_rates() -> tuple[np.ndarray, np.ndarray]:
    """Return learning rates of the base [TOTAL] and of the replicas [TOTAL, N].

    Simulated losses are lowest where the path length (sum of learning rates) is that of the best peak.
    """
    # As losses of training batches, which need no early syncs and no pairs.
    controller, run = hk.RegressionController(), Run(TOTAL, SYNC, 0.3, (None,), (START,))
    turning = turning_length(SYNC, TOTAL, controller.settings)
    state = controller.start(1, run)
    plain = schedule()
    base, rates = np.empty(TOTAL), np.empty((TOTAL, REPLICAS))
    rho, (departs,) = hk.multipliers(REPLICAS, SPREAD), controller.prepare(run).departs
    for step in range(TOTAL):
        if step % SYNC == 0:
            own = rho[hk.permutation(REPLICAS, seed=0, cycle=step // SYNC, hyperparameter="lr/0")]
        base[step] = controller.base(state, 0, plain[step])
        rates[step] = base[step] * (own if departs is None or step < departs[1] else 1.0)
        if (step + 1) % SYNC == 0 and controller.active(run, step + 1):
            path_length = base[: step + 1].sum() + base[step] * SYNC
            losses = np.log(np.cosh(np.log(path_length * own / (BEST * turning)))) / 3 - step / SYNC
            state = controller.update(run, state, Observation(losses, own[None], base[step : step + 1], step + 1))
    return base, rates


def draw(path: Path) -> None:
    """Write the figure to ``path``."""
    base, rates = replica_rates()
    figure = Figure(figsize=(8.4, 3.6), layout="constrained")
    axes = figure.add_subplot()
    for replica in range(REPLICAS):
        axes.plot(rates[:, replica], lw=1.2, alpha=0.9, label=f"replica {replica}")
    axes.plot(base, color="black", lw=1.8, label="base $\\eta(t)$")
    axes.plot(schedule(), color="black", lw=1.0, ls=":", label="OneCycleLR as given")
    for sync in range(SYNC, TOTAL + 1, SYNC):
        axes.axvline(sync, color="0.85", lw=0.8, zorder=0)
    axes.axvspan(0, 0.3 * TOTAL, color="tab:green", alpha=0.08, lw=0)
    middle = 0.15 * TOTAL
    axes.text(middle, base.max() * 1.33, "fan-out, $\\mu$ moves", ha="center", va="top", color="tab:green", fontsize=9)
    at = 11 * SYNC
    axes.annotate(
        "every T steps: average the parameters, change places",
        (at, rates[at - 1].max()),
        (at + 2 * SYNC, base.max() * 1.3),
        fontsize=9,
        arrowprops={"arrowstyle": "->", "color": "0.4"},
    )
    axes.set(xlabel="step", ylabel="learning rate", xlim=(0, TOTAL), ylim=(0, base.max() * 1.36), yticks=[])
    axes.legend(loc="center right", fontsize=8, frameon=False)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    draw(Path(__file__).with_name("how_it_works.svg"))
