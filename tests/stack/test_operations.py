"""Operations in a stack are as precise as in separate modules: ``bench/stack_operations.py``."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from bench.stack_comparison import SeparateModulesFail, compare
from bench.stack_operations import OPERATIONS, PRECISIONS, RANDOM_OPERATIONS, outcome

# A few of each family in make test; all of them in make test-full.
CHOSEN = [
    *("batch_norm, training", "batch_norm, no statistics", "instance_norm", "embedding_bag, mean", "GRUCell"),
    *("attention, learned bias", "MultiheadAttention", "einsum", "max_pool2d", "interpolate, bilinear", "scatter_add"),
    *("cross_entropy, smoothed", "ctc_loss", "dropout", "attention, dropout"),
]
EVERY = [*OPERATIONS, *RANDOM_OPERATIONS]


@pytest.mark.parametrize("precision", PRECISIONS["cpu"])
@pytest.mark.parametrize(
    "name", [name if name in CHOSEN else pytest.param(name, marks=pytest.mark.full) for name in EVERY]
)
def test_operations_are_as_precise_as_in_separate_modules(name: str, precision: str) -> None:
    found = outcome(name, precision, "cpu")
    assert found["result"] in ("equal", "unknown"), found


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no usable NVIDIA GPU")
@pytest.mark.parametrize("precision", PRECISIONS["cuda"])
@pytest.mark.parametrize("name", EVERY)
def test_operations_on_a_gpu(name: str, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    found = outcome(name, precision, "cuda")
    assert found["result"] in ("equal", "unknown"), found


def test_nothing_that_torch_computes_is_left_out() -> None:
    assert len(set(EVERY)) == len(EVERY)
    assert set(CHOSEN) <= set(EVERY)


@pytest.mark.parametrize("name", ["attention", "attention, causal", "attention, boolean mask", "batch_norm, training"])
def test_corrected_operations_are_computed_together(name: str) -> None:
    for precision in PRECISIONS["cpu"]:
        found = outcome(name, precision, "cpu")
        assert not found["loops"]
        assert not found["one by one"]


def test_a_wrong_result_is_noticed() -> None:
    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        wrong = torch._C._functorch.is_batchedtensor(model.weight)  # type: ignore[arg-type]
        return model(x).square().mean() * (1 + 1e-4 * wrong)

    x = torch.randn(6, 8)
    assert compare(nn.Linear(8, 2), loss_fn, [x], "fp32").excess > 10
    assert compare(nn.Linear(8, 2), lambda model, x: model(x).square().mean(), [x], "fp32").excess <= 1


def test_separate_modules_that_fail_are_told_apart() -> None:
    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        raise RuntimeError("not in this precision")

    with pytest.raises(SeparateModulesFail, match="not in this precision"):
        compare(nn.Linear(8, 2), loss_fn, [torch.randn(6, 8)], "fp32")
