"""The check that something is an ensemble at all."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from hdet_kernels.ensemble import ProcessEnsemble, RowEnsemble, SingleReplica, Trading, check_ensemble, held


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


@pytest.mark.parametrize("ensemble", [SingleReplica(), RowEnsemble(3)], ids=str)
def test_ensembles_pass_and_hold_a_slice_of_the_replicas(ensemble: Any) -> None:
    check_ensemble("ensemble", ensemble)
    assert held(ensemble) == slice(0, ensemble.size)


def test_only_some_ensembles_trade() -> None:
    assert not isinstance(SingleReplica(), Trading)
    assert {"trades", "trade"} <= set(vars(ProcessEnsemble)) & set(vars(RowEnsemble))
