"""Measure memory in bytes a parameter: parameters, gradients and optimizer state, in every precision.

    python -m pytest bench/test_memory.py --benchmark-only -k gpu

The memory of torch's allocator is counted from before the parameters exist (``memory_tracker.py``), at the peak of each
phase:

    built          the optimizer is constructed, without gradients. Ours moves the parameters into one buffer
    first step     the state is created, with all gradients present
    step           a later step, whose time pytest-benchmark shows
    loaded         ``load_state_dict`` of a checkpoint in host memory, which is counted too on a CPU: torch uses it as
                   the state, ours copies it
    step after it  with new gradients, after the checkpoint is freed

``held`` is the memory after a step. With ``clip`` gradients are clipped first; ours clips within the step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

from bench import copy_bandwidth, implementations, memory_tracker, models
from bench.training_steps import OURS

MODEL = {"cuda": "gpt2-124M", "cpu": "transformer-5M"}
BF16, FP16 = torch.bfloat16, torch.float16


@dataclass(frozen=True)
class Mode:
    """A precision: dtype of the parameters, options of our optimizer, and torch's implementations beside it."""

    dtype: torch.dtype = torch.float32
    options: dict[str, Any] = field(default_factory=dict)
    beside: tuple[str, ...] = ()
    rule: str = "adamw"
    max_grad_norm: float | None = None


BOTH = ("torch-foreach", "torch-fused")
MODES = {
    "adamw-fp32": Mode(beside=BOTH),
    "adamw-fp32-clip": Mode(beside=BOTH, max_grad_norm=1.0),
    "adamw-fp32-fixed-gradients": Mode(options={"gradients": "fixed"}),
    "adamw-fp32-bf16-state": Mode(options={"state_dtype": BF16}),
    "adamw-fp32-int8-state": Mode(options={"state_dtype": "int8"}),
    "adamw-bf16-master": Mode(BF16, {"master_weights": True}),
    "adamw-bf16-master-bf16-state": Mode(BF16, {"master_weights": True, "state_dtype": BF16}),
    "adamw-bf16-split": Mode(BF16, {"master_weights": "split"}),
    "adamw-bf16-split-bf16-state": Mode(BF16, {"master_weights": "split", "state_dtype": BF16}),
    "adamw-bf16-split-int8-state": Mode(BF16, {"master_weights": "split", "state_dtype": "int8"}),
    "adamw-bf16-stochastic": Mode(BF16, {"stochastic_rounding": True}),
    "adamw-bf16-stochastic-bf16-state": Mode(BF16, {"stochastic_rounding": True, "state_dtype": BF16}),
    "adamw-bf16-stochastic-int8-state": Mode(BF16, {"stochastic_rounding": True, "state_dtype": "int8"}),
    "adamw-bf16": Mode(BF16, {"master_weights": False}),
    "adamw-bf16-bf16-state": Mode(BF16, {"master_weights": False, "state_dtype": BF16}, BOTH),
    "adamw-fp16-master": Mode(FP16, {"master_weights": True}),
    "adamw-fp16": Mode(FP16, {"master_weights": False}),
    "sgd-momentum-fp32": Mode(beside=BOTH, rule="sgd-momentum"),
    "adagrad-fp32": Mode(beside=BOTH, rule="adagrad"),
    "lion-fp32": Mode(rule="lion"),
}


def _cases() -> Iterator[Any]:
    for device in MODEL:
        for name, mode in MODES.items():
            for way in (*mode.beside, OURS[device]):
                yield implementations.case(device, name, way, why_not=implementations.why_not(way, device, mode.rule))


def put_gradients(params: list[nn.Parameter]) -> None:
    """Fill the gradients as a backward pass does: in new tensors, or in place where they exist."""
    for param in params:
        if param.grad is None:
            param.grad = torch.empty_like(param)
        param.grad.normal_(std=models.GRADIENT)


def in_host_memory(state: Any) -> Any:
    """Copy a state_dict to the CPU, as ``torch.load(map_location="cpu")`` returns it."""
    if isinstance(state, torch.Tensor):
        return state.detach().to("cpu", copy=True)
    if isinstance(state, dict):
        return {key: in_host_memory(value) for key, value in state.items()}
    return [in_host_memory(value) for value in state] if isinstance(state, list) else state


@pytest.mark.parametrize(("device", "mode", "way"), list(_cases()))
def test_memory(benchmark: Any, device: str, mode: str, way: str) -> None:
    copy_bandwidth.measure_once(device)
    known = MODES[mode]
    book = memory_tracker.MemoryTracker(device)
    with book.phase("parameters"):
        params = models.parameters(models.MODELS[device][MODEL[device]].shapes, device, known.dtype)
    with book.phase("built"):
        optimizer, step = implementations.stepper(way, known.rule, params, known.max_grad_norm, **known.options)
    with book.phase("gradients"):
        put_gradients(params)
    with book.phase("first step"):
        step()
    with book.phase("step"):
        step()
    benchmark.pedantic(step, rounds=3)
    with book.phase("saved"):
        saved = in_host_memory(optimizer.state_dict())
        optimizer.zero_grad()
    with book.phase("loaded"):
        optimizer.load_state_dict(saved)
    with book.phase("gradients again"):
        del saved
        put_gradients(params)
    with book.phase("step after it"):
        step()
    count = sum(param.numel() for param in params)
    phases = ("parameters", "built", "first step", "step", "loaded", "step after it")
    benchmark.extra_info |= {
        "parameters": count,
        "peak B a parameter": {name: book.peaks[name] / count for name in phases},
        "held B a parameter": book.held["step"] / count,
    }
    peaks = ", ".join(f"{name} {peak:.2f}" for name, peak in benchmark.extra_info["peak B a parameter"].items())
    print(f"\n{benchmark.name}: peak bytes a parameter: {peaks}")
