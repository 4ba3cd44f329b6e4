"""The parts of an average in two phases: memory that is kept, and writes that an interrupt does not leave half done."""

from __future__ import annotations

import pytest
import torch

from hdet_kernels.converge.two_phase import Room, confirm, write_all
from hdet_kernels.ensemble import ProcessEnsemble
from tests.ranks import run_ranks

SIZES = [(3, torch.float32), (5, torch.float64)]


@pytest.mark.parametrize("keeps", [True, False])
def test_memory_is_kept_after_a_success_alone(keeps: bool) -> None:
    room = Room(keeps=keeps)
    first = room.take(SIZES)
    assert [(tensor.numel(), tensor.dtype) for tensor in first] == SIZES
    room.keep(first)
    second = room.take(SIZES)
    assert [a is b for a, b in zip(first, second, strict=True)] == [keeps, keeps]
    assert room.take(SIZES)[0] is not second[0], "what a failed average took may still be written to"


def test_kept_memory_of_another_size_is_not_used() -> None:
    room = Room(keeps=True)
    first = room.take(SIZES)
    room.keep(first)
    again = room.take([(4, torch.float32), SIZES[1], (1, torch.float32)])
    assert [tensor.numel() for tensor in again] == [4, 5, 1]
    assert again[1] is first[1]


@pytest.mark.parametrize("interrupted", range(3))
def test_all_steps_are_done_after_an_interrupt(interrupted: int) -> None:
    done: list[int] = []

    def step(number: int) -> None:
        done.append(number)
        if number == interrupted and done.count(number) == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_all([lambda number=number: step(number) for number in range(3)])  # type: ignore[misc]
    assert set(done) == {0, 1, 2}
    assert done.count(interrupted) == 2


def _confirmed(rank: int) -> float:
    return confirm(ProcessEnsemble(), 1.5 + rank)


@pytest.mark.full
def test_the_numbers_of_all_are_added() -> None:
    assert run_ranks(3, _confirmed) == [7.5] * 3
