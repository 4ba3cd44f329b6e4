"""Time and memory of whole training steps whose optimizer steps in the backward pass, beside ``step()`` and torch.

    python -m pytest bench/test_in_backward.py --benchmark-only -k gpu

The ways take turns of a few steps. Parameters are in float32 under bf16 autocast (``fp32``), or in bf16, ours with
moments in 8 bits and stochastic rounding (``bf16-int8``). ``torch-hooks`` is the pattern of torchtune: a hook steps an
optimizer of each parameter, torch's fused AdamW. ``flashoptim-release`` is FlashAdamW with gradient release, which has
moments in 8 bits, and 8 bits more of each parameter. Blocks of the largest model are computed again in the backward
pass.

Bytes a parameter are those of parameters, gradients and state: the allocator's peak from the first step on, with one
short example, whose activations take little; and what is held after a step.

Host time is that of many small tensors until ``backward()``, ``step()`` and ``zero_grad()`` have returned, on an idle
device, over that of the backward pass alone.
"""

from __future__ import annotations

import functools
import gc
import importlib
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bench import copy_bandwidth, implementations, measure, memory_tracker, peers
from bench.training_steps import OURS, TRAININGS, Training
from hdet_kernels.optim import InBackward

BF16 = torch.bfloat16
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16-int8": {"stochastic_rounding": True, "state_dtype": "int8"},
}
EARLY = "hdet-in-backward"
RELEASE = "flashoptim-release"
#: Peers that are measured where they are installed, as ``peers.py`` names them.
PEERS = {"bitsandbytes-8bit": "bitsandbytes-8bit", RELEASE: "flashoptim-8bit"}
#: Tokens, or examples, with which memory is measured.
SHORT = 32
#: Tensors, their elements, and launches of one way, with which host time is measured.
TENSORS, ELEMENTS, LAUNCHES = 148, 64, 8


class TorchHooks:
    """An optimizer for every parameter, which a hook steps as soon as the gradient is there."""

    def __init__(self, params: list[nn.Parameter]) -> None:
        self._of = {param: torch.optim.AdamW([param], lr=1e-3, fused=True) for param in params}
        self._handles = [param.register_post_accumulate_grad_hook(self._step) for param in params]

    def _step(self, param: Tensor) -> None:
        self._of[param].step()  # type: ignore[index]
        param.grad = None

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def step(self) -> None:
        pass

    def zero_grad(self) -> None:
        pass


class Again(nn.Module):
    """Blocks whose activations are computed again in the backward pass."""

    def __init__(self, blocks: nn.Sequential) -> None:
        super().__init__()
        self.blocks = blocks

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


class Step:
    """Training steps with one optimizer."""

    def __init__(self, training: Training, device: str, precision: str, way: str) -> None:
        torch.manual_seed(0)
        with torch.device(device):
            self.model = training.build()
        if training.computed_again:
            self.model.blocks = Again(self.model.blocks)  # type: ignore[arg-type]
        if precision != "fp32":
            self.model.to(BF16)
        self.params, self.device = list(self.model.parameters()), device
        #: Undoes what keeps the parameters alive: hooks that refer to them.
        self.close: Callable[[], None] = lambda: None
        self.optimizer = self._made(way, PRECISIONS[precision])

    def _made(self, way: str, options: dict[str, Any]) -> Any:
        if way == "torch-hooks":
            hooks = TorchHooks(self.params)
            self.close = hooks.remove
            return hooks
        if way not in (OURS[self.device], EARLY):
            theirs = implementations.optimizer(PEERS.get(way, way), "adamw", self.params)
            if way == RELEASE:
                release = importlib.import_module("flashoptim").enable_gradient_release(self.model, theirs)
                self.close = release.remove
                warnings.filterwarnings("ignore", message=".*enable_gradient_release.*")
            return theirs
        return implementations.optimizer(OURS[self.device], "adamw", self.params, in_backward=way == EARLY, **options)

    def __call__(self, batch: tuple[Tensor, ...]) -> None:
        with torch.autocast(self.device, dtype=BF16):
            loss = self.model(*batch)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def bytes_of(make: Callable[[], Step], batch: tuple[Tensor, ...], device: str) -> dict[str, float]:
    """Return the peak and what is held after a step, in bytes a parameter."""
    # Of windows of tokens the first ones, of other batches the first example.
    short = (batch[0][:1, :SHORT],) if len(batch) == 1 else tuple(part[:1] for part in batch)
    memory_tracker.warm_up_libraries(device)
    gc.collect()  # what was measured before
    book = memory_tracker.MemoryTracker(device)
    with book.phase("built"):
        step = make()
    with book.phase("first steps"):
        step(short)
        step(short)
    with book.phase("step"):
        step(short)
    count = sum(param.numel() for param in step.params)
    step.close()
    return {
        "parameters": count,
        "peak of the first steps": book.peaks["first steps"] / count,
        "peak": book.peaks["step"] / count,
        "held": book.held["step"] / count,
    }


def _cases() -> Iterator[Any]:
    for device, known in TRAININGS.items():
        for model, training in known.items():
            for precision in PRECISIONS if not training.computed_again else ("bf16-int8",):
                yield implementations.case(device, model, precision, why_not=training.why_not(device))


@pytest.mark.parametrize(("device", "model", "precision"), list(_cases()))
def test_in_backward(benchmark: Any, device: str, model: str, precision: str) -> None:
    copy_bandwidth.measure_once(device)
    training = TRAININGS[device][model]
    with torch.device(device):
        batch = training.batch()
    ways = ["torch-fused", "torch-hooks", OURS[device], EARLY]
    ways += [
        way
        for way, peer in PEERS.items()
        if peers.why_not(peer, device) is None and (precision != "fp32" or "adamw-fp32" in peers.PEERS[peer].works)
    ]
    make = {way: functools.partial(Step, training, device, precision, way) for way in ways}
    memory: dict[str, dict[str, float]] = {}
    for way in ways:
        try:
            memory[way] = bytes_of(make[way], batch, device)
        except Exception as error:
            if way not in PEERS:
                raise
            print(peers.fail(PEERS[way], error))
    ways = list(memory)
    steps = {way: make[way]() for way in ways} if not training.computed_again else {}
    if steps:
        calls = {way: functools.partial(step, batch) for way, step in steps.items()}
        measure.take_turns(benchmark, calls, device, turns=max(training.turns // 2, 3), iterations=training.steps)
        for step in steps.values():
            step.close()
    else:  # two of them do not fit beside each other
        times = {}
        for way in ways:
            gc.collect()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            step = make[way]()
            times[way] = [measure.seconds_each(functools.partial(step, batch), device, 2) for _ in range(4)][1:]
            memory[way]["whole peak GB"] = (torch.cuda.max_memory_allocated() - before) / 1e9
            step.close()
            del step
        benchmark.pedantic(int)
        benchmark.extra_info["ways"] = {way: measure.summary(found) for way, found in times.items()}
    for way, found in memory.items():
        benchmark.extra_info["ways"][way] |= found
        print(f"{way}: peak {found['peak']:.2f}, held {found['held']:.2f} bytes a parameter")


class Small:
    """Backward pass and step of many small tensors; without an implementation, the backward pass alone."""

    def __init__(self, way: str | None, device: str, **options: Any) -> None:
        self.params = [nn.Parameter(torch.randn(ELEMENTS, device=device)) for _ in range(TENSORS)]
        self.optimizer = None if way is None else implementations.optimizer(way, "adamw", self.params, **options)

    def seconds(self, device: str) -> float:
        """Return the host time of a step."""
        loss = torch.cat(self.params).sum()
        measure.synchronize(device)
        start = time.perf_counter()
        loss.backward()
        if self.optimizer is not None:
            self.optimizer.step()
            self.optimizer.zero_grad()
        end = time.perf_counter()
        for param in self.params if self.optimizer is None else ():
            param.grad = None
        return end - start


@pytest.mark.parametrize(
    "device",
    [implementations.case(each, why_not=implementations.why_not(OURS[each], each)) for each in OURS],
)
def test_host_time(benchmark: Any, device: str) -> None:
    alone = Small(None, device)
    several = InBackward(chunk_bytes=ELEMENTS * 4 * -(-TENSORS // LAUNCHES))
    ways = {
        "torch-fused": Small("torch-fused", device),
        OURS[device]: Small(OURS[device], device),
        EARLY: Small(OURS[device], device, in_backward=True),
        f"{EARLY}, {LAUNCHES} launches": Small(OURS[device], device, in_backward=several),
    }
    times: dict[str | None, list[float]] = {way: [] for way in (None, *ways)}

    def turn() -> None:
        times[None].append(alone.seconds(device))
        for way, step in ways.items():
            times[way].append(step.seconds(device))

    for _ in range(measure.rounds(5)):
        turn()
    for found in times.values():
        found.clear()
    benchmark.pedantic(turn, rounds=measure.rounds(300))
    bare = times.pop(None)
    benchmark.extra_info["tensors"] = TENSORS
    benchmark.extra_info["ways"] = {
        way: {name: 1e3 * (take(found) - take(bare)) for name, take in (("ms", statistics.median), ("best ms", min))}
        for way, found in times.items()
    }
    print(f"\n{benchmark.name}: {benchmark.extra_info['ways']}")
