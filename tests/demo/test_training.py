"""Training of one replica; tests/demo/test_command.py trains two."""

from __future__ import annotations

from pathlib import Path

import torch

from hdet_kernels.demo.options import Options
from hdet_kernels.demo.training import RUNS, _generator


def test_batches_differ_between_replicas_and_seeds() -> None:
    options = [Options(2, 40, "text", Path("out"), seed, 0.1) for seed in (0, 1)]
    draws = [
        torch.randint(10**9, (4,), generator=_generator(each, stream)).tolist()
        for each in options
        for stream in range(3)
    ]
    assert len({tuple(draw) for draw in draws}) == 6


def test_plain_training_comes_first() -> None:
    assert RUNS == ("plain", "hdet")
