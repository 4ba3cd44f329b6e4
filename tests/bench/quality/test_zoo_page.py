"""The zoo's part of the page."""

from __future__ import annotations

from bench.quality.excess import excesses
from bench.quality.zoo_page import headline, zoo_section
from tests.bench.quality.made_up_zoo import hdet_runs, plain_runs, zoo


def test_section_has_every_part() -> None:
    constants = {task: {"slack": 0.9} for task in ("digits", "images", "flights")}
    text = zoo_section(zoo(), constants, {"careful": hdet_runs(harm=-0.4)})
    titles = [line.removeprefix("### ") for line in text.splitlines() if line.startswith("### ")]
    assert titles == [
        "The bars", "From every start", "Sensitivity to the learning rate", "Harm against recovery",
        "Task by task: HDET, probe", "Task by task: HDET, training loss", "Task by task: plain",
        "Tasks and yardsticks", "Constants without a family",
    ]  # fmt: skip
    assert "0 of 144 HDET runs had constants" in text
    assert "**144 had the defaults of the package**" in text
    assert text.count("quality_zoo_") == 3


def test_section_of_a_grid_alone() -> None:
    text = zoo_section(zoo(plain_runs()), {}, {})
    assert "### Tasks and yardsticks" in text
    assert "### The bars" not in text
    assert "quality_zoo_" not in text


def test_headline_has_mean_and_worst_of_both_modes() -> None:
    text = headline(excesses([*plain_runs(), *hdet_runs(["digits"]), *hdet_runs(["images"], harm=4.0)]))
    assert "by 2.5 % on average and 4.5 % at worst (images) with a probe" in text
    assert "by 3.0 % on average and 5.0 % at worst (images) with training losses only, over 2 tasks" in text
