"""Options of the demo; tests/test_main.py has the messages for invalid ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from hdet_kernels.demo.options import checked_options
from hdet_kernels.demo.tasks import TextTask


def test_defaults_come_from_the_task(tmp_path: Path) -> None:
    out = tmp_path / "new" / "folder"
    options = checked_options(replicas=2, steps=None, task="text", out=out, seed=0, max_lr=None)
    assert (options.steps, options.max_lr) == (TextTask.steps, TextTask.poor_lr)
    assert out.is_dir()


def test_unknown_task_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--task must be one of text, digits, got 'poetry'"):
        checked_options(replicas=2, steps=None, task="poetry", out=tmp_path, seed=0, max_lr=None)
