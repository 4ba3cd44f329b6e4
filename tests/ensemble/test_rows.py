"""Several replicas in one process, as rows; those of several processes are in ``test_processes.py``."""

from __future__ import annotations

import pytest
import torch

from hdet_kernels.ensemble import RowEnsemble, SingleReplica, held
from tests.ensemble.places import ALONE, place


def test_rows_of_one_process() -> None:
    ensemble = RowEnsemble(3)
    assert place(ensemble) == {**ALONE, "size": 3, "rows": 3, "talks": False}
    assert ensemble.gather(torch.tensor([[1.0], [2.0], [3.0]])).tolist() == [[[1.0]], [[2.0]], [[3.0]]]
    assert held(ensemble) == slice(0, 3)
    assert repr(ensemble) == "RowEnsemble(3 rows, SingleReplica())"
    assert isinstance(ensemble.twin(), RowEnsemble)
    ensemble.confirm()


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match="rows must be a whole number of at least 1, got 0"):
        RowEnsemble(0)
    with pytest.raises(ValueError, match="among must be processes that hold one whole replica each, got RowEnsemble"):
        RowEnsemble(2, RowEnsemble(2))


def test_processes_that_do_not_trade() -> None:
    rows = RowEnsemble(2, SingleReplica())
    assert not rows.trades(torch.device("cpu"))
    with pytest.raises(TypeError, match=r"SingleReplica\(\) does not pass tensors between single processes"):
        rows.trade([None], [None])
