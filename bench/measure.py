"""Time calls on a GPU or a CPU.

A time on a GPU is that between two CUDA events around a series of calls on an idle device. The series is long enough
that the latency of its first launch does not count. Where the host is slower than the device, the device waits within
the series, and the result is the wall time."""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

Call = Callable[[], object]
# Set by ``bench --quick``: few and short rounds, to check that everything runs. The times are meaningless.
QUICK = os.environ.get("HDET_BENCH_QUICK", "0") not in ("", "0")
# Seconds that a series of calls between two readings of the clock takes at least.
SERIES = {"cuda": 0.05, "cpu": 0.02}


class CudaEvent:
    """A reading of the GPU's clock. The difference of two readings is in seconds and waits for the later one."""

    def __init__(self) -> None:
        self._event = torch.cuda.Event(enable_timing=True)
        self._event.record()

    def __sub__(self, earlier: CudaEvent) -> float:
        self._event.synchronize()
        return earlier._event.elapsed_time(self._event) / 1e3


def clock(device: str) -> Callable[[], Any]:
    """Return a timer for the device: the difference of two of its readings is in seconds."""
    return CudaEvent if device == "cuda" else time.perf_counter


def synchronize(device: str) -> None:
    """Wait until the device has finished its work."""
    if device == "cuda":
        torch.cuda.synchronize()


def rounds(wanted: int) -> int:
    """Return ``wanted``, or at most 2 in a quick run."""
    return min(wanted, 2) if QUICK else wanted


def seconds_each(call: Call, device: str, iterations: int) -> float:
    """Return the seconds of one call, averaged over a series of ``iterations`` calls."""
    now = clock(device)
    start = now()
    for _ in range(iterations):
        call()
    return float(now() - start) / iterations


def plan(call: Call, device: str, seconds: float = 0.5) -> dict[str, int]:
    """Warm ``call`` up and return the rounds and iterations that take about ``seconds``, for pytest-benchmark."""
    for _ in range(rounds(3)):
        call()
    synchronize(device)
    once = min(seconds_each(call, device, 1) for _ in range(rounds(3)))
    iterations = 1 if QUICK else min(max(math.ceil(SERIES[device] / once), 1), 2000)
    return {"iterations": iterations, "rounds": rounds(min(max(int(seconds / (once * iterations)), 5), 15))}


def few_rounds(call: Call, prepare: Call, device: str, most: int, seconds: float = 2.0) -> dict[str, int]:
    """Warm ``prepare`` and ``call`` up and return the rounds of both that take about ``seconds``.

    There are at least five rounds and at most ``most``.
    """
    for _ in range(rounds(3)):
        start = time.perf_counter()
        prepare()
        call()
        synchronize(device)
        once = time.perf_counter() - start
    return {"rounds": rounds(min(max(int(seconds / once), 5), most))}


def sample(call: Call, device: str, seconds: float) -> list[float]:
    """Return the seconds of one call in each round."""
    planned = plan(call, device, seconds)
    return [seconds_each(call, device, planned["iterations"]) for _ in range(planned["rounds"])]


def host_times(call: Call, device: str, wanted: int = 20) -> list[float]:
    """Return the seconds until each of ``wanted`` calls returns, on an idle device."""
    times = []
    for _ in range(rounds(wanted)):
        synchronize(device)
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    synchronize(device)
    return times


def until_done(call: Call, device: str) -> Call:
    """Return a function that calls and waits for the device, so that its host time is the wall time of one call."""

    def alone() -> None:
        call()
        synchronize(device)

    return alone


def take_turns(
    benchmark: Any,
    calls: Mapping[str, Call],
    device: str,
    *,
    turns: int,
    iterations: int,
    against: str = "torch-fused",
) -> dict[str, list[float]]:
    """Time ``calls`` in turns of ``iterations`` each, forwards and backwards, so that clock drift affects all alike.

    Records each time in ``benchmark``, and the ratio of ours to ``against`` or, without that, ``torch-foreach``.

    Returns:
        The seconds of a call in every turn, by name.
    """
    for call in calls.values():
        seconds_each(call, device, rounds(3))
    times: dict[str, list[float]] = {name: [] for name in calls}

    def turn() -> None:
        names = list(calls)
        for name in names if len(times[names[0]]) % 2 == 0 else reversed(names):
            synchronize(device)
            times[name].append(seconds_each(calls[name], device, iterations))

    benchmark.pedantic(turn, rounds=rounds(turns))
    benchmark.extra_info["ways"] = {name: summary(found) for name, found in times.items()}
    peer = against if against in calls else "torch-foreach"
    for name in calls:
        if name.startswith("hdet-"):
            benchmark.extra_info["ratio"] = found = ratio(times[name], times[peer])
            spread = f"{found['low']:.4f} to {found['high']:.4f}"
            print(f"\n{benchmark.name}: {name} / {peer} {found['ratio']:.4f} ({spread})")
    return times


def summary(times: Sequence[float]) -> dict[str, float]:
    """Return the median and the best in milliseconds, and the distance of the quartiles as a share of the median."""
    median = statistics.median(times)
    low, high = _quartiles(times)
    return {"ms": median * 1e3, "best ms": min(times) * 1e3, "spread": (high - low) / median}


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, float]:
    """Return the ratio of the medians, and the quartiles of the ratios of single turns."""
    low, high = _quartiles([a / b for a, b in zip(ours, theirs, strict=True)])
    return {"ratio": statistics.median(ours) / statistics.median(theirs), "low": low, "high": high}


def median_ratio(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, float]:
    """Return the median of the ratios of single turns, and its 95 % confidence interval.

    The interval is between two of the sorted ratios, and holds for any distribution of them: how many lie below the
    true median is binomial. Of fewer than six turns it is the whole range, which is less certain.
    """
    found = sorted(a / b for a, b in zip(ours, theirs, strict=True))
    chances = accumulate(math.comb(len(found), below) / 2 ** len(found) for below in range(len(found)))
    left_out = max(sum(chance <= 0.025 for chance in chances) - 1, 0)  # on either side
    return {"ratio": statistics.median(found), "low": found[left_out], "high": found[-1 - left_out]}


def _quartiles(values: Sequence[float]) -> tuple[float, float]:
    if len(values) == 1:  # --benchmark-disable
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high


# Events on the device's timeline that are not work: the profiler's own, and waits.
_NOT_WORK = ("Activity Buffer Request", "Command Buffer Full", "Lazy Function Loading", "Buffer Flush")


_NOT_WORK += ("Context Sync", "Stream Sync", "Event Sync", "Stream Wait Event")


def by_part(parts: Mapping[str, Call], device: str, steps: int = 3) -> dict[str, dict[str, float]]:
    """Return ``device ms`` (the device is busy), ``wall ms`` and the number of ``kernels`` of each part of a step.

    The host waits for the device at the end of every part, so that all work belongs to a part whichever thread
    launched it. On a CPU, ``device ms`` is the wall time. ``elsewhere`` is device work outside of all parts.
    """
    for call in parts.values():
        call()
    synchronize(device)
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device == "cuda" else [])
    with profile(activities=activities) as profiled:
        for _ in range(steps):
            for name, call in parts.items():
                with record_function(name):
                    call()
                    synchronize(device)
    return summed(profiled.events() or (), list(parts), device, steps)


def device_seconds(call: Call, device: str, calls: int = 3) -> float:
    """Return the seconds that the device is busy with one call."""
    return by_part({"call": call}, device, calls)["call"]["device ms"] / 1e3


def summed(events: Iterable[Any], parts: list[str], device: str, steps: int) -> dict[str, dict[str, float]]:
    """Return the mean over ``steps`` steps of the profiler's events, in the form of :func:`by_part`."""
    known = list(events)
    ranges = [event for event in known if event.name in parts and event.device_type == DeviceType.CPU]
    work = [event for event in known if event.device_type != DeviceType.CPU and not _is_a_mark(event, parts)]
    found = {name: {"device ms": 0.0, "wall ms": 0.0, "kernels": 0.0} for name in [*parts, "elsewhere"]}
    for span in ranges:
        found[span.name]["wall ms"] += span.time_range.elapsed_us() / 1e3 / steps
    for event in work:
        at = event.time_range.start
        home = next((r.name for r in ranges if r.time_range.start <= at <= r.time_range.end), "elsewhere")
        found[home]["device ms"] += event.time_range.elapsed_us() / 1e3 / steps
        found[home]["kernels"] += 1 / steps
    if device == "cpu":
        for each in found.values():
            each["device ms"] = each["wall ms"]
    return found


def _is_a_mark(event: Any, parts: list[str]) -> bool:
    """Return whether the event is a range annotation on the device's timeline, or a wait."""
    return bool(getattr(event, "is_user_annotation", False)) or event.name in parts or event.name in _NOT_WORK
