"""The summary of tensors: checksums, hashes of integers and layouts, and buffers that are not finite by design."""

from __future__ import annotations

import logging
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import hdet_kernels as hk
from hdet_kernels.converge.summary import (
    Checksum,
    begins_nonfinite,
    fingerprints,
    finite_part,
    integer_hash,
    keep_own,
    names_of_nonfinite,
    pattern,
)
from tests.ranks import Cases

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


NAN, INF = math.nan, math.inf


def test_which_buffers_begin_not_finite() -> None:
    assert [begins_nonfinite(torch.tensor([value, 0.0])) for value in (1.0, NAN, INF, -INF)] == [
        False,
        True,
        True,
        True,
    ]
    assert begins_nonfinite(torch.tensor([complex(0, INF)]))
    assert not begins_nonfinite(torch.tensor([True]))


def test_a_fingerprint_changes_with_the_values() -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.complex64, torch.int64):
        values = torch.tensor([1.0, 2.0, 3.0]).to(dtype)
        before = fingerprints([values, values[::2]])
        assert before == fingerprints([values.clone(), values[::2]])
        values[2] = 5
        assert all(old != new for old, new in zip(before, fingerprints([values, values[::2]]), strict=True))
    assert fingerprints([]) == []


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_pattern_tells_where_and_what(device: str) -> None:
    rows = torch.tensor([[1.0, 2.0], [NAN, 2.0], [INF, 2.0], [-INF, 2.0], [2.0, NAN], [7.0, NAN]], device=device)
    first, *others = pattern([rows], 6, rows.device).tolist()
    assert first == 0
    assert others[3] == others[4], "finite values do not matter"
    assert len(set(others)) == 4
    assert all(0 < value < 2**48 for value in others)
    assert finite_part(rows)[1:4, 0].tolist() == [0.0] * 3


def test_healthy_rows_get_their_own_back_where_the_mean_is_not_finite() -> None:
    own = torch.tensor([[INF, 1.0], [5.0, 3.0], [NAN, NAN]])
    averaged = torch.tensor([[INF, 2.0]] * 3)
    keep_own(averaged, own, [True, True, False])
    assert averaged.tolist() == [[INF, 2.0], [5.0, 2.0], [INF, 2.0]]
    single = torch.tensor([NAN, 2.0])
    keep_own(single, torch.tensor([INF, 1.0]), [True])
    assert single.tolist() == [INF, 2.0]


def test_tensors_are_named_by_row() -> None:
    tensors = [torch.tensor([[1.0], [NAN]]), torch.tensor([[INF], [NAN]]), torch.tensor([[1], [2]]), torch.ones(2, 0)]
    assert names_of_nonfinite(zip("abcd", tensors, strict=True), 2) == {"0": ["b"], "1": ["a", "b"]}


# Over ranks


class Noted(nn.Module):
    """A layer with buffers: a constant mask, a minimum that starts at infinity, a value not known yet, a mean."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("mask", torch.tensor([0.0, -INF]))
        self.register_buffer("least", torch.full((3,), INF))
        self.register_buffer("later", torch.zeros(1))
        self.register_buffer("mean", torch.zeros(2))


def _buffers(rank: int, change: str, overlap_steps: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model = Noted()
    optimizer = hk.FusedSGD(model.parameters(), lr=0.1)
    scheduler = hk.HDETOneCycleLR(
        optimizer,
        0.1,
        12,
        sync_every=4,
        auto_lr=False,
        gradients="local",
        model=model,
        averaging=hk.Averaging(overlap_steps=overlap_steps),
    )
    told: list[str] = []

    class Told(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            told.append(record.getMessage())

    handler = Told()
    logging.getLogger("hdet_kernels").addHandler(handler)
    buffers: dict[str, Tensor] = dict(model.named_buffers())
    with torch.no_grad():
        buffers["mean"].fill_(float(rank))
        if change == "least":
            buffers["least"][0] = float(rank)  # finite on all ranks
            if rank == 0:
                buffers["least"][1] = 1.0  # and on one of them
        elif change == "later":
            buffers["later"].fill_(NAN)
        elif change == "damage" and rank == 1:
            buffers["mean"][1] = NAN
        elif change == "all differ":
            buffers["mean"][rank % 2] = NAN
    message = ""
    try:
        for _ in range(4 + overlap_steps):
            model.weight.grad = torch.ones(2)
            optimizer.step()
            scheduler.step(1.0)
    except RuntimeError as error:
        message = str(error)
    finally:
        logging.getLogger("hdet_kernels").removeHandler(handler)
    excluded = scheduler.history[0].excluded if scheduler.history else None
    values = {name: [None if math.isnan(v) else v for v in buffer.tolist()] for name, buffer in buffers.items()}
    dist.barrier()
    return {"values": values, "excluded": excluded, "told": told, "message": message}


CASES = Cases(
    2,
    _buffers,
    [(change, 0) for change in ("nothing", "least", "later", "damage", "all differ")] + [("least", 2), ("later", 2)],
)


@pytest.mark.parametrize("overlap_steps", [0, 2])
def test_a_buffer_that_starts_at_infinity_is_averaged_where_it_is_finite(overlap_steps: int) -> None:
    for rank, result in enumerate(CASES["least", overlap_steps]):
        assert result["message"] == ""
        assert result["excluded"] == []
        assert result["values"]["least"] == [0.5, 1.0 if rank == 0 else INF, INF]
        assert result["values"]["mask"] == [0.0, -INF]
        assert result["values"]["mean"] == [0.5, 0.5]


def test_a_mask_stays_as_it_is() -> None:
    for result in CASES["nothing", 0]:
        assert result["excluded"] == []
        assert result["values"]["mask"] == [0.0, -INF]
        assert result["values"]["least"] == [INF] * 3
        assert result["values"]["mean"] == [0.5, 0.5]
        assert result["told"] == []


@pytest.mark.parametrize("overlap_steps", [0, 2])
def test_what_is_nan_on_all_replicas_stays_so_and_is_told_once(overlap_steps: int) -> None:
    for result in CASES["later", overlap_steps]:
        assert (result["message"], result["excluded"]) == ("", [])
        assert result["values"]["later"] == [None]
        assert result["values"]["mean"] == [0.5, 0.5]
        assert len(result["told"]) == 1
        assert "buffer later" in result["told"][0]


def test_a_damaged_buffer_excludes_its_replica_and_is_named_there() -> None:
    first, second = CASES["damage", 0]
    for result in (first, second):
        assert result["excluded"] == [1]
        assert result["values"]["mean"] == [0.0, 0.0]
    assert any("replica 1 is left out of the mean; not finite: buffer mean" in line for line in second["told"])


def test_buffers_that_differ_are_named_and_the_learning_rate_is_not_blamed() -> None:
    for result in CASES["all differ", 0]:
        assert "buffer mean on ranks 0, 1" in result["message"]
        assert "hk.Averaging(buffers=False)" in result["message"]
        assert "learning rate" not in result["message"]
