"""Buffers that are not finite: by design, on all replicas alike, or as damage of one of them."""

from __future__ import annotations

import logging
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import hdet_kernels as hk
from hdet_kernels.converge.nonfinite import (
    begins_nonfinite,
    fingerprints,
    finite_part,
    keep_own,
    names_of_nonfinite,
    pattern,
)
from tests.ranks import Cases

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
