"""The losses of a scouting round."""

from __future__ import annotations

import pytest
import torch

from hdet_kernels.schedule.scout.phase import RoundLosses


def test_the_first_step_and_the_last_ones_count() -> None:
    losses = RoundLosses(1)
    for step, loss in enumerate([8.0, 4.0, 3.0, 1.0]):
        losses.record(loss, step, tail_from=2)
    assert (losses.first.sum, losses.first.count) == (8.0, 1)
    assert (losses.tail.sum, losses.tail.count, losses.squares.sum) == (4.0, 2, 10.0)
    losses.clear()
    assert losses.ever
    assert losses.tail.count == 0


def test_a_loss_that_was_divided_counts_as_it_was() -> None:
    losses = RoundLosses(1)
    for loss in (2.0, torch.tensor(1.0)):
        losses.record(loss, 0, tail_from=0, divided_by=2)
    assert [float(each.sum) for each in (losses.first, losses.tail, losses.squares)] == [6.0, 6.0, 20.0]
    assert losses.tail.count == 2


def test_losses_of_a_stack_are_summed_in_full_precision() -> None:
    losses = RoundLosses(2)
    losses.record(torch.tensor([1.001, 2.0], dtype=torch.bfloat16), 5, tail_from=5)
    losses.record([3.0, 4.0], 6, tail_from=5)
    assert isinstance(losses.squares.sum, torch.Tensor)
    assert losses.squares.sum.dtype is torch.float64
    assert losses.squares.sum.tolist() == [10.0, 20.0]
    with pytest.raises(ValueError, match=r"must have shape \[2\], got \[3\]"):
        losses.record([1.0, 2.0, 3.0], 7, tail_from=5)


def test_sums_are_saved_and_taken_back() -> None:
    losses = RoundLosses(1)
    losses.record(2.0, 0, tail_from=0)
    mark = losses.mark()
    losses.record(5.0, 1, tail_from=0)
    saved = losses.state_dict()
    losses.reset(mark)
    assert losses.tail.sum == 2.0
    other = RoundLosses(1)
    other.load_state_dict(saved)
    assert other.state_dict() == saved
