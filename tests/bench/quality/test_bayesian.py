"""Proposals of a Gaussian process."""

from __future__ import annotations

import math

import numpy as np
import pytest

from bench.quality.bayesian import propose

OCTAVES = np.arange(-8.0, 6.5, 0.5)


@pytest.mark.parametrize("best", [-6.0, -1.5, 0.0, 4.5])
def test_a_valley_is_found_in_eight_trials(best: float) -> None:
    """What is far too high diverges, what is far too low is flat, as with learning rates."""

    def loss(octave: float) -> float:
        return math.inf if octave > best + 4 else 2.3 - 2 * math.exp(-0.1 * (octave - best) ** 2)

    tried = [0.0, -4.0, 4.0]
    losses = [loss(octave) for octave in tried]
    while len(tried) < 8:
        tried.append(propose(tried, losses, OCTAVES))
        losses.append(loss(tried[-1]))
    assert len(set(tried)) == 8
    assert abs(tried[int(np.argmin(losses))] - best) <= 1.0


def test_nothing_is_tried_twice_and_equal_losses_are_no_obstacle() -> None:
    for value in (1.0, math.inf):
        assert propose([0.0, 1.0], [value, value], np.array([0.0, 1.0, 2.0])) == 2.0
