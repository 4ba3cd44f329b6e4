"""The outcome of an average holds what was agreed on, planned and paid."""

from __future__ import annotations

import math

import numpy as np

from hdet_kernels.converge.outcome import Outcome
from hdet_kernels.converge.plan import AverageRequest, decide
from hdet_kernels.converge.transport import Cost
from tests.converge.agreements import agreement


def test_every_field_has_its_source() -> None:
    seen = agreement(healthy=[True, False], losses=[1.0, math.nan], probes=[3.0, math.inf], shared=None)
    plan = decide(seen, AverageRequest(known_shared=True), merge="best", compresses=False)
    outcome = Outcome.of(seen, plan, Cost(100, 3), 0.5)
    assert outcome.losses is seen.losses
    assert outcome.probes is seen.probes
    assert outcome.healthy.tolist() == [True, False]
    assert outcome.shared is True
    assert (outcome.bytes, outcome.collectives, outcome.seconds, outcome.taken) == (100, 3, 0.5, 0)


def test_taken_is_left_out_of_older_records() -> None:
    assert Outcome.__dataclass_fields__["taken"].default is None


def test_probes_are_compared_where_there_are_any_and_bad_replicas_have_no_loss() -> None:
    for probes, expected in (([3.0, 4.0], [3.0, math.nan]), ([math.nan, math.nan], [1.0, math.nan])):
        seen = agreement(healthy=[True, False], losses=[1.0, 2.0], probes=probes, shared=None)
        np.testing.assert_array_equal(Outcome.of_none(seen, Cost(), 0.0).compared, expected)
