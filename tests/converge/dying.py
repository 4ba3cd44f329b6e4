"""A rank that ends itself in the middle of an average, and what the others are left with."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import hdet_kernels as hk
from hdet_kernels.converge import Report


def second_average(
    rank: int, last: int, homed: bool, values: Sequence[Sequence[Tensor]], **options: Any
) -> tuple[bool, str]:
    """Average twice; rank 1 ends itself in the second average, before its message number ``last``.

    Args:
        rank: this rank.
        last: the number of the message.
        homed: whether the parameters live in buckets.
        values: those of the parameters before the first average and before the second.
        options: of the converger.

    Returns:
        Whether the parameters are as before the second average, and its message.
    """
    params = [nn.Parameter(tensor) for tensor in values[0]]
    converger = hk.Converger(hk.Buckets(params) if homed else params, hk.ProcessEnsemble(), **options)
    converger.converge(Report(step=0))
    with torch.no_grad():
        for param, own in zip(params, values[1], strict=True):
            param.copy_(own)
    if rank == 1:
        original, count = dist.isend, [0]

        def isend(*args: Any, **keywords: Any) -> Any:
            count[0] += 1
            if count[0] == last:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **keywords)

        dist.isend = isend
    with pytest.raises(RuntimeError, match="rank 1 came and then gave no sign") as error:
        converger.converge(Report(step=1))
    return all(map(torch.equal, params, values[1])), str(error.value)
