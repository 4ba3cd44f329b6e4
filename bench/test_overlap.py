"""Time a sync within training: waited for, and running behind the next steps.

    python -m pytest bench/test_overlap.py --benchmark-only -k gpu     # GPT-2, one rank over NCCL
    python -m pytest bench/test_overlap.py --benchmark-only -k cpu     # a perceptron, two ranks over gloo

A lap is a few training steps, without a sync or with one after the first step. Laps of the three kinds take turns; a
sync costs the difference to a lap without. On one machine a collective takes hardly any time, so that it is delayed by
50 ms, as over a slow network, by a sleeping kernel (on the CPU by a sleep).
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hdet_kernels as hk
from bench import implementations, measure, two_ranks
from bench.training_steps import TRAININGS, Steps, one_rank
from hdet_kernels.converge import Report
from hdet_kernels.ensemble import Collective

KINDS = ("without", "waited for", "behind the steps")
# Steps of a lap, and the step after which an overlapped sync lands.
LAP, BEHIND = 8, 5
TURNS = 9
# Seconds that every collective is delayed by.
SLOW = 0.05


class SlowEnsemble(hk.ProcessEnsemble):
    """A process group whose all-reduce is delayed."""

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
    """Return a function for each kind of lap that runs it and returns the seconds of its parts."""

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


@pytest.mark.parametrize("device", [implementations.case("cuda", why_not=implementations.why_not("hdet-cuda", "cuda"))])
def test_a_sync_on_a_gpu(benchmark: Any, nccl: None, device: str) -> None:
    steps = Steps(TRAININGS["cuda"]["gpt2-124M"], device, "hdet-cuda", None)
    converger = hk.Converger(steps.optimizer.buckets, SlowEnsemble())  # type: ignore[attr-defined]
    take_turns(benchmark, laps(steps.whole, converger, device))


def operations() -> list[Callable[[], object]]:
    """Return one lap of each kind; their times are appended to ``measured``."""
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


@pytest.mark.parametrize("device", [implementations.case("cpu", why_not=None)])
def test_a_sync_on_a_cpu(benchmark: Any, device: str) -> None:
    threads = max((os.cpu_count() or 2) // 4, 1)  # half of them for the ranks, half for gloo
    with two_ranks.lead(operations, threads) as lead:

        def lap(number: int) -> dict[str, float]:
            lead(number)
            return measured[-1]

        take_turns(benchmark, {kind: lambda n=n: lap(n) for n, kind in enumerate(KINDS)})  # type: ignore[misc]
