"""Constants that were fitted without the family of a task."""

from __future__ import annotations

import json
from pathlib import Path

from bench.quality import held_out
from bench.quality.tasks import TASKS
from tests.bench.quality.made_up_zoo import hdet_runs, plain_runs, run


def test_family_shares_data_or_architecture() -> None:
    for name, task in TASKS.items():
        family = held_out.family(name)
        assert name in family
        assert family == {
            other for other, cls in TASKS.items() if task.data == cls.data or task.architecture == cls.architecture
        }
    assert "few digits" in held_out.family("digits")
    assert "language" not in held_out.family("digits")


def test_runs_with_other_constants_are_told_and_not_kept(tmp_path: Path) -> None:
    path = tmp_path / "constants.json"
    path.write_text(json.dumps({"digits": {"slack": 1 / 3}, "images": {"slack": 0.9}}))
    constants = held_out.read(path)
    right = run("start", "digits", "hdet", 1.0, 0, 1.0, options={"slack": 0.33333})
    assert held_out.verdict([right], constants).startswith("All 1 HDET runs had constants")
    others = [{**right, "options": {"slack": 0.4}}, {**right, "options": {}}, {**right, "task": "flights"}]
    text = held_out.verdict([right, *others, *plain_runs()], constants)
    assert "1 of 4" in text
    assert "1 had the defaults" in text
    assert "2 had constants that" in text
    assert held_out.current([right, *others[:2], *plain_runs()], constants) == [right, *plain_runs()]
    assert held_out.verdict(plain_runs(), constants) == ""


def test_without_constants_runs_with_the_defaults_are_kept(tmp_path: Path) -> None:
    assert held_out.current(hdet_runs(), held_out.read(tmp_path / "absent.json")) == hdet_runs()


def test_how_far_constants_differ() -> None:
    constants = {"a": {"slack": 0.5, "law": "root"}, "b": {"slack": 1.0, "law": "log"}, "c": {"slack": 0.8, "zero": 0}}
    assert held_out.spreads(constants) == [
        ["slack", "0.5", "0.8", "1", "2.00"],
        ["law", "log, root", "–", "–", "–"],
        ["zero", "0", "0", "0", "–"],
    ]
