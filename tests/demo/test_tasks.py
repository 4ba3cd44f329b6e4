"""Data of the demo's tasks."""

from __future__ import annotations

from pathlib import Path

import torch

from hdet_kernels.demo.tasks import TextTask


def test_text_is_split_by_file_and_drawn_reproducibly(tmp_path: Path) -> None:
    for index in range(20):
        (tmp_path / f"m{index:02}.py").write_bytes(bytes([index]) * 100)
    task = TextTask(tmp_path)
    assert set(task.unseen.tolist()) == {0, 10}
    assert set(task.train.tolist()) == set(range(20)) - {0, 10}
    inputs, targets = task.batch(torch.Generator().manual_seed(3))
    again, _ = task.batch(torch.Generator().manual_seed(3))
    assert torch.equal(inputs, again)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
