"""8-bit state, split masters and Muon in trainers with HDET, on two ranks, interrupted and resumed."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import FRAMEWORKS, run_ranks
from tests.training import same

# Looked for, not imported: imports take seconds, and other tests look at what is imported.
MISSING = [name for name in ("lightning", "accelerate", "transformers") if importlib.util.find_spec(name) is None]

pytestmark = [pytest.mark.full, pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")]


def _on_a_rank(rank: int, folder: Path) -> dict[str, Any]:
    from tests.integrations.precision_runs import run_all  # imports the trainers

    return run_all(rank, folder)


def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(tmp_path: Path) -> None:
    first, second = run_ranks(2, _on_a_rank, tmp_path, imported=FRAMEWORKS)
    assert len(first) == 5 + 2 + 2
    for name, run in first.items():
        for each in (run, second[name]):
            assert same(each["resumed"], each["whole"]), name
            whole, rest = each["losses"]
            assert rest == whole[len(whole) // 2 :], name
            assert all(map(math.isfinite, whole)), name
            assert all(norm < 1.02 for norm in each["norms"]), f"{name}: gradients are clipped, up to bf16's rounding"
        assert same(run["whole"][0], second[name]["whole"][0]), f"{name}: replicas end with one model"
