"""Checkpoints of this release and of those before it load, and the run goes on as it did then."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import hdet_kernels as hk
from hdet_kernels.schedule.checkpoint import unpacked
from tests.golden import files
from tests.golden.__main__ import main as write_missing
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


def hdet_of(name: str) -> list[dict[str, Any]]:
    """Return the scheduler's own part of the checkpoint of every rank, packed in a tuple or not."""
    parts = [unpacked(saved["scheduler"]["hdet"]) for saved in load(hk.__version__, name)]
    return [part for part in parts if isinstance(part, dict)]


def test_the_checkpoint_of_an_overlapping_average_has_one_under_way() -> None:
    assert [part["pending"] is not None for part in hdet_of("ranks-overlap")] == [True] * RANKS
    for name in ("ranks-bf16", "ranks-int8"):
        assert hdet_of(name)[0]["compression"] is not None


def test_a_missing_checkpoint_of_ranks_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "ranks-overlap"
    shutil.copytree(FOLDER / hk.__version__, tmp_path / hk.__version__)
    monkeypatch.setattr(files, "FOLDER", tmp_path)
    kept = {path: path.read_bytes() for path in tmp_path.glob("*/*.pt") if path.stem != name}
    files.path_of(hk.__version__, name).unlink()
    threads = torch.get_num_threads()
    write_missing()
    torch.set_num_threads(threads)
    assert len(kept) == len(CASES) - 1
    assert all(path.read_bytes() == content for path, content in kept.items()), "only the missing one is written"
    assert [part["pending"] is not None for part in hdet_of(name)] == [True] * RANKS
    for mine, released in zip(load(hk.__version__, name), TOGETHER[hk.__version__, name], strict=True):
        compare(mine["end"], released)
