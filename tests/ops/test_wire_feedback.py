"""Error feedback of the compressed average: errors of many averages do not accumulate."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from hdet_kernels.ops.wire import BLOCK, FORMATS, GRAIN, Wire
from tests.ops.cases import QUICK

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
