"""The comparison of replicas at the end of a scouting round."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from hdet_kernels.ensemble import RowEnsemble
from hdet_kernels.fanout.explore import Hyperparameter
from hdet_kernels.schedule.scout.phase import RoundLosses, compare, gather_numbers, raise_failed_probe, scout_record

RATES = (0.01, 0.02, 0.04)


def losses_of(*steps: tuple[float, ...], tail_from: int = 1) -> RoundLosses:
    losses = RoundLosses(3)
    for step, values in enumerate(steps):
        losses.record(torch.tensor(values), step, tail_from)
    return losses


def compared(losses: RoundLosses, probe: Any = None, level: Any = math.nan) -> tuple[Any, Any]:
    return compare(RowEnsemble(3), RATES, losses, probe, step=3, level=level)


def test_mean_noise_and_level_come_from_the_training_losses() -> None:
    seen, training = compared(losses_of((4.0, 4.2, 3.8), (1.0, 2.0, math.nan), (3.0, 2.0, 5.0)))
    assert training is None
    assert seen.losses.tolist() == [2.0, 2.0, math.inf]
    assert seen.level == pytest.approx(4.0)
    # The variance of the first is 2, of the second 0: at least the median, 1.
    assert seen.errors[:2].tolist() == pytest.approx([1.0, math.sqrt(1 / 2)])


def test_the_noise_of_a_single_step_is_that_of_the_first_losses() -> None:
    seen, _ = compared(losses_of((4.0, 5.0, 6.0), (1.0, 2.0, 3.0)))
    assert seen.errors.tolist() == pytest.approx([1.0] * 3)


def test_a_probe_takes_the_place_of_the_training_losses() -> None:
    probe = torch.tensor([1.0, 0.5, math.nan])
    seen, training = compared(losses_of((4.0,) * 3, (1.0, 2.0, 3.0)), lambda: probe, torch.tensor([3.0, 3.0, 3.0]))
    assert training.tolist() == [1.0, 2.0, 3.0]
    assert seen.losses.tolist() == [1.0, 0.5, math.inf]
    assert (seen.level, seen.errors.tolist()) == (3.0, [0.0] * 3)


def test_without_losses_it_says_so() -> None:
    with pytest.raises(RuntimeError, match=r"replicas \[0, 1, 2\] recorded no loss in the last steps"):
        compared(losses_of((1.0, 1.0, 1.0)))


def test_a_failed_probe_raises_with_its_cause() -> None:
    failure = KeyError("x")
    with pytest.raises(RuntimeError, match=r"probe\(\) raised on replicas \[1\]") as raised:
        raise_failed_probe(np.array([0.0, 1.0]), failure)
    assert raised.value.__cause__ is failure
    raise_failed_probe(np.zeros(2), None)


def test_numbers_and_rows_are_gathered_by_replica() -> None:
    found = gather_numbers(RowEnsemble(3), {"one": 2.0, "each": torch.tensor([1, 2, 3]), "none": None})
    assert found["one"].tolist() == [2.0] * 3
    assert found["each"].tolist() == [1.0, 2.0, 3.0]
    assert np.isnan(found["none"]).all()


def test_a_record_has_the_peaks_of_all_groups() -> None:
    seen, _ = compared(losses_of((4.0,) * 3, (1.0, 2.0, math.inf)))
    rate = Hyperparameter("lr", 0.3, "linear", None, None, 0, "lr", tied=(1,))
    others = replace(rate, name="lr.2", group=2, tied=()), replace(rate, name="weight_decay", base=0.1, tied=())
    record = scout_record([rate, *others], [0.02, 0.3, 0.01], seen, None, RowEnsemble(3), step=7, number=1)
    assert record.values["lr"] == pytest.approx(RATES)
    assert record.values["lr.2"] == pytest.approx([rate / 2 for rate in RATES])
    assert record.values["weight_decay"] == [0.1] * 3
    assert (record.kind, record.step, record.cycle, record.excluded) == ("scout", 7, 1, [2])
