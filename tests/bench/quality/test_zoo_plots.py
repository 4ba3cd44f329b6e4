"""Plots of the zoo."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bench.quality import zoo_plots
from bench.quality.designs import DEFAULT, Outcome
from bench.quality.excess import MODES, excesses
from tests.bench.quality.made_up_zoo import hdet_runs, plain_runs, zoo


@pytest.mark.full
def test_plots_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    found = excesses(zoo().records)
    outcomes = [Outcome(DEFAULT, mode, 3, 0.1, 1.0, 10.0, 3.0, 5.0) for mode in MODES]
    outcomes += [replace(one, design="rash", harm=3.0, recovery=1.0) for one in outcomes]
    made = zoo_plots.plots(found, outcomes)
    assert set(made) == {zoo_plots.STARTS_PLOT, zoo_plots.SENSITIVITY_PLOT, zoo_plots.FRONTIER_PLOT}
    for name, (_, draw) in made.items():
        draw(tmp_path / name)
        assert (tmp_path / name).stat().st_size > 1000


def test_only_plots_with_data() -> None:
    found = excesses(plain_runs())
    assert zoo_plots.plots(found, []) == {}
    found = excesses([*plain_runs(), *hdet_runs()])
    assert set(zoo_plots.plots(found, [])) == {
        zoo_plots.STARTS_PLOT,
        zoo_plots.SENSITIVITY_PLOT,
    }
