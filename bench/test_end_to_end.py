"""Time a whole training step under bf16 autocast: plain torch (fused AdamW, OneCycleLR, clipping) beside HDET.

    python -m pytest bench/test_end_to_end.py --benchmark-only -k gpu
    python -m pytest bench/test_end_to_end.py --benchmark-only -k 'gpu and llama'

Three trainings of one model on one batch take turns of a few steps, so that clock drift affects all alike: torch's;
HDET with T = 1000, without a sync in the measured steps; and HDET with a sync after every step. The time that
pytest-benchmark shows is that of a turn of all three. A sync costs the difference of the last two, including the wait
for an empty queue. With T steps between two syncs a step costs ours + sync/T.

The ensemble is a process group of one rank (NCCL, on a CPU gloo). A sync does everything that it does with many ranks
(control row, checksums, backup, a collective for every bucket, controller) except network traffic, which
``cost_model.py`` models. Gradients count as shared, as under DDP: parameters and buffers are averaged, moments are not.

``least ratio`` is the ratio of an ideal optimizer: torch's training step, less the time of its clipping and optimizer,
plus the time of the bytes at the copy bandwidth. Memory is the allocator's peak from building the model to the end of
the third step.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from bench import copy_bandwidth, implementations, measure, memory_tracker
from bench.training_steps import OURS, TRAININGS, Steps, Training, one_rank

# Key in the records: the training that syncs after every step.
SYNCING = "a sync every step"
CLIPPING = {"no-clipping": None, "clip-1.0": 1.0}
# Intervals T that are reported. The first is measured with, so that no sync falls into the measured steps.
SYNC_EVERY = (1000, 100)


def _cases() -> Iterator[Any]:
    for device, known in TRAININGS.items():
        for model, training in known.items():
            if training.computed_again:
                continue
            for clipping in CLIPPING if model.startswith("gpt2") else ("clip-1.0",):
                yield implementations.case(device, model, clipping, why_not=training.why_not(device))


def made(training: Training, device: str, clip: float | None) -> tuple[dict[str, Steps], dict[str, dict[str, float]]]:
    """Return the three trainings, and the memory of each in MiB: its peak, and after the last step."""
    plans = {"torch-fused": ("torch-fused", None), OURS[device]: (OURS[device], SYNC_EVERY[0])}
    plans[SYNCING] = OURS[device], 1
    memory_tracker.warm_up_libraries(device)
    steps, memory = {}, {}
    for name, (way, every) in plans.items():
        book = memory_tracker.MemoryTracker(device)
        with book.phase("training"):
            steps[name] = Steps(training, device, way, clip, every)
            measure.seconds_each(steps[name].whole, device, 3)
        memory[name] = {"peak MiB": book.peaks["training"] / 2**20, "held MiB": book.held["training"] / 2**20}
    return steps, memory


def amortised(times: Mapping[str, list[float]], ours: str, every: int) -> dict[str, float]:
    """Return the ratio of our step plus a T-th of a sync to torch's step, with its confidence interval."""
    both = zip(times[ours], times[SYNCING], strict=True)
    return measure.median_ratio([step + (syncing - step) / every for step, syncing in both], times["torch-fused"])


def least_ratio(theirs: Steps, whole: float, device: str) -> tuple[float, float]:
    """Return the seconds of torch's clipping and optimizer, and the ratio if they ran at the copy bandwidth."""
    theirs.backward()
    alone = statistics.median(measure.sample(theirs.update, device, 0.3))
    theirs.optimizer.zero_grad()
    moved = (28 if theirs.clip is None else 32) * sum(param.numel() for param in theirs.params)
    return alone, (whole - alone + moved / copy_bandwidth.measure_once(device)["copy B/s"]) / whole


def parts_of(steps: Steps, device: str) -> dict[str, dict[str, float]] | str:
    try:
        return measure.by_part(steps.parts, device)
    except RuntimeError as error:  # a GPU whose performance counters are restricted
        return f"failed: {error}"


def _spelt(found: Mapping[str, float]) -> str:
    return f"{found['ratio']:.4f} ({found['low']:.4f} to {found['high']:.4f})"


@pytest.mark.parametrize(("device", "model", "clipping"), list(_cases()))
def test_end_to_end(benchmark: Any, device: str, model: str, clipping: str) -> None:
    copy_bandwidth.measure_once(device)
    training, clip, ours = TRAININGS[device][model], CLIPPING[clipping], OURS[device]
    with one_rank(device):
        steps, memory = made(training, device, clip)
        calls = {way: each.whole for way, each in steps.items()}
        times = measure.take_turns(benchmark, calls, device, turns=training.turns, iterations=training.steps)
        parts = {way: parts_of(steps[way], device) for way in ("torch-fused", ours)}
        hdet, syncing = steps[ours].hdet, steps[SYNCING].hdet
        if hdet is None or hdet.history or syncing is None or len(syncing.history) != syncing.last_epoch:
            raise RuntimeError(
                f"expected no sync with T = {SYNC_EVERY[0]} and one every step with T = 1; the histories differ"
            )
        seen = syncing.history[-1]
    whole = statistics.median(times["torch-fused"])
    alone, least = least_ratio(steps["torch-fused"], whole, device)
    syncs = [syncing - step for syncing, step in zip(times[SYNCING], times[ours], strict=True)]
    info = benchmark.extra_info
    for way, found in info["ways"].items():
        found |= memory[way]
    info |= {
        "batch": training.batch_is,
        "parameters": sum(param.numel() for param in steps[ours].params),
        "ratio": measure.median_ratio(times[ours], times["torch-fused"]),
        "amortised": {str(every): amortised(times, ours, every) for every in SYNC_EVERY},
        "sync": {"ms": statistics.median(syncs) * 1e3, "bytes": seen.bytes, "collectives": seen.collectives},
        "torch's update ms": alone * 1e3,
        "least ratio": least,
        "parts": parts,
    }
    ratios = ", ".join(f"T = {every}: {_spelt(found)}" for every, found in info["amortised"].items())
    print(f"a sync takes {info['sync']['ms']:.3f} ms; ratios with syncs: {ratios}")
    print(f"torch's update takes {alone * 1e3:.3f} ms; an ideal optimizer has the ratio {least:.4f}")
    print("peak MiB " + ", ".join(f"{way}: {found['peak MiB']:.1f}" for way, found in memory.items()))
