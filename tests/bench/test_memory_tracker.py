"""Memory by phases on the CPU."""

from __future__ import annotations

from typing import Any

import torch

from bench import memory_tracker


def test_peaks_and_what_stays_to_the_byte() -> None:
    tracker = memory_tracker.MemoryTracker("cpu")
    with tracker.phase("kept"):
        kept = torch.ones(1000)
    not_counted = torch.ones(500)
    with tracker.phase("a temporary"):
        _ = torch.ones(250).sum().item()
    with tracker.phase("freed"):
        del kept
    assert tracker.peaks["kept"] == tracker.held["kept"] == 4000
    assert 5000 <= tracker.peaks["a temporary"] < 5100  # and the sum, which is aligned
    assert tracker.held == {"kept": 4000, "a temporary": 4000, "freed": 0}
    assert not_counted.numel() == 500


def test_cycles_of_references_do_not_count_as_held() -> None:
    tracker = memory_tracker.MemoryTracker("cpu")
    with tracker.phase("a cycle"):
        cycle: list[Any] = [torch.ones(1000)]
        cycle.append(cycle)
        del cycle
    assert (tracker.peaks["a cycle"], tracker.held["a cycle"]) == (4000, 0)
