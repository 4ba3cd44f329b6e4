"""An average under way: it is saved with its result, and restored as one that has arrived.

The average itself is tested with the converger. Here a stand-in takes the place of its correction.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hdet_kernels.converge.converger import Outcome
from hdet_kernels.fanout.spread import Placement
from hdet_kernels.schedule import overlapping
from hdet_kernels.schedule.overlapping import Overlapping
from tests.training import same


class Correction:
    """A correction with one number, as far as saving and restoring need it."""

    def __init__(self, value: float) -> None:
        self.value = value

    def of_the_consensus(self) -> Correction:
        return Correction(0.0)

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    @staticmethod
    def of(state: dict[str, Any]) -> Correction:
        return Correction(state["value"])


class Flight:
    """An average that has arrived, or failed."""

    def __init__(self, correction: Correction, outcome: Outcome, failed: bool = False) -> None:
        self.result, self.failed = (correction, outcome), failed

    def wait(self) -> tuple[Correction, Outcome]:
        return self.result

    @classmethod
    def landed(cls, correction: Correction, outcome: Outcome) -> Flight:
        return cls(correction, outcome)


def under_way(*, failed: bool = False) -> Overlapping:
    base = np.array([0.1, 0.2])
    placed = Placement(base, base[:, None] * [[0.7, 1.3], [1.0, 1.0]], np.array([[0.7, 1.3], [1.0, 1.0]]))
    outcome = Outcome(
        losses=np.array([1.5, np.nan]),
        probes=np.array([0.5, 0.25]),
        healthy=np.array([True, False]),
        shared=None,
        bytes=400,
        collectives=2,
        seconds=0.125,
    )
    return Overlapping(12, 15, placed, True, Flight(Correction(3.0), outcome, failed))  # type: ignore[arg-type]


def test_it_is_saved_with_its_result_as_plain_values() -> None:
    state = under_way().state_dict(in_consensus=False)
    assert state is not None
    assert (state["step"], state["due"], state["acting"], state["correction"]) == (12, 15, True, {"value": 3.0})
    assert state["placed"]["values"] == [pytest.approx([0.07, 0.13]), [0.2, 0.2]]
    expected = {"shared": None, "bytes": 400, "collectives": 2, "seconds": 0.125}
    expected |= {"losses": [1.5, float("nan")], "probes": [0.5, 0.25], "healthy": [True, False]}
    assert same(state["outcome"], expected)


def test_parameters_that_are_the_average_already_need_no_correction() -> None:
    state = under_way().state_dict(in_consensus=True)
    assert state is not None
    assert state["correction"] == {"value": 0.0}


def test_a_failed_average_is_not_saved() -> None:
    assert under_way(failed=True).state_dict(in_consensus=False) is None


def test_it_is_restored_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlapping, "Correction", Correction)
    monkeypatch.setattr(overlapping, "Flight", Flight)
    state = under_way().state_dict(in_consensus=False)
    assert state is not None
    again = Overlapping.of(state)
    assert same(again.state_dict(in_consensus=False), state)
    assert again.flight.wait()[1].healthy.dtype == bool
    assert again.placed.applied.shape == (2, 2)
