"""The real handshake and average with a thousand replicas, which are threads over a process group that counts."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from hdet_kernels.converge import Report
from hdet_kernels.converge.converger import Converger
from hdet_kernels.converge.handshake import COLUMNS
from hdet_kernels.ensemble import ProcessEnsemble
from tests.threaded_ranks import run_threads

# Neither the first nor the last, and in the second half of a node of eight.
ODD = 101


def _converge(rank: int) -> tuple[list[float], list[int], bytes]:
    """Average parameters; those of one replica are not finite. Return them, who was left out, and all losses."""
    params = torch.full((3,), float(rank % 8))
    if rank == ODD:
        params[1] = math.nan
    outcome = Converger([params], ProcessEnsemble()).converge(Report(step=3, loss_sum=0.1 * rank, loss_count=1))
    return params.tolist(), np.flatnonzero(~outcome.healthy).tolist(), outcome.losses.tobytes()


def _disagree(rank: int, odd: int, what: str) -> str:
    params = torch.zeros(4 if what == "layout" and rank == odd else 3)
    report = Report(step=4 if what == "step" and rank == odd else 3)
    with pytest.raises(RuntimeError) as error:
        Converger([params], ProcessEnsemble()).converge(report)
    assert not params.any(), "nothing was averaged"
    return str(error.value)


@pytest.mark.parametrize("ranks", [128, *(pytest.param(n, marks=pytest.mark.full) for n in (1536,))])
def test_all_replicas_agree_and_leave_the_bad_one_out(ranks: int) -> None:
    found, traffic = run_threads(ranks, _converge)
    healthy = [rank % 8 for rank in range(ranks) if rank != ODD]
    mean = float(np.float32(sum(healthy)) / np.float32(len(healthy)))
    losses = np.array([0.1 * rank for rank in range(ranks)])
    assert found == [([mean] * 3, [ODD], losses.tobytes())] * ranks, "every replica agrees"
    assert traffic.gathered == [8 * len(COLUMNS), 8], "the handshake, and the confirmation"
    assert traffic.all_reduced == [3 * 4], "one all-reduce, of the parameters"


MESSAGES = {
    "step": "the step ({others}: step 3; {odd}: step 4): a replica stepped more often, or resumed from",
    "layout": (
        "the layout of parameters and buffers ({others}: elements 3, tensor 0 parameter 0: float32 (3,) with strides "
        "(1,); {odd}: elements 4, tensor 0 parameter 0: float32 (4,) with strides (1,)): all replicas must build the"
    ),
}


@pytest.mark.parametrize("what", MESSAGES)
@pytest.mark.parametrize(
    ("ranks", "odd", "others"),
    [(24, 5, "ranks 0-4, 6-23"), pytest.param(1024, ODD, "ranks 0-100, 102-1023", marks=pytest.mark.full)],
)
def test_the_one_that_disagrees_is_named_on_all(ranks: int, odd: int, others: str, what: str) -> None:
    found, _ = run_threads(ranks, _disagree, odd, what)
    expected = MESSAGES[what].format(others=others, odd=f"rank {odd}")
    assert set(found) == {found[0]}
    assert found[0].startswith(f"the replicas disagree on {expected}")
    assert found[0].endswith("Nothing was averaged.")
