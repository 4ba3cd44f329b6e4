"""State in 8 bits: what codes stand for, how numbers are rounded to them, and blocks that have no ordinary scale."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hdet_kernels.ops.chunks import CHUNK, ChunkTable
from hdet_kernels.ops.torch.companding import (
    BLOCK,
    BLOCKS_PER_CHUNK,
    SMALLEST_SCALE,
    TOP,
    block_count,
    decode,
    encode,
    encode_again,
    first_scales,
    positions_of_bits,
)
from hdet_kernels.ops.torch.rounding import random_bits
from hdet_kernels.tensors import Slot

ROOT = Path(__file__).parents[2]
SIGNED = pytest.mark.parametrize("signed", [True, False], ids=["signed", "unsigned"])


def numbers(count: int, signed: bool) -> Tensor:
    """Return random numbers of many orders of magnitude."""
    generator = torch.Generator().manual_seed(count)
    values = torch.randn(count, generator=generator) * 10 ** (3 * torch.randn(count, generator=generator))
    return values if signed else values.square()


def neighbours(values: Tensor, signed: bool) -> tuple[Tensor, Tensor]:
    """Return the next smaller and the next larger value that a code stands for."""
    _, scales = encode(values, signed)
    codes = torch.arange(1 if signed else 0, 256, dtype=torch.uint8)
    own = scales.repeat_interleave(BLOCK)[: len(values)]
    levels = decode(codes.expand(len(own), -1), own[:, None], signed)
    low = torch.where(levels <= values[:, None] * (1 + 3e-7 * values[:, None].sign()), levels, -torch.inf).amax(1)
    high = torch.where(levels >= values[:, None] * (1 - 3e-7 * values[:, None].sign()), levels, torch.inf).amin(1)
    return low, high


@SIGNED
def test_every_code_survives_decoding_and_encoding(signed: bool) -> None:
    codes = torch.arange(1 if signed else 0, 256, dtype=torch.uint8)
    for scale in (1.0, 3e-7, 1.5 * SMALLEST_SCALE[signed], 3e37):
        values = decode(codes, torch.tensor([scale]), signed)
        # The scale is a millionth more than before: of 65536 random numbers, a few at either end may lead elsewhere.
        for noise in (0.0, *(torch.tensor(bits) for bits in (16, 0x3FFF, 0xC000, 0xFFEF))):
            again, scales = encode(values, signed, noise)
            assert torch.equal(again, codes)
            assert scales.tolist() == pytest.approx([scale], rel=1.2e-6), "a millionth below the highest level"


@SIGNED
def test_larger_numbers_never_get_lower_codes(signed: bool) -> None:
    values = torch.linspace(-1 if signed else 0, 1, 100_001).pow(3)
    blocks = torch.nn.functional.pad(values[:-1].unflatten(0, (-1, 200)), (0, 1), value=1.0)  # all with the scale 1
    for noise in (0.0, *(torch.tensor(bits) for bits in (0, 0x1234, 0xFFFF))):
        codes, _ = encode(blocks, signed, noise)
        assert (codes[:, :-1].flatten().int().diff() >= 0).all()


@SIGNED
def test_decoded_numbers_encode_to_the_same_numbers(signed: bool) -> None:
    values = numbers(200 * BLOCK + 7, signed)
    values[3 * BLOCK : 4 * BLOCK] = 0
    values[5 * BLOCK] = torch.nan
    once = decode(*encode(values, signed, noise=random_bits(1, 2, 0, values)), signed)
    again = decode(*encode_again(once, signed), signed)
    torch.testing.assert_close(again, once, rtol=0, atol=0, equal_nan=True)
    plain = decode(*encode(once, signed), signed)
    assert (plain != once)[: 3 * BLOCK].any() or (plain != once)[6 * BLOCK :].any(), "rounding alone does not do it"


@SIGNED
@pytest.mark.parametrize("count", [1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 7])
def test_rounding_picks_a_neighbour_and_to_nearest_the_nearer_one(signed: bool, count: int) -> None:
    values = numbers(count, signed)
    low, high = neighbours(values, signed)
    for noise in (0, 0x7FFF, 0xFFFF):
        codes, scales = encode(values, signed, torch.full((count,), noise))
        got = decode(codes, scales, signed)
        assert scales.shape == (block_count(count),)
        assert ((got == low) | (got == high)).all()
    got = decode(*encode(values, signed), signed)
    above_zero = got != 0 if signed else torch.ones(count, dtype=torch.bool)
    nearest = torch.where((values - low) * 2 < high - low, low, high)
    # In the middle between two levels both are right.
    middle = ((values - low) - (high - values)).abs() <= 1e-4 * (high - low)
    assert ((got == nearest) | middle)[above_zero].all()


@SIGNED
def test_the_mean_over_all_random_numbers_is_the_value(signed: bool) -> None:
    # One number in each of many gaps between levels, at the lower end and at the upper one, and below the first level.
    gaps = torch.cat([torch.arange(6), torch.arange(6, 120, 6), torch.arange(120, 127)])
    gaps = torch.cat([-gaps - 1, gaps]) if signed else torch.cat([torch.tensor([0]), 2 * gaps, 2 * gaps + 1])
    codes = (gaps + 128 if signed else gaps).to(torch.uint8)
    scale = torch.tensor([1.0])
    low, high = decode(codes, scale, signed), decode(codes + 1, scale, signed)
    values = low + torch.rand(len(gaps), generator=torch.Generator().manual_seed(1)) * (high - low)
    if not signed:
        values[0] = 0.3 * low[0]
    values = torch.cat([values, torch.ones(1)])
    noise = torch.arange(2**16)[:, None]
    codes, scales = encode(values.expand(len(noise), -1), signed, noise)
    mean = decode(codes, scales, signed).double().mean(0)
    error, width = (mean - values).abs()[:-1], (high - low).double()
    if not signed:
        assert error[0] == low[0] - values[0]
        # Less than 4 units below a level, numbers are always rounded up.
        error[1:] -= torch.where(high - values[:-1] < 4 / TOP[signed], 4 / TOP[signed], 0.0)[1:]
    assert (error <= width * 2.0**-16 + 5e-7 * values[:-1].abs())[0 if signed else 1 :].all()


def test_a_parameter_and_its_states_use_different_parts_of_a_hash() -> None:
    position = torch.arange(8, 24)
    used = positions_of_bits(position)
    assert (used >> 2 == position >> 2).all()
    assert (used != position).all()
    assert used.sort().values.equal(position), "and no two elements the same one"


def test_states_that_share_a_random_number_disturb_their_quotient_less() -> None:
    source = torch.Generator().manual_seed(2)
    first = torch.randn(200, BLOCK, generator=source)
    second = (first.abs() * (1 + torch.rand(200, BLOCK, generator=source))).square()
    bits, others = torch.randint(2**16, (2, 200, BLOCK), generator=source)
    exact = first / second.sqrt()

    def rounded(noise: torch.Tensor) -> torch.Tensor:
        return decode(*encode(first, True, bits), True) / decode(*encode(second, False, noise), False).sqrt()

    assert (rounded(bits) - exact).std() < 0.95 * (rounded(others) - exact).std()


def test_no_sum_of_squares_of_a_block_is_0_and_small_ones_are_the_smallest() -> None:
    values = torch.tensor([0.0, 1e-30, 1e-12, 1.0])
    for noise in (0, 0xFFFF):
        codes, scales = encode(values, False, torch.full((4,), noise))
        assert codes[:3].tolist() == [0, 0, 0]
        assert codes[3] >= 254
        assert decode(codes, scales, False)[:3].tolist() == pytest.approx([511.0**-4] * 3, rel=2e-6)


@SIGNED
def test_blocks_without_an_ordinary_scale(signed: bool) -> None:
    values = torch.ones(6 * BLOCK - 10)
    blocks = values.split(BLOCK)
    blocks[0].fill_(0.0)
    blocks[1].fill_(1e-40)
    blocks[2][3] = torch.inf
    blocks[3][BLOCK - 1] = torch.nan
    blocks[4].fill_(torch.finfo(torch.float32).max * (1 - 2**-19))
    for noise in (0, 0x7FFF, 0xFFFF):
        codes, scales = encode(values, signed, torch.full(values.shape, noise))
        got = decode(codes, scales, signed).split(BLOCK)
        assert (got[0] == (0 if signed else decode(*encode(torch.zeros(1), signed), signed))).all()
        for block in got[:2]:
            assert (block < 2e-38).all(), "nothing, or the smallest value of the smallest scale"
        assert got[2].isnan().all()
        assert got[3].isnan().all()
        # The largest is a millionth below the highest level, and is rounded to the one below that hardly ever.
        step = 1.6e-2 if noise in (0, 0xFFFF) else 1.2e-6
        torch.testing.assert_close(got[4], blocks[4], rtol=step, atol=0)
        torch.testing.assert_close(got[5], blocks[5], rtol=step, atol=0)
        assert scales[2:4].view(torch.int32).tolist() == [0x7FC00000] * 2


@SIGNED
def test_new_buffers_of_zeros_stand_for_zeros(signed: bool) -> None:
    codes, scales = torch.zeros(300, dtype=torch.uint8), torch.zeros(2)
    assert (decode(codes, scales, signed) == 0).all()
    assert (decode(*encode_again(torch.zeros(300), signed), signed) == 0).all()


def test_replicas_are_encoded_row_by_row() -> None:
    values = torch.stack([numbers(300, True), 5 * numbers(300, True)])
    codes, scales = encode(values, True)
    assert scales.shape == (2, 2)
    for row in range(2):
        alone = encode(values[row], True)
        assert torch.equal(codes[row], alone[0])
        assert torch.equal(scales[row], alone[1])
    assert torch.equal(decode(codes, scales, True)[1], decode(codes[1], scales[1], True))


def test_the_scales_of_a_slot_follow_each_other() -> None:
    sizes = (1, 0, CHUNK, CHUNK + 1, 5)
    slots = [Slot(0, 3000 * index, size, (size,), (1,)) for index, size in enumerate(sizes)]
    chunks = ChunkTable(slots, [0] * len(sizes), torch.device("cpu"), torch.float32).chunks.tolist()
    for index, first in enumerate(first_scales(sizes)):
        own = [number for number, chunk in enumerate(chunks) if chunk[3] == index]
        scales = [
            BLOCKS_PER_CHUNK * number + block for number in own for block in range(block_count(chunks[number][2]))
        ]
        assert scales == list(range(first, first + block_count(sizes[index])))


def test_the_compiled_backends_have_the_same_constants() -> None:
    text = (ROOT / "csrc/companding.h").read_text()
    for name, of in (("kTop", TOP), ("kSmallestScale", SMALLEST_SCALE)):
        found = re.search(rf"float {name} = kSigned \? (\S+)f : (\S+)f;", text)
        assert found is not None
        assert [float.fromhex(part) if "p" in part else float(part) for part in found.groups()] == [of[True], of[False]]
    constants = dict(re.findall(r"constexpr int64_t (k\w+) = (\d+);", text))
    assert constants == {"kStateBlock": str(BLOCK), "kBlocksPerChunk": str(BLOCKS_PER_CHUNK)}
