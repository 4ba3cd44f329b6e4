"""The hyperparameter table, and small tensors that are written to the device only when they change."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hdet_kernels.ops.table import COLUMNS, MOST_ARGUMENT_BYTES, HyperTable, Staged
from tests.ops.cases import make_table

ON_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no usable NVIDIA GPU"),
]
EACH_DEVICE = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_GPU)])


@EACH_DEVICE
def test_staged_values_are_written_only_when_they_changed(device: str) -> None:
    staged = Staged((2, 2), torch.float64, torch.device(device))
    values = np.array([[1.0, 2.0], [3.0, 4.0]]).tobytes()
    assert staged.write(values)
    assert staged.tensor.tolist() == [[1.0, 2.0], [3.0, 4.0]]
    staged.tensor.zero_()
    assert not staged.write(bytes(bytearray(values))), "equal values must not be copied again"
    seen = []
    for value in range(2000):  # far more copies than are ever in flight: no staging buffer may be overwritten too early
        staged.write(np.array([[float(value), 0.0], [0.0, 0.0]]).tobytes())
        seen.append(staged.tensor[0, 0].clone())
    assert torch.stack(seen).tolist() == list(range(2000))


@EACH_DEVICE
def test_a_tensor_learning_rate_follows_its_tensor(device: str) -> None:
    table = HyperTable(2, torch.device(device))
    lr = torch.tensor([0.5], device=device)
    rows = [{"lr": lr, "eps": 1e-8}, {"lr": 0.25}]
    table.write(rows)
    lr.fill_(0.125)
    table.write(rows)
    assert table.tensor[:, 0].tolist() == [0.125, 0.25]
    assert table.tensor[:, COLUMNS.index("eps")].tolist() == [1e-8, 0.0]


def test_a_seed_of_32_bits_is_kept_exactly() -> None:
    assert make_table("cpu", {"seed": 2**32 - 1}).tensor[0, COLUMNS.index("seed")].item() == 2**32 - 1


def test_columns_that_are_left_out_become_zero() -> None:
    table = make_table("cpu", {"lr": 0.5, "momentum": 0.9})
    table.write([{"lr": 0.25, "eps": 1}])
    row = dict(zip(COLUMNS, table.tensor[0].tolist(), strict=True))
    assert {name: value for name, value in row.items() if value} == {"lr": 0.25, "eps": 1.0}
    with pytest.raises(KeyError, match="learning_rate"):
        table.write([{"learning_rate": 0.1}])
    with pytest.raises(ValueError, match="has 1 rows, got 2"):
        table.write([{"lr": 0.1}, {"lr": 0.1}])


@EACH_DEVICE
@pytest.mark.parametrize("count", [1, 496, 497, MOST_ARGUMENT_BYTES // 8, MOST_ARGUMENT_BYTES // 8 + 1, 20_000])
def test_bytes_are_written_whatever_the_size(device: str, count: int) -> None:
    """On CUDA: of one launch, of two, of the most, and more, which are copied through pinned memory."""
    staged = Staged((count,), torch.int64, torch.device(device))
    for start in (0, 2**40, 0):
        values = np.arange(start, start + count).tobytes()
        assert not staged.holds(values)
        assert staged.write(values)
        assert staged.holds(values)
        assert staged.tensor.tolist() == list(range(start, start + count))
