"""Running jobs in several processes."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.quality.pool import MOST_ROWS, Job, bundled, run_bundle
from bench.quality.spec import Spec

ROOT = Path(__file__).parents[3]


def job(kind: str, task: str, method: str, lr: float, seed: int = 0) -> Job:
    return {"kind": kind, "task": task, "spec": asdict(Spec(task, method, lr, seed))}


def test_plain_runs_of_a_task_are_bundled_and_others_are_alone() -> None:
    plain = [job("near", "digits", "plain", lr, seed) for lr in (0.1, 0.2) for seed in (0, 1)]
    others = [
        job("start", "digits", "hdet", 0.1),
        job("start", "images", "plain", 0.1),
        job("sweep", "digits", "sweep", 0.1),
    ]
    found = bundled([*plain, *others])
    assert plain in found
    assert sorted(map(len, found)) == [1, 1, 1, 4]
    assert [one for bundle in found for one in bundle if len(bundle) == 1] == others


def test_bundles_are_limited_and_spread() -> None:
    plain = [job("near", "digits", "plain", 0.1, seed) for seed in range(2 * MOST_ROWS + 1)]
    others = [job("start", "digits", "hdet", 0.1, seed) for seed in range(8)]
    found = bundled([*others, *plain])
    assert sorted(map(len, found))[-2:] == [MOST_ROWS, MOST_ROWS]
    assert sum(map(len, found)) == len(plain) + len(others)
    assert len(found[0]) == MOST_ROWS
    assert len(found[1]) == 1


def test_bundle_gives_a_record_for_each_job(digits: Any) -> None:
    jobs = [
        {**one, "spec": {**one["spec"], "steps": 3}}
        for one in (job("near", "digits", "plain", lr) for lr in (1e-3, 1e-2))
    ]
    found = run_bundle(jobs, digits, torch.device("cpu"))
    assert [record["lr"] for record in found] == [1e-3, 1e-2]
    assert all({"kind", "task", "method", "seed", "val", "initial", "seconds"} <= record.keys() for record in found)
    assert found[0]["initial"] == found[1]["initial"] > found[1]["val"]


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
