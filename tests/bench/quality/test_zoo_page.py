"""The zoo's part of the page."""

from __future__ import annotations

import math
import re
from dataclasses import replace

from bench.quality.designs import DEFAULT, Outcome
from bench.quality.excess import PROBE, excesses
from bench.quality.zoo_page import choice, headline, noisy, zoo_section
from tests.bench.quality.made_up_zoo import BEST, hdet_runs, plain_runs, run, zoo


def test_section_has_every_part() -> None:
    constants = {task: {"slack": 0.9} for task in ("digits", "images", "flights")}
    text = zoo_section(zoo(), constants, [Outcome(DEFAULT, PROBE, 3, 0.1, 1.0, 10.0, 3.0, 5.0)])
    titles = [line.removeprefix("### ") for line in text.splitlines() if line.startswith("### ")]
    assert titles == [
        "The goals", "From every start", "Sensitivity to the learning rate", "Harm against recovery",
        "Task by task: HDET, probe", "Task by task: HDET, training loss", "Task by task: plain",
        "Tasks and yardsticks", "Constants without a family",
    ]  # fmt: skip
    assert "0 of 144 HDET runs had constants" in text
    assert "**144 had the defaults of the package**" in text
    assert text.count("](quality_") == 3


def test_section_of_a_grid_alone() -> None:
    text = zoo_section(zoo(plain_runs()), {}, [])
    assert "### Tasks and yardsticks" in text
    assert "### The goals" not in text
    assert "](quality_" not in text


def test_choice_is_the_best_recovery_within_the_goal_for_harm() -> None:
    points = {"a": (0.1, 9.0), "b": (0.2, 5.0), "c": (2.0, 0.5)}
    made = [Outcome(name, PROBE, 3, harm, harm, 0.0, 0.0, end) for name, (harm, end) in points.items()]
    assert choice(made).endswith("HDET, probe: b, which misses the goal for recovery (median ≤ 1 %).")


def test_headline_has_mean_median_and_worst_of_both_modes() -> None:
    runs = [*plain_runs(), *hdet_runs(["digits"]), *hdet_runs(["images"], harm=4.0)]
    moved = [one | {"mu": [-1.0]} if one["task"] == "images" and one["probe"] else one for one in runs]
    text = headline(excesses(moved), moved)
    assert re.search(r"by 2\.5 ± 0\.\d % on average with a probe \(median 2\.5 %; worst 4\.5 %: images, whose", text)
    assert "worse by two standard errors on 2 of 2 tasks: digits, by 0.5 %; images, by 4.5 %" in text
    assert re.search(r"by 3\.0 ± 0\.\d % on average with training losses only \(median 3\.0 %; worst 5\.0 %: im", text)
    assert text.endswith("The controller changed it on 1 and 0 of these tasks.")


def test_noisy_tasks_are_named() -> None:
    assert noisy(excesses(plain_runs())) == ""
    loud = [
        record | {"val": record["val"] * (1 + 0.3 * (record["seed"] % 3 - 1))} if record["task"] == "digits" else record
        for record in plain_runs()
    ]
    assert re.search(r"large on some: digits 2\d % of the loss\.", noisy(excesses(loud)))


def test_one_seed_notes_and_tasks_without_a_yardstick_are_told() -> None:
    lost = [run("near", "weather", "plain", BEST, seed, math.inf) for seed in (0, 1)]
    report = zoo([*plain_runs(), *lost, *(one for one in hdet_runs() if one["seed"] == 0)])
    text = zoo_section(replace(report, notes=["Run on a Tuesday."]), {}, [])
    assert "one seed from each start" in text
    assert "Run on a Tuesday." in text
    assert "Left out: weather. At every learning rate of its grid some seed" in text
    whole = zoo_section(zoo(), {}, [])
    assert "one seed from each start" not in whole
    assert "Left out" not in whole
