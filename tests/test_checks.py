"""The shared checks of arguments: what they accept, what they refuse, and the value in the message."""

from __future__ import annotations

import math
from typing import Any

import pytest

from hdet_kernels.checks import check_choice, check_positive, check_share, check_whole


@pytest.mark.parametrize("value", [0.0, 0.5, 1.0, 0, 1])
def test_a_share_lies_between_0_and_1(value: float) -> None:
    check_share("beta", value)


@pytest.mark.parametrize("value", [-1e-9, 1.0000001, math.nan, math.inf])
def test_other_shares_are_refused(value: float) -> None:
    with pytest.raises(ValueError, match=rf"beta must lie between 0 and 1, got {value}"):
        check_share("beta", value)


def test_a_share_below_one() -> None:
    check_share("beta", 0.999, below_one=True)
    with pytest.raises(ValueError, match=r"beta must lie between 0 and 1 \(excluded\), got 1.0"):
        check_share("beta", 1.0, below_one=True)


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_a_positive_number_is_finite(value: float) -> None:
    check_positive("rate", 1e-300)
    with pytest.raises(ValueError, match=f"rate must be a positive number, got {value}"):
        check_positive("rate", value)


@pytest.mark.parametrize("value", [True, 1.0, "1", None, -3])
def test_a_whole_number_is_an_int_and_no_bool(value: Any) -> None:
    check_whole("seed", 0, at_least=0)
    with pytest.raises(ValueError, match="seed must be a whole number of at least 0, got"):
        check_whole("seed", value, at_least=0)


def test_a_whole_number_without_a_bound() -> None:
    check_whole("seed", -3)
    with pytest.raises(ValueError, match=r"seed must be a whole number, got 0\.5"):
        check_whole("seed", 0.5)


@pytest.mark.parametrize("value", ["auto", True, False])
def test_choices(value: object) -> None:
    check_choice("average_state", value, ("auto", True, False))


@pytest.mark.parametrize("value", [1, 0, "yes", None])
def test_numbers_are_not_taken_for_booleans(value: object) -> None:
    with pytest.raises(ValueError, match=f"average_state must be one of 'auto', True, False, got {value!r}"):
        check_choice("average_state", value, ("auto", True, False))
