"""The bars of the zoo."""

from __future__ import annotations

import pytest

from bench.quality.bars import BARS, verdicts
from bench.quality.excess import MODES, PROBE, TRAINING, excesses
from bench.quality.suite import STARTS
from tests.bench.quality.made_up_zoo import TASKS, hdet_runs, plain_runs, zoo


def test_every_start_and_mode_has_bars() -> None:
    found = verdicts(excesses(zoo().records))
    assert {start for start, _ in found} == {*STARTS, None}
    assert all(set(modes) == set(MODES) for _, modes in found)
    assert len(found) == sum(len(bar.starts) for bar in BARS) == 17


def test_met_and_missed() -> None:
    """With a probe the harm at the best is 0.5 %, with training losses only 1 %, on one task ten more."""
    records = [*plain_runs(), *hdet_runs(TASKS[:2]), *hdet_runs(TASKS[2:], harm=10.0)]
    at_best = [modes for start, modes in verdicts(excesses(records)) if start == 1.0]
    mean, worst, worse = (modes[PROBE] for modes in at_best)
    assert (mean.text, mean.met) == ("mean ≤ 0.3 %", False)
    assert worst.figure == pytest.approx(10.5, abs=0.1)
    assert (worse.figure, worse.met) == (100.0, False)
    none = [modes[TRAINING] for start, modes in verdicts(excesses(records)) if start is None]
    assert [(one.text, one.met) for one in none] == [("median ≤ 2 %", True), ("above 5 %: ≤ 20 % of tasks", False)]


def test_only_what_was_run_is_judged() -> None:
    records = [*plain_runs(), *(run for run in hdet_runs() if run["probe"] and run["kind"] == "start")]
    found = dict(verdicts(excesses(records)))
    assert set(found[1.0]) == {PROBE}
    assert found[None] == {}


def test_one_seed_is_judged_by_the_noise_of_the_yardstick() -> None:
    records = [*plain_runs(), *(run for run in hdet_runs(harm=10.0) if run["seed"] == 0)]
    (worse,) = (
        modes[PROBE] for start, modes in verdicts(excesses(records)) if start == 1.0 and "plain" in modes[PROBE].text
    )
    assert (worse.figure, worse.met) == (100.0, False)
