"""Noise: every backend against plain torch, bit for bit, and plain torch against the normal distribution."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from hdet_kernels.ops.chunks import CHUNK
from hdet_kernels.ops.noise import add_noise_
from hdet_kernels.ops.reference_noise import cos_and_sin, keys_of, normals, square_of_radius, words
from tests.ops.cases import BACKENDS, BF16, FP16, FP32, FP64, assert_same, available
from tests.ops.noise_cases import DTYPES, KEYS, Case, drawn, keys_and_scales, make_case, table_of
from tests.ops.operator_cases import noise_operator

# The dtypes that are not among the mixed ones; the others alone are left to make test-full.
EACH_DTYPE = [
    pytest.param(kinds, id=name, marks=[] if name in ("fp64", "mixed") else pytest.mark.full)
    for name, kinds in DTYPES.items()
]


@pytest.mark.parametrize("kinds", EACH_DTYPE)
@pytest.mark.parametrize("backend", BACKENDS)
class TestEveryDtype:
    def test_the_bits_are_those_of_plain_torch(self, backend: tuple[str, str], kinds: tuple[torch.dtype, ...]) -> None:
        where, device = backend
        got, plain = make_case(kinds, device), make_case(kinds, "cpu")
        got.add_noise_(where)
        plain.add_noise_("torch")
        assert_same([t for t in got.tensors if t is not None], [t for t in plain.tensors if t is not None])
        got.assert_neighbours_untouched()

    def test_the_sum_is_rounded_once(self, backend: tuple[str, str], kinds: tuple[torch.dtype, ...]) -> None:
        where, device = backend
        case = make_case(kinds, device)
        before = [t.cpu().clone() for t in case.tensors if t is not None]
        case.add_noise_(where)
        for slot, (old, new) in enumerate(zip(before, case.tensors, strict=True)):
            assert new is not None
            wide = FP64 if old.dtype == FP64 else FP32
            z = normals(keys_of(case.keys[slot].cpu()), 0, old.numel()).to(wide)
            expected = (old.to(wide) + case.scales[slot].cpu().to(wide) * z).to(old.dtype)
            assert_same([new], [expected])
            assert old.numel() < 4 or not torch.equal(new.cpu(), old)

    def test_a_slot_without_a_tensor_is_skipped(self, backend: tuple[str, str], kinds: tuple[torch.dtype, ...]) -> None:
        where, device = backend
        whole, without = make_case(kinds, device), make_case(kinds, device)
        kept = without.around[1].clone()
        without.tensors[1] = None
        for case in (whole, without):
            case.add_noise_(where)
        assert_same([without.around[1]], [kept])
        for slot in (0, 2, 3, 4, 5):
            assert_same([without.around[slot]], [whole.around[slot]])


@pytest.mark.parametrize("backend", BACKENDS)
class TestFunctionOfKeyAndElement:
    def test_noise_depends_neither_on_size_nor_on_place(self, backend: tuple[str, str]) -> None:
        where, device = backend
        long, short = drawn([5], 3000, where, device)[0], drawn([7, 9, 5], 1500, where, device)[2]
        assert torch.equal(short, long[:1500])

    def test_all_keys_are_used_in_full(self, backend: tuple[str, str]) -> None:
        found = drawn(KEYS, 100, *backend)
        assert len(set(map(tuple, found.tolist()))) == len(KEYS)


@pytest.mark.parametrize("start", [2**33 - 40, 2**33 + 2**31 - 7], ids=hex)
@pytest.mark.parametrize("backend", [backend for backend in BACKENDS if not backend.id.startswith("torch")])
def test_positions_beyond_32_bits(backend: tuple[str, str], start: int) -> None:
    """Use an address so far before a small tensor that these positions lie in it."""
    where, device = backend
    chunks = torch.tensor([[0, start, 64, 0]], device=device)
    tensor = torch.zeros(64, device=device)
    places = torch.tensor([[tensor.data_ptr() - 4 * start, 0]], device=device)
    key, scale = torch.tensor([3], device=device), torch.ones(1, dtype=FP64, device=device)
    noise_operator(where)(chunks, places, key, scale, *([False] if where == "triton" else []))
    assert_same([tensor], [normals(keys_of(key[0].cpu()), start, 64)])


def test_plain_torch_takes_large_tensors_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = drawn([4], 3000)
    monkeypatch.setattr("hdet_kernels.ops.reference_noise.PIECE", 700)
    assert torch.equal(drawn([4], 3000), whole)


# The elements drawn with each key.
SAMPLES = 2**20


@pytest.fixture(scope="module")
def sample() -> Tensor:
    """Return normal numbers [keys, SAMPLES] of keys that are neighbours in either word."""
    return drawn([6, 7, 6 + 2**32], SAMPLES)


class TestNormal:
    """The distribution of plain torch's numbers, which all backends share, within five standard errors."""

    def test_moments(self, sample: Tensor) -> None:
        for row in sample:
            for power, moment, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
                error = (row**power).mean().item() - moment
                assert abs(error) < 5 * math.sqrt(variance / SAMPLES), f"moment {power}"

    def test_distribution(self, sample: Tensor) -> None:
        """The Kolmogorov–Smirnov statistic √n·D stays below 1.95 in 999 of 1000 cases."""
        ordered = sample.flatten().sort().values
        n = ordered.numel()
        cdf = torch.special.ndtr(ordered)
        steps = torch.arange(n + 1, dtype=FP64) / n
        distance = max((steps[1:] - cdf).max().item(), (cdf - steps[:-1]).max().item())
        assert math.sqrt(n) * distance < 1.95

    def test_tails(self, sample: Tensor) -> None:
        for bound in (3.0, 4.0):
            expected = sample.numel() * math.erfc(bound / math.sqrt(2))
            assert abs((sample.abs() > bound).sum().item() - expected) < 5 * math.sqrt(expected)
        assert sample.abs().max() < 6.8

    @pytest.mark.parametrize("lag", [1, 2, 32, CHUNK])
    def test_elements_are_independent(self, sample: Tensor, lag: int) -> None:
        for row in sample:
            for values, variance in ((row, 1), (row**2 - 1, 2)):
                assert abs((values[lag:] * values[:-lag]).mean().item()) < 5 * variance / math.sqrt(SAMPLES)

    def test_the_two_numbers_of_a_pair_are_independent(self, sample: Tensor) -> None:
        """Products of powers have the mean of independent numbers, also where both are squared."""
        even, odd = sample.view(-1, 2).T
        n, moments = even.numel(), {0: 1, 1: 0, 2: 1, 3: 0, 4: 3, 6: 15, 8: 105}
        for i, j in ((1, 1), (1, 2), (2, 1), (2, 2), (1, 3), (3, 1), (2, 4), (4, 2)):
            mean = moments[i] * moments[j]
            error = (even**i * odd**j).mean().item() - mean
            assert abs(error) < 5 * math.sqrt((moments[2 * i] * moments[2 * j] - mean**2) / n), (i, j)

    def test_pairs_have_every_direction(self, sample: Tensor) -> None:
        even, odd = sample.view(-1, 2).T
        turns = torch.atan2(odd, even) / (2 * math.pi) % 1
        parts = torch.histc(turns, 64, 0, 1)
        # Chi-squared of 63 degrees of freedom is below 117 in all but 4 of 100 000 cases.
        assert ((parts - parts.mean()) ** 2 / parts.mean()).sum() < 117

    def test_neighbouring_keys_are_independent(self, sample: Tensor) -> None:
        for values, variance in ((sample, 1), (sample**2 - 1, 2)):
            between = values @ values.T / SAMPLES
            assert between.fill_diagonal_(0).abs().max().item() < 5 * variance / math.sqrt(SAMPLES)
        ordered = sample.sort(dim=1).values
        assert not torch.equal(ordered[0], ordered[1]), "the same numbers in another order"

    @pytest.mark.full
    def test_the_bits_of_words_are_independent(self) -> None:
        """The bits of both words, of a pair and of the next, of neighbouring keys."""
        n, drawn = 2**18, []
        for key, start in ((6, 0), (6, 1), (7, 0), (6, 2**32)):
            drawn += words(keys_of(torch.tensor(key)), torch.arange(start, start + n))
        bits = torch.cat([(word >> bit & 1).float()[None] * 2 - 1 for word in drawn for bit in range(32)])
        # Among 32 640 pairs the largest exceeds 5.5 standard errors once in 800 times.
        assert bits.mean(dim=1).abs().max() < 5 / math.sqrt(n)
        assert (bits @ bits.T / n).fill_diagonal_(0).abs().max() < 5.5 / math.sqrt(n)

    def test_radius(self) -> None:
        some, others = torch.rand(2, 200_000, generator=torch.Generator().manual_seed(0))
        u = torch.cat([some, 2 ** (-33 * others), 1 - 2.0**-24 * torch.arange(1.0, 999)])
        u = u.clamp(2.0**-33, 1 - 2.0**-24)
        u = torch.cat([u, torch.tensor([2.0**-33, 0.5, 0.70710677, 0.70710684, 1 - 2.0**-24])])
        truth = -2 * u.double().log()
        assert ((square_of_radius(u).double() - truth).abs() <= 1.3e-6 * truth).all()

    def test_cosine_and_sine(self) -> None:
        some = torch.randint(2**31, (200_000,), generator=torch.Generator().manual_seed(0))
        word = torch.cat([some, *(place + torch.arange(-500, 500) & 2**31 - 1 for place in (0, 2**29, 2**30))])
        x = torch.where(word < 2**30, word, word - 2**31).double() * (math.pi / 2**31)
        cosine, sine = (part.double() for part in cos_and_sin(word))
        assert (cosine - x.cos()).abs().max() <= 3e-7
        assert ((sine - x.sin()).abs() <= 1.3e-6 * x.sin().abs()).all()
        assert all(torch.equal(*pair) for pair in zip(cos_and_sin(word), cos_and_sin(word + 2**31), strict=True))


@pytest.mark.parametrize("sizes", [(), (0, 0), (3, 5)], ids=["no-slots", "empty-slots", "no-tensors"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_to_do(backend: tuple[str, str], sizes: tuple[int, ...]) -> None:
    where, device = backend
    case = make_case((FP32,), device, sizes)
    before = [outer.clone() for outer in case.around]
    if any(sizes):
        case.tensors = [None] * len(sizes)
    case.add_noise_(where)
    assert_same(case.around, before)


@pytest.mark.parametrize("backend", BACKENDS)
def test_autograd_sees_that_a_tensor_was_changed(backend: tuple[str, str]) -> None:
    where, device = backend
    weight = torch.ones(5, device=device, requires_grad=True)
    loss = (weight.exp() * weight).sum()
    table = table_of([5], FP32, device)
    add_noise_(table, table.match([weight.detach()]), *keys_and_scales(1, device), backend=where)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("backend", BACKENDS)
def test_infinities_and_nans_stay(backend: tuple[str, str]) -> None:
    where, device = backend
    values = torch.tensor([math.inf, -math.inf, math.nan, 1.0], device=device)
    for dtype in (FP32, FP64, BF16, FP16):
        tensor = values.to(dtype)
        table = table_of([4], dtype, device)
        add_noise_(table, table.match([tensor]), *keys_and_scales(1, device), backend=where)
        assert_same([tensor[:3]], [values[:3].to(dtype)])
        assert tensor[3].isfinite()


@pytest.mark.parametrize("backend", [available("cpp", "cpu")])
def test_threads_do_not_change_the_result(backend: tuple[str, str]) -> None:
    threads, results = torch.get_num_threads(), []
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            results.append(drawn([1, 2], 100_001, *backend))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def wrong(case: Case) -> dict[str, tuple[tuple[Any, ...], str]]:
    matched, keys, scales = case.table.match(case.tensors), case.keys, case.scales
    columns = [tensor[::2] for tensor in (torch.zeros(2 * size) for size in case.sizes)]
    return {
        "slots": ((table_of([1], FP32, "cpu").match([torch.ones(1)]), keys, scales), "has 6 slots, got 1 tensors"),
        "copied": ((case.table.match(columns), keys, scales), "was copied: the noise would be added to the copy alone"),
        "keys": (
            (matched, keys.int(), scales),
            r"keys must be 6 contiguous elements of torch.int64, .* torch.int32",
        ),
        "few": ((matched, keys[:5], scales), r"keys must be 6 .* of shape \(5,\)"),
        "scales": ((matched, keys, scales.float()), "scales must be 6 contiguous elements of torch.float64"),
        "strides": ((matched, keys, scales.repeat(2)[::2]), "scales must be 6 contiguous"),
        "device": ((matched, keys.to("meta"), scales), "keys is on meta and the tensors on cpu"),
    }


@pytest.mark.parametrize("what", wrong(make_case((FP32,), "cpu")))
def test_arguments_are_checked(what: str) -> None:
    case = make_case((FP32,), "cpu")
    before = [outer.clone() for outer in case.around]
    given, message = wrong(case)[what]
    with pytest.raises(ValueError, match=message):
        add_noise_(case.table, *given)
    assert_same(case.around, before)
