"""The torchrun example resumes from its checkpoint."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch.distributed as dist

from tests import ranks


def _whole_and_halves(rank: int, folder: Path) -> tuple[float, float, float]:
    path = Path(__file__).parents[2] / "examples" / "torchrun_onecycle.py"
    spec = importlib.util.spec_from_file_location("torchrun_onecycle", path)
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    whole = example.train(20, 2e-3, folder / "whole.pt")
    half = example.train(20, 2e-3, folder / "halves.pt", stop_after=10)
    dist.barrier()
    return whole, half, example.train(20, 2e-3, folder / "halves.pt")


def test_example_resumes_bit_for_bit(tmp_path: Path) -> None:
    for whole, half, resumed in ranks.run_ranks(2, _whole_and_halves, tmp_path):
        assert resumed == whole
        assert resumed != half
