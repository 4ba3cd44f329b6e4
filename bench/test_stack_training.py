"""Time a whole training step of 8 stacked replicas, beside one plain model and beside 8 processes.

    python -m pytest bench/test_stack_training.py --benchmark-only -k gpu

The model is a transformer of 10 M parameters under bf16 autocast. The plain model trains with torch's fused AdamW and
OneCycleLR on all tokens, each replica on an eighth of them. Plain model and stack take turns. The processes run alone,
under DDP over gloo, since NCCL refuses several ranks on one GPU. The peak of torch's memory is recorded too; of the
processes it is the sum, without the memory of the CUDA contexts.
"""

from __future__ import annotations

import datetime
import statistics
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import hdet_kernels as hk
from bench import copy_bandwidth, implementations, measure
from bench.models import GPT2

REPLICAS = 2 if measure.QUICK else 8
TOTAL_STEPS = 10_000


@dataclass(frozen=True)
class Training:
    """A model and batch: ``size`` is layers, width, heads, hidden width, vocabulary and context."""

    size: tuple[int, int, int, int, int, int]
    batch: int
    turns: int
    steps: int


# 6 layers of width 384 over bytes: 10.8 M parameters.
SMALL = (6, 384, 6, 1536, 256, 256)
TRAININGS = {
    "cuda": {
        "16k-tokens": Training(SMALL, batch=64, turns=12, steps=5),
        "64k-tokens": Training(SMALL, batch=256, turns=12, steps=5),
    },
    "cpu": {"tiny": Training((1, 32, 2, 64, 128, 16), batch=16, turns=4, steps=1)},
}


def _cases() -> Iterator[Any]:
    for device, known in TRAININGS.items():
        for name in known:
            yield implementations.case(
                device, name, why_not=implementations.why_not("hdet-cuda" if device == "cuda" else "hdet-cpp", device)
            )


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    loss: Tensor = model(tokens)
    return loss


def build(training: Training, device: str) -> tuple[GPT2, Tensor]:
    torch.manual_seed(0)
    layers, width, heads, hidden, vocabulary, context = training.size
    with torch.device(device):
        model = GPT2(layers, width, heads, hidden, vocabulary, context)
    return model, torch.randint(vocabulary, (training.batch, context + 1), device=device)


def plain(training: Training, device: str) -> measure.Call:
    model, tokens = build(training, device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, TOTAL_STEPS)

    def step() -> None:
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = loss_of(model, tokens)
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()

    return step


def stack(training: Training, device: str, cuda_graphs: bool = False) -> measure.Call:
    model, tokens = build(training, device)
    replicas = hk.ReplicaStack(model, replicas=REPLICAS, cuda_graphs=cuda_graphs)
    optimizer = hk.FusedAdamW(replicas.parameters())
    scheduler = hk.HDETOneCycleLR(optimizer, 1e-3, TOTAL_STEPS, ensemble=replicas.ensemble)

    def step() -> None:
        with torch.autocast(device, dtype=torch.bfloat16):
            losses = replicas.backward(loss_of, tokens)
        optimizer.step()
        scheduler.step(losses)
        optimizer.zero_grad()

    return step


def _rank(rank: int, training: Training, device: str, store: str, found: Any) -> None:
    """Train as one of the processes, and send the median time of a step and the peak memory."""
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=120)
    dist.init_process_group("gloo", f"file://{store}", timeout=timeout, rank=rank, world_size=REPLICAS)
    model, tokens = build(training, device)
    own = tokens.chunk(REPLICAS)[rank].clone()
    del tokens
    ddp = DistributedDataParallel(model)
    optimizer = hk.FusedAdamW(model.parameters())
    scheduler = hk.HDETOneCycleLR(optimizer, 1e-3, TOTAL_STEPS, gradients="shared")

    def step() -> None:
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = loss_of(ddp, own)
        loss.backward()
        optimizer.step()
        scheduler.step(loss)
        optimizer.zero_grad()

    for _ in range(3):
        step()
    times = [measure.seconds_each(step, device, training.steps) for _ in range(3)]
    found.put((statistics.median(times), torch.cuda.max_memory_reserved() if device == "cuda" else 0))
    dist.barrier()
    dist.destroy_process_group()


def processes(training: Training, device: str) -> dict[str, float]:
    context = torch.multiprocessing.get_context("spawn")
    found = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        torch.multiprocessing.spawn(_rank, (training, device, store, found), nprocs=REPLICAS)
    each = [found.get() for _ in range(REPLICAS)]
    return {"ms": max(time for time, _ in each) * 1e3, "peak MiB": sum(peak for _, peak in each) / 2**20}


def with_peak(make: Any, training: Training, device: str) -> tuple[measure.Call, float]:
    """Return a training step and its peak memory in MiB, including activations and recorded CUDA graphs."""
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_reserved() if device == "cuda" else 0
    call = make(training, device)
    measure.seconds_each(call, device, 5)  # the third call records the CUDA graph
    peak = torch.cuda.max_memory_reserved() if device == "cuda" else 0
    return call, (peak - before) / 2**20


@pytest.mark.parametrize(("device", "training"), list(_cases()))
def test_stack_training(benchmark: Any, device: str, training: str) -> None:
    copy_bandwidth.measure_once(device)
    known = TRAININGS[device][training]
    makers = {"torch-fused": plain, "hdet-stack": stack, "hdet-stack-graphs": partial(stack, cuda_graphs=True)}
    made = {
        name: with_peak(make, known, device) for name, make in makers.items() if device == "cuda" or "graph" not in name
    }
    calls = {name: call for name, (call, _) in made.items()}
    measure.take_turns(benchmark, calls, device, turns=known.turns, iterations=known.steps)
    info = benchmark.extra_info
    for name, (_, peak) in made.items():
        info["ways"][name]["peak MiB"] = peak
    info["ways"]["processes"] = processes(known, device)
    info |= {
        "replicas": REPLICAS,
        "tokens": known.batch * known.size[-1],
        "parameters": sum(p.numel() for p in build(known, "cpu")[0].parameters()),
    }
    print(f"{ {name: {key: round(v, 3) for key, v in way.items()} for name, way in info['ways'].items()} }")
