"""What a sync adds to the training steps around it: waited for, and behind the next steps.

    python -m pytest bench/test_overlap.py --benchmark-only -k gpu     # GPT-2, one rank over NCCL
    python -m pytest bench/test_overlap.py --benchmark-only -k cpu     # a perceptron, two ranks over gloo

A lap is a few training steps with a sync after the first, or without one. Laps of the three kinds take turns, and what
a sync adds is the difference to a lap without. Over one rank, or on one machine, a collective takes hardly any time:
here it takes 50 ms more, as over a slow network, by a kernel (on the CPU a thread) that sleeps.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import measure
import pytest
import torch
import two_ranks
import ways
from torch import Tensor, nn
from trainings import TRAININGS, Steps, one_rank

import hdet_kernels as hk
from hdet_kernels.converge import Report
from hdet_kernels.ensemble import Collective

KINDS = ("without", "waited for", "behind the steps")
#: Steps of a lap, and after how many of them the sync lands.
LAP, BEHIND = 8, 5
TURNS = 9
#: Seconds that a collective takes more.
SLOW = 0.05


class SlowEnsemble(hk.ProcessEnsemble):
    def all_reduce(self, tensor: Tensor, operation: str) -> Collective:
        if tensor.is_cuda:
            torch.cuda._sleep(int(SLOW * 1.98e9))  # cycles, at the clock of an H200 under load
            return super().all_reduce(tensor, operation)
        return _Late(super().all_reduce(tensor, operation))

    def twin(self) -> SlowEnsemble:
        return SlowEnsemble(super().twin().group)


class _Late:
    def __init__(self, work: Collective) -> None:
        self.work = work

    def wait(self) -> None:
        time.sleep(SLOW)
        self.work.wait()


def laps(step: Callable[[], object], converger: hk.Converger, device: str) -> dict[str, Callable[[], dict[str, float]]]:
    """By kind, a function that runs a lap and says what each part of it took, in seconds."""

    def lap(kind: str) -> dict[str, float]:
        measure.synchronize(device)
        start = time.perf_counter()
        flight, started = None, 0.0
        for number in range(LAP):
            step()
            before = time.perf_counter()
            if number == 0 and kind == "waited for":
                converger.converge(Report(step=0))
            if number == 0 and kind == "behind the steps":
                flight = converger.start(Report(step=0))
            if number == BEHIND and flight is not None:
                converger.land(flight)
            if number == 0:
                started = time.perf_counter() - before
        measure.synchronize(device)
        return {"lap": time.perf_counter() - start, "until the sync returns": started}

    return {kind: lambda kind=kind: lap(kind) for kind in KINDS}  # type: ignore[misc]


def take_turns(benchmark: Any, run: dict[str, Callable[[], dict[str, float]]]) -> None:
    for call in run.values():
        call()
    found: dict[str, list[dict[str, float]]] = {kind: [] for kind in run}

    def turn() -> None:
        for kind, call in run.items():
            found[kind].append(call())

    benchmark.pedantic(turn, rounds=measure.rounds(TURNS))
    none = statistics.median(lap["lap"] for lap in found["without"])
    benchmark.extra_info["step ms"] = none / LAP * 1e3
    for kind in KINDS[1:]:
        added = statistics.median(
            lap["lap"] - bare["lap"] for lap, bare in zip(found[kind], found["without"], strict=True)
        )
        back = statistics.median(lap["until the sync returns"] for lap in found[kind])
        benchmark.extra_info[kind] = {"added ms": added * 1e3, "until it returns ms": back * 1e3}
        print(f"\n{benchmark.name}: a sync {kind} adds {added * 1e3:.2f} ms to steps of {none / LAP * 1e3:.2f} ms")


@pytest.fixture
def nccl() -> Iterator[None]:
    with one_rank("cuda"):
        yield


@pytest.mark.parametrize("device", [ways.case("cuda", why_not=ways.why_not("hdet-cuda", "cuda"))])
def test_a_sync_on_a_gpu(benchmark: Any, nccl: None, device: str) -> None:
    steps = Steps(TRAININGS["cuda"]["gpt2-124M"], device, "hdet-cuda", None)
    converger = hk.Converger(steps.optimizer.buckets, SlowEnsemble())  # type: ignore[attr-defined]
    take_turns(benchmark, laps(steps.whole, converger, device))


def operations() -> list[Callable[[], object]]:
    """One lap of each kind; the process that measures reads what they took from ``measured``."""
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(1024, 1024), nn.ReLU())))
    optimizer = hk.FusedSGD(model.parameters(), lr=1e-3)
    batch = torch.randn(64, 1024)

    def step() -> None:
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    run = laps(step, hk.Converger(optimizer.buckets, SlowEnsemble()), "cpu")
    return [lambda call=call: measured.append(call()) for call in run.values()]  # type: ignore[misc]


measured: list[dict[str, float]] = []


@pytest.mark.parametrize("device", [ways.case("cpu", why_not=None)])
def test_a_sync_on_a_cpu(benchmark: Any, device: str) -> None:
    threads = max((os.cpu_count() or 2) // 4, 1)  # half of them for the ranks, half for gloo
    with two_ranks.lead(operations, threads) as lead:

        def lap(number: int) -> dict[str, float]:
            lead(number)
            return measured[-1]

        take_turns(benchmark, {kind: lambda n=n: lap(n) for n, kind in enumerate(KINDS)})  # type: ignore[misc]
