"""The replicas of a scheduler: ensembles, models, optimizers and gradients that do not belong to each other."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import hdet_kernels as hk
from hdet_kernels.ensemble import RowEnsemble, SingleReplica
from hdet_kernels.schedule.build import ensemble_of, gradients_of
from tests.schedule.cases import adam
from tests.training import network


def test_one_replica_where_none_are_given_and_otherwise_those() -> None:
    """Parameters that are sharded over a mesh are in ``tests/converge/test_topologies.py``."""
    groups, given = adam().param_groups, RowEnsemble(2)
    assert isinstance(ensemble_of(groups, None), SingleReplica)
    assert ensemble_of(groups, given) is given


def test_a_stack_knows_its_gradients() -> None:
    assert gradients_of(adam(), SingleReplica(), "auto") == "auto"
    for gradients in ("shared", "local"):
        stack = hk.ReplicaStack(network(), 2, gradients=gradients)
        assert gradients_of(hk.FusedAdamW(stack.parameters()), stack.ensemble, "auto") == gradients


def test_the_ensemble_must_be_that_of_the_stack() -> None:
    stack = hk.ReplicaStack(network(), 4)
    optimizer = hk.FusedAdamW(stack.parameters())
    groups = copy.deepcopy({k: v for k, v in optimizer.param_groups[0].items() if k != "params"})
    for ensemble in (None, RowEnsemble(3)):
        with pytest.raises(ValueError, match=r"a stack of 4 replicas, and .* pass ensemble=stack.ensemble"):
            hk.HDETOneCycleLR(optimizer, 0.01, 24, ensemble=ensemble)
    with pytest.raises(ValueError, match=r"holds 4 replicas in this process, but the optimizer's parameters are those"):
        hk.HDETOneCycleLR(hk.FusedAdamW(network().parameters()), 0.01, 24, ensemble=stack.ensemble)
    assert {k: v for k, v in optimizer.param_groups[0].items() if k != "params"} == groups


def test_model_must_be_the_stack() -> None:
    """The buffers of a BatchNorm with as many channels as replicas would look like rows."""
    module = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4))
    stack = hk.ReplicaStack(module, 4)
    optimizer = hk.FusedAdamW(stack.parameters())
    with pytest.raises(ValueError, match=r"model= is a Sequential, .* leave model= out"):
        hk.HDETOneCycleLR(optimizer, 0.01, 24, ensemble=stack.ensemble, model=module)
    hk.HDETOneCycleLR(optimizer, 0.01, 24, ensemble=stack.ensemble, model=stack)


def test_torch_optimizers_are_refused() -> None:
    stack = hk.ReplicaStack(network(), 4)
    with pytest.raises(TypeError, match=r"AdamW has one learning rate for all .* FusedAdamW\(stack.parameters\(\)\)"):
        hk.HDETOneCycleLR(torch.optim.AdamW(stack.parameters()), 0.01, 24, ensemble=stack.ensemble)


def test_the_gradient_mode_must_be_that_of_the_stack() -> None:
    stack = hk.ReplicaStack(network(), 4)
    optimizer = hk.FusedAdamW(stack.parameters())
    with pytest.raises(ValueError, match="gradients='local', but the stack has shared ones"):
        hk.HDETOneCycleLR(optimizer, 0.01, 24, ensemble=stack.ensemble, gradients="local")
