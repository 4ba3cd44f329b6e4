"""Models of the whole training steps."""

from __future__ import annotations

import pytest
import torch

from bench import training_steps


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_models_have_their_documented_parameters(device: str) -> None:
    for name, training in training_steps.TRAININGS[device].items():
        with torch.device("meta"):
            params = list(training.build().parameters())
        if training.shapes is not None:
            assert sorted(tuple(p.shape) for p in params) == sorted(training.shapes), name
        if name == "resnet50":  # as torchvision's
            assert (sum(p.numel() for p in params), len(params)) == (25_557_032, 161)
