"""State dicts and copies of the fused optimizers: exchanged with torch.optim, resumed to the bit."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.ops.cases import QUICK
from tests.optim.cases import (
    FUSED,
    PAIRS,
    QUICK_FUSED,
    QUICK_PAIRS,
    assert_close,
    assert_equal,
    fused_optimizer,
    parameters,
    run,
    saved_and_loaded,
    shapes_of,
    torch_optimizer,
    with_backends,
)


def twins(backend: tuple[str, str], name: str) -> tuple[Any, list[Any], Any, list[Any]]:
    """Return a fused optimizer and its parameters, then torch's and its own."""
    where, device = backend
    ours, theirs = parameters(device=device), parameters(device=device)
    return fused_optimizer(name, ours, backend=where), ours, torch_optimizer(name, theirs), theirs


@pytest.mark.parametrize(("backend", "name"), with_backends(QUICK, PAIRS, QUICK_PAIRS))
class TestExchangeWithTorch:
    def test_torch_state_continues_in_the_fused_optimizer(self, backend: tuple[str, str], name: str) -> None:
        fused, ours, torchs, theirs = twins(backend, name)
        torchs.param_groups[0]["lr"] = 0.05
        run(torchs, theirs, range(3))
        flats = [flat.data_ptr() for flat in fused.state_flats().values()]
        with torch.no_grad():
            for mine, other in zip(ours, theirs, strict=True):
                mine.copy_(other)
        fused.load_state_dict(saved_and_loaded(torchs.state_dict()))
        assert fused.param_groups[0]["lr"] == 0.05
        assert "foreach" not in fused.param_groups[0]
        assert [flat.data_ptr() for flat in fused.state_flats().values()][: len(flats)] == flats, (
            "state must stay in its buffers"
        )
        run(torchs, theirs, range(3, 6))
        run(fused, ours, range(3, 6))
        assert_close(ours, theirs)

    def test_fused_state_continues_in_torch(self, backend: tuple[str, str], name: str) -> None:
        fused, ours, torchs, theirs = twins(backend, name)
        for target in (fused, torchs):
            target.param_groups[0]["lr"] = 0.05
        run(fused, ours, range(3))
        run(torchs, theirs, range(3))
        assert shapes_of(fused.state_dict()["state"]) == shapes_of(torchs.state_dict()["state"])
        other = torch_optimizer(name, theirs)
        other.load_state_dict(saved_and_loaded(fused.state_dict()))
        assert other.param_groups[0]["lr"] == 0.05
        run(fused, ours, range(3, 6))
        run(other, theirs, range(3, 6))
        assert_close(ours, theirs)

    def test_state_before_the_first_step(self, backend: tuple[str, str], name: str) -> None:
        fused, ours, torchs, theirs = twins(backend, name)
        assert shapes_of(fused.state_dict()["state"]) == shapes_of(torchs.state_dict()["state"])
        torchs.load_state_dict(saved_and_loaded(fused.state_dict()))
        run(torchs, theirs, range(2))
        run(fused, ours, range(2))
        assert_close(ours, theirs)


@pytest.mark.parametrize(("backend", "name"), with_backends(QUICK, FUSED, QUICK_FUSED))
class TestCopies:
    def test_resuming_from_a_state_dict_is_exact(self, backend: tuple[str, str], name: str) -> None:
        where, device = backend
        straight, resumed = parameters(device=device), parameters(device=device)
        run(fused_optimizer(name, straight, backend=where), straight, range(4))
        first = fused_optimizer(name, resumed, backend=where)
        run(first, resumed, range(2))
        second = fused_optimizer(name, resumed, backend=where)
        second.load_state_dict(saved_and_loaded(first.state_dict()))
        run(second, resumed, range(2, 4))
        assert_equal(straight, resumed)

    def test_loading_its_own_state_changes_nothing(self, backend: tuple[str, str], name: str) -> None:
        where, device = backend
        params = parameters(device=device)
        optimizer = fused_optimizer(name, params, backend=where)
        run(optimizer, params, range(2))
        before = [flat.clone() for flat in optimizer.state_flats().values()]
        optimizer.load_state_dict(optimizer.state_dict())
        assert_equal(list(optimizer.state_flats().values()), before)

    @pytest.mark.parametrize(
        "duplicate",
        [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))],
        ids=["deepcopy", "pickle"],
    )
    def test_a_copy_is_complete_and_independent(
        self, backend: tuple[str, str], name: str, duplicate: Callable[[Any], Any]
    ) -> None:
        where, device = backend
        params = parameters(device=device)
        optimizer = fused_optimizer(name, params, backend=where, max_grad_norm=1.0)
        run(optimizer, params, range(2))
        other_params, other = duplicate((params, optimizer))
        kept = [param.detach().clone() for param in params]
        run(other, other_params, range(2, 4))
        assert_equal(params, kept)
        assert other.max_grad_norm == 1.0
        assert other.options.backend == where
        run(optimizer, params, range(2, 4))
        assert_equal(params, other_params)
