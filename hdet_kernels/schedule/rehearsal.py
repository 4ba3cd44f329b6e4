"""Play a copy of a schedule ahead, to find its highest learning rates and where it ends."""

from __future__ import annotations

import contextlib
import copy
import logging
import random
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR

log = logging.getLogger("hdet_kernels")

#: Runs of more steps are not played: a step takes about 10 µs.
LONGEST = 100_000


@dataclass(frozen=True)
class Rehearsal:
    """The outcome of playing a schedule.

    Args:
        highest: highest learning rate of every parameter group.
        end: learning rate at the last step over the highest one, as a mean over the groups.
        peak: share of the run after which the first group has reached 99 % of its highest learning rate.
    """

    highest: tuple[float, ...]
    end: float
    peak: float


def rehearse(scheduler: LRScheduler, total_steps: int) -> Rehearsal | None:
    """Play a copy of ``scheduler`` from its current step to step ``total_steps``, on a stand-in for its optimizer.

    Optimizer, scheduler and random generators are not modified.

    Returns:
        None if the run has more than 100 000 steps, or the schedule cannot be copied or played.
    """
    if total_steps > LONGEST:
        return None
    try:
        with warnings.catch_warnings(), _same_generators():
            warnings.simplefilter("ignore")  # torch warns that the stand-in takes no steps
            stand_in = _stand_in(scheduler.optimizer)
            played = copy.deepcopy(scheduler, {id(scheduler.optimizer): stand_in})
            rates, step = [_rates(stand_in)], getattr(scheduler, "last_epoch", 0)
            if step > 0:  # its first part is over; it began at initial_lr
                rates.insert(0, [float(group.get("initial_lr", 0.0)) for group in stand_in.param_groups])
            for _ in range(step, total_steps - 1):
                played.step()
                rates.append(_rates(stand_in))
    except Exception as error:  # a user's schedule may raise anything
        log.info("%s cannot be played ahead (%s): taken as one that anneals", type(scheduler).__name__, error)
        return None
    values = np.array(rates)  # [steps, groups]
    if not np.isfinite(values).all():
        log.info("%s has learning rates that are not finite: taken as one that anneals", type(scheduler).__name__)
        return None
    highest = values.max(axis=0)
    shares = (values[-1] / np.where(highest > 0, highest, 1.0)).clip(0.0, 1.0)[highest > 0]
    reached = (values >= 0.99 * highest).any(axis=1).argmax() / total_steps
    return Rehearsal(tuple(highest.tolist()), float(shares.mean()) if len(shares) else 0.0, float(reached))


def built_state(optimizer: Optimizer, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the state that torch's OneCycleLR has when it is built with these arguments. Nothing is modified."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        stand_in = _stand_in(optimizer)
        stand_in.defaults = dict(optimizer.defaults)  # they tell whether the optimizer has a momentum or betas
        return OneCycleLR(stand_in, **arguments).state_dict()


def _stand_in(optimizer: Optimizer) -> SGD:
    """Return an optimizer whose groups have the same entries, but one dummy parameter each."""
    entries = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    stand_in = SGD([{"params": [torch.zeros(1, device="cpu")]} for _ in entries], lr=0.0)
    for group, own in zip(stand_in.param_groups, copy.deepcopy(entries), strict=True):
        group.update(own)
    return stand_in


def _rates(optimizer: Optimizer) -> list[float]:
    return [float(group["lr"]) for group in optimizer.param_groups]


@contextlib.contextmanager
def _same_generators() -> Iterator[None]:
    """Restore the global random generators after the block: a schedule may draw from them."""
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)  # noqa: NPY002
