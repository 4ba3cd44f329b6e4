"""Attribution of profiled work to the parts of a step."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.autograd import DeviceType

from bench import step_profile


def event(name: str, start: float, end: float, on: DeviceType, *, marks: bool = False) -> SimpleNamespace:
    span = SimpleNamespace(start=start, end=end, elapsed_us=lambda: end - start)
    return SimpleNamespace(name=name, time_range=span, device_type=on, is_user_annotation=marks)


def test_work_belongs_to_the_part_in_which_it_starts() -> None:
    cpu, gpu = DeviceType.CPU, DeviceType.CUDA
    events = [
        event("forward", 0, 1000, cpu),
        event("backward", 1000, 4000, cpu),
        event("aten::mm", 10, 20, cpu),
        event("gemm", 100, 600, gpu),
        event("forward", 100, 600, gpu, marks=True),
        event("gemm", 1500, 2000, gpu),
        event("Memset", 2000, 2100, gpu),
        event("Optimizer.step#AdamW.step", 1500, 2100, gpu, marks=True),
        event("late", 5000, 5200, gpu),
    ]
    found = step_profile.summed(events, ["forward", "backward"], "cuda", 2)
    assert found["forward"] == pytest.approx({"device ms": 0.25, "wall ms": 0.5, "kernels": 0.5})
    assert found["backward"] == pytest.approx({"device ms": 0.3, "wall ms": 1.5, "kernels": 1.0})
    assert found["elsewhere"] == pytest.approx({"device ms": 0.1, "wall ms": 0.0, "kernels": 0.5})


def test_on_a_cpu_the_device_is_the_host() -> None:
    calls = {"one": lambda: torch.ones(10), "two": lambda: torch.ones(2**20).exp()}
    found = step_profile.by_part(calls, "cpu", 2)
    assert list(found) == ["one", "two", "elsewhere"]
    assert found["two"]["device ms"] == found["two"]["wall ms"] > found["one"]["wall ms"] > 0
