"""Every Python block of the README and the documentation runs.

The blocks of a page run in order in one namespace, which begins with :func:`tests.docs.namespace.namespace`. A block
under ``<!-- needs: 4 ranks -->`` runs in four gloo processes, one under ``<!-- needs: gpu -->`` on a GPU; those of one
page again share a namespace.
"""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

import hdet_kernels as hk
from hdet_kernels.ops import STATES
from hdet_kernels.ops.torch.rules import RULES
from tests.docs.namespace import namespace
from tests.docs.pages import PAGES, Block, blocks_of
from tests.ranks import environment_of_torchrun, run_ranks

#: Pages whose libraries take long to import; tests/integrations runs the same code in ``make test``.
TRAINERS = ("docs/usage/lightning.md", "docs/usage/transformers.md")
BLOCKS = [block for page in PAGES for block in blocks_of(page)]


def _cases() -> list[object]:
    cases = []
    for page, needs in dict.fromkeys((block.page, block.needs) for block in BLOCKS):
        marks = [pytest.mark.gpu] if needs == "gpu" else [pytest.mark.full] if page in TRAINERS else []
        cases.append(pytest.param(page, needs, id=f"{page}-{needs.replace(' ', '-')}", marks=marks))
    return cases


@pytest.mark.usefixtures("restored_log_level")
@pytest.mark.parametrize(("page", "needs"), _cases())
def test_the_blocks_of_a_page_run(page: str, needs: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = [block for block in BLOCKS if (block.page, block.needs) == (page, needs)]
    if needs == "gpu" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    if needs.endswith("ranks"):
        run_ranks(int(needs.split()[0]), _on_a_rank, blocks, tmp_path)
        return
    monkeypatch.chdir(tmp_path)
    with patch.dict(STATES), patch.dict(RULES):  # docs/extending.md adds an update rule
        _run(blocks, tmp_path, "cuda" if needs == "gpu" else "cpu")


def _run(blocks: list[Block], folder: Path, device: str = "cpu") -> None:
    names = namespace(folder, device)
    for block in blocks:
        exec(block.compiled(), names)


def _on_a_rank(rank: int, blocks: list[Block], folder: Path) -> None:
    """Run ``blocks`` as torchrun would start them: they initialise the process group themselves."""
    own = folder / str(rank)
    own.mkdir()
    with contextlib.chdir(own), environment_of_torchrun(rank):
        _run(blocks, own)


def test_most_pages_have_blocks() -> None:
    assert len({block.page for block in BLOCKS}) >= 12


def test_every_name_of_the_package_exists() -> None:
    """Also the names in the text between the blocks."""
    used = {name for page in PAGES for name in re.findall(r"\bhk\.(\w+)", page.read_text())}
    assert "HDETOneCycleLR" in used
    assert sorted(name for name in used if not hasattr(hk, name)) == []
