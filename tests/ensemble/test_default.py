"""The ensemble where none is given, before and without a process group."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import hdet_kernels as hk
from hdet_kernels.ensemble import SingleReplica, announced_size, default_ensemble


def test_one_replica_without_a_process_group() -> None:
    assert isinstance(default_ensemble(), SingleReplica)


@pytest.mark.parametrize(("text", "size"), [("", 1), ("1", 1), ("8", 8), ("many", 1), ("-2", 1)])
def test_the_announced_size(text: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", text)
    assert announced_size() == size


@pytest.mark.parametrize("build", [lambda m: hk.ReplicaStack(m, 2), lambda m: hk.warm_noisy_init_(m.parameters())])
def test_what_needs_the_processes_at_once_raises_before_they_have_a_group(
    build: Callable[[nn.Module], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    model = nn.Linear(2, 1)
    before = model.weight.detach().clone()
    with pytest.raises(RuntimeError, match=r"WORLD_SIZE is 4 .* call torch.distributed.init_process_group\(\) before"):
        build(model)
    assert torch.equal(model.weight, before)


def test_a_process_that_trains_for_itself_needs_no_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert hk.ReplicaStack(nn.Linear(2, 1), 2, ensemble=SingleReplica()).ensemble.size == 2
