"""Optimizers of the suite, and optimizers and schedules of other packages that HDET is compared with."""

from __future__ import annotations

import importlib
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import hdet_kernels as hk


class Rule(NamedTuple):
    """An optimizer for one model and the same for replicas, with the options of both."""

    plain: Callable[..., Optimizer]
    replicas: Callable[..., Optimizer]
    options: dict[str, Any]


# torch has no Lion.
OPTIMIZERS: dict[str, Rule] = {
    "adamw": Rule(torch.optim.AdamW, hk.FusedAdamW, {"weight_decay": 0.01}),
    "adamw, 0.95": Rule(torch.optim.AdamW, hk.FusedAdamW, {"betas": (0.9, 0.95), "weight_decay": 0.1}),
    "adam": Rule(torch.optim.Adam, hk.FusedAdam, {}),
    "sgd": Rule(torch.optim.SGD, hk.FusedSGD, {"momentum": 0.9}),
    "adagrad": Rule(torch.optim.Adagrad, hk.FusedAdagrad, {}),
    "lion": Rule(hk.FusedLion, hk.FusedLion, {}),
}


def plain_optimizer(name: str, groups: list[dict[str, Any]], lr: float) -> Optimizer:
    """Return the optimizer of one model."""
    rule = OPTIMIZERS[name]
    return rule.plain(groups, lr=lr, **rule.options)


def replica_optimizer(name: str, groups: list[dict[str, Any]], lr: float, clip: float | None) -> Optimizer:
    """Return the optimizer of a stack's or a process' replicas, which clips gradients to the norm ``clip`` itself."""
    rule = OPTIMIZERS[name]
    return rule.replicas(groups, lr=lr, max_grad_norm=clip, **rule.options)


# The folder of downloaded packages; HDET_QUALITY_PEERS chooses another.
FOLDER = Path(os.environ.get("HDET_QUALITY_PEERS", "build/peers"))


if FOLDER.is_dir() and str(FOLDER.resolve()) not in sys.path:
    sys.path.append(str(FOLDER.resolve()))  # at the end: what is installed comes first


def is_installed(requirement: str) -> bool:
    """Return whether a distribution is importable, in the version of a requirement "name>=version" or a newer one."""
    name, _, least = requirement.partition(">=")
    try:
        return _numbers(metadata.version(name)) >= _numbers(least)
    except metadata.PackageNotFoundError:
        return False


def fetch_packages(requirements: Sequence[str], folder: Path = FOLDER) -> None:
    """Download packages into ``folder``, without their dependencies: torch is here already."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--upgrade", "--target", str(folder)]
    subprocess.run([*command, *requirements], check=True)
    print(f"{folder}: {', '.join(requirements)}")


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)]


Groups = list[dict[str, Any]]
# Share of the steps for a linear warm-up, where a peer has one of its own.
WARM_UP = 0.05


@dataclass(frozen=True)
class Setup:
    """A run for a peer: model, parameter groups, given learning rate, number of steps, and the task's optimizer."""

    model: nn.Module
    groups: Groups
    lr: float
    steps: int
    optimizer: str

    @property
    def weight_decay(self) -> float:
        """Return the weight decay of the task's optimizer."""
        return float(OPTIMIZERS[self.optimizer].options.get("weight_decay", 0.0))

    def groups_at(self, lr: float) -> Groups:
        """Return the parameter groups with another learning rate."""
        return [{**group, "lr": lr} for group in self.groups]


@dataclass(frozen=True)
class Running:
    """A peer in training.

    Args:
        optimizer: The optimizer, whose ``lr`` a schedule may set.
        step: Update the parameters after a backward pass; takes the loss, as a tensor.
        finish: Set the parameters to those that are evaluated.
        averaged: Whether these are an average that no forward pass has seen: batch norms need new statistics.
    """

    optimizer: Optimizer
    step: Callable[[Tensor], object]
    finish: Callable[[], object] = lambda: None
    averaged: bool = False


@dataclass(frozen=True)
class Peer:
    """An optimizer or a schedule from another package.

    Args:
        requirement: Its distribution and the least version, for pip.
        schedule: "cosine" (with a warm-up), "annealed" (a cosine without one) or "none", beside what ``build`` does.
        build: Return it, ready for the first step.
        from_lr: Whether its result depends on the given learning rate.
        stands_for: Optimizers of tasks that it can replace.
        alone: Whether its package works without others beside torch, and can be downloaded by itself.
    """

    requirement: str
    schedule: str
    build: Callable[[Setup], Running]
    from_lr: bool = False
    stands_for: tuple[str, ...] = tuple(OPTIMIZERS)
    alone: bool = True

    def missing(self) -> str | None:
        """Return the command that installs it, or None if it is installed."""
        return None if is_installed(self.requirement) else f"pip install '{self.requirement}'"


def _usual(optimizer: Any) -> Running:
    return Running(optimizer, lambda loss: optimizer.step())


def _with_loss(optimizer: Any) -> Running:
    return Running(optimizer, lambda loss: optimizer.step(loss=loss))


def _switched(optimizer: Any) -> Running:
    """Return an optimizer that trains at one point and is evaluated at another."""
    optimizer.train()
    return Running(optimizer, lambda loss: optimizer.step(), optimizer.eval, averaged=True)


def _schedule_free(setup: Setup) -> Running:
    """Return Schedule-Free AdamW, with the warm-up that its authors recommend."""
    package = importlib.import_module("schedulefree")
    warm = round(WARM_UP * setup.steps)
    return _switched(
        package.AdamWScheduleFree(setup.groups, lr=setup.lr, warmup_steps=warm, weight_decay=setup.weight_decay)
    )


def _schedule_free_sgd(setup: Setup) -> Running:
    """Return Schedule-Free SGD at ten times the learning rate of SGD; its authors recommend 10 to 50 times."""
    package = importlib.import_module("schedulefree")
    lr, warm = 10 * setup.lr, round(WARM_UP * setup.steps)
    groups = setup.groups_at(lr)
    return _switched(package.SGDScheduleFree(groups, lr=lr, warmup_steps=warm, weight_decay=setup.weight_decay))


def _prodigy(setup: Setup) -> Running:
    """Return Prodigy; its authors recommend lr=1 and a cosine without a warm-up."""
    package = importlib.import_module("prodigyopt")
    return _usual(package.Prodigy(setup.groups_at(1.0), lr=1.0, weight_decay=setup.weight_decay))


def _prodigy_plus(setup: Setup) -> Running:
    """Return Prodigy with Schedule-Free; its author recommends the defaults and a constant schedule."""
    package = importlib.import_module("prodigyplus")
    keywords = {"weight_decay": setup.weight_decay, "split_groups": len(setup.groups) > 1}
    return _switched(package.ProdigyPlusScheduleFree(setup.groups_at(1.0), lr=1.0, **keywords))


def _d_adaptation(setup: Setup) -> Running:
    """Return D-Adaptation for AdamW at lr=1.

    Its authors recommend the usual schedule. A warm-up is left out: small first steps look like a far optimum, and with
    one it ended higher on the digits.
    """
    package = importlib.import_module("dadaptation")
    decay = setup.weight_decay
    return _usual(package.DAdaptAdam(setup.groups_at(1.0), lr=1.0, weight_decay=decay, decouple=True))


def _d_adaptation_sgd(setup: Setup) -> Running:
    package = importlib.import_module("dadaptation")
    decay = setup.weight_decay
    return _usual(package.DAdaptSGD(setup.groups_at(1.0), lr=1.0, momentum=0.9, weight_decay=decay))


def _momo(setup: Setup) -> Running:
    """Return MoMo: lr bounds a Polyak step.

    Its momentum is a mean of gradients, SGD's with momentum 0.9 is ten times that: so is the learning rate for the same
    steps. Its authors recommend a constant one, and 1 where SGD has 0.1.
    """
    package = importlib.import_module("momo")
    lr = 10 * setup.lr
    return _with_loss(package.Momo(setup.groups_at(lr), lr=lr, weight_decay=setup.weight_decay))


def _momo_adam(setup: Setup) -> Running:
    package = importlib.import_module("momo")
    return _with_loss(package.MomoAdam(setup.groups, lr=setup.lr, weight_decay=setup.weight_decay))


def _averaged(setup: Setup, optimizer: Any) -> Running:
    """Return an optimizer with the polynomial averaging that DoG's authors call crucial; it averages buffers too."""
    averager = importlib.import_module("dog").PolynomialDecayAverager(setup.model)

    def step(loss: Tensor) -> None:
        try:
            optimizer.step()
        except AssertionError:  # gradients are not finite, and DoG refuses this and all further steps
            _lose(setup.model)
        averager.step()

    return Running(optimizer, step, lambda: setup.model.load_state_dict(averager.averaged_model.state_dict()))


@torch.no_grad()
def _lose(model: nn.Module) -> None:
    """Count a run that its optimizer has given up as diverged."""
    for param in model.parameters():
        param.fill_(math.nan)


def _first_distance(setup: Setup) -> float:
    """Return DoG's first relative distance: its authors recommend more with batch norms."""
    return 1e-4 if any(isinstance(part, nn.modules.batchnorm._BatchNorm) for part in setup.model.modules()) else 1e-6


def _dog(setup: Setup) -> Running:
    made = importlib.import_module("dog").DoG(setup.groups_at(1.0), _first_distance(setup))
    return _averaged(setup, made)


def _layerwise_dog(setup: Setup) -> Running:
    made = importlib.import_module("dog").LDoG(setup.groups_at(1.0), _first_distance(setup))
    return _averaged(setup, made)


def _dowg(setup: Setup) -> Running:
    return _usual(importlib.import_module("dowg").DoWG(setup.groups))


def _mechanic(setup: Setup) -> Running:
    """Return the task's optimizer under Mechanic, which scales it; its authors recommend lr=1 and any schedule."""
    rule = OPTIMIZERS[setup.optimizer]
    made = importlib.import_module("mechanic_pytorch").mechanize(rule.plain)
    return _usual(made(setup.groups_at(1.0), lr=1.0, **rule.options))


def _greedy(setup: Setup) -> Running:
    """Return the task's optimizer under GreedyLR, which reads the training loss of every step.

    Its authors recommend smoothing for noisy losses and, in their examples, lower bounds down to 1/500 of the learning
    rate; the rest are its defaults.
    """
    optimizer = plain_optimizer(setup.optimizer, setup.groups, setup.lr)
    schedule = importlib.import_module("transformers.optimization").GreedyLR(
        optimizer, smooth=True, min_lr=setup.lr / 500, max_lr=max(1.0, setup.lr)
    )

    def step(loss: Tensor) -> None:
        optimizer.step()
        schedule.step(loss)

    return Running(optimizer, step)


_SCHEDULE_FREE = "schedulefree>=1.4"
_D_ADAPTATION = "dadaptation>=3.2"
_MOMO = "momo-opt>=0.1"
_DOG = "dog-optimizer>=1.0.3"
_ADAM = ("adamw", "adamw, 0.95", "adam")

PEERS: dict[str, Peer] = {
    "Schedule-Free AdamW": Peer(_SCHEDULE_FREE, "none", _schedule_free, from_lr=True, stands_for=_ADAM),
    "Schedule-Free SGD": Peer(_SCHEDULE_FREE, "none", _schedule_free_sgd, from_lr=True, stands_for=("sgd",)),
    "Prodigy": Peer("prodigyopt>=1.1", "annealed", _prodigy),
    "Prodigy + Schedule-Free": Peer("prodigy-plus-schedule-free>=2.0", "none", _prodigy_plus),
    "D-Adaptation": Peer(_D_ADAPTATION, "annealed", _d_adaptation),
    "D-Adaptation SGD": Peer(_D_ADAPTATION, "annealed", _d_adaptation_sgd, stands_for=("sgd",)),
    "MoMo-Adam": Peer(_MOMO, "none", _momo_adam, from_lr=True, stands_for=_ADAM),
    "MoMo": Peer(_MOMO, "none", _momo, from_lr=True, stands_for=("sgd",)),
    "DoG": Peer(_DOG, "none", _dog),
    "LDoG": Peer(_DOG, "none", _layerwise_dog),
    "DoWG": Peer("dowgopt>=0.13", "none", _dowg),
    "Mechanic": Peer("mechanic-pytorch>=0.0.1", "cosine", _mechanic),
    "GreedyLR": Peer("transformers>=5.4", "none", _greedy, from_lr=True, alone=False),
}


def packages() -> list[str]:
    """Return the requirements of the peers that can be downloaded by themselves."""
    return sorted({peer.requirement for peer in PEERS.values() if peer.alone})


def peers_for(optimizer: str) -> dict[str, Peer]:
    """Return the installed peers that can replace an optimizer of a task."""
    return {name: peer for name, peer in PEERS.items() if optimizer in peer.stands_for and peer.missing() is None}
