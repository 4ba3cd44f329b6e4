"""Float32 masters as bf16 parameters and lower halves: nothing is lost, and no value of either half is a trap."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hdet_kernels.ops import halves
from hdet_kernels.ops.halves import read_halves, write_halves
from hdet_kernels.split_master import copy_of, joined, low_of_copy, split

BF16 = torch.bfloat16
INF = float("inf")


def bits(values: Tensor) -> Tensor:
    return values.view(torch.int32 if values.dtype == torch.float32 else torch.int16)


def from_bits(*words: int) -> Tensor:
    return torch.tensor(words, dtype=torch.int64).to(torch.int32).view(torch.float32)


def numbers() -> Tensor:
    """Return floats of all exponents and signs, without NaN: every upper half, with random and extreme lower halves."""
    upper = torch.arange(2**16, dtype=torch.int64) << 16
    random = torch.randint(2**16, (2**16,), generator=torch.Generator().manual_seed(0))
    words = [upper | low for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF, random)]
    values = torch.cat(words).to(torch.int32).view(torch.float32)
    return values[~values.isnan()]


# Exactly between two bf16 numbers, so that ties to even and ties away from zero differ; and the odd number above.
TIES = from_bits(0x3F808000, 0xBF808000, 0x00008000, 0x80008000, 0x3F818000)


def test_a_split_master_is_the_same_bits_and_its_parameter_the_nearest_number() -> None:
    master = numbers()
    param, low = split(master)
    assert (param.dtype, low.dtype) == (BF16, torch.int16)
    assert torch.equal(bits(joined(param, low)), bits(master))
    nearest = master.to(BF16)
    tie = (bits(master) & 0x1FFFF) == 0x8000  # between an even number and the odd one above it
    assert torch.equal(bits(param)[~tie], bits(nearest)[~tie])
    assert torch.equal(bits(param)[tie], bits(nearest)[tie] + 1), "away from zero"


def test_every_nan_stays_nan() -> None:
    param, low = split(from_bits(0x7F800001, 0x7FFFFFFF, 0xFF800001, 0xFFFFFFFF, 0x7FC00000))
    assert param.isnan().all()
    assert (low == 0).all()
    assert joined(param, low).isnan().all()


@pytest.mark.parametrize("low", [-(2**15), -1, 0, 1, 2**15 - 1])
def test_any_lower_half_leaves_a_written_parameter_what_it_is(low: int) -> None:
    param = torch.arange(2**16).to(torch.int16).view(BF16)
    master = joined(param, torch.full((2**16,), low, dtype=torch.int16))
    assert torch.equal(master.isnan(), param.isnan())
    number = ~param.isnan()
    assert torch.equal(master[number].signbit(), param[number].signbit())
    inside = number & param.isfinite() & (param != 0)
    assert torch.equal(bits(split(master)[0])[inside], bits(param)[inside]), "it is the rounding of its master"
    zeros = master[param == 0]
    assert (zeros.abs() <= 2.0**-133 / 2).all(), "at most half of the smallest bf16 number"
    infinite = master[param.isinf()]
    assert (infinite.abs() >= 3.39e38).all(), "infinity, or what rounds to it"
    assert low < 0 or bool(infinite.isinf().all())


def test_a_copy_becomes_a_split_master_and_back_with_its_parameters() -> None:
    copy = torch.cat([numbers(), TIES])
    param = copy.to(BF16)
    low = low_of_copy(copy)
    there = joined(param, low)
    tie = bits(param) != bits(split(copy)[0])
    assert tie.any()
    assert torch.equal(bits(there)[~tie], bits(copy)[~tie])
    assert torch.equal(bits(there)[tie], bits(copy)[tie] - 1), "the last bit"

    param, low = split(copy)
    back = copy_of(param, low)
    assert torch.equal(bits(back.to(BF16)), bits(param)), "or the copy would take the parameter for overwritten"
    half = low == -(2**15)
    assert torch.equal(bits(back)[~half], bits(copy)[~half])
    assert torch.equal(bits(back)[half], bits(copy)[half] + 1), "the last bit"


def test_buffers_are_converted_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(halves, "_AT_ONCE", 7)
    master = torch.randn(2, 24)
    param, low = torch.empty(2, 24, dtype=BF16), torch.empty(2, 24, dtype=torch.int16)
    for backend in ("torch", None):
        write_halves(master, param.zero_(), low.zero_(), backend=backend)
        assert torch.equal(read_halves(param, low, backend=backend), master)
        assert torch.equal(param, split(master)[0])
