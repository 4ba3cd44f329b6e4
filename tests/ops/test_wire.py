"""The compressed average: every backend against plain torch, bit for bit, error feedback, and checks of arguments."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hdet_kernels.ops.backends import backends
from hdet_kernels.ops.wire import BLOCK, FORMATS, GRAIN, Wire
from tests.ops.cases import BACKENDS, BF16, FP32, ON_CPU, QUICK, available, interpreted, naming

ROOT = Path(__file__).parents[2]

# By name: elements, shards, and the floats by which the buffers lie after a multiple of 16 bytes.
SHAPES = {
    "empty": (0, 3, 0),
    "one": (1, 1, 0),
    "fewer-than-shards": (2, 3, 0),
    "one-short-of-a-block": (BLOCK - 1, 1, 0),
    "whole": (2 * GRAIN, 2, 4),
    "odd": (GRAIN + 2 * BLOCK + 7, 2, 0),
    "unaligned": (GRAIN + BLOCK + 3, 2, 1),
    "unaligned-whole": (GRAIN, 1, 3),
}

# In Triton's interpreter, which is slow, make test has these shapes and magnitudes.
INTERPRETED_SHAPES = ("unaligned",)
MAGNITUDES = (2 * 2.0**-149, 100 * 2.0**-149, 180 * 2.0**-149, 1e-40, 1e-36, 3e38)
INTERPRETED_MAGNITUDES = (180 * 2.0**-149, 3e38)

# The bits around every buffer, those of a NaN: reading it makes the result NaN, overwriting it changes it.
POISON = 0x7FC0BEEF
SMALLEST = 2.0**-149


class Buffer:
    """A copy of ``values`` inside poisoned memory, ``offset`` floats after a multiple of 16 bytes."""

    def __init__(self, values: Tensor, device: str, offset: int = 0) -> None:
        start = GRAIN + offset
        self._whole = torch.full((start + values.numel() + GRAIN,), POISON, dtype=torch.int32, device=device)
        self._inside = slice(start, start + values.numel())
        self.values = self._whole.view(FP32)[self._inside]
        self.values.copy_(values)

    def assert_neighbours_untouched(self) -> None:
        outside = torch.ones_like(self._whole, dtype=torch.bool)
        outside[self._inside] = False
        assert (self._whole[outside] == POISON).all()


@dataclass
class Averaged:
    """Everything that one average of ``shards`` processes has written."""

    sent: list[Tensor]
    merged: Tensor
    errors: list[Tensor]
    merge_errors: list[Tensor]
    consensus: Tensor
    target: Tensor

    def tensors(self) -> list[Tensor]:
        return [*self.sent, self.merged, *self.errors, *self.merge_errors, self.consensus, self.target]


def average(
    backend: str,
    device: str,
    format: str,
    replicas: list[Tensor],
    consensus: Tensor,
    *,
    error: float | None = 0.01,
    offset: int = 0,
    divisor: float | None = None,
    filled: int = 0xAB,
) -> Averaged:
    """Average ``replicas``, whose errors are random of size ``error`` before (``None``: no error feedback)."""
    shards, numel = len(replicas), consensus.numel()
    wire = Wire(format, numel, shards, torch.device(device), backend=backend)
    generator = torch.Generator().manual_seed(1)

    def feedback(size: int) -> Buffer | None:
        return None if error is None else Buffer(error * torch.randn(size, generator=generator), device, offset)

    def given(buffer: Buffer | None) -> Tensor | None:
        return None if buffer is None else buffer.values

    common, target = Buffer(consensus, device, offset), Buffer(torch.zeros(numel), device, offset)
    inputs = [Buffer(replica, device, offset) for replica in replicas]
    errors, merge_errors = [feedback(numel) for _ in replicas], [feedback(wire.shard) for _ in replicas]
    sent = [wire.empty().fill_(filled) for _ in replicas]
    for x, lost, out in zip(inputs, errors, sent, strict=True):
        wire.encode(x.values, common.values, given(lost), out)
    merged = wire.empty().fill_(filled)
    for i, lost in enumerate(merge_errors):
        received = torch.stack([rows[i] for rows in sent])
        wire.merge(received, divisor or shards, given(lost), merged[i])
    wire.decode(merged, common.values, target.values)
    for buffer in (*inputs, *errors, *merge_errors, common, target):
        if buffer is not None:
            buffer.assert_neighbours_untouched()
    kept = [[buffer.values for buffer in kind if buffer is not None] for kind in (errors, merge_errors)]
    return Averaged(sent, merged, kept[0], kept[1], common.values, target.values)


def assert_bits(got: Averaged, expected: Averaged) -> None:
    """Assert that all tensors are equal bit for bit, except that the bits of a NaN may differ between processors."""
    for mine, theirs in zip(got.tensors(), expected.tensors(), strict=True):
        mine = mine.cpu()
        same = mine == theirs
        if mine.dtype == FP32:
            same = (mine.view(torch.int32) == theirs.view(torch.int32)) | (mine.isnan() & theirs.isnan())
        assert same.all(), f"{(~same).sum()} of {same.numel()} differ, the first at {(~same).nonzero()[0].tolist()}"


def random_replicas(numel: int, shards: int) -> tuple[list[Tensor], Tensor]:
    """Return replicas whose differences have magnitudes that vary from block to block, and their consensus."""
    generator = torch.Generator().manual_seed(numel)
    sizes = 10.0 ** torch.randint(-6, 3, (-(-numel // BLOCK),), generator=generator).repeat_interleave(BLOCK)[:numel]
    consensus = torch.randn(numel, generator=generator)
    return [consensus + sizes * torch.randn(numel, generator=generator) for _ in range(shards)], consensus


def blocks_of(wire: Wire, row: Tensor) -> tuple[Tensor, Tensor]:
    """Return the codes [blocks, BLOCK] and the scales [blocks] of an encoded int8 shard."""
    codes, scales = row[: wire.shard].view(torch.int8), row[wire.shard :].view(FP32)
    return codes.view(-1, BLOCK), scales


def check_shape(backend: tuple[str, str], format: str, shape: str) -> None:
    """Assert that an average has the bits of plain torch, with and without error feedback."""
    numel, shards, offset = SHAPES[shape]
    replicas, consensus = random_replicas(numel, shards)
    for error in (0.01, None):
        given: dict[str, Any] = {"format": format, "replicas": replicas, "consensus": consensus, "error": error}
        assert_bits(average(*backend, **given, offset=offset), average("torch", "cpu", **given))


def check_magnitude(backend: tuple[str, str], format: str, largest: float) -> None:
    """Average a block of numbers up to ``largest``, beside a block of zeros and one of usual numbers."""
    x = torch.zeros(3 * BLOCK)
    x[:BLOCK] = torch.linspace(-1, 1, BLOCK).double().mul(largest).float()
    x[2 * BLOCK :] = torch.linspace(-1, 1, BLOCK)
    given: dict[str, Any] = {"format": format, "replicas": [x], "consensus": torch.zeros_like(x)}
    for error in (None, 0.0):
        got = average(*backend, **given, error=error)
        assert_bits(got, average("torch", "cpu", **given, error=error))
        assert not got.consensus[BLOCK : 2 * BLOCK].any()
        assert got.consensus.isfinite().all()


@pytest.mark.full
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("backend", [backend for backend in ON_CPU if backend.id == "triton-cpu"])
def test_every_shape_and_magnitude_in_the_interpreter(backend: tuple[str, str], format: str) -> None:
    for shape in SHAPES:
        with naming(shape):
            check_shape(backend, format, shape)
    for largest in MAGNITUDES:
        with naming(largest):
            check_magnitude(backend, format, largest)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("backend", BACKENDS)
class TestEveryFormat:
    def test_the_bits_are_those_of_plain_torch(self, backend: tuple[str, str], format: str) -> None:
        for shape in INTERPRETED_SHAPES if interpreted(backend) else SHAPES:
            with naming(shape):
                check_shape(backend, format, shape)

    def test_any_divisor_divides(self, backend: tuple[str, str], format: str) -> None:
        """Divisors that are no powers of two: multiplying by their reciprocals would give other numbers."""
        replicas, consensus = random_replicas(2 * BLOCK + 5, 2)
        given: dict[str, Any] = {"format": format, "replicas": replicas, "consensus": consensus}
        for divisor in (3.0, 0.7):
            got = average(*backend, **given, divisor=divisor)
            assert_bits(got, average("torch", "cpu", **given, divisor=divisor))

    def test_every_byte_is_written_and_the_tail_is_zero(self, backend: tuple[str, str], format: str) -> None:
        numel, shards = GRAIN + BLOCK + 9, 2
        replicas, consensus = random_replicas(numel, shards)
        first, second = (average(*backend, format, replicas, consensus, filled=filled) for filled in (0xAB, 0x54))
        assert_bits(first, Averaged(*[_on_cpu(part) for part in vars(second).values()]))
        wire = Wire(format, numel, shards, "cpu")
        for rows in first.sent:
            elements = rows.cpu()[:, : wire.shard * (2 if format == "bf16" else 1)].reshape(shards * wire.shard, -1)
            assert elements[:numel].any()
            assert not elements[numel:].any()
            if format == "int8":
                scales = rows.cpu()[:, wire.shard :].reshape(-1, 4)
                assert not scales[-(-numel // BLOCK) :].any()

    def test_blocks_at_the_ends_of_the_range(self, backend: tuple[str, str], format: str) -> None:
        for largest in INTERPRETED_MAGNITUDES if interpreted(backend) else MAGNITUDES:
            with naming(largest):
                check_magnitude(backend, format, largest)

    def test_an_overflow_is_visible_and_stays_in_its_block(self, backend: tuple[str, str], format: str) -> None:
        consensus = torch.zeros(3 * BLOCK)
        consensus[BLOCK + 5] = -3e38
        x = torch.linspace(1, 2, 3 * BLOCK)
        x[BLOCK + 5] = 3e38
        given: dict[str, Any] = {"format": format, "replicas": [x], "consensus": consensus}
        got = average(*backend, **given)
        assert_bits(got, average("torch", "cpu", **given))
        if format == "int8":
            _, scales = blocks_of(Wire(format, 3 * BLOCK, 1, "cpu"), got.merged[0].cpu())
            assert scales.isinf().tolist() == [False, True, False, False], "no NaN, whose bits may differ"
        lost = ~got.consensus.isfinite()
        assert lost[BLOCK + 5]
        assert not lost[:BLOCK].any()
        assert not lost[2 * BLOCK :].any()

    def test_the_error_is_the_part_that_was_lost_and_is_small(self, backend: tuple[str, str], format: str) -> None:
        where, device = backend
        numel = 2 * GRAIN - 3
        (x,), _ = random_replicas(numel, 1)
        wire = Wire(format, numel, 1, torch.device(device), backend=where)
        error, travelled, sent = torch.zeros(numel, device=device), torch.zeros(numel, device=device), wire.empty()
        wire.encode(x.to(device), torch.zeros(numel, device=device), error, sent)
        wire.decode(sent, travelled)
        d, q, lost = x.double(), travelled.double().cpu(), error.double().cpu()
        if format == "bf16":
            _, exponent = torch.frexp(x)
            half = torch.ldexp(torch.ones(numel).double(), exponent - 9)
        else:
            _, scales = blocks_of(wire, sent[0].cpu())
            # The quotient and the product are each rounded.
            half = scales.double().repeat_interleave(BLOCK)[:numel] * (0.5 + 2 * 127 * 2.0**-24)
        assert ((d - q).abs() <= half).all()
        assert ((d - q).abs().amax() > 0.2 * half.amax()).all(), "the bound would hold for anything"
        assert torch.equal(lost.float(), (d - q).float())


def _on_cpu(part: Any) -> Any:
    return [tensor.cpu() for tensor in part] if isinstance(part, list) else part.cpu()


@pytest.mark.parametrize("backend", BACKENDS)
def test_int8_rounds_to_even_steps_of_a_127th_of_the_largest(backend: tuple[str, str]) -> None:
    where, device = backend
    wire = Wire("int8", 2 * BLOCK, 1, torch.device(device), backend=where)
    x = torch.zeros(2 * BLOCK)
    x[:8] = torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -126.5, 126.5])
    x[BLOCK : BLOCK + 3] = torch.tensor([-254.0, 3.0, 100.0])
    sent, error = wire.empty(), torch.zeros(2 * BLOCK, device=device)
    wire.encode(x.to(device), torch.zeros_like(error), error, sent)
    codes, scales = blocks_of(wire, sent[0].cpu())
    assert scales.tolist() == [1, 2, 0, 0]
    assert codes[0, :8].tolist() == [127, 0, 2, 2, 0, -2, -126, 126]
    assert codes[1, :3].tolist() == [-127, 2, 50]
    assert not codes[2:].any()
    assert error[:8].tolist() == [0, 0.5, -0.5, 0.5, -0.5, 0.5, -0.5, 0.5]
    assert error[BLOCK : BLOCK + 3].tolist() == [0, -1, 0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_int8_with_a_scale_that_is_subnormal_or_zero(backend: tuple[str, str]) -> None:
    where, device = backend
    wire = Wire("int8", 2 * BLOCK, 1, torch.device(device), backend=where)
    x = torch.zeros(2 * BLOCK)
    x[0], x[1], x[BLOCK] = 180 * SMALLEST, -100 * SMALLEST, 60 * SMALLEST
    sent, error = wire.empty(), torch.zeros(2 * BLOCK, device=device)
    wire.encode(x.to(device), torch.zeros_like(error), error, sent)
    codes, scales = blocks_of(wire, sent[0].cpu())
    assert scales.tolist()[:2] == [SMALLEST, 0], "180/127 and 60/127 of the smallest number, rounded"
    assert codes[0, :2].tolist() == [127, -100], "180 steps are more than a code can say"
    assert not codes[1].any()
    assert error[[0, 1, BLOCK]].tolist() == [53 * SMALLEST, 0, 60 * SMALLEST], "what does not travel is kept"


@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")
@pytest.mark.parametrize("format", FORMATS)
def test_processes_with_different_backends_agree_to_the_bit(format: str) -> None:
    able = [name for name in ("torch", "cpp", "triton") if available(name, "cpu").marks[0].args == (False,)]
    numel = GRAIN + 77
    wires = [Wire(format, numel, 3, "cpu", backend=name) for name in itertools.islice(itertools.cycle(able), 3)]
    generator = torch.Generator().manual_seed(0)
    agreed = [torch.randn(numel, generator=torch.Generator().manual_seed(7)) for _ in wires]
    replicas = [consensus.clone() for consensus in agreed]
    errors = [torch.zeros(numel) for _ in wires]
    merge_errors = [torch.zeros(wire.shard) for wire in wires]
    for _ in range(3):
        sent, merged = [wire.empty() for wire in wires], wires[0].empty()
        for wire, x, consensus, error, out in zip(wires, replicas, agreed, errors, sent, strict=True):
            x += 0.01 * torch.randn(numel, generator=generator)
            wire.encode(x, consensus, error, out)
        for i, (wire, error) in enumerate(zip(wires, merge_errors, strict=True)):
            wire.merge(torch.stack([rows[i] for rows in sent]), 3, error, merged[i])
        for wire, x, consensus in zip(wires, replicas, agreed, strict=True):
            wire.decode(merged, consensus, x)
        for tensor in (*replicas, *agreed):
            assert torch.equal(tensor, agreed[0])


@pytest.mark.parametrize("backend", [available("cpp", "cpu")])
def test_threads_do_not_change_the_result(backend: tuple[str, str]) -> None:
    replicas, consensus = random_replicas(200_001, 2)
    threads, results = torch.get_num_threads(), []
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            results.append(average(*backend, "int8", replicas, consensus))
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert_bits(other, results[0])


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("backend", [available("cuda", "cuda"), available("triton", "cuda")])
def test_more_elements_than_32_bits_count(backend: tuple[str, str], format: str) -> None:
    where, device = backend
    numel = 2**31 + 3 * BLOCK + 5
    wire = Wire(format, numel, 1, device, backend=where)
    x, consensus, sent, merged = torch.full((numel,), 127.0, device=device), None, wire.empty(), wire.empty()
    x[-1] = 64.0
    consensus = torch.zeros_like(x)
    wire.encode(x, consensus, None, sent)
    wire.merge(sent, 1.0, None, merged[0])
    assert torch.equal(sent, merged)
    wire.decode(merged, consensus)
    assert torch.equal(x, consensus)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    "backend", [available("torch", "cuda"), available("cuda", "cuda"), available("triton", "cuda")]
)
def test_nothing_waits_for_the_device(backend: tuple[str, str], format: str) -> None:
    where, device = backend
    wire = Wire(format, 5000, 2, device, backend=where)
    x, consensus, error = torch.randn(3, 5000, device=device)
    sent, merged = wire.empty(), wire.empty()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        wire.encode(x, consensus, error, sent)
        wire.merge(sent, 3.0, None, merged[0])
        wire.merge(sent, 3.0, None, merged[1])
        wire.decode(merged, consensus, x)
    finally:
        torch.cuda.set_sync_debug_mode(before)


WORLD = 4
# The size of an update: a power of two, so that numbers derived from it are exact.
SIZE = 2.0**-6
NUMEL = WORLD * GRAIN - 100


def with_rounds() -> Iterator[Any]:
    """Yield each backend with a number of rounds: the compiled one with 100, and in make test-full all with 1000.

    Plain torch, which is slow and has the same bits, has 100 in make test-full.
    """
    for backend in QUICK:
        rounds = 100 if backend.id.startswith("torch") else 1000
        marks = [*backend.marks, pytest.mark.full]
        yield pytest.param(*backend.values, rounds, id=f"{backend.id}-{rounds}", marks=marks)
        if backend.id == "cpp-cpu":
            yield pytest.param(*backend.values, 100, id=f"{backend.id}-100", marks=backend.marks)


def updates(format: str, generator: torch.Generator) -> Tensor:
    """Return updates [WORLD, NUMEL] whose small part is lost in every round without feedback, always in one direction.

    bf16: ``SIZE·(1 + 2⁻⁸·r)`` with r below 1: the neighbour of ``SIZE`` is 2⁻⁷ of it away, so all round to ``SIZE``.
    int8: the first of every block is ±``SIZE``, so that a step is a 127th of it, and the others are below half a step.
    """
    small = torch.rand((WORLD, NUMEL), generator=generator)
    if format == "bf16":
        return SIZE * (1 + 2.0**-8 * (0.05 + 0.85 * small))
    given = 0.49 * SIZE / 127 * small
    signs = torch.randint(0, 2, (WORLD, -(-NUMEL // BLOCK)), generator=generator) * 2.0 - 1
    given[:, ::BLOCK] = SIZE * signs
    return given


def deviations(backend: tuple[str, str], format: str, rounds: int, *, feedback: bool) -> Iterator[tuple[Tensor, float]]:
    """Yield after every round |consensus − exact mean trajectory| [NUMEL] and the largest |consensus|."""
    where, device = backend
    wire = Wire(format, NUMEL, WORLD, torch.device(device), backend=where)
    generator = torch.Generator().manual_seed(0)
    consensus, exact = torch.zeros(NUMEL, device=device), torch.zeros(NUMEL, device=device, dtype=torch.float64)
    errors = [torch.zeros(NUMEL, device=device) if feedback else None for _ in range(WORLD)]
    merge_errors = [torch.zeros(wire.shard, device=device) if feedback else None for _ in range(WORLD)]
    sent, merged = [wire.empty() for _ in range(WORLD)], wire.empty()
    for _ in range(rounds):
        replicas = consensus + updates(format, generator).to(device)
        exact += (replicas.double() - consensus.double()).mean(0)
        for x, error, out in zip(replicas, errors, sent, strict=True):
            wire.encode(x, consensus, error, out)
        for i, error in enumerate(merge_errors):
            wire.merge(torch.stack([rows[i] for rows in sent]), WORLD, error, merged[i])
        wire.decode(merged, consensus)
        yield (consensus - exact).abs(), consensus.abs().max().item()


def bound(format: str, rounds: int, largest: float) -> float:
    """Return an upper bound of |consensus − exact mean| with feedback.

    The sums telescope: consensus = Σ Q(m) = Σ m − error_s and Σ m = Σ mean Q(d) = Σ mean u − mean error_w, which leaves
    one error of each kind. In bf16 an error is at most half the distance of neighbours, which is 2⁻⁸·SIZE for numbers
    below 2·SIZE. In int8 it is at most half a step: |d| ≤ SIZE + |error| and |error| ≤ max|d|/254 give
    max|d| ≤ SIZE·254/253 and |error| ≤ SIZE/253; in the same way |m| ≤ max|d| + |error_s| gives |error_s| ≤ max|d|/253.

    The roundings of float32 are not fed back. Each round adds half a unit in the last place of the consensus and, for
    numbers of at most 2·SIZE, the roundings of x − consensus, + error, Σ (three), /W, + error, − Q (twice) and of the
    products (twice).
    """
    errors = 2 * 2.0**-8 * SIZE if format == "bf16" else SIZE / 253 + SIZE * 254 / 253**2
    return errors + rounds * 2.0**-24 * (largest + 11 * 2 * SIZE)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("backend", "rounds"), list(with_rounds()))
def test_with_feedback_errors_do_not_accumulate(backend: tuple[str, str], rounds: int, format: str) -> None:
    for found, largest in deviations(backend, format, rounds, feedback=True):
        assert found.max() <= bound(format, rounds, largest)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("backend", "rounds"), list(with_rounds()))
def test_without_feedback_errors_accumulate(backend: tuple[str, str], rounds: int, format: str) -> None:
    drifting = torch.ones(NUMEL, dtype=torch.bool)
    if format == "int8":
        drifting[::BLOCK] = False
    found = list(deviations(backend, format, rounds, feedback=False))
    half, end = (found[after - 1][0].cpu()[drifting] for after in (rounds // 2, rounds))
    # The mean loss of a round, from the distribution in updates().
    loss = SIZE * 2.0**-8 * 0.475 if format == "bf16" else 0.245 * SIZE / 127
    assert half.mean().item() == pytest.approx(rounds / 2 * loss, rel=0.02)
    assert end.mean().item() == pytest.approx(rounds * loss, rel=0.02)
    assert end.min() > 10 * bound(format, rounds, found[-1][1])


@pytest.mark.parametrize("shards", [1, 3, 8])
@pytest.mark.parametrize("numel", [0, 1, GRAIN - 1, GRAIN, 8 * GRAIN + 1, 10**9 + 7])
def test_shards_are_equal_aligned_and_cover_all_elements(numel: int, shards: int) -> None:
    bf16, int8 = (Wire(format, numel, shards, torch.device("meta"), backend="torch") for format in FORMATS)
    for wire in (bf16, int8):
        assert wire.shard % GRAIN == 0
        assert wire.shard_bytes % 16 == 0
        assert numel <= shards * wire.shard < numel + shards * GRAIN
        assert (wire.empty().shape, wire.empty().dtype) == ((shards, wire.shard_bytes), torch.uint8)
    assert bf16.shard_bytes == 2 * bf16.shard
    assert int8.shard_bytes == int8.shard + 4 * int8.shard // BLOCK


def test_formats_and_sizes_are_those_of_the_header() -> None:
    header = (ROOT / "csrc" / "wire.h").read_text()
    assert f"enum class Format : int64_t {{ {', '.join(FORMATS)} }};" in header
    assert re.search(r"kShared = (\d+);", header).group(1) == str(BLOCK)  # type: ignore[union-attr]
    assert re.search(r"kGrain = (\d+) \* kShared;", header).group(1) == str(GRAIN // BLOCK)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("int4", 10, 2), "unknown wire format 'int4'; choose one of bf16, int8"),
        (("int8", -1, 2), "at least 0, got -1"),
        (("int8", 10, 0), "1 to 65535, got 0"),
        (("int8", 10, 65536), "1 to 65535, got 65536"),
    ],
)
def test_impossible_wires_are_refused(given: tuple[str, int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Wire(*given, torch.device("cpu"))


def _good() -> dict[str, Any]:
    wire = Wire("int8", 1000, 2, "cpu", backend="torch")
    return {
        "x": torch.ones(1000),
        "consensus": torch.zeros(1000),
        "error": torch.zeros(1000),
        "wire": wire.empty().zero_(),
        "wires": wire.empty().zero_(),
        "divisor": 2.0,
        "merge_error": torch.zeros(wire.shard),
        "row": wire.empty().zero_()[0],
        "target": torch.zeros(1000),
    }


ROW = GRAIN + 4 * GRAIN // BLOCK
# The operation, the argument, a value that does not fit, and the name by which the message calls the argument.
BAD: dict[str, tuple[str, str, Any, str]] = {
    "size": ("encode", "x", torch.ones(999), "x"),
    "shape": ("encode", "x", torch.ones(10, 100), "x"),
    "dtype": ("encode", "x", torch.ones(1000).double(), "x"),
    "strides": ("encode", "x", torch.ones(2000)[::2], "x"),
    "device": ("encode", "x", torch.ones(1000, device="meta"), "x"),
    "consensus": ("encode", "consensus", torch.ones(1000, dtype=BF16), "consensus"),
    "error": ("encode", "error", torch.ones(1), "error"),
    "wire-shape": ("encode", "wire", torch.zeros(2 * ROW, dtype=torch.uint8), "wire"),
    "wire-dtype": ("encode", "wire", torch.zeros(2, ROW, dtype=torch.int8), "wire"),
    "wire-address": ("encode", "wire", torch.zeros(2 * ROW + 4, dtype=torch.uint8)[4:].view(2, ROW), "wire"),
    "wires": ("merge", "wires", torch.zeros(3, ROW, dtype=torch.uint8), "wires"),
    "divisor-0": ("merge", "divisor", 0, "divisor"),
    "divisor-nan": ("merge", "divisor", math.nan, "divisor"),
    "merge-error": ("merge", "merge_error", torch.zeros(1000), "error"),
    "row": ("merge", "row", torch.zeros(ROW + 16, dtype=torch.uint8), "wire"),
    "decoded": ("decode", "wire", torch.zeros(1, ROW, dtype=torch.uint8), "wire"),
    "decoded-consensus": ("decode", "consensus", torch.zeros(1001), "consensus"),
    "target": ("decode", "target", torch.zeros(1000).half(), "target"),
}
ARGUMENTS = {
    "encode": ("x", "consensus", "error", "wire"),
    "merge": ("wires", "divisor", "merge_error", "row"),
    "decode": ("wire", "consensus", "target"),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_arguments_name_what_was_given_and_expected(what: str) -> None:
    operation, name, value, called = BAD[what]
    given = _good() | {name: value}
    before = {key: kept.clone() for key, kept in given.items() if isinstance(kept, Tensor) and not kept.is_meta}
    wire = Wire("int8", 1000, 2, "cpu")
    with pytest.raises(ValueError, match=rf"^{called} (must|is on)"):
        getattr(wire, operation)(*(given[argument] for argument in ARGUMENTS[operation]))
    for key, kept in before.items():
        assert torch.equal(given[key], kept)


# Wrong arguments of the compiled operators, for callers that do not use Wire.
WRONG: dict[str, tuple[str, int, Any, str]] = {
    "format": ("encode", 0, 2, "unknown format 2"),
    "dtype": ("encode", 1, torch.ones(1000).double(), "x has another dtype"),
    "size": ("encode", 2, torch.ones(999), "consensus must have 1000 elements, got 999"),
    "dimensions": ("encode", 4, torch.zeros(ROW, dtype=torch.uint8), "wire must have 2 dimensions, got 1"),
    "place": ("encode", 4, torch.zeros(1, 0, dtype=torch.uint8), "place for 0 elements, got 1000"),
    "row": ("encode", 4, torch.zeros(2, ROW + 16, dtype=torch.uint8), "rows of a multiple of 1040 bytes, got 1056"),
    "no-rows": ("merge", 1, torch.zeros(0, ROW, dtype=torch.uint8), "wires must have rows, got 0"),
    "other-row": ("merge", 4, torch.zeros(2 * ROW, dtype=torch.uint8), "of 1024 elements, got 2048"),
    "decoded": ("decode", 1, torch.zeros(1, 0, dtype=torch.uint8), "wire has 0 elements, the consensus 1000"),
    "target": ("decode", 3, torch.zeros(999), "target must have 1000 elements, got 999"),
}


@pytest.mark.skipif(backends()["cpp"] != "ok", reason=f"cpp: {backends()['cpp']}")
@pytest.mark.parametrize("what", WRONG)
def test_the_compiled_operators_check_their_arguments(what: str) -> None:
    operation, position, value, message = WRONG[what]
    good = _good()
    given: list[Any] = [1, *(good[argument] for argument in ARGUMENTS[operation])]
    given[position] = value
    with pytest.raises(RuntimeError, match=message):
        getattr(torch.ops.hdet_kernels, operation)(*given)
