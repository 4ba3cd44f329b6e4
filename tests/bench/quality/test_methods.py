"""Configurations of the compared methods."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bench.quality.methods import controller, hdet_method
from bench.quality.spec import Spec
from bench.quality.train import train

CPU = torch.device("cpu")


def test_unknown_method_is_named(digits: Any) -> None:
    with pytest.raises(ValueError, match=r"method='hdt' is not one of plain, hdet"):
        train(digits, Spec("digits", "hdt", 1e-3, 0, steps=40), CPU)


def test_methods_differ_in_gradients_and_noise() -> None:
    shared, local, noisy = (
        hdet_method(Spec("digits", name, 1e-3, 0), 400) for name in ("hdet", "local SGD", "warm init")
    )
    assert (shared.gradients, local.gradients) == ("shared", "local")
    assert (shared.noise, noisy.noise) == (0.0, 0.01)


def test_options_are_arguments_or_settings_of_the_controller() -> None:
    found = controller({"trust": 10.0, "edge_cost": 0.2})
    assert (found.trust, found.settings.edge_cost) == (10.0, 0.2)
    with pytest.raises(TypeError, match="slack"):
        controller({"slack": 0.4})
    assert hdet_method(Spec("digits", "hdet", 1e-3, 0, options={"quantile": 0.3}), 400).keywords["auto_lr"] == (
        controller({"quantile": 0.3})
    )
