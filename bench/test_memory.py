"""Bytes of memory a parameter: what an optimizer in each of its precisions takes with its parameters and gradients.

    python -m pytest bench/test_memory.py --benchmark-only -k gpu

Counted is what torch's allocator has handed out since before the parameters were made (``ledger.py``): parameters,
gradients, state, tables and temporaries, at the peak of each phase:

    built          the optimizer is built; there are no gradients yet. Ours moves the parameters into one buffer
    first step     which makes the state, with all gradients there
    step           a later one; pytest-benchmark's time is that of such a step
    loaded         ``load_state_dict`` of a checkpoint in the memory of the host, which on a CPU is counted too: torch
                   makes it the state, ours copies it
    step after it  with new gradients, when the checkpoint is forgotten

``held`` is what stays after a step. Nothing is computed from sizes. With ``clip`` gradients are clipped first, ours
within the step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import ledger
import models
import pytest
import torch
import ways
import yardstick
from torch import nn
from trainings import OURS

MODEL = {"cuda": "gpt2-124M", "cpu": "transformer-5M"}
BF16, FP16 = torch.bfloat16, torch.float16


@dataclass(frozen=True)
class Mode:
    """Parameters of ``dtype``; ``options`` are our optimizer's; ``beside`` are torch's ways of the same."""

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
    "adamw-bf16-master": Mode(BF16, {"master_weights": True}),
    "adamw-bf16-master-bf16-state": Mode(BF16, {"master_weights": True, "state_dtype": BF16}),
    "adamw-bf16-stochastic": Mode(BF16, {"stochastic_rounding": True}),
    "adamw-bf16-stochastic-bf16-state": Mode(BF16, {"stochastic_rounding": True, "state_dtype": BF16}),
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
                yield ways.case(device, name, way, why_not=ways.why_not(way, device, mode.rule))


def put_gradients(params: list[nn.Parameter]) -> None:
    """As a backward pass would: into new tensors, or where the gradients are for good."""
    for param in params:
        if param.grad is None:
            param.grad = torch.empty_like(param)
        param.grad.normal_(std=models.GRADIENT)


def in_host_memory(state: Any) -> Any:
    """A copy of a state_dict as ``torch.load(map_location="cpu")`` gives it."""
    if isinstance(state, torch.Tensor):
        return state.detach().to("cpu", copy=True)
    if isinstance(state, dict):
        return {key: in_host_memory(value) for key, value in state.items()}
    return [in_host_memory(value) for value in state] if isinstance(state, list) else state


@pytest.mark.parametrize(("device", "mode", "way"), list(_cases()))
def test_memory(benchmark: Any, device: str, mode: str, way: str) -> None:
    yardstick.yardstick(device)
    known = MODES[mode]
    book = ledger.Ledger(device)
    with book.phase("parameters"):
        params = models.parameters(models.MODELS[device][MODEL[device]].shapes, device, known.dtype)
    with book.phase("built"):
        optimizer, step = ways.stepper(way, known.rule, params, known.max_grad_norm, **known.options)
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
    told = ", ".join(f"{name} {peak:.2f}" for name, peak in benchmark.extra_info["peak B a parameter"].items())
    print(f"\n{benchmark.name}: bytes a parameter at most: {told}")
