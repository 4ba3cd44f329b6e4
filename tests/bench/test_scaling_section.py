"""Slopes, tables and the plot of the scaling suite."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from bench import scaling_section, test_scaling
from tests.bench.entries import gpu_entry


class TestFit:
    @pytest.mark.parametrize("slope", [1.0, 0.0, 0.5, -0.3])
    def test_a_power_law_has_its_slope_and_no_error(self, slope: float) -> None:
        xs = [1e4, 1e5, 1e6, 3e7]
        found = scaling_section.fit(xs, [2.5 * x**slope for x in xs])
        assert found.slope == pytest.approx(slope, abs=1e-12)
        assert found.error == pytest.approx(0, abs=1e-12)
        assert found.points == 4

    def test_the_standard_error_by_hand(self) -> None:
        """log x = 0, 1, 2 and log y = 0, 1, 1: slope 1/2, residuals −1/6, 1/3, −1/6, so √(1/6 / 1 / 2)."""
        found = scaling_section.fit([1, math.e, math.e**2], [1, math.e, math.e])
        assert found.slope == pytest.approx(0.5)
        assert found.error == pytest.approx(math.sqrt(1 / 12))

    @pytest.mark.parametrize("xs", [[], [1.0], [1.0, 10.0], [1.0, 1.0, 10.0]])
    def test_too_few_points_have_no_fit(self, xs: list[float]) -> None:
        assert scaling_section.fit(xs, xs) is None


def scaled(axis: str, way: str, addresses: str, count: int, ms: float, *, cached: bool = False) -> dict[str, Any]:
    parameters, tensors = (count, 16) if axis == "parameters" else (10**8, count)
    info = {"parameters": parameters, "tensors": tensors, "bytes": 28 * parameters, "ms": ms, "share": 0.5}
    info |= {"cached": cached, "host us": 40.0, "device ms": 0.8 * ms}
    return gpu_entry("scaling", {"axis": axis, "count": count, "way": way, "addresses": addresses}, info)


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
    def test_only_what_is_above_the_floor_is_fitted(self, steps: list[dict[str, Any]]) -> None:
        series = scaling_section.series_of(steps, "parameters")["`cuda`"]
        assert [info["parameters"] for info in series] == [10**n for n in range(4, 10)]
        assert [info["parameters"] for info in scaling_section.above_the_floor(series)] == [10**8, 10**9]
        series[3] |= {"ms": 5 * 0.03}  # 10⁷, not cached: just there
        assert [info["parameters"] for info in scaling_section.above_the_floor(series)] == [10**7, 10**8, 10**9]
        series[2] |= {"ms": 1.0}  # cached: never
        assert scaling_section.slope("parameters", series).points == 3

    def test_the_section_prints_the_slopes(self, steps: list[dict[str, Any]]) -> None:
        steps.append(scaled("parameters", "hdet-cuda", "same", 4 * 10**9, 28.0))
        text = scaling_section.section(steps)
        assert "1.000 ± 0.000 (3 sizes)" in text
        slopes = next(line for line in text.splitlines()[::-1] if line.startswith("| slope"))
        assert slopes.split("|")[2].split(";")[0].strip() == "0.000 ± 0.000"
        assert slopes.split("|")[3].split(";")[0].strip() == "0.500 ± 0.000"
        assert "| 4·10⁹ | 28.00 (50.0%) |" in text
        assert "| 10⁴ | 0.03000 (50.0%) \\* |" in text

    def test_there_is_nothing_without_records(self, tmp_path: Path) -> None:
        assert scaling_section.section([]) == ""
        assert not scaling_section.plot([], tmp_path / "nowhere.png")
        assert not (tmp_path / "nowhere.png").exists()

    def test_the_plot_is_written_without_pyplot(self, steps: list[dict[str, Any]], tmp_path: Path) -> None:
        pytest.importorskip("matplotlib")
        assert scaling_section.plot(steps, tmp_path / "scaling_section.png")
        assert (tmp_path / "scaling_section.png").read_bytes().startswith(b"\x89PNG")

    @pytest.mark.parametrize(("parameters", "tensors"), [(10, 3), (16, 16), (10**6, 7)])
    def test_parameters_are_split_evenly(self, parameters: int, tensors: int) -> None:
        sizes = [shape[0] for shape in test_scaling.split(parameters, tensors)]
        assert (sum(sizes), len(sizes)) == (parameters, tensors)
        assert max(sizes) - min(sizes) <= 1
