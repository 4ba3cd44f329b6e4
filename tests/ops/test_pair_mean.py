"""The mean of two replicas: its values, its distance, and that an interrupt at any place averages nothing twice."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hdet_kernels.ops import pair_mean
from hdet_kernels.ops.pack import Pack
from hdet_kernels.ops.pair_mean import PairMean
from hdet_kernels.tensors import Piece
from tests.ops.cases import available

BACKENDS = [available("torch", "cpu"), available("cpp", "cpu")]
#: Of blocks, chunks and vectors none divides them all.
SIZES = (1, 2049, 1024, 5003, 7)


def case(backend: str, *dtypes: torch.dtype) -> tuple[Pack, list[Tensor], Tensor]:
    """Return tensors of which a part is averaged, in another order, with their pack and values to average with."""
    generator = torch.Generator().manual_seed(0)
    tensors = [
        torch.randn(size, generator=generator, dtype=torch.float64).to(dtypes[index % len(dtypes)])
        for index, size in enumerate(SIZES)
    ]
    pieces = [Piece(3, 5, 5000), Piece(0, 0, 1), Piece(1, 0, 2049), Piece(4, 2, 7), Piece(2, 1, 1024)]
    wide = torch.promote_types(dtypes[0], torch.float32)
    pack = Pack(SIZES, pieces, tensors[0].device, wide, backend=backend)
    return pack, tensors, torch.randn(pack.numel, generator=generator, dtype=torch.float64).to(wide)


def expected_of(pack: Pack, tensors: list[Tensor], received: Tensor, measured: int) -> tuple[list[Tensor], float]:
    own = torch.empty_like(received)
    pack.pack(tensors, own)
    means = [tensor.clone() for tensor in tensors]
    pack.unpack(means, (own + received) / 2)
    return means, float((own - received)[:measured].double().square().sum())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("measured", [0, 4996, 6000, 10**6])
@pytest.mark.parametrize(
    "dtypes", [(torch.float32,), (torch.float64,), (torch.bfloat16, torch.float32, torch.float16)], ids=str
)
def test_means_and_their_distance(backend: tuple[str, str], measured: int, dtypes: tuple[torch.dtype, ...]) -> None:
    pack, tensors, received = case(backend[0], *dtypes)
    means, distance = expected_of(pack, tensors, received, measured)
    versions = [tensor._version for tensor in tensors]
    mean = PairMean(pack, tensors, received, measured)
    mean.write()
    assert all(map(torch.equal, tensors, means))
    assert mean.squared_distance == pytest.approx(distance, rel=1e-6)
    assert all(tensor._version > before for tensor, before in zip(tensors, versions, strict=True))
    mean.write()
    assert all(map(torch.equal, tensors, means)), "averaged twice"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_an_interrupt_around_the_write(backend: tuple[str, str], after: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    pack, tensors, received = case(backend[0], torch.float32)
    means, _ = expected_of(pack, tensors, received, 0)
    mean = PairMean(pack, tensors, received)
    holder: Any = pair_mean.implementation("cpp") if backend[0] == "cpp" else Pack
    name = "pair_mean_" if backend[0] == "cpp" else "unpack"
    original = getattr(holder, name)

    def interrupted(*args: Any) -> None:
        monkeypatch.setattr(holder, name, original)
        if after:
            original(*args)
        raise KeyboardInterrupt

    monkeypatch.setattr(holder, name, interrupted)
    with pytest.raises(KeyboardInterrupt):
        mean.write()
    mean.write()
    assert all(map(torch.equal, tensors, means))


@pytest.mark.parametrize("backend", [available("cpp", "cpu")])
def test_the_operator_checks_before_it_writes(backend: tuple[str, str]) -> None:
    pack, tensors, received = case(backend[0], torch.float32)
    before = [tensor.clone() for tensor in tensors]
    table = pack.table
    given = [table.chunks, table.point_at(table.match(tensors)), table.strides, 0, received]
    for result in (torch.zeros(2), torch.zeros(3, dtype=torch.float64)):
        with pytest.raises(RuntimeError, match="result"):
            torch.ops.hdet_kernels.pair_mean_(*given, result)
    with pytest.raises(RuntimeError, match="staging buffer must be float32 or float64"):
        torch.ops.hdet_kernels.pair_mean_(*given[:4], received.half(), torch.zeros(2, dtype=torch.float64))
    assert all(map(torch.equal, tensors, before))
