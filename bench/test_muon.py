"""Time one step of Muon on the matrices of transformer blocks: ours beside torch.optim.Muon and others, in turns.

    python -m pytest bench/test_muon.py --benchmark-only -k gpu

All have the same hyperparameters, five Newton–Schulz steps and float32 parameters. ``stack`` is our step of 8 replicas
in a stack that share a gradient, each with a learning rate of its own. Beside its ratio to one replica, ``stack floor``
is what it would be if the parameters of 7 more replicas, which are read and written, added the time of a copy to the
step of one. The time that pytest-benchmark shows is that of a turn of all implementations. Other packages that cannot
be imported, or that fail, are noted with the reason.
"""

from __future__ import annotations

import importlib.util
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import hdet_kernels as hk
from bench import copy_bandwidth, implementations, measure, models
from hdet_kernels.stack import StackedParameter

REPLICAS = 8
MUON: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.1, "momentum": 0.95, "nesterov": True}


def gpt2(layers: int, width: int) -> models.Shapes:
    """Return the matrices of the blocks of a GPT-2."""
    block: models.Shapes = [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)]
    return block * layers


def llama(layers: int, width: int) -> models.Shapes:
    """Return the matrices of the blocks of a Llama: a quarter of the heads for keys and values."""
    block: models.Shapes = [(width, width), (width // 4, width), (width // 4, width), (width, width)]
    return [*block, (4 * width, width), (4 * width, width), (width, 4 * width)] * layers


# On the CPU they are small: without instructions for bfloat16, torch.optim.Muon takes seconds for a step.
SHAPES: dict[str, dict[str, models.Shapes]] = {
    "cuda": {"gpt2-124M": gpt2(12, 768), "llama-1.2B": llama(16, 2048)},
    "cpu": {"gpt2-64-wide": gpt2(2, 64), "llama-64-wide": llama(2, 64)},
}


def _flash_muon(params: list[nn.Parameter]) -> Any:
    from flash_muon import Muon

    if not torch.distributed.is_initialized():  # it gathers the updates of all ranks
        torch.distributed.init_process_group("nccl", store=torch.distributed.HashStore(), rank=0, world_size=1)
    return Muon(params, **MUON, rank=0, world_size=1)


def _dion(params: list[nn.Parameter]) -> Any:
    from dion import Muon

    options = MUON | {"mu": MUON["momentum"], "use_triton": True}
    del options["momentum"]
    return Muon(params, **options)


def _gram_newton_schulz(params: list[nn.Parameter]) -> Any:
    from gram_newton_schulz import YOU_COEFFICIENTS, Muon

    return Muon(
        params,
        **MUON,
        ns_algorithm="gram_newton_schulz",
        ns_use_kernels=True,
        ns_coefficients=YOU_COEFFICIENTS,
        gram_newton_schulz_num_restarts=1,
    )


# By name: the module that must be importable, and what builds its optimizer. All of them need a GPU.
OTHERS: dict[str, tuple[str, Callable[[list[nn.Parameter]], Any]]] = {
    "flash-muon": ("flash_muon", _flash_muon),
    "dion": ("dion", _dion),
    "gram-newton-schulz": ("gram_newton_schulz", _gram_newton_schulz),
}


def _cases() -> Iterator[Any]:
    for device, known in SHAPES.items():
        main = f"hdet-{implementations.BACKENDS[device][0]}"
        for model in known:
            yield implementations.case(device, model, why_not=implementations.why_not(main, device))


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # of torch.optim.Muon, on CPUs without bfloat16
@pytest.mark.parametrize(("device", "model"), list(_cases()))
def test_muon(benchmark: Any, device: str, model: str) -> None:
    copy_bandwidth.measure_once(device)
    shapes = SHAPES[device][model]
    calls: dict[str, measure.Call] = {"torch": _step(torch.optim.Muon(_parameters(shapes, device), **MUON))}
    absent: dict[str, str] = {}
    for name, (module, make) in OTHERS.items():
        if device == "cpu" or importlib.util.find_spec(module) is None:
            absent[name] = "needs a GPU" if device == "cpu" else f"no module {module}; pip install {name}"
            continue
        try:
            calls[name] = _step(make(_parameters(shapes, device)))
            calls[name]()
        except Exception as error:
            calls.pop(name, None)
            absent[name] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    backends = [name for name in reversed(implementations.BACKENDS[device]) if hk.backends()[name] == "ok"]
    calls["stack"] = _step(_stack(shapes, device, backends[-1]))
    for backend in backends:  # the fastest comes last: its ratio is recorded
        calls[f"hdet-{backend}"] = _step(hk.FusedMuon(_parameters(shapes, device), **MUON, backend=backend))
    many = device == "cuda"
    times = measure.take_turns(
        benchmark, calls, device, turns=15 if many else 5, iterations=5 if many else 1, against="torch"
    )
    info = benchmark.extra_info
    info |= {"parameters": sum(a * b for a, b in shapes), "tensors": len(shapes), "absent": absent}
    one = times[f"hdet-{backends[-1]}"]
    info["stack ratio"] = measure.ratio(times["stack"], one)
    info["stack floor"] = _stack_floor(info["parameters"], device, statistics.median(one))


def _stack_floor(parameters: int, device: str, one: float) -> dict[str, float]:
    """Return the ms that a copy takes for the parameters of all replicas, and the ratio if the others cost that alone.

    Args:
        parameters: The parameters of one replica, in float32.
        device: The device, whose copy bandwidth is measured in this run.
        one: The seconds of a step of one replica.
    """
    each = 2 * 4 * parameters / copy_bandwidth.measure_once(device)["copy B/s"]
    return {"ms": REPLICAS * each * 1e3, "ratio": 1 + (REPLICAS - 1) * each / one}


def _step(optimizer: Any) -> measure.Call:
    call: measure.Call = optimizer.step
    return call


def _parameters(shapes: models.Shapes, device: str) -> list[nn.Parameter]:
    params = models.parameters(shapes, device)
    models.set_gradients(params)
    return params


def _stack(shapes: models.Shapes, device: str, backend: str) -> hk.FusedMuon:
    params = [
        StackedParameter(param.detach().expand(REPLICAS, *param.shape).clone()) for param in _parameters(shapes, device)
    ]
    for param in params:
        param.grad = torch.randn_like(param[0]).mul_(models.GRADIENT).expand_as(param)
    optimizer = hk.FusedMuon(params, **MUON, backend=backend)
    rates = tuple(MUON["lr"] * (1 + row / REPLICAS) for row in range(REPLICAS))
    optimizer.param_groups[0]["per_replica"] = {"lr": rates}
    return optimizer
