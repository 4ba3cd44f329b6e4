"""Time one optimizer step beside torch and other peers, as a share of the copy bandwidth of the same run.

    python -m pytest bench/test_optim_step.py --benchmark-only -k gpu
    python -m pytest bench/test_optim_step.py --benchmark-only -k 'gpu and adamw-fp32 and not clip'

A step must read θ, g and the state and write θ and the state: 28 bytes a parameter for AdamW in fp32. Models of many
small tensors are measured one step at a time until the device is done, with gradients at new addresses every step. A
peer (``peers.py``) that keeps its state in another precision has its share computed from its own bytes.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from bench import copy_bandwidth, implementations, measure, models, peers


@dataclass(frozen=True)
class StepCase:
    """An optimizer step.

    Args:
        rule: Update rule, a key of ``implementations.RULES``.
        read: Bytes a parameter that a step reads.
        written: Bytes a parameter that a step writes.
        beside: torch's implementations that are measured too.
        dtype: Dtype of the parameters.
        options: Options of our optimizer.
        max_grad_norm: Clip gradients to this norm.
        small_too: Whether models of many small tensors are measured.
        sizes: Whether only the models of ``SIZES`` are measured.
    """

    rule: str
    read: float
    written: float
    beside: tuple[str, ...] = ()
    dtype: torch.dtype = torch.float32
    options: dict[str, Any] = field(default_factory=dict)
    max_grad_norm: float | None = None
    small_too: bool = False
    sizes: bool = False


# Models of cases with ``sizes``, by device.
SIZES = {"cuda": ("gpt2-124M", "llama-1.2B"), "cpu": ("transformer-5M",)}
BF16, FP16 = torch.bfloat16, torch.float16
ALL_BF16 = {"state_dtype": BF16, "master_weights": False}
# Two moments in a byte each, with a float32 scale for 256 of them.
CODES = 2 * (1 + 4 / 256)
WORKS = {
    "adamw-fp32": StepCase("adamw", 16, 12, ("torch-foreach", "torch-fused"), small_too=True),
    "adamw-fp32-clip": StepCase("adamw", 20, 12, ("torch-fused",), max_grad_norm=1.0, small_too=True),
    "adamw-fp32-bf16-state": StepCase("adamw", 12, 8, options={"state_dtype": BF16}),
    "adamw-bf16": StepCase("adamw", 8, 6, ("torch-fused",), BF16, ALL_BF16),
    "adamw-bf16-stochastic": StepCase("adamw", 8, 6, (), BF16, {"state_dtype": BF16, "stochastic_rounding": True}),
    "adamw-fp32-int8-state": StepCase("adamw", 8 + CODES, 4 + CODES, options={"state_dtype": "int8"}),
    "adamw-bf16-int8-state": StepCase(
        "adamw", 4 + CODES, 2 + CODES, (), BF16, {"state_dtype": "int8", "stochastic_rounding": True}
    ),
    # θ is read too, to notice a parameter that was written from outside and differs from its rounded master.
    "adamw-bf16-master": StepCase("adamw", 16, 14, (), BF16, {"master_weights": True}),
    "adamw-bf16-split": StepCase("adamw", 14, 12, (), BF16, {"master_weights": "split"}),
    "adamw-bf16-split-bf16-state": StepCase(
        "adamw", 10, 8, (), BF16, {"master_weights": "split", "state_dtype": BF16}, sizes=True
    ),
    "adamw-bf16-split-int8-state": StepCase(
        "adamw", 6 + CODES, 4 + CODES, (), BF16, {"master_weights": "split", "state_dtype": "int8"}, sizes=True
    ),
    "adamw-fp16-master": StepCase("adamw", 16, 14, (), FP16, {"master_weights": True}, sizes=True),
    "adam-fp32": StepCase("adam", 16, 12, ("torch-fused",), sizes=True),
    "adam-amsgrad-fp32": StepCase("adam-amsgrad", 20, 16, ("torch-fused",), sizes=True),
    "sgd-momentum-fp32": StepCase("sgd-momentum", 12, 8, ("torch-fused",)),
    "sgd-momentum-bf16": StepCase("sgd-momentum", 6, 4, ("torch-fused",), BF16, ALL_BF16, sizes=True),
    "sgd-fp32": StepCase("sgd", 8, 4, ("torch-fused",), sizes=True),
    "adagrad-fp32": StepCase("adagrad", 12, 8, ("torch-foreach", "torch-fused")),
    "adagrad-bf16": StepCase("adagrad", 6, 4, ("torch-foreach",), BF16, ALL_BF16, sizes=True),
    "lion-fp32": StepCase("lion", 12, 8),
    "lion-bf16": StepCase("lion", 6, 4, (), BF16, ALL_BF16, sizes=True),
}


def _cases() -> Iterator[Any]:
    for device, known in models.MODELS.items():
        for name, work in WORKS.items():
            for model in known:
                if (models.is_small(model) and not work.small_too) or (work.sizes and model not in SIZES[device]):
                    continue
                others = (peer for peer in peers.PEERS if name in peers.PEERS[peer].works)
                for way in (
                    *work.beside,
                    *others,
                    *(f"hdet-{backend}" for backend in implementations.BACKENDS[device]),
                ):
                    reason = implementations.why_not(way, device, work.rule, known[model].tensors)
                    yield implementations.case(
                        device, model, name, way, why_not=reason, on_device=not models.is_small(model)
                    )


@pytest.mark.parametrize(("device", "model", "work", "way"), list(_cases()))
def test_optim_step(benchmark: Any, device: str, model: str, work: str, way: str) -> None:
    copy_bandwidth.measure_once(device)
    known = WORKS[work]
    params = models.parameters(models.MODELS[device][model].shapes, device, known.dtype)
    count = sum(param.numel() for param in params)
    least = known.read + known.written
    info = benchmark.extra_info
    info |= {"parameters": count, "tensors": len(params), "bytes a parameter": least}
    with peers.guarded(way):
        optimizer, step = implementations.stepper(way, known.rule, params, known.max_grad_norm, **known.options)
        if models.is_small(model):
            alone, backward = measure.until_done(step, device), models.Backward(params, device)
            benchmark.pedantic(alone, setup=backward, **measure.few_rounds(alone, backward, device, 10))
        else:
            models.set_gradients(params)
            benchmark.pedantic(step, warmup_rounds=1, **measure.plan(step, device, 0.3))
            info["host us"] = statistics.median(measure.host_times(step, device)) * 1e6
    if way in peers.PEERS:
        own = peers.bytes_moved(params, optimizer, known.max_grad_norm is not None) / count
        if abs(own / least - 1) > 0.01:
            info |= {"bytes a parameter": own, "work's bytes a parameter": least}
    moved = round(count * info["bytes a parameter"])
    copy_bandwidth.report(benchmark, device, moved=moved, held=round(moved * known.read / least))
