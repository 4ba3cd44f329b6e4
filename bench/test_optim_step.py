"""Time of one optimizer step as a share of the copy bandwidth measured in the same run, beside torch's own.

    python -m pytest bench/test_optim_step.py --benchmark-columns=min,median --benchmark-group-by=param:model

Every step must read θ, g and the state and write θ and the state: 28 bytes a parameter for AdamW in fp32. ``share`` is
those bytes over the best time, over the bandwidth of a copy of 256 MB (of 64 MB on the CPU). A share above 1 is a
model that fits into a cache.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

from hdet_kernels.ops.backends import backends
from hdet_kernels.optim import FusedAdamW, FusedSGD

Shapes = list[tuple[int, ...]]


def transformer(layers: int, width: int, hidden: int, vocabulary: int, context: int) -> Shapes:
    block: Shapes = [(width,), (width,), (3 * width, width), (3 * width,), (width, width), (width,), (width,), (width,)]
    block += [(hidden, width), (hidden,), (width, hidden), (width,)]
    return [(vocabulary, width), (context, width), *(block * layers), (width,), (width,)]


def gated_transformer(layers: int, width: int, hidden: int, vocabulary: int) -> Shapes:
    block: Shapes = [(width, width), (width // 4, width), (width // 4, width), (width, width)]
    block += [(hidden, width), (hidden, width), (width, hidden), (width,), (width,)]
    return [(vocabulary, width), *(block * layers), (width,), (vocabulary, width)]


def tables() -> Shapes:
    return [(2_000_000, 64), *[(50_000, 32)] * 40, *[(512, 512), (512,)] * 200]


def many_small(count: int) -> Shapes:
    return [(32, 32) if index % 2 == 0 else (128 + index % 97,) for index in range(count)]


MODELS: dict[str, dict[str, Callable[[], Shapes]]] = {
    "cuda": {
        "gpt2-124M": lambda: transformer(12, 768, 3072, 50304, 1024),
        "llama-1.2B": lambda: gated_transformer(16, 2048, 8192, 128256),
        "recsys-mix": tables,
        "many-small-10k": lambda: many_small(10_000),
    },
    "cpu": {
        "transformer-5M": lambda: transformer(4, 256, 1024, 8192, 256),
        "many-small-1k": lambda: many_small(1_000),
    },
}
BYTES = {"adamw": 28, "sgd-momentum": 20}


def _torch(name: str, params: list[nn.Parameter], **how: bool) -> torch.optim.Optimizer:
    if name == "adamw":
        return torch.optim.AdamW(params, **how)
    return torch.optim.SGD(params, lr=1e-3, momentum=0.9, **how)


def _ours(name: str, params: list[nn.Parameter], backend: str) -> torch.optim.Optimizer:
    if name == "adamw":
        return FusedAdamW(params, backend=backend)
    return FusedSGD(params, lr=1e-3, momentum=0.9, backend=backend)


WAYS: dict[str, Callable[[str, list[nn.Parameter]], torch.optim.Optimizer]] = {
    "torch-foreach": lambda name, params: _torch(name, params, foreach=True),
    "torch-fused": lambda name, params: _torch(name, params, fused=True),
    "hdet-cuda": lambda name, params: _ours(name, params, "cuda"),
    "hdet-cpp": lambda name, params: _ours(name, params, "cpp"),
    "hdet-torch": lambda name, params: _ours(name, params, "torch"),
}


def _cases() -> Iterator[Any]:
    for device, models in MODELS.items():
        absent = device == "cuda" and not torch.cuda.is_available()
        for way in WAYS:
            backend = way.removeprefix("hdet-") if way.startswith("hdet-") else "torch"
            if way in (("hdet-cpp", "hdet-torch") if device == "cuda" else ("hdet-cuda",)):
                continue  # of the other device, or the fallback, which takes minutes for 10 000 tensors there
            reason = "torch finds no usable NVIDIA GPU" if absent else backends()[backend]
            for model in models:
                mark = pytest.mark.skipif(reason != "ok", reason=f"{way} on {device}: {reason}")
                yield pytest.param(device, model, way, id=f"{model}-{way}", marks=mark)


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


@cache
def copy_bandwidth(device: str) -> float:
    """Bytes read and written in a second by a plain copy: the best of several."""
    source = torch.ones(2**26 if device == "cuda" else 2**24, device=device)
    target = torch.empty_like(source)
    best = float("inf")
    for _ in range(20):
        _wait(device)
        start = time.perf_counter()
        for _ in range(10):
            target.copy_(source)
        _wait(device)
        best = min(best, (time.perf_counter() - start) / 10)
    return 2 * source.nbytes / best


@pytest.mark.parametrize("rule", BYTES)
@pytest.mark.parametrize(("device", "model", "way"), list(_cases()))
def test_optim_step(benchmark: Any, device: str, model: str, way: str, rule: str) -> None:
    params = [nn.Parameter(torch.randn(shape, device=device)) for shape in MODELS[device][model]()]
    for param in params:
        param.grad = torch.randn_like(param) * 1e-3
    optimizer = WAYS[way](rule, params)
    inner = 10 if device == "cuda" else 1

    def run() -> None:
        for _ in range(inner):
            optimizer.step()
        _wait(device)

    benchmark.pedantic(run, rounds=5, iterations=1, warmup_rounds=1)
    best = benchmark.stats.stats.min / inner
    moved = BYTES[rule] * sum(param.numel() for param in params)
    share = moved / best / copy_bandwidth(device)
    benchmark.extra_info |= {"ms": best * 1e3, "share": share, "copy GB/s": copy_bandwidth(device) / 1e9}
    print(f"\n{model} {rule} {way}: {best * 1e3:.3f} ms, {share:.1%} of {copy_bandwidth(device) / 1e9:.0f} GB/s")
