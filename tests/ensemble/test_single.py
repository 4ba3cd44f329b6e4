"""One replica alone: every collective returns what it was given."""

from __future__ import annotations

import torch

from hdet_kernels.ensemble import SingleReplica, held
from tests.ensemble.places import ALONE, place


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
    ensemble.confirm()
    assert ensemble.twin() is ensemble
    assert repr(ensemble) == "SingleReplica()"
    assert held(ensemble) == slice(0, 1)
