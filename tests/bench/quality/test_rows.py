"""Many runs of one task as rows of one stack."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("sklearn", reason="the digits need scikit-learn: pip install scikit-learn")

from bench.quality.rows import Moves, Seen, one_cycle, train_rows
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


def test_control_sees_every_row_and_moves_it(digits: Any) -> None:
    seen: list[Seen] = []

    def control(now: Seen) -> Moves:
        seen.append(now)
        return Moves(np.array([0.0, -1.0]))

    found = train_rows(digits, [4e-3, 4e-3], [0, 0], CPU, steps=9, sync_every=3, control=control)
    assert [now.step for now in seen] == [3, 6, 9]
    assert seen[0].level[0] == pytest.approx(seen[0].level[1])
    assert seen[1].rate[1] == pytest.approx(seen[1].rate[0] / np.e)
    assert [mu.tolist() for mu in found.mu] == [[0.0, -1.0]] * 3
    assert found.val[0] != found.val[1]
