"""What benchmarks of scaling, memory and whole training steps make of their records: fits, tables and plots of made-up
ones, parts of made-up timelines; and what they measure memory with."""

from __future__ import annotations

import importlib
import math
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch.autograd import DeviceType

ROOT = Path(__file__).parents[2]
RECORD = {
    "machine_info": {"gpu": "a GPU", "torch": "2.11", "command": "python -m pytest bench", "load before": 0.0},
    "datetime": "2026-11-15T12:00:00",
    "yardsticks": {"cuda": {"copy B/s": 4e12, "copied": "4096 MiB", "under load": None}},
}


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(ROOT / "bench")  # as for a script there
    return importlib.import_module


@pytest.fixture
def scaling(bench: Any) -> ModuleType:
    return bench("scaling_section")


def entry(suite: str, params: dict[str, Any], info: dict[str, Any]) -> dict[str, Any]:
    full = f"bench/test_{suite}.py::test_{suite}[gpu]"
    return {
        "fullname": full,
        "name": full,
        "params": {"device": "cuda", **params},
        "extra_info": info,
        "record": RECORD,
    }


class TestFit:
    @pytest.mark.parametrize("slope", [1.0, 0.0, 0.5, -0.3])
    def test_a_power_law_has_its_slope_and_no_error(self, scaling: ModuleType, slope: float) -> None:
        xs = [1e4, 1e5, 1e6, 3e7]
        found = scaling.fit(xs, [2.5 * x**slope for x in xs])
        assert found.slope == pytest.approx(slope, abs=1e-12)
        assert found.error == pytest.approx(0, abs=1e-12)
        assert found.points == 4

    def test_the_standard_error_by_hand(self, scaling: ModuleType) -> None:
        """log x = 0, 1, 2 and log y = 0, 1, 1: slope 1/2, residuals −1/6, 1/3, −1/6, so √(1/6 / 1 / 2)."""
        found = scaling.fit([1, math.e, math.e**2], [1, math.e, math.e])
        assert found.slope == pytest.approx(0.5)
        assert found.error == pytest.approx(math.sqrt(1 / 12))

    @pytest.mark.parametrize("xs", [[], [1.0], [1.0, 10.0], [1.0, 1.0, 10.0]])
    def test_too_few_points_have_no_fit(self, scaling: ModuleType, xs: list[float]) -> None:
        assert scaling.fit(xs, xs) is None


def scaled(axis: str, way: str, addresses: str, count: int, ms: float, *, cached: bool = False) -> dict[str, Any]:
    parameters, tensors = (count, 16) if axis == "parameters" else (10**8, count)
    info = {"parameters": parameters, "tensors": tensors, "bytes": 28 * parameters, "ms": ms, "share": 0.5}
    info |= {"cached": cached, "host us": 40.0, "device ms": 0.8 * ms}
    return entry("scaling", {"axis": axis, "count": count, "way": way, "addresses": addresses}, info)


@pytest.fixture
def steps() -> list[dict[str, Any]]:
    """Linear in the parameters above a floor of 0.03 ms, and the small ones in the cache; constant in the tensors for
    ours, and by the square root for torch's."""
    sizes = [10**n for n in range(4, 10)]
    found = [
        scaled("parameters", "hdet-cuda", "same", n, max(0.03, 7e-9 * n), cached=n < 10**7) for n in reversed(sizes)
    ]
    counts = [10**n for n in range(6)]
    found += [scaled("tensors", "hdet-cuda", "fixed", n, 0.7) for n in counts]
    found += [scaled("tensors", "torch-fused", "same", n, 0.7 * n**0.5) for n in counts]
    return found


class TestScaling:
    def test_only_what_is_above_the_floor_is_fitted(self, scaling: ModuleType, steps: list[dict[str, Any]]) -> None:
        series = scaling.series_of(steps, "parameters")["`cuda`"]
        assert [info["parameters"] for info in series] == [10**n for n in range(4, 10)]
        assert [info["parameters"] for info in scaling.above_the_floor(series)] == [10**8, 10**9]
        series[3] |= {"ms": 5 * 0.03}  # 10⁷, not cached: just there
        assert [info["parameters"] for info in scaling.above_the_floor(series)] == [10**7, 10**8, 10**9]
        series[2] |= {"ms": 1.0}  # cached: never
        assert scaling.slope("parameters", series).points == 3

    def test_the_section_prints_the_slopes(self, scaling: ModuleType, steps: list[dict[str, Any]]) -> None:
        steps.append(scaled("parameters", "hdet-cuda", "same", 4 * 10**9, 28.0))
        text = scaling.section(steps)
        assert "1.000 ± 0.000 (3 sizes)" in text
        slopes = next(line for line in text.splitlines()[::-1] if line.startswith("| slope"))
        assert slopes.split("|")[2].split(";")[0].strip() == "0.000 ± 0.000"
        assert slopes.split("|")[3].split(";")[0].strip() == "0.500 ± 0.000"
        assert "| 4·10⁹ | 28.00 (50.0%) |" in text
        assert "| 10⁴ | 0.03000 (50.0%) \\* |" in text

    def test_there_is_nothing_without_records(self, scaling: ModuleType, tmp_path: Path) -> None:
        assert scaling.section([]) == ""
        assert not scaling.plot([], tmp_path / "nowhere.png")
        assert not (tmp_path / "nowhere.png").exists()

    def test_the_plot_is_written_without_pyplot(
        self, scaling: ModuleType, steps: list[dict[str, Any]], tmp_path: Path
    ) -> None:
        pytest.importorskip("matplotlib")
        assert scaling.plot(steps, tmp_path / "scaling.png")
        assert (tmp_path / "scaling.png").read_bytes().startswith(b"\x89PNG")

    @pytest.mark.parametrize(("parameters", "tensors"), [(10, 3), (16, 16), (10**6, 7)])
    def test_parameters_are_split_evenly(self, bench: Any, parameters: int, tensors: int) -> None:
        sizes = [shape[0] for shape in bench("test_scaling").split(parameters, tensors)]
        assert (sum(sizes), len(sizes)) == (parameters, tensors)
        assert max(sizes) - min(sizes) <= 1


def remembered(mode: str, way: str, step: float) -> dict[str, Any]:
    peaks = {"parameters": 4.0, "built": 12.0, "first step": step, "step": step, "loaded": 20.0, "step after it": step}
    info = {"parameters": 124_500_000, "peak B a parameter": peaks, "held B a parameter": 16.0}
    return entry("memory", {"mode": mode, "way": way}, info)


def test_the_section_of_memory_compares_with_the_lower_of_torchs(bench: Any) -> None:
    found = [
        remembered("adamw-fp32", "torch-foreach", 24.0),
        remembered("adamw-bf16-master", "hdet-cuda", 16.0),
        remembered("adamw-fp32", "hdet-cuda", 15.0),
        remembered("adamw-fp32", "torch-fused", 20.0),
    ]
    rows = [line for line in bench("memory_section").section(found).splitlines() if line.startswith("| adamw")]
    assert rows == [
        "| adamw-fp32 | torch foreach | 16.00 | 12.00 | 24.00 | 24.00 | 20.00 | 24.00 | – |",
        "| adamw-fp32 | `cuda` | 16.00 | 12.00 | 15.00 | 15.00 | 20.00 | 15.00 | 0.750 |",
        "| adamw-fp32 | torch fused | 16.00 | 12.00 | 20.00 | 20.00 | 20.00 | 20.00 | – |",
        "| adamw-bf16-master | `cuda` | 16.00 | 12.00 | 16.00 | 16.00 | 20.00 | 16.00 | – |",
    ]


def trained(model: str, ratio: float, parts: Any) -> dict[str, Any]:
    def of(value: float) -> dict[str, float]:
        return {"ratio": value, "low": value - 0.01, "high": value + 0.01}

    ways = {"torch-fused": (20.0, 3072.0), "hdet-cuda": (20.0 * ratio, 3000.0), "a sync every step": (25.0, 3500.0)}
    info = {
        "ways": {way: {"ms": ms, "peak MiB": peak} for way, (ms, peak) in implementations.items()},
        "ratio": of(ratio),
        "amortised": {"1000": of(ratio + 0.001), "100": of(ratio + 0.01)},
        "sync": {"ms": 5.0, "bytes": 1, "collectives": 2},
        "batch": "8192 tokens",
        "least ratio": 0.9,
        "parts": {"torch-fused": parts, "hdet-cuda": parts},
    }
    return entry("end_to_end", {"model": model, "clipping": "clip-1.0"}, info)


class TestEndToEnd:
    def test_the_section_has_every_ratio_and_says_where_the_claim_fails(self, bench: Any) -> None:
        parts = {"forward": {"device ms": 5.0}, "optimizer": {"device ms": 1.25}, "elsewhere": {"device ms": 0.0}}
        found = [trained("gpt2-124M", 0.97, parts), trained("resnet50", 0.995, "failed: no counters")]
        text = bench("end_to_end_section").section(found)
        assert "in 3 of 4 cases; not for resnet50, 8192 tokens, clip-1.0 with T = 100 (1.005)." in text
        assert "| 20.00 ms, 3.0 GiB | 19.40 ms, 2.9 GiB | 5.000 ms, 3.4 GiB | 0.970 (0.960–0.980) |" in text
        assert "| gpt2-124M, 8192 tokens, clip-1.0 | `cuda` | 5.000 | 1.250 | 0.000 | 6.250 |" in text
        assert "failed: no counters" in text

    def test_a_sync_is_shared_by_the_steps_between(self, bench: Any) -> None:
        times = {"torch-fused": [10.0, 20.0], "hdet-cuda": [9.0, 18.0], "a sync every step": [19.0, 28.0]}
        found = bench("test_end_to_end").amortised(times, "hdet-cuda", 100)
        assert found["ratio"] == pytest.approx((9.1 + 18.1) / 30)
        assert (found["low"], found["high"]) == pytest.approx((0.90625, 0.90875))  # 0.905 and 0.91 by turns


class TestTrainings:
    @pytest.mark.parametrize("device", ["cuda", "cpu"])
    def test_the_models_have_the_parameters_that_they_say(self, bench: Any, device: str) -> None:
        for name, training in bench("trainings").TRAININGS[device].items():
            with torch.device("meta"):
                params = list(training.build().parameters())
            if training.shapes is not None:
                assert sorted(tuple(p.shape) for p in params) == sorted(training.shapes), name
            if name == "resnet50":  # as torchvision's
                assert (sum(p.numel() for p in params), len(params)) == (25_557_032, 161)


def happened(name: str, start: float, end: float, on: DeviceType, *, marks: bool = False) -> SimpleNamespace:
    span = SimpleNamespace(start=start, end=end, elapsed_us=lambda: end - start)
    return SimpleNamespace(name=name, time_range=span, device_type=on, is_user_annotation=marks)


class TestParts:
    def test_work_belongs_to_the_part_in_which_it_starts(self, bench: Any) -> None:
        cpu, gpu = DeviceType.CPU, DeviceType.CUDA
        events = [
            happened("forward", 0, 1000, cpu),
            happened("backward", 1000, 4000, cpu),
            happened("aten::mm", 10, 20, cpu),
            happened("gemm", 100, 600, gpu),
            happened("forward", 100, 600, gpu, marks=True),
            happened("gemm", 1500, 2000, gpu),
            happened("Memset", 2000, 2100, gpu),
            happened("Optimizer.step#AdamW.step", 1500, 2100, gpu, marks=True),
            happened("late", 5000, 5200, gpu),
        ]
        found = bench("timeline").summed(events, ["forward", "backward"], "cuda", 2)
        assert found["forward"] == pytest.approx({"device ms": 0.25, "wall ms": 0.5, "kernels": 0.5})
        assert found["backward"] == pytest.approx({"device ms": 0.3, "wall ms": 1.5, "kernels": 1.0})
        assert found["elsewhere"] == pytest.approx({"device ms": 0.1, "wall ms": 0.0, "kernels": 0.5})

    def test_on_a_cpu_the_device_is_the_host(self, bench: Any) -> None:
        calls = {"one": lambda: torch.ones(10), "two": lambda: torch.ones(2**20).exp()}
        found = bench("timeline").by_part(calls, "cpu", 2)
        assert list(found) == ["one", "two", "elsewhere"]
        assert found["two"]["device ms"] == found["two"]["wall ms"] > found["one"]["wall ms"] > 0


class TestLedger:
    def test_peaks_and_what_stays_to_the_byte(self, bench: Any) -> None:
        book = bench("ledger").Ledger("cpu")
        with book.phase("kept"):
            kept = torch.ones(1000)
        not_counted = torch.ones(500)
        with book.phase("a temporary"):
            _ = torch.ones(250).sum().item()
        with book.phase("freed"):
            del kept
        assert book.peaks["kept"] == book.held["kept"] == 4000
        assert 5000 <= book.peaks["a temporary"] < 5100  # and the sum, which is aligned
        assert book.held == {"kept": 4000, "a temporary": 4000, "freed": 0}
        assert not_counted.numel() == 500

    def test_cycles_of_references_do_not_count_as_held(self, bench: Any) -> None:
        book = bench("ledger").Ledger("cpu")
        with book.phase("a cycle"):
            cycle: list[Any] = [torch.ones(1000)]
            cycle.append(cycle)
            del cycle
        assert (book.peaks["a cycle"], book.held["a cycle"]) == (4000, 0)
