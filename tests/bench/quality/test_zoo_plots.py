"""Plots of the zoo."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.quality import designs, zoo_plots
from bench.quality.excess import excesses
from tests.bench.quality.made_up_zoo import hdet_runs, plain_runs, zoo


@pytest.mark.full
def test_plots_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    found = excesses(zoo().records)
    outcomes = designs.outcomes(found, {"careful": hdet_runs(harm=-0.4)})
    made = zoo_plots.plots(found, outcomes)
    assert set(made) == {zoo_plots.STARTS_PLOT, zoo_plots.SENSITIVITY_PLOT, zoo_plots.FRONTIER_PLOT}
    for name, (_, draw) in made.items():
        draw(tmp_path / name)
        assert (tmp_path / name).stat().st_size > 1000


def test_only_plots_with_data() -> None:
    found = excesses(plain_runs())
    assert zoo_plots.plots(found, []) == {}
    found = excesses([*plain_runs(), *hdet_runs()])
    assert set(zoo_plots.plots(found, designs.outcomes(found, {}))) == {
        zoo_plots.STARTS_PLOT,
        zoo_plots.SENSITIVITY_PLOT,
    }
