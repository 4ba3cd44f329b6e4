"""Warm noisy initialisation: the size of the noise, and the arguments on which it depends."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from hdet_kernels import Buckets, warm_noisy_init_
from hdet_kernels.ensemble import RowEnsemble
from tests.ops.cases import BF16, FP32, FP64

COUNT = 40_000


@dataclass
class Replica:
    """The attributes of an ensemble that the noise depends on."""

    replica: int
    size: int = 8
    rows: int = 1


def weights(scale: float = 1.0, count: int = COUNT, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    """Return elements around ``scale``, whose root mean square is another number."""
    return nn.Parameter((scale * torch.linspace(0.5, 1.5, count, dtype=torch.float64)).to(dtype))


def added_noise(replica: int = 0, *params: nn.Parameter, **options: Any) -> list[torch.Tensor]:
    params = params or (weights(),)
    before = [p.detach().clone() for p in params]
    warm_noisy_init_(params, ensemble=Replica(replica), **options)
    return [p.detach().double() - b.double() for p, b in zip(params, before, strict=True)]


def rms(tensor: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor.detach().double())) / math.sqrt(tensor.numel())


def assert_normal(sample: torch.Tensor, std: float) -> None:
    """Assert mean, standard deviation and fourth moment within five standard errors."""
    n = sample.numel()
    assert abs(sample.mean().item()) < 5 * std / math.sqrt(n)
    assert sample.std().item() == pytest.approx(std, rel=5 / math.sqrt(2 * n))
    assert ((sample / std) ** 4).mean().item() == pytest.approx(3, abs=5 * math.sqrt(96 / n))


class TestSize:
    @pytest.mark.parametrize(("scale", "nu"), [(1.0, 0.2), (1e-3, 0.01), (300.0, 0.2)])
    def test_is_nu_times_the_root_mean_square_of_the_tensor(self, scale: float, nu: float) -> None:
        expected = nu * rms(weights(scale))
        assert expected == pytest.approx(nu * scale * math.sqrt(13 / 12), rel=1e-4)
        (found,) = added_noise(0, weights(scale), nu=nu)
        assert_normal(found, expected)

    def test_default_is_one_percent_of_each_tensor(self) -> None:
        small, large = added_noise(0, weights(0.1), weights(10.0))
        assert_normal(small, 0.01 * rms(weights(0.1)))
        assert_normal(large, 0.01 * rms(weights(10.0)))

    def test_global_scope_has_one_size_for_all_tensors(self) -> None:
        params = [weights(0.1), weights(10.0, COUNT // 2), nn.Parameter(torch.zeros(COUNT))]
        expected = 0.05 * rms(torch.cat([p.detach() for p in params]))
        for found in added_noise(0, *params, nu=0.05, scope="global"):
            assert_normal(found, expected)

    def test_a_tensor_of_zeros_stays_zero(self) -> None:
        zeros, others = nn.Parameter(torch.zeros(50)), weights()
        added_noise(0, zeros, others)
        assert not zeros.any()

    def test_nothing_at_nu_zero(self) -> None:
        param = weights()
        added_noise(0, param, nu=0)
        assert torch.equal(param, weights())


class TestReproducible:
    def test_the_same_again(self) -> None:
        assert torch.equal(added_noise(3, seed=5)[0], added_noise(3, seed=5)[0])

    @pytest.mark.parametrize(
        ("this", "that"),
        [((0, 0), (1, 0)), ((0, 0), (0, 1)), ((1, 11), (11, 1)), ((0, 1), (1, 0))],
        ids=["replica", "seed", "exchanged digits", "equal sums"],
    )
    def test_replicas_and_seeds_are_independent(self, this: tuple[int, int], that: tuple[int, int]) -> None:
        a, b = (added_noise(replica, seed=seed)[0] for replica, seed in (this, that))
        assert abs(np.corrcoef(a.numpy(), b.numpy())[0, 1]) < 5 / math.sqrt(COUNT)

    def test_tensors_of_a_replica_are_independent(self) -> None:
        a, b = added_noise(0, weights(), weights())
        assert abs(np.corrcoef(a.numpy(), b.numpy())[0, 1]) < 5 / math.sqrt(COUNT)

    def test_depends_on_the_values_through_their_size_alone(self) -> None:
        (a,), (b,) = added_noise(0, weights()), added_noise(0, weights(2.0))
        torch.testing.assert_close(2 * a, b, rtol=1e-4, atol=1e-6)

    def test_without_a_process_group_it_is_replica_zero(self) -> None:
        param = weights()
        warm_noisy_init_([param])
        assert torch.equal(param.detach().double() - weights().detach().double(), added_noise(0)[0])

    def test_strides_do_not_matter(self) -> None:
        square = torch.linspace(0.5, 1.5, 64 * 32).reshape(64, 32)
        plain, transposed = nn.Parameter(square.clone()), nn.Parameter(square.t().contiguous().t())
        for param in (plain, transposed):
            added_noise(0, param)
        assert torch.equal(plain, transposed)

    def test_global_generators_are_neither_read_nor_changed(self) -> None:
        found = []
        for seed in (1, 2):
            random.seed(seed)
            np.random.seed(seed)  # noqa: NPY002
            torch.manual_seed(seed)
            states = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
            found.append(added_noise()[0])
            assert random.getstate() == states[0]
            assert np.array_equal(np.random.get_state()[1], states[1][1])  # noqa: NPY002
            assert np.random.get_state()[2:] == states[1][2:]  # noqa: NPY002
            assert torch.equal(torch.get_rng_state(), states[2])
        assert torch.equal(*found)


class TestParameters:
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
    def test_other_dtypes(self, dtype: torch.dtype) -> None:
        param = weights(dtype=dtype)
        expected = 0.1 * rms(param)
        (found,) = added_noise(0, param, nu=0.1)
        assert param.dtype == dtype
        assert_normal(found, expected)

    def test_integers_are_left_alone_and_do_not_count(self) -> None:
        steps = nn.Parameter(torch.arange(5), requires_grad=False)
        (nothing, beside), (alone,) = added_noise(0, steps, weights()), added_noise(0, weights())
        assert not nothing.any()
        assert torch.equal(beside, alone)

    def test_integers_do_not_count_in_the_global_norm(self) -> None:
        steps = nn.Parameter(torch.full((5,), 10**6), requires_grad=False)
        assert torch.equal(
            added_noise(0, steps, weights(), scope="global")[1], added_noise(0, weights(), scope="global")[0]
        )

    def test_a_parameter_given_twice_gets_noise_once(self) -> None:
        param = weights()
        warm_noisy_init_([param, param], ensemble=Replica(0))
        assert torch.equal(param.detach().double() - weights().detach().double(), added_noise(0)[0])

    def test_empty_tensors(self) -> None:
        beside = added_noise(0, nn.Parameter(torch.empty(0)), weights())[1]
        assert torch.equal(beside, added_noise(0, weights())[0])

    def test_in_place_without_a_graph(self) -> None:
        model = nn.Linear(4, 4)
        buckets = Buckets(model.parameters())
        before = buckets.flats[0].clone()
        warm_noisy_init_(model.parameters(), ensemble=Replica(0))
        assert buckets.moved() == []
        assert not torch.equal(buckets.flats[0], before)
        assert model.weight.is_leaf
        assert model.weight.requires_grad
        assert model.weight.grad is None

    def test_gaps_do_not_matter(self) -> None:
        wide = torch.linspace(0.5, 1.5, 64 * 40).reshape(64, 40)
        gapped, plain = wide.clone()[:, 3:35], wide[:, 3:35].contiguous()
        outer = gapped._base
        added_noise(0, gapped, plain.clone())
        added_noise(0, plain, plain.clone())
        assert torch.equal(gapped, plain)
        assert outer is not None
        assert torch.equal(outer[:, :3], wide[:, :3])
        assert torch.equal(outer[:, 35:], wide[:, 35:])

    def test_autograd_sees_that_they_changed(self) -> None:
        param = nn.Parameter(torch.ones(5))
        loss = (param.exp() * param).sum()
        added_noise(0, param)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


ROWS = 3
#: By name, the shape of one row and the dtype.
SHAPES = {
    "matrix": ((37, 5), FP32),
    "scalar": ((), FP32),
    "half": ((300,), BF16),
    "wide": ((33,), FP64),
    "vector": ((2051,), FP32),
}


def replicas() -> list[list[torch.Tensor]]:
    """Return [replica][parameter]; each replica has another norm, as after separate training."""
    generator = torch.Generator().manual_seed(0)
    return [
        [((1 + row) * torch.randn(shape, generator=generator)).to(dtype) for shape, dtype in SHAPES.values()]
        for row in range(ROWS)
    ]


def stacked(rows: list[list[torch.Tensor]], how: str) -> list[torch.Tensor]:
    """Return [rows, …] for each parameter: dense, with gaps between the rows, or with the rows innermost in memory."""
    stacks = [torch.stack(rows_of) for rows_of in zip(*rows, strict=True)]
    if how == "gaps":
        around = [torch.full((ROWS, stack[0].numel() + 3), 7.0, dtype=stack.dtype) for stack in stacks]
        views = [outer[:, 1:-2].view(stack.shape) for outer, stack in zip(around, stacks, strict=True)]
        for view, stack in zip(views, stacks, strict=True):
            view.copy_(stack)
        return views
    if how == "innermost":
        return [stack.movedim(0, -1).contiguous().movedim(-1, 0) for stack in stacks]
    return stacks


class TestRows:
    @pytest.mark.parametrize("how", ["dense", "gaps", "innermost"])
    @pytest.mark.parametrize("scope", ["tensor", "global"])
    def test_rows_get_the_noise_of_separate_processes(self, scope: Any, how: str) -> None:
        """Equal to the bit: process 2 of an ensemble with three rows each holds replicas 6, 7 and 8."""
        alone, together = replicas(), stacked(replicas(), how)
        for row, params in enumerate(alone):
            warm_noisy_init_(params, 0.1, 5, Replica(2 * ROWS + row), scope=scope)
        warm_noisy_init_(together, 0.1, 5, Replica(2 * ROWS, 3 * ROWS, ROWS), scope=scope)
        for name, stack, *rows in zip(SHAPES, together, *alone, strict=True):
            assert torch.equal(stack, torch.stack(rows)), name
        for stack, before in zip(together, stacked(replicas(), how), strict=True):
            assert (stack != before).any(dim=tuple(range(1, stack.dim()))).all(), "a row without noise"

    def test_memory_between_rows_is_not_written(self) -> None:
        params = stacked(replicas(), "gaps")
        warm_noisy_init_(params, ensemble=RowEnsemble(ROWS))
        for param in params:
            outer = param._base
            assert outer is not None
            assert (outer[:, :1] == 7).all()
            assert (outer[:, -2:] == 7).all()

    def test_equal_rows_become_different(self) -> None:
        param = weights().detach().expand(2, COUNT).clone()
        warm_noisy_init_([param], ensemble=RowEnsemble(2))
        a, b = (row.double() - weights().detach().double() for row in param)
        assert abs(np.corrcoef(a.numpy(), b.numpy())[0, 1]) < 5 / math.sqrt(COUNT)

    @pytest.mark.parametrize(
        "param",
        [torch.ones(2, 4), torch.ones(()), torch.ones(4).expand(3, 4)],
        ids=["fewer rows", "no rows", "expanded"],
    )
    def test_tensors_without_these_rows_are_refused(self, param: torch.Tensor) -> None:
        good = torch.ones(3, 4)
        with pytest.raises(ValueError, match=r"3 replicas are the rows of tensors \[3, …\] without overlaps"):
            warm_noisy_init_([good, param], ensemble=RowEnsemble(3))
        assert (good == 1).all()


class TestRefuses:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"nu": -0.1}, "nu must be a finite number of at least 0, got -0.1"),
            ({"nu": math.nan}, "nu must be a finite number of at least 0, got nan"),
            ({"nu": math.inf}, "nu must be a finite number of at least 0, got inf"),
            ({"scope": "layer"}, "scope must be one of 'tensor', 'global', got 'layer'"),
        ],
        ids=lambda v: str(v) if isinstance(v, dict) else "",
    )
    def test_bad_arguments_before_anything_is_touched(self, options: dict[str, Any], message: str) -> None:
        param = weights()
        with pytest.raises(ValueError, match=message):
            warm_noisy_init_([param], **options)
        assert torch.equal(param, weights())

    @pytest.mark.parametrize("params", [[], [torch.arange(3)], [torch.empty(0)]], ids=["none", "integers", "empty"])
    def test_nothing_to_initialise(self, params: list[torch.Tensor]) -> None:
        with pytest.raises(ValueError, match="got no floating-point parameters"):
            warm_noisy_init_(params)


def test_parameters_tied_by_memory_get_noise_once() -> None:
    first = nn.Parameter(torch.ones(1000))
    tied = nn.Parameter(first.data)
    alone = nn.Parameter(torch.ones(1000))
    warm_noisy_init_([first, tied], seed=1)
    warm_noisy_init_([alone], seed=1)
    assert torch.equal(first, alone)


def test_a_single_tensor_is_refused() -> None:
    with pytest.raises(TypeError, match=r"pass \[tensor\]"):
        warm_noisy_init_(torch.ones(3, 4))
