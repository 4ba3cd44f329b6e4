"""Axes and their ticks."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hdet_kernels.history_page.scale import Scale, scale_of, short
from tests.controller.cases import PROPERTY


@pytest.mark.parametrize(
    ("low", "high", "labels"),
    [
        (0, 10, ["0", "2", "4", "6", "8", "10"]),
        (0, 100_000, ["0", "20,000", "40,000", "60,000", "80,000", "100,000"]),
        (-0.06, 0.04, ["−0.06", "−0.04", "−0.02", "0", "0.02", "0.04"]),
        (0, 0.011, ["0", "0.0025", "0.005", "0.0075", "0.01"]),
        (0, 1e-5, ["0", "2e−6", "4e−6", "6e−6", "8e−6", "1e−5"]),
    ],
)
def test_ticks_of_a_linear_axis_are_round(low: float, high: float, labels: list[str]) -> None:
    assert [label for _, label in Scale(low, high).ticks()] == labels


@pytest.mark.parametrize(
    ("low", "high", "labels"),
    [
        (1e-5, 1, ["1e−5", "1e−4", "0.001", "0.01", "0.1", "1"]),
        (0.9, 110, ["1", "10", "100"]),
        (0.02, 0.6, ["0.03", "0.1", "0.3"]),
        (1e-300, 1e300, None),
    ],
)
def test_ticks_of_a_logarithmic_axis_are_powers_of_ten_or_finer(
    low: float, high: float, labels: list[str] | None
) -> None:
    found = [label for _, label in Scale(low, high, log=True).ticks()]
    assert found == labels if labels else 3 <= len(found) <= 12


def test_steps_are_whole() -> None:
    assert [label for _, label in Scale(3, 5, whole=True).ticks()] == ["3", "4", "5"]


FINITE = st.floats(-1e300, 1e300)


@PROPERTY
@given(st.lists(FINITE, max_size=8), st.booleans(), st.booleans())
@example([0.0, 5e-324], False, False)
@example([1e-260, 3e-250], True, True)
def test_every_value_has_a_place_and_there_are_ticks(values: list[float], log: bool, zero: bool) -> None:
    scale = scale_of(values, log=log, zero=zero)
    assert scale.high > scale.low
    places = [scale.place(value) for value in sorted(values)]
    assert places == sorted(places)
    assert all(0 <= place <= 1 for place in places)
    ticks = scale.ticks()
    assert 1 <= len(ticks) <= 20
    assert all(-1e-6 <= (value - scale.low) / (scale.high - scale.low) <= 1 + 1e-6 for value, _ in ticks)


def test_decades_cut_a_logarithmic_axis_from_below() -> None:
    scale = scale_of([1e-9, 1e-3, 1.0], log=True, decades=3)
    assert 5e-4 < scale.low < 1e-3
    assert scale.place(1e-9) == 0


def test_a_short_range_or_a_negative_value_is_linear() -> None:
    assert not scale_of([1.0, 7.0], log=True).log
    assert not scale_of([-1.0, 700.0], log=True).log
    assert scale_of([1.0, 700.0], log=True).log


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (12_000, "12,000"), (0.25, "0.25"), (3e-5, "3e−5"), (-1.25e7, "−1.25e7"), (88.44, "88.44")],
)
def test_numbers_are_short(value: float, text: str) -> None:
    assert short(value) == text
