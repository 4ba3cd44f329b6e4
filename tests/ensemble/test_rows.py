"""The replicas of one process, a single one or rows, and the check that something is an ensemble at all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from hdet_kernels.ensemble import RowEnsemble, SingleReplica, check_ensemble, held
from tests.ensemble.places import ALONE, place


def test_rows_of_one_process() -> None:
    ensemble = RowEnsemble(3)
    assert place(ensemble) == {**ALONE, "size": 3, "rows": 3, "talks": False}
    assert ensemble.gather(torch.tensor([[1.0], [2.0], [3.0]])).tolist() == [[[1.0]], [[2.0]], [[3.0]]]
    assert held(ensemble) == slice(0, 3)
    assert repr(ensemble) == "RowEnsemble(3 rows, SingleReplica())"
    assert isinstance(ensemble.twin(), RowEnsemble)


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match="rows must be a whole number of at least 1, got 0"):
        RowEnsemble(0)
    with pytest.raises(ValueError, match="among must be processes that hold one whole replica each, got RowEnsemble"):
        RowEnsemble(2, RowEnsemble(2))


def test_a_single_replica() -> None:
    ensemble = SingleReplica()
    assert place(ensemble) == {**ALONE, "talks": False}
    assert ensemble.gather(torch.tensor([[1.0, 2.0]])).tolist() == [[[1.0, 2.0]]]
    assert ensemble.serves(torch.device("cuda"))
    assert ensemble.averages(torch.device("cpu"))
    tensor = torch.tensor([3.0])
    ensemble.all_reduce(tensor, "sum").wait()
    ensemble.broadcast(tensor, 0).wait()
    assert tensor.tolist() == [3.0]
    received, gathered = torch.zeros(1, 1), torch.zeros(1, 1)
    ensemble.exchange(received, torch.tensor([[4.0]])).wait()
    ensemble.collect(gathered, torch.tensor([5.0])).wait()
    assert (received.item(), gathered.item()) == (4.0, 5.0)
    assert ensemble.twin() is ensemble
    assert repr(ensemble) == "SingleReplica()"
    assert held(ensemble) == slice(0, 1)


@pytest.mark.parametrize(
    ("given", "remedy"),
    [
        (SingleReplica, "pass a ProcessEnsemble"),
        (4, "pass a ProcessEnsemble, stack.ensemble of a ReplicaStack, or leave it out"),
        (dist.ProcessGroup(0, 1), r"pass hdet_kernels.ProcessEnsemble\(…\) of it"),
    ],
    ids=["class", "number", "group"],
)
def test_what_is_no_ensemble_is_refused_with_a_remedy(given: Any, remedy: str) -> None:
    with pytest.raises(TypeError, match=f"^ensemble must be an ensemble, which says who the replicas are, .*{remedy}"):
        check_ensemble("ensemble", given)
