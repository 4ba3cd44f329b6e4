"""Many runs of one task as rows of one stack."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("sklearn", reason="the digits need scikit-learn: pip install scikit-learn")

from bench.quality.rows import one_cycle, train_rows
from bench.quality.spec import Spec
from bench.quality.train import train

CPU = torch.device("cpu")


def test_row_is_plain_training_with_its_seed_and_learning_rate(digits: Any) -> None:
    runs = [(4e-3, 0), (3e-2, 0), (4e-3, 1)]
    found = train_rows(digits, [lr for lr, _ in runs], [seed for _, seed in runs], CPU, steps=12)
    plain = [train(digits, Spec("digits", "plain", lr, seed, steps=12), CPU)["val"] for lr, seed in runs]
    assert found.val.tolist() == pytest.approx(plain, rel=1e-4)
    assert len(set(plain)) == 3


def test_learning_rates_are_those_of_one_cycle() -> None:
    rates = one_cycle(100)
    assert rates[0] == pytest.approx(1 / 25)
    assert (rates.argmax(), rates.max()) == (29, pytest.approx(1.0))


def test_every_row_is_looked_at_every_few_steps(digits: Any) -> None:
    seen = train_rows(digits, [4e-3, 4e-3, 8e-3], [0, 0, 0], CPU, steps=9, sync_every=3).seen
    assert [now.step for now in seen] == [3, 6, 9]
    assert seen[0].level[0] == pytest.approx(seen[0].level[1])
    assert seen[1].level[0] != seen[1].level[2]
    assert seen[1].rate.tolist() == [pytest.approx(one_cycle(9)[5])] * 3
    assert np.isfinite(seen[2].error).all()
