"""Processes of the demo when one of them fails."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hdet_kernels.demo import launch
from tests import ranks


@pytest.mark.parametrize(("gpus", "expected"), [(0, ("gloo", "cpu")), (1, ("gloo", "cuda")), (2, ("nccl", "cuda"))])
def test_backend_and_device(gpus: int, expected: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    assert launch.place(2) == expected


def _fail(rank: int, device: torch.device, send: Callable[[object], None], how: str) -> None:
    send(f"rank {rank} is here")
    dist.barrier()
    if rank == 1:
        if how == "raises":
            raise ValueError("this is rank 1's own fault")
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()  # would wait forever


@pytest.mark.parametrize(
    ("how", "message"),
    [("raises", r"rank 1 failed:(?s:.)*own fault"), ("is killed", r"rank 1 ended without a result \(exit code -9\)")],
)
def test_failing_rank_ends_all(how: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.multiprocessing.get_context", lambda _: ranks._context)  # forked ranks start at once
    messages: list[Any] = []
    with pytest.raises(launch.RankFailed, match=message):
        launch.run_ranks(2, _fail, how, on_message=messages.append)
    assert sorted(messages) == ["rank 0 is here", "rank 1 is here"]
