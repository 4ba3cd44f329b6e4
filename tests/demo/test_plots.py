"""Plots of the demo."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hdet_kernels.demo.plots import plot_learning_rates, plot_training_losses, smoothed
from tests.demo.two_runs import OPTIONS, two_runs
from tests.png import png_size


def test_smoothing_keeps_a_constant_and_the_length() -> None:
    np.testing.assert_allclose(smoothed(np.full(100, 3.0)), np.full(100, 3.0))
    np.testing.assert_allclose(smoothed(np.array([1.0, 2.0, 3.0])), [1.5, 2.0, 2.5])


def test_plots_of_two_runs(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot_training_losses(two_runs(), OPTIONS, tmp_path / "losses.png")
    plot_learning_rates(two_runs(), OPTIONS, tmp_path / "rates.png")
    assert png_size(tmp_path / "losses.png") == png_size(tmp_path / "rates.png") == (1350, 750)
