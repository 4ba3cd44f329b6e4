"""Train the model plainly, by torch alone, or as 8 replicas by HDET; stop after a while, and go on exactly.

Plain training is ``torch.optim.AdamW``, ``clip_grad_norm_`` and ``OneCycleLR`` on whole batches. HDET is a stack of
replicas with shared gradients, each on its part of the same batches, with its defaults. Both call the same compiled
functions (``model.py``), see the same windows of the text, and begin with the same parameters.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import OneCycleLR

import hdet_kernels as hk
from bench.models import GPT2

from .model import Losses, Size
from .text import Tokens

OPTIONS: dict[str, Any] = {"betas": (0.9, 0.95), "weight_decay": 0.1}
LARGEST_NORM = 1.0
# A point of the recorded curve is the mean of so many steps.
EVERY = 10
# The losses are read, and the clock is looked at, after so many steps: reading waits for the device.
LOOK = 50
# The mean training loss at the end is that of the last steps, as a share of the run.
LAST = 0.05
VALIDATION_BATCHES = 4


@dataclass(frozen=True)
class Setup:
    """What all runs have in common.

    Args:
        size: shape of the model.
        sequences: windows of a step, of all replicas together.
        replicas: rows of the stack.
        steps: length of the schedule.
        seed: seed of parameters and data.
        device: where to train.
        compiled: whether to use ``torch.compile``.
    """

    size: Size
    sequences: int
    replicas: int
    steps: int
    seed: int
    device: torch.device
    compiled: bool
    losses: Losses = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        object.__setattr__(self, "losses", Losses(self.size, dtype, self.compiled))

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.sequences * self.size.context

    def model(self) -> GPT2:
        """Return the model that every run begins with."""
        return self.size.build(self.seed, self.device)

    def to_device(self, tokens: Tensor) -> Tensor:
        """Return the tokens on the device, without waiting for it."""
        if self.device.type == "cuda":
            tokens = tokens.pin_memory()
        return tokens.to(self.device, non_blocking=True)


class Training(Protocol):
    """A model with its optimizer and schedule."""

    def step(self, tokens: Tensor) -> Tensor:
        """Train one step and return its mean loss, on the device."""

    def validate(self, tokens: Tensor) -> Tensor:
        """Return the mean loss of the trained model, of the consensus if there are replicas."""

    def parameters(self) -> list[Tensor]:
        """Return all parameters, of all replicas."""

    def state(self) -> list[Any]:
        """Return all that :meth:`load` needs."""

    def load(self, state: list[Any]) -> None:
        """Go on from a state."""

    def told(self) -> dict[str, Any]:
        """Return what a record says about the schedule beyond its losses."""


class Plain:
    """torch's AdamW and OneCycleLR."""

    def __init__(self, setup: Setup, lr: float) -> None:
        self._losses = setup.losses
        self._model = setup.model()
        fused = setup.device.type == "cuda"
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr, fused=fused, **OPTIONS)
        self._scheduler = OneCycleLR(self._optimizer, lr, setup.steps, cycle_momentum=False)

    def step(self, tokens: Tensor) -> Tensor:
        loss = self._losses.plain(self._model, tokens)
        loss.backward()
        clip_grad_norm_(self._model.parameters(), LARGEST_NORM)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._scheduler.step()
        return loss.detach()

    @torch.no_grad()
    def validate(self, tokens: Tensor) -> Tensor:
        return self._losses.plain(self._model, tokens)

    def parameters(self) -> list[Tensor]:
        return [parameter.detach() for parameter in self._model.parameters()]

    def state(self) -> list[Any]:
        return [self._model.state_dict(), self._optimizer.state_dict(), self._scheduler.state_dict()]

    def load(self, state: list[Any]) -> None:
        parts: list[Any] = [self._model, self._optimizer, self._scheduler]
        for part, found in zip(parts, state, strict=True):
            part.load_state_dict(found)

    def told(self) -> dict[str, Any]:
        return {}


class Replicas:
    """HDET with its defaults; ``lr`` None lets it find the learning rate."""

    def __init__(self, setup: Setup, lr: float | None) -> None:
        self._loss = setup.losses.replica
        self._stack = hk.ReplicaStack(setup.model(), setup.replicas)
        self._optimizer = hk.FusedAdamW(self._stack.parameters(), lr or 1.0, max_grad_norm=LARGEST_NORM, **OPTIONS)
        self._scheduler = hk.HDETOneCycleLR(
            self._optimizer, lr, setup.steps, cycle_momentum=False, ensemble=self._stack.ensemble, seed=setup.seed
        )

    def step(self, tokens: Tensor) -> Tensor:
        losses = self._stack.backward(self._loss, tokens)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._scheduler.step(losses)
        return losses.mean()

    def validate(self, tokens: Tensor) -> Tensor:
        with self._scheduler.consensus():
            return self._stack.losses(self._loss, tokens).mean()

    def parameters(self) -> list[Tensor]:
        return [parameter.detach() for parameter in self._stack.parameters()]

    def state(self) -> list[Any]:
        return [self._stack.state_dict(), self._optimizer.state_dict(), self._scheduler.state_dict()]

    def load(self, state: list[Any]) -> None:
        parts: list[Any] = [self._stack, self._optimizer, self._scheduler]
        for part, found in zip(parts, state, strict=True):
            part.load_state_dict(found)

    def told(self) -> dict[str, Any]:
        history = self._scheduler.history
        return {
            "acts": [{"step": one.step, "act": one.act, "why": one.event} for one in history if one.event],
            "rates": [[one.step, *one.base.values()] for one in history if one.kind != "scout"],
            "peaks": next((one.peaks for one in reversed(history) if one.peaks), None),
            "found": getattr(self._scheduler, "scouted", None),
        }


METHODS: Mapping[str, Callable[[Setup, Any], Training]] = {"plain": Plain, "hdet": Replicas}


@dataclass
class Run:
    """One run, at a step.

    Args:
        setup: what all runs have in common.
        text: the tokens.
        method: "plain" or "hdet".
        lr: the peak of the schedule; None: HDET finds it.
    """

    setup: Setup
    text: Tokens
    method: str
    lr: float | None
    step: int = field(default=0, init=False)
    times: list[float] = field(default_factory=list, init=False)
    pieces: list[int] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        if self.method == "plain" and self.lr is None:
            raise ValueError("plain training needs a learning rate, got none: give a number")
        self.training = METHODS[self.method](self.setup, self.lr)
        self.losses = torch.full((self.setup.steps,), math.nan, device=self.setup.device)

    def train(self, until: int, deadline: float = math.inf) -> bool:
        """Train up to step ``until``; return whether it got there before the deadline, a ``time.perf_counter()``."""
        setup, start, first = self.setup, time.perf_counter(), self.step
        while self.step < until:
            tokens = self.text.batch(setup.sequences, setup.size.context, setup.seed, self.step)
            self.losses[self.step] = self.training.step(setup.to_device(tokens))
            self.step += 1
            if self.step % LOOK and self.step < until:
                continue
            recent = self.losses[first : self.step].mean().item()
            now = time.perf_counter()
            self.times.append((now - start) / (self.step - first))
            print(f"  step {self.step}: {recent:.4f}, {1e3 * self.times[-1]:.1f} ms a step", flush=True)
            if now > deadline and self.step < until:
                return False
            start, first = now, self.step
        return True

    def save(self, path: Path) -> None:
        """Write a checkpoint; a file that is there stays until the new one is complete."""
        path.parent.mkdir(parents=True, exist_ok=True)
        device = self.setup.device
        generators = [torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None]
        known = {"step": self.step, "times": self.times, "pieces": [*self.pieces, self.step]}
        partial = path.with_suffix(".partial")
        torch.save(
            {**known, "training": self.training.state(), "losses": self.losses, "generators": generators}, partial
        )
        partial.replace(path)

    def load(self, path: Path) -> None:
        """Go on from a checkpoint."""
        found = torch.load(path, map_location="cpu", weights_only=True)
        self.training.load(found["training"])
        self.step, self.times, self.pieces = found["step"], found["times"], found["pieces"]
        self.losses.copy_(found["losses"])
        cpu, cuda = found["generators"]
        torch.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state(cuda, self.setup.device)

    def validation_loss(self) -> float:
        """Return the mean loss on windows of the text that was held out; infinity where it is not finite."""
        setup = self.setup
        windows = self.text.validation(VALIDATION_BATCHES * setup.sequences, setup.size.context)
        losses = [self.training.validate(setup.to_device(part)) for part in windows.split(setup.sequences)]
        loss = torch.stack(losses).mean().item()
        return loss if math.isfinite(loss) else math.inf

    def record(self) -> dict[str, Any]:
        """Return what the run was and how it ended; a number that is not finite is None."""
        setup, losses = self.setup, self.losses.cpu()
        last = losses[-max(round(LAST * setup.steps), 1) :].mean().item()
        curve = losses[: setup.steps // EVERY * EVERY].view(-1, EVERY).mean(1).tolist()
        return {
            "method": self.method,
            "lr": self.lr,
            "steps": setup.steps,
            "tokens a step": setup.tokens,
            "replicas": setup.replicas if self.method == "hdet" else 1,
            "seed": setup.seed,
            "validation": _known(self.validation_loss()),
            "training": _known(last),
            "every": EVERY,
            "curve": [_known(value, 5) for value in curve],
            "ms a step": 1e3 * median(self.times),
            "stopped at": self.pieces,
            **self.training.told(),
        }


def _known(value: float, digits: int = 6) -> float | None:
    return round(value, digits) if math.isfinite(value) else None


def resumed_exactly(
    setup: Setup, text: Tokens, method: str, lr: float | None, until: int, path: Path
) -> dict[str, Any]:
    """Train ``until`` steps in one piece and in two, and return whether parameters and losses are equal bit for bit."""

    def piece(until: int, *, begin: Path | None = None, end: Path | None = None) -> tuple[list[Tensor], Tensor]:
        run = Run(setup, text, method, lr)
        if begin is not None:
            run.load(begin)
        run.train(until)
        if end is not None:
            run.save(end)
        return [parameter.cpu().clone() for parameter in run.training.parameters()], run.losses.cpu()[:until]

    parameters, losses = piece(until)
    piece(until // 2, end=path)
    resumed, again = piece(until, begin=path)
    path.unlink()
    return {
        "method": method,
        "lr": lr,
        "schedule": setup.steps,
        "stopped at": until // 2,
        "steps": until,
        "parameters equal": all(map(torch.equal, parameters, resumed)),
        "losses equal": torch.equal(losses, again),
    }


def disagreement(setup: Setup, tokens: Tensor) -> dict[str, tuple[float, float]]:
    """Return how far loss and gradient by the functions of each method are from those of the module under autocast.

    Both are relative; the gradient is that of all parameters, as one vector.
    """
    model = setup.model()
    with torch.autocast(setup.device.type, torch.bfloat16, enabled=setup.device.type == "cuda"):
        expected: Tensor = model(tokens)
    expected.backward()
    wanted = [parameter.grad for parameter in model.parameters()]
    plain = setup.model()
    loss = setup.losses.plain(plain, tokens)
    loss.backward()
    found = {"plain": (loss, [parameter.grad for parameter in plain.parameters()])}
    stack = hk.ReplicaStack(plain, setup.replicas)
    hk.FusedAdamW(stack.parameters())  # lays the rows out as in training, for which functions are compiled
    losses = stack.backward(setup.losses.replica, tokens)
    found["hdet"] = losses.mean(), [None if one.grad is None else one.grad[0] for one in stack.parameters()]
    return {
        method: (_relative([loss], [expected]), _relative(gradients, wanted))
        for method, (loss, gradients) in found.items()
    }


@torch.no_grad()
def _relative(found: Sequence[Tensor | None], wanted: Sequence[Tensor | None]) -> float:
    pairs = [(one, other) for one, other in zip(found, wanted, strict=True) if one is not None and other is not None]
    error = torch.stack([(one - other).norm() for one, other in pairs]).norm()
    return float(error / torch.stack([other.norm() for _, other in pairs]).norm())
