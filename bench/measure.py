"""How the benchmarks measure.

A time on a GPU is that between two CUDA events around a row of calls, on a device that was idle before the first. The
row is long enough that the wait for its first launch does not count. Where the host is slower than the device, the
device waits within the row, so that this is the wall time.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

Call = Callable[[], object]

#: To see that everything runs: few and short rows, times that are good for nothing else (``bench --quick``).
QUICK = os.environ.get("HDET_BENCH_QUICK", "0") not in ("", "0")

#: Seconds that a row of calls between two readings of the clock takes.
ROW = {"cuda": 0.05, "cpu": 0.02}


class CudaEvent:
    """A reading of the device's clock: the difference of two is in seconds, and waits for the later one."""

    def __init__(self) -> None:
        self._event = torch.cuda.Event(enable_timing=True)
        self._event.record()

    def __sub__(self, earlier: CudaEvent) -> float:
        self._event.synchronize()
        return earlier._event.elapsed_time(self._event) / 1e3


def clock(device: str) -> Callable[[], Any]:
    """A timer, for pytest-benchmark too: the difference of two of its readings is in seconds."""
    return CudaEvent if device == "cuda" else time.perf_counter


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def rounds(wanted: int) -> int:
    return min(wanted, 3) if QUICK else wanted


def row(call: Call, device: str, iterations: int) -> float:
    """Seconds that each of ``iterations`` calls in a row takes."""
    now = clock(device)
    start = now()
    for _ in range(iterations):
        call()
    return float(now() - start) / iterations


def plan(call: Call, device: str, seconds: float = 0.5) -> dict[str, int]:
    """Warms ``call`` up, and says how many rounds of how many iterations take about ``seconds``."""
    for _ in range(3):
        call()
    synchronize(device)
    once = min(row(call, device, 1) for _ in range(3))
    iterations = 1 if QUICK else min(max(math.ceil(ROW[device] / once), 1), 2000)
    return {"iterations": iterations, "rounds": rounds(min(max(int(seconds / (once * iterations)), 5), 15))}


def few_rounds(call: Call, prepare: Call, device: str, most: int, seconds: float = 2.0) -> dict[str, int]:
    """Warms a single ``call`` after ``prepare`` up, and says how many rounds of both take about ``seconds``: at least
    five, at most ``most``."""
    for _ in range(3):
        start = time.perf_counter()
        prepare()
        call()
        synchronize(device)
        once = time.perf_counter() - start
    return {"rounds": rounds(min(max(int(seconds / once), 5), most))}


def sample(call: Call, device: str, seconds: float) -> list[float]:
    """The time of one call in each round."""
    planned = plan(call, device, seconds)
    return [row(call, device, planned["iterations"]) for _ in range(planned["rounds"])]


def host_times(call: Call, device: str, wanted: int = 20) -> list[float]:
    """Until each of so many calls returns, on a device that has nothing else to do."""
    times = []
    for _ in range(rounds(wanted)):
        synchronize(device)
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    synchronize(device)
    return times


def until_done(call: Call, device: str) -> Call:
    """``call`` and the wait for the device, so that its host time is the wall time of one call alone."""

    def alone() -> None:
        call()
        synchronize(device)

    return alone


def take_turns(
    benchmark: Any, calls: Mapping[str, Call], device: str, *, turns: int, iterations: int
) -> dict[str, list[float]]:
    """Times ``calls`` in turns of ``iterations`` each, forwards and backwards, so that a drift of the clocks hits all
    alike; records each one, and the ratio of ours to ``torch-fused``. Returns the seconds of a call in every turn."""
    for call in calls.values():
        row(call, device, 3)
    times: dict[str, list[float]] = {name: [] for name in calls}

    def turn() -> None:
        names = list(calls)
        for name in names if len(times[names[0]]) % 2 == 0 else reversed(names):
            synchronize(device)
            times[name].append(row(calls[name], device, iterations))

    benchmark.pedantic(turn, rounds=rounds(turns))
    benchmark.extra_info["ways"] = {name: _summary(found) for name, found in times.items()}
    for name in calls:
        if name.startswith("hdet-"):
            benchmark.extra_info["ratio"] = found = ratio(times[name], times["torch-fused"])
            spread = f"{found['low']:.4f} to {found['high']:.4f}"
            print(f"\n{benchmark.name}: {name} / torch-fused {found['ratio']:.4f} ({spread})")
    return times


def _summary(times: Sequence[float]) -> dict[str, float]:
    median = statistics.median(times)
    low, high = _quartiles(times)
    return {"ms": median * 1e3, "best ms": min(times) * 1e3, "spread": (high - low) / median}


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, float]:
    """The ratio of the medians, and the quartiles of the ratios of each turn."""
    low, high = _quartiles([a / b for a, b in zip(ours, theirs, strict=True)])
    return {"ratio": statistics.median(ours) / statistics.median(theirs), "low": low, "high": high}


def _quartiles(values: Sequence[float]) -> tuple[float, float]:
    if len(values) == 1:  # --benchmark-disable
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high
