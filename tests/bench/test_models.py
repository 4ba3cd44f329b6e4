"""Shapes of the measured models."""

from __future__ import annotations

import pytest

from bench import models


def test_model_with_other_numbers_is_refused() -> None:
    with pytest.raises(ValueError, match=r"have 2 tensors and 2.0 M parameters, expected 3 and 2.0 M"):
        models.Model([(1000, 1000)] * 2, 3, 2.0)


def test_backward_puts_gradients_at_new_addresses() -> None:
    params = models.parameters([(16,), (4, 4)], "cpu")
    backward = models.Backward(params, "cpu")
    backward()
    first = [param.grad.data_ptr() for param in params if param.grad is not None]
    backward()
    second = [param.grad.data_ptr() for param in params if param.grad is not None]
    assert len(first) == len(second) == 2
    assert not set(first) & set(second)
