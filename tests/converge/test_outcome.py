"""The outcome of an average holds what was agreed on, planned and paid."""

from __future__ import annotations

import math

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
