"""The two sums of squares of amsgrad in 8 bits: the largest one as a short float, the current one as a share of it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hdet_kernels.ops.amsgrad_codes import (
    CURRENT,
    LARGEST,
    decode_largest,
    decode_share,
    decode_state,
    encode_largest,
    encode_share,
    encode_state,
)
from hdet_kernels.ops.companding import BLOCK
from hdet_kernels.ops.rounding import random_bits


def numbers(count: int, *, decades: float = 4.0, seed: int = 0) -> Tensor:
    """Return positive numbers over many orders of magnitude."""
    generator = torch.Generator().manual_seed(seed)
    return 10 ** (torch.rand(count, generator=generator) * decades - decades)


def test_the_largest_sum_is_rounded_to_the_nearest_of_its_floats() -> None:
    values = numbers(3 * BLOCK + 7, decades=8)
    codes, scales = encode_largest(values)
    assert (codes.dtype, codes.shape, scales.shape) == (torch.uint8, values.shape, (4,))
    exponents = torch.log2(scales)
    assert torch.equal(exponents, exponents.round())
    # Half of an eighth of the number before the point.
    assert ((decode_largest(codes, scales) / values - 1).abs() <= 1 / 16).all()


def test_every_code_of_the_largest_sum_is_its_own() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    for scale in (2.0**-60, 1.0, 2.0**127):
        values = decode_largest(codes, torch.tensor([scale]))
        assert (values.diff() > 0).all()
        again, scales = encode_largest(values)
        assert torch.equal(again, codes)
        assert scales.tolist() == [scale]


def test_a_new_largest_number_of_the_block_changes_no_other() -> None:
    """Its scale grows by a power of two, and codes move by whole exponents: nothing is rounded again."""
    values = decode_largest(*encode_largest(numbers(BLOCK)))
    for growth in (1.01, 3.0, 1000.0):
        grown = values.clone()
        grown[3] = values.max() * growth
        got = decode_largest(*encode_largest(grown))
        others = torch.arange(BLOCK) != 3
        assert torch.equal(got[others], values[others])


def test_extremes_of_the_largest_sum() -> None:
    highest = torch.finfo(torch.float32).max
    codes, scales = encode_largest(torch.tensor([highest, 1.0, 0.0]))
    assert decode_largest(codes, scales).tolist() == [1.875 * 2.0**127, 2.0**96, 2.0**96]
    codes, scales = encode_largest(torch.tensor([0.0, 1e-40]))
    assert decode_largest(codes, scales).tolist() == [2.0**-91] * 2
    for bad in (torch.inf, torch.nan):
        codes, scales = encode_largest(torch.tensor([1.0] * BLOCK + [bad, 1.0]))
        got = decode_largest(codes, scales)
        assert got[:BLOCK].tolist() == [1.0] * BLOCK
        assert got[BLOCK:].isnan().all()


def test_a_share_is_rounded_to_nearest_and_decodes_to_the_same_again() -> None:
    largest = decode_largest(*encode_largest(numbers(4096)))
    values = largest * torch.rand(4096, generator=torch.Generator().manual_seed(1)) * 1.0624
    once = decode_share(encode_share(values, largest), largest)
    # The widest step, of the smallest values, is (255² - 254²)/255².
    assert ((once - values).abs() <= 1.0625 / 255 * largest).all()
    assert torch.equal(decode_share(encode_share(once, largest), largest), once)
    close = values > 0.9 * largest
    assert ((once - values).abs()[close] <= 0.0017 * largest[close]).all()


def test_a_share_is_right_on_average() -> None:
    largest, values = torch.ones(100), torch.linspace(0, 1.0625, 100)
    noise = torch.arange(65536)[:, None].expand(-1, 100)
    codes = encode_share(values.expand_as(noise), largest.expand_as(noise), noise)
    mean = decode_share(codes, largest).double().mean(0)
    assert (mean - values.double()).abs().max() < 2e-6


def test_a_large_random_number_makes_both_states_smaller() -> None:
    value, largest = torch.full((65536,), 0.5004), torch.ones(65536)
    codes = encode_share(value, largest, torch.arange(65536))
    assert (codes.int().diff() <= 0).all()
    assert codes[0] == codes[-1] + 1


def test_zero_and_numbers_that_are_not_finite_have_a_code() -> None:
    largest = torch.tensor([1.0, 1.0, 1.0, torch.nan])
    for noise in (0, 1, 32768, 65535):
        codes = encode_share(torch.tensor([0.0, 1.0625, 2.0, 1.0]), largest, torch.full((4,), noise))
        got = decode_share(codes, largest)
        assert got[0] == 0
        assert got[1:3].tolist() == pytest.approx([1.0625] * 2, rel=2e-5)
        assert got[3].isnan()


@pytest.mark.parametrize("count", [1, BLOCK, 2 * BLOCK + 3])
def test_both_states_are_encoded_as_what_they_decode_to(count: int) -> None:
    """So a state_dict of decoded numbers is loaded bit for bit."""
    largest = numbers(count)
    its = encode_state(LARGEST, largest, decoded_before=False)
    codes = encode_share(largest * 0.7, decode_largest(*its), random_bits(1, 2, 0, largest))
    values = decode_state(CURRENT, codes, -its[1], its)
    its_again = encode_state(LARGEST, decode_largest(*its), decoded_before=True)
    again = encode_state(CURRENT, values, its_again, decoded_before=True)
    assert torch.equal(again[0], codes)
    assert torch.equal(again[1], -its[1])


def test_values_that_are_no_shares_have_codes_of_their_own() -> None:
    values = numbers(2 * BLOCK)
    nothing = encode_state(LARGEST, torch.zeros(2 * BLOCK), decoded_before=True)
    assert (decode_largest(*nothing) == 0).all()
    smaller = encode_state(LARGEST, torch.cat([values[:BLOCK], values[BLOCK:] / 2]), decoded_before=True)
    for largest, shared in ((nothing, [False, False]), (smaller, [True, False])):
        codes, scales = encode_state(CURRENT, values, largest, decoded_before=True)
        assert (scales < 0).tolist() == shared
        got = decode_state(CURRENT, codes, scales, largest)
        assert ((got - values).abs() <= 0.04 * values + 0.005 * values.max()).all()
