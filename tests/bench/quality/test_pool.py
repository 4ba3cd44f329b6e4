"""Running jobs in several processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.full
def test_exit_does_not_wait_for_jobs_that_were_left_out() -> None:
    """The queue of unfinished jobs is larger than the buffer of a pipe."""
    code = (
        "from bench.quality.pool import run_jobs\n"
        "job = {'kind': 'start', 'task': 'digits', 'spec': {'note': 'x' * 1000}}\n"
        "if __name__ == '__main__':\n"
        "    assert run_jobs([job] * 1000, 'cpu', 1, seconds=0.1) == []\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert "1000 of 1000 runs were left out" in done.stderr
