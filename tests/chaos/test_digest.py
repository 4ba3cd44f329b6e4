"""Digests are equal exactly if all bits are."""

from __future__ import annotations

import math

import pytest
import torch

from tests.chaos.digest import digest

VALUES = [
    0.0, -0.0, math.nan, 1, True, "1", None, [], [1.0], (1.0, 2.0), [1.0, [2.0]], {"a": 1}, {"b": 1}, {"a": {"b": 1}},
    torch.zeros(2), torch.zeros(2, 1), torch.zeros(2, dtype=torch.float64), torch.tensor([0.0, -0.0]),
    torch.tensor([0.0, math.nan]), torch.zeros(0), torch.zeros((), dtype=torch.int64),
]  # fmt: skip


def test_different_values_have_different_digests() -> None:
    assert len({digest(value) for value in VALUES}) == len(VALUES)


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_the_same_value_has_the_same_digest(value: object) -> None:
    again = value.clone() if isinstance(value, torch.Tensor) else value
    assert digest(value) == digest(again)


def test_strides_are_no_part_of_a_value() -> None:
    square = torch.arange(4.0).reshape(2, 2)
    assert digest(square.t()) == digest(square.t().contiguous())
