"""Profile a training step by its parts: the time that the device is busy in each of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from bench import measure

# Events on the device's timeline that are not work: the profiler's own, and waits.
_NOT_WORK = ("Activity Buffer Request", "Command Buffer Full", "Lazy Function Loading", "Buffer Flush")
_NOT_WORK += ("Context Sync", "Stream Sync", "Event Sync", "Stream Wait Event")


def by_part(parts: Mapping[str, measure.Call], device: str, steps: int = 3) -> dict[str, dict[str, float]]:
    """Return ``device ms`` (the device is busy), ``wall ms`` and the number of ``kernels`` of each part of a step.

    The host waits for the device at the end of every part, so that all work belongs to a part whichever thread
    launched it. On a CPU, ``device ms`` is the wall time. ``elsewhere`` is device work outside of all parts.
    """
    for call in parts.values():
        call()
    measure.synchronize(device)
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device == "cuda" else [])
    with profile(activities=activities) as profiled:
        for _ in range(steps):
            for name, call in parts.items():
                with record_function(name):
                    call()
                    measure.synchronize(device)
    return summed(profiled.events() or (), list(parts), device, steps)


def device_seconds(call: measure.Call, device: str, calls: int = 3) -> float:
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
