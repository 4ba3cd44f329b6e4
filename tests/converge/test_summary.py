"""The summary of tensors: checksums, hashes of integers, and the description of a layout."""

from __future__ import annotations

import math

import pytest
import torch

from hdet_kernels.converge.summary import Checksum, describe_layout, integer_hash

CPU = torch.device("cpu")


def test_a_checksum_is_the_norm_in_fp64() -> None:
    tensors = [torch.tensor([3.0, 4.0]), torch.tensor([12.0]), torch.empty(0)]
    assert Checksum(1, None)(tensors, CPU).tolist() == [13.0]
    assert Checksum(1, None)(tensors, CPU).dtype == torch.float64
    assert Checksum(1, None)([], CPU).tolist() == [0.0]


def test_doubles_have_a_norm_of_their_own_and_another_weight() -> None:
    single, double = torch.tensor([3.0]), torch.tensor([4.0], dtype=torch.float64)
    checksum = Checksum(1, None)
    assert checksum([single, double], CPU).tolist() == [3.0 + 2 * 4.0]
    assert checksum([torch.tensor([4.0]), torch.tensor([3.0], dtype=torch.float64)], CPU).tolist() == [4.0 + 2 * 3.0]


def test_every_row_has_its_own_checksum() -> None:
    found = Checksum(2, None)([torch.tensor([[3.0], [6.0]]), torch.tensor([[4.0], [8.0]])], CPU)
    assert found.tolist() == [5.0, 10.0]


def test_of_many_tensors_it_is_found_again_where_they_lie_now() -> None:
    tensors = [torch.full((4,), 1.0, dtype=torch.float64 if number == 5 else torch.float32) for number in range(100)]
    checksum = Checksum(1, None)
    plain = math.sqrt(99 * 4)
    assert checksum(tensors, CPU).tolist() == checksum(tensors, CPU).tolist() == [plain + 2 * 2.0]
    tensors[5].fill_(2.0)
    assert checksum(tensors, CPU).tolist() == [plain + 2 * 4.0]
    tensors[7].data = torch.full((4,), 1.5)
    assert checksum(tensors, CPU).tolist() == [math.sqrt(98 * 4 + 9) + 2 * 4.0], "at another address"
    tensors[7].data = torch.ones(6)
    assert checksum(tensors, CPU).tolist() == [math.sqrt(98 * 4 + 6) + 2 * 4.0], "of another size"
    tensors[5] = torch.ones(4)
    assert checksum(tensors, CPU).tolist() == [math.sqrt(99 * 4 + 6)], "of another dtype"
    assert not any(alike.matched.tensors for _, groups in checksum._known.values() for alike in groups), "none is kept"


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_it_is_finite_exactly_if_all_elements_are(dtype: torch.dtype, bad: float) -> None:
    tensors = [torch.ones(1000, dtype=dtype), torch.full((7,), 1e30, dtype=dtype)]
    checksum = Checksum(1, None)
    assert checksum(tensors, CPU).isfinite().all(), "no overflow"
    tensors[0][999] = bad
    assert not checksum(tensors, CPU).isfinite().any()


def test_squares_of_doubles_that_overflow_do_not_make_it_infinite() -> None:
    checksum = Checksum(2, None)
    tensors = [
        torch.tensor([[1e200], [1.0]], dtype=torch.float64),
        torch.tensor([[3.0], [1.7e308]], dtype=torch.float64),
    ]
    assert checksum(tensors, CPU).isfinite().all()
    assert (checksum(tensors, CPU) > 1e190).all()
    tensors[0][1, 0] = math.inf
    assert checksum(tensors, CPU).isinf().tolist() == [False, True]


def test_integers_hash_by_value_place_and_row() -> None:
    def hashed(*tensors: torch.Tensor, rows: int = 1) -> list[int]:
        return integer_hash(tensors, rows, CPU).tolist()

    mask = torch.tensor([1, 0, 0, 1, 0])
    assert hashed(mask) == hashed(mask.clone())
    assert hashed(mask) != hashed(torch.tensor([0, 1, 1, 0, 0])), "changes that cancel out in a sum"
    assert hashed(mask) != hashed(mask.flip(0))
    assert hashed(mask, torch.tensor([2])) != hashed(mask, torch.tensor([3]))
    assert hashed(mask) == hashed(mask.to(torch.int8)) == hashed(mask.bool())
    rows = torch.stack([mask, mask, mask.flip(0)])
    first, second, third = hashed(rows, rows=3)
    assert first == second != third
    assert all(0 <= value < 2**48 for value in (first, third)), "exact in fp64"
    assert hashed() == [0]


def test_a_layout_is_described_by_tensor() -> None:
    weight, bias = torch.zeros(3, 2).t(), torch.zeros(3, dtype=torch.bfloat16)
    assert describe_layout([weight, bias]) == {
        "tensors": 2,
        "elements": 9,
        "tensor 0": "float32 (2, 3) with strides (1, 2)",
        "tensor 1": "bfloat16 (3,) with strides (1,)",
    }
    assert list(describe_layout([bias], ["moment"])) == ["tensors", "elements", "moment"]
    with pytest.raises(ValueError, match="zip"):
        describe_layout([weight, bias], ["one"])
