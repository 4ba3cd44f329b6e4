"""An average under way: it is saved with its result, and restored as one that has arrived."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hdet_kernels.converge import Correction, Outcome, OverlappedAverage
from hdet_kernels.fanout.spread import Placement
from hdet_kernels.schedule.cycle import Overlapping
from tests.training import same

CORRECTION = Correction(
    sound=(True,),
    heal=False,
    has_state=False,
    params=[torch.tensor([3.0, -1.0])],
    buffers=[],
    buffers_before=[],
    state={},
    state_before={},
    integers=[],
    counts=None,
)
OUTCOME = Outcome(
    losses=np.array([1.5, np.nan]),
    probes=np.array([0.5, 0.25]),
    healthy=np.array([True, False]),
    shared=None,
    bytes=400,
    collectives=2,
    seconds=0.125,
    distance=0.25,
)


def finished() -> tuple[Correction, Outcome]:
    return CORRECTION, OUTCOME


def failed() -> tuple[Correction, Outcome]:
    raise RuntimeError("a peer died")


def under_way(average: OverlappedAverage[Outcome]) -> Overlapping:
    base = np.array([0.1, 0.2])
    placed = Placement(base, base[:, None] * [[0.7, 1.3], [1.0, 1.0]], np.array([[0.7, 1.3], [1.0, 1.0]]))
    return Overlapping(12, 15, placed, True, average)


def test_it_is_saved_with_its_result_as_plain_values() -> None:
    state = under_way(OverlappedAverage(finished, None)).state_dict(in_consensus=False)
    assert state is not None
    assert (state["step"], state["due"], state["acting"]) == (12, 15, True)
    assert same(state["correction"], CORRECTION.state_dict())
    assert state["placed"]["values"] == [pytest.approx([0.07, 0.13]), [0.2, 0.2]]
    expected = {"shared": None, "bytes": 400, "collectives": 2, "seconds": 0.125, "kept": None, "distance": 0.25}
    expected |= {"losses": [1.5, float("nan")], "probes": [0.5, 0.25], "healthy": [True, False]}
    assert same(state["outcome"], expected)


def test_parameters_that_are_the_average_already_need_no_correction() -> None:
    state = under_way(OverlappedAverage(finished, None)).state_dict(in_consensus=True)
    assert state is not None
    assert state["correction"]["params"][0].tolist() == [0.0, 0.0]


def test_a_failed_average_is_not_saved() -> None:
    assert under_way(OverlappedAverage(failed, None)).state_dict(in_consensus=False) is None


def test_it_is_restored_as_it_was() -> None:
    state = under_way(OverlappedAverage(finished, None)).state_dict(in_consensus=False)
    assert state is not None
    again = Overlapping.of(state)
    assert same(again.state_dict(in_consensus=False), state)
    assert again.average.wait()[1].healthy.dtype == bool
    assert again.placed.applied.shape == (2, 2)
