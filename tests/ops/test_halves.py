"""Split masters from their halves to float32 and back: the same bits in every backend."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hdet_kernels.ops.halves import read_halves, write_halves
from hdet_kernels.split_master import joined, split
from tests.ops.cases import available

BACKENDS = [available("cpp", "cpu"), available("torch", "cpu")]


def bits(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Random bits: numbers of every size, infinities, NaNs and zeros among them."""
    generator = torch.Generator().manual_seed(0)
    found = torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8, generator=generator)
    return found.flatten(-2).view(dtype)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", [(70_001,), (0,), (3, 1001)], ids=str)
def test_halves_and_masters_are_those_of_the_equations(backend: tuple[str, str], shape: tuple[int, ...]) -> None:
    param, low = bits(shape, torch.bfloat16), bits(shape, torch.int16)
    for number in (0.0, -0.0, torch.inf, -torch.inf):  # whose lower half other code has not written
        param[..., :: 7 + int(number == 0)] = number
    found = read_halves(param, low, backend=backend[0])
    assert torch.equal(found.view(torch.int32), joined(param, low).view(torch.int32))
    out = torch.empty(shape)
    assert read_halves(param, low, out=out, backend=backend[0]) is out
    assert torch.equal(out.view(torch.int32), found.view(torch.int32))
    master = bits(shape, torch.float32)
    write_halves(master, param, low, backend=backend[0])
    for mine, expected in zip((param, low), split(master), strict=True):
        assert torch.equal(mine.view(torch.int16), expected.view(torch.int16))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_part_of_several_rows_is_read_and_written(backend: tuple[str, str]) -> None:
    param, low = bits((3, 50), torch.bfloat16), bits((3, 50), torch.int16)
    before = param.clone(), low.clone()
    part = (half[:, 10:20] for half in (param, low))
    write_halves(torch.ones(10).expand(3, 10), *part, backend=backend[0])
    assert (read_halves(param[:, 10:20], low[:, 10:20], backend=backend[0]) == 1).all()
    for half, old in zip((param, low), before, strict=True):
        for kept in (slice(10), slice(20, None)):
            assert torch.equal(half[:, kept].view(torch.int16), old[:, kept].view(torch.int16))


@pytest.mark.parametrize("backend", [available("cpp", "cpu")])
def test_the_operators_check_before_they_write(backend: tuple[str, str]) -> None:
    param, low, master = torch.ones(4, dtype=torch.bfloat16), torch.zeros(4, dtype=torch.int16), torch.full((4,), 2.0)
    operators = torch.ops.hdet_kernels
    for name, wrong in {"low": (param, low[:3], master), "master": (param, low, master.double())}.items():
        with pytest.raises(RuntimeError, match=f"{name} (must have 4 elements|has another dtype)"):
            operators.join_halves(*wrong)
        with pytest.raises(RuntimeError, match=name):
            operators.split_into_halves(wrong[2], *wrong[:2])
    assert param.tolist() == [1.0] * 4
    assert master.tolist() == [2.0] * 4
