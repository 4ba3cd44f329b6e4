"""Draw how_it_works.svg: the learning rates of four replicas, computed by the library's fan-out and controller.

python docs/how_it_works.py
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure

import hdet_kernels as hk
from hdet_kernels.controller.protocol import Observation, Run

REPLICAS, TOTAL, SYNC, SPREAD = 4, 640, 16, 0.3
# Best peak learning rate of the simulated run, and the one that it starts with.
BEST, START = 1.0, 10.0
# Learning rate from which training breaks, and cost of an e-fold larger one at twice the best, over the gain.
BREAKS, COST = 2.7, 0.14
# Loss at the first sync, and at the end of all training.
FIRST, LAST = 4.0, 1.0


@dataclass
class Simulated:
    """Learning rates of a simulated run, and its returns to the start.

    Args:
        base: [TOTAL].
        rates: [TOTAL, REPLICAS].
        returns: the last steps before the returns.
    """

    base: np.ndarray = field(default_factory=lambda: np.empty(TOTAL))
    rates: np.ndarray = field(default_factory=lambda: np.empty((TOTAL, REPLICAS)))
    returns: list[int] = field(default_factory=list)


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


def simulated() -> Simulated:
    """Return a run whose level falls at each sync, or rises where the learning rate is too high."""
    controller = hk.RegressionController()
    run = controller.prepare(Run(TOTAL, SYNC, 0.3, (None,), (START,), gradients="shared", probed=False))
    state, plain, found = controller.start(1, run), schedule(), Simulated()
    level, rho, origin, left = FIRST, hk.multipliers(REPLICAS, SPREAD), 0, TOTAL
    for made in range(TOTAL):
        step = made - origin
        if step % SYNC == 0:
            own = rho[hk.permutation(REPLICAS, seed=0, cycle=step // SYNC, hyperparameter="lr/0")]
        found.base[made] = rate = controller.base(state, 0, plain[round(step * (TOTAL - 1) / (left - 1))])
        (departs,) = run.departs
        found.rates[made] = rate * (own if departs is None or step < departs[1] else 1.0)
        if (step + 1) % SYNC == 0 and controller.active(run, step + 1):
            level += 0.0 if step < SYNC else 3.0 if rate > BREAKS * BEST else -0.1 * (level - LAST)
            slope = np.array([COST * (rate / BEST - 1) * (FIRST - LAST)])
            losses, base = np.full(REPLICAS, level), np.array([rate])
            seen = Observation(losses, own[None], base, step + 1, slope, np.abs(slope) / 20)
            if controller.broke(run, state, seen):
                state, run = controller.begun_anew(run, state, seen), controller.prepare(run.rest(step + 1))
                level, origin, left = FIRST, made + 1, TOTAL - made - 1
                found.returns.append(made)
            else:
                state = controller.update(run, state, seen)
    return found


def draw(path: Path) -> None:
    """Write the figure to ``path``."""
    run = simulated()
    figure = Figure(figsize=(8.4, 3.6), layout="constrained")
    axes = figure.add_subplot()
    for replica in range(REPLICAS):
        axes.plot(run.rates[:, replica], lw=1.0, alpha=0.9, label=f"replica {replica}")
    axes.plot(run.base, color="black", lw=1.8, label="base $\\eta(t)$")
    axes.plot(schedule(), color="black", lw=1.0, ls=":", label="OneCycleLR as given")
    axes.axhline(BEST, color="tab:green", lw=0.8, ls="--", label="right peak")
    origin = run.returns[-1] + 1 if run.returns else 0
    acts_until = origin + 0.3 * (TOTAL - origin)
    axes.axvspan(0, acts_until, color="tab:green", alpha=0.08, lw=0)
    top = run.rates.max() * 1.6
    axes.text(acts_until / 2, top * 0.98, "fan-out, it is judged", ha="center", va="top", color="tab:green", fontsize=9)
    for number, step in enumerate(run.returns):
        axes.annotate(
            "too high: back to the start; the schedule\nbegins again, with a lower peak",
            (step, run.rates[step].max()),
            (0.4 * TOTAL, top * (0.8 - 0.22 * number)),
            fontsize=9,
            arrowprops={"arrowstyle": "->", "color": "0.4"},
        )
    axes.set(xlabel="step", ylabel="learning rate", xlim=(0, TOTAL), ylim=(0, top), yticks=[])
    axes.legend(loc="upper right", fontsize=8, frameon=False)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    draw(Path(__file__).with_name("how_it_works.svg"))
