"""The comparison of training with optimizer state in several precisions."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from bench.quality import state_precision

RECORD = Path(__file__).parents[3] / "bench" / "results" / "state_quality_cpu.json"


@pytest.mark.full
def test_the_command_writes_a_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sklearn")
    out = tmp_path / "found.json"
    arguments = ["--tasks", "digits", "--steps", "4", "--seeds", "2", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["state_precision", *arguments])
    threads = torch.get_num_threads()
    state_precision.main()
    torch.set_num_threads(threads)
    record = json.loads(out.read_text())
    assert record["command"].endswith('--tasks "digits" --steps 4 --seeds 2 --out found.json')
    for states in record["tasks"]["digits"].values():
        assert states.keys() == {*state_precision.STATES, state_precision.ANOTHER_ORDER}
        assert states["float32"]["difference"] == 0
        # Rounding matters little after four steps, but it is there.
        assert 0 < abs(states["int8"]["difference"]) < abs(states[state_precision.ANOTHER_ORDER]["difference"])


def test_the_recorded_losses_of_8_bit_state_are_those_of_float32() -> None:
    for task in json.loads(RECORD.read_text())["tasks"].values():
        for states in task.values():
            found, noise = states["int8"], states["float32, another order"]
            assert abs(found["difference"]) <= 3 * max(found["standard error"], noise["standard error"])
