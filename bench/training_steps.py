"""Whole training steps for benchmarks: models and batches, and the step with each optimizer, part by part."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import hdet_kernels as hk
from bench import implementations, measure, models
from bench.models import GPT2, Llama, Recommender, ResNet, clicks, pictures

# Length of the schedules: so long that the default T is that of long runs.
TOTAL_STEPS = 40_000
PEAK = 1e-3
OURS = {"cuda": "hdet-cuda", "cpu": "hdet-cpp"}


@dataclass(frozen=True)
class Training:
    """A model, its batch, and how it is measured.

    Args:
        build: Function that builds the model on the default device; the model maps a batch to the loss.
        batch: Function that builds a batch on the default device.
        shapes: The shapes that the parameters must have, if they are known.
        batch_is: Description of the batch.
        turns: Number of turns.
        steps: Steps of a turn.
        gibibytes: GPU memory that three such trainings need, one of them in a step.
        computed_again: Whether the activations of its blocks are computed again in the backward pass. Such a model is
            so large that only one is trained at a time.
    """

    build: Callable[[], nn.Module]
    batch: Callable[[], tuple[Tensor, ...]]
    shapes: models.Shapes | None
    batch_is: str
    turns: int
    steps: int
    gibibytes: int = 0
    computed_again: bool = False

    def why_not(self, device: str) -> str | None:
        """Return why it cannot be measured on ``device``, or None if it can."""
        reason = implementations.why_not(OURS[device], device)
        if reason is not None or device != "cuda":
            return reason
        free = torch.cuda.mem_get_info()[0] / 2**30
        return (
            None
            if free >= self.gibibytes
            else f"needs about {self.gibibytes} GiB of GPU memory, {free:.0f} GiB are free"
        )


def _tokens(vocabulary: int, batch: int, context: int) -> tuple[Tensor, ...]:
    return (torch.randint(vocabulary, (batch, context + 1)),)


def _gpt2(size: tuple[int, int, int, int, int, int], batch: int, **how: int) -> Training:
    """``size`` is layers, width, heads, hidden width, vocabulary and context."""
    layers, width, _, hidden, vocabulary, context = size
    shapes = models.transformer(layers, width, hidden, vocabulary, context)
    read = partial(_tokens, vocabulary, batch, context)
    return Training(partial(GPT2, *size), read, shapes, f"{batch * context} tokens", **how)


def _llama(size: tuple[int, int, int, int, int], batch: int, context: int, **how: Any) -> Training:
    """``size`` is layers, width, heads, hidden width and vocabulary."""
    layers, width, _, hidden, vocabulary = size
    shapes = models.gated_transformer(layers, width, hidden, vocabulary)
    read = partial(_tokens, vocabulary, batch, context)
    return Training(partial(Llama, *size), read, shapes, f"{batch * context} tokens", **how)


def _recommender(shapes: models.Shapes, width: int, batch: int, **how: int) -> Training:
    tables = [(shape[0], shape[1]) for shape in shapes if len(shape) == 2 and shape != (width, width)]
    layers = sum(shape == (width,) for shape in shapes)
    build, read = partial(Recommender, tables, layers, width), partial(clicks, tables, batch)
    return Training(build, read, shapes, f"{batch} clicks", **how)


def _resnet(blocks: tuple[int, ...], width: int, batch: int, size: int, **how: int) -> Training:
    build, read = partial(ResNet, blocks, width, 1000), partial(pictures, batch, size, 1000)
    return Training(build, read, None, f"{batch} images of {size}²", **how)


TRAININGS: dict[str, dict[str, Training]] = {
    "cuda": {
        "gpt2-124M": _gpt2((12, 768, 12, 3072, 50304, 1024), batch=8, turns=30, steps=5, gibibytes=20),
        "llama-1.2B": _llama((16, 2048, 32, 8192, 128256), batch=4, context=1024, turns=12, steps=2, gibibytes=100),
        "llama-7B": _llama(
            (32, 4096, 32, 11008, 32000), batch=1, context=4096, turns=3, steps=2, gibibytes=90, computed_again=True
        ),
        "recsys-mix": _recommender(models.tables(), width=512, batch=8192, turns=10, steps=5, gibibytes=30),
        "resnet50": _resnet((3, 4, 6, 3), width=64, batch=128, size=224, turns=12, steps=4, gibibytes=20),
    },
    "cpu": {
        "gpt2-tiny": _gpt2((1, 32, 2, 64, 128, 16), batch=2, turns=4, steps=1),
        "llama-tiny": _llama((1, 32, 4, 64, 128), batch=2, context=16, turns=4, steps=1),
        "recsys-tiny": _recommender([(500, 8), *[(100, 4)] * 4, *[(16, 16), (16,)] * 4], 16, 32, turns=4, steps=1),
        "resnet-tiny": _resnet((1, 1), width=8, batch=2, size=32, turns=4, steps=1),
    },
}


@contextlib.contextmanager
def one_rank(device: str) -> Iterator[None]:
    """Create a process group of this process alone: collectives are called without any network traffic."""
    with tempfile.TemporaryDirectory() as folder:
        backend = "nccl" if device == "cuda" else "gloo"
        dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()


class Steps:
    """Training with one optimizer under bf16 autocast: the whole step and its parts.

    ``way`` names the optimizer as in ``implementations.py``. The schedule is torch's OneCycleLR or, with
    ``sync_every``, that of HDET over the default process group: fan-out, the default controller, and an average every
    so many steps. The controller acts at every sync.
    """

    def __init__(
        self, training: Training, device: str, way: str, clip: float | None, sync_every: int | None = None
    ) -> None:
        torch.manual_seed(0)  # the same model and batch for every optimizer
        with torch.device(device):
            self.model = training.build()
            self.batch = training.batch()
        self.params = list(self.model.parameters())
        self.device = device
        ours = way.startswith("hdet-")
        self.clip = None if ours else clip  # our optimizer clips within its step
        self.optimizer = implementations.optimizer(
            way, "adamw", self.params, **({"max_grad_norm": clip} if ours else {})
        )
        self.hdet = None if sync_every is None else self._hdet(sync_every)
        self.plain = None
        if self.hdet is None:
            self.plain = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, PEAK, TOTAL_STEPS)
        self.loss: Tensor | None = None
        self.parts: dict[str, measure.Call] = {"forward": self.forward, "backward": self._backward}
        self.parts |= {} if self.clip is None else {"clip": self._clip}
        self.parts |= {"optimizer": self.optimizer.step, "scheduler": self._schedule}
        self.parts |= {"zero_grad": self.optimizer.zero_grad}

    def _hdet(self, sync_every: int) -> hk.HDETOneCycleLR:
        return hk.HDETOneCycleLR(
            self.optimizer,
            PEAK,
            TOTAL_STEPS,
            sync_every=sync_every,
            auto_lr=hk.RegressionController(start_at=0.0, stop_at=1.0),
            gradients="shared",  # as under DDP: moments are not averaged
            ensemble=hk.ProcessEnsemble(),  # a single process averages only with an explicit ensemble
            model=self.model,
        )

    def forward(self) -> None:
        with torch.autocast(self.device, dtype=torch.bfloat16):
            self.loss = self.model(*self.batch)

    def _backward(self) -> None:
        assert self.loss is not None
        self.loss.backward()

    def backward(self) -> None:
        self.forward()
        self._backward()

    def _clip(self) -> None:
        assert self.clip is not None
        torch.nn.utils.clip_grad_norm_(self.params, self.clip)

    def _schedule(self) -> None:
        if self.hdet is not None:
            self.hdet.step(self.loss)
        elif self.plain is not None:
            self.plain.step()

    def update(self) -> None:
        if self.clip is not None:
            self._clip()
        self.optimizer.step()

    def whole(self) -> None:
        for part in self.parts.values():
            part()
