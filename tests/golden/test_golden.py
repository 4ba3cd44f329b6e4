"""Checkpoints of this release and of those before it load, and the run goes on as it did then."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import hdet_kernels as hk
from tests.golden.cases import CASES, RANKS, SAVED_AT, TOTAL, resumed
from tests.golden.files import FOLDER, all_files, load
from tests.ranks import Cases

# Other processors round transcendental functions and sums of several numbers otherwise.
CLOSE = {"rtol": 1e-5, "atol": 1e-6}

ALONE = [each for each in all_files() if CASES[each[1]].ranks == 1]


def resume_rank(rank: int, version: str, name: str) -> dict[str, Any]:
    return resumed(rank, name, load(version, name)[rank])


TOGETHER = Cases(RANKS, resume_rank, [each for each in all_files() if CASES[each[1]].ranks > 1])


def compare(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert len(found["rates"]) == TOTAL - SAVED_AT
    np.testing.assert_allclose(found["rates"], expected["rates"], **CLOSE)
    np.testing.assert_allclose(found["base"], expected["base"], **CLOSE)
    for mine, other in zip(found["parameters"], expected["parameters"], strict=True):
        torch.testing.assert_close(mine, other, **CLOSE)
    mine, other = found["last sync"], expected["last sync"]
    assert (mine["step"], mine["gradients"]) == (other["step"], other["gradients"])
    np.testing.assert_allclose(mine["losses"], other["losses"], **CLOSE)
    for key in ("base", "values"):
        assert mine[key].keys() == other[key].keys()
        for name in other[key]:
            np.testing.assert_allclose(mine[key][name], other[key][name], **CLOSE)


@pytest.mark.parametrize(("version", "name"), ALONE)
def test_a_checkpoint_goes_on_as_it_did(version: str, name: str) -> None:
    (saved,) = load(version, name)
    compare(resumed(0, name, saved), saved["end"])


@pytest.mark.parametrize(("version", "name"), TOGETHER.params())
def test_the_checkpoints_of_two_ranks_go_on_as_they_did(version: str, name: str) -> None:
    for found, saved in zip(TOGETHER[version, name], load(version, name), strict=True):
        compare(found, saved["end"])


def test_every_case_of_this_version_is_kept() -> None:
    kept = {name for version, name in all_files() if version == hk.__version__}
    assert kept == CASES.keys(), "python -m tests.golden writes those that are missing"


def test_checkpoints_are_small() -> None:
    for folder in {path.parent for path in FOLDER.glob("*/*.pt")}:
        assert sum(path.stat().st_size for path in folder.glob("*.pt")) < 300_000


def test_the_checkpoint_of_an_overlapping_average_has_one_under_way() -> None:
    for saved in load(hk.__version__, "ranks-overlap"):
        assert saved["scheduler"]["hdet"]["pending"] is not None
    for name in ("ranks-bf16", "ranks-int8"):
        assert load(hk.__version__, name)[0]["scheduler"]["hdet"]["compression"] is not None
