"""Where the time goes: what torch's profiler sees of the device's work in each part of a step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import measure
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

#: What is on the device's timeline and no work: what the profiler does itself, and waits.
_NO_WORK = ("Activity Buffer Request", "Command Buffer Full", "Lazy Function Loading", "Buffer Flush")
_NO_WORK += ("Context Sync", "Stream Sync", "Event Sync", "Stream Wait Event")


def by_part(parts: Mapping[str, measure.Call], device: str, steps: int = 3) -> dict[str, dict[str, float]]:
    """Of each part of a step: ``device ms`` that the device is busy, the ``kernels`` (and copies) that it runs, and
    ``wall ms``. The host waits at the end of every part, so that a part is all that runs until then, whichever thread
    has launched it; on a CPU the device is the host. ``elsewhere`` is the device's work that falls into no part."""
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
    """How long the device is busy with one call."""
    return by_part({"call": call}, device, calls)["call"]["device ms"] / 1e3


def summed(events: Iterable[Any], parts: list[str], device: str, steps: int) -> dict[str, dict[str, float]]:
    """The profiler's events of ``steps`` steps as a mean over them, see :func:`by_part`."""
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
    """Whether it is the shadow of a range on the device's timeline, or a wait."""
    return bool(getattr(event, "is_user_annotation", False)) or event.name in parts or event.name in _NO_WORK
