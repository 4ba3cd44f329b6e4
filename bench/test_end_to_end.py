"""A whole training step under bf16 autocast: plain torch (fused AdamW, OneCycleLR, clipping) beside ours with HDET on.

    python -m pytest bench/test_end_to_end.py --benchmark-only -k gpu
    python -m pytest bench/test_end_to_end.py --benchmark-only -k 'gpu and llama'

Three trainings of one model on one batch take turns, a few steps each, so that a drift of the clocks decides nothing:
torch's; ours with HDET, T = 1000, none of whose syncs falls into the measured steps; and ours with a sync after every
step. The time that pytest-benchmark shows is that of a turn of all. What a sync adds to a step is the difference of the
last two, the wait for an empty queue included, and with T steps between two of them a step costs ours + sync/T.

The ensemble is a process group of one rank (NCCL, on a CPU gloo). A sync is then all that it is with many (control row,
checksums, backup, a collective for every bucket, controller), but what the wires take: ``cost_model.py`` has that.
Gradients count as shared, as they are under DDP: parameters and buffers are averaged, moments are not.

``least ratio`` is what an optimizer at the copy bandwidth would come to: the training step of torch's, less what its
clipping and optimizer take alone, and more what moving the bytes takes. Peaks of memory are those of the allocator,
from building the model to the end of the third step, less what was there before.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from typing import Any

import ledger
import measure
import pytest
import timeline
import ways
import yardstick
from end_to_end_section import SYNCING
from trainings import OURS, TRAININGS, Steps, Training, one_rank

CLIPPING = {"no-clipping": None, "clip-1.0": 1.0}
#: The T of which the cost is told. The first is measured with: no sync may fall into the measured steps.
SYNC_EVERY = (1000, 100)


def _cases() -> Iterator[Any]:
    for device, known in TRAININGS.items():
        for model, training in known.items():
            for clipping in CLIPPING if model.startswith("gpt2") else ("clip-1.0",):
                yield ways.case(device, model, clipping, why_not=training.why_not(device))


def made(training: Training, device: str, clip: float | None) -> tuple[dict[str, Steps], dict[str, dict[str, float]]]:
    """The three trainings, and what each takes of the memory, in MiB: at most, and after its last step."""
    plans = {"torch-fused": ("torch-fused", None), OURS[device]: (OURS[device], SYNC_EVERY[0])}
    plans[SYNCING] = OURS[device], 1
    ledger.warm_up_libraries(device)
    steps, memory = {}, {}
    for name, (way, every) in plans.items():
        book = ledger.Ledger(device)
        with book.phase("training"):
            steps[name] = Steps(training, device, way, clip, every)
            measure.row(steps[name].whole, device, 3)
        memory[name] = {"peak MiB": book.peaks["training"] / 2**20, "held MiB": book.held["training"] / 2**20}
    return steps, memory


def amortised(times: Mapping[str, list[float]], ours: str, every: int) -> dict[str, float]:
    """The ratio to torch's of a step of ours and its share of a sync, by turns."""
    both = zip(times[ours], times[SYNCING], strict=True)
    return measure.ratio([step + (syncing - step) / every for step, syncing in both], times["torch-fused"])


def least_ratio(theirs: Steps, whole: float, device: str) -> tuple[float, float]:
    """Seconds of torch's clipping and optimizer alone, and what the ratio would be were they at the copy bandwidth."""
    theirs.backward()
    alone = statistics.median(measure.sample(theirs.update, device, 0.3))
    theirs.optimizer.zero_grad()
    moved = (28 if theirs.clip is None else 32) * sum(param.numel() for param in theirs.params)
    return alone, (whole - alone + moved / yardstick.yardstick(device)["copy B/s"]) / whole


def parts_of(steps: Steps, device: str) -> dict[str, dict[str, float]] | str:
    try:
        return timeline.by_part(steps.parts, device)
    except RuntimeError as error:  # a GPU whose counters are not for everyone
        return f"failed: {error}"


@pytest.mark.parametrize(("device", "model", "clipping"), list(_cases()))
def test_end_to_end(benchmark: Any, device: str, model: str, clipping: str) -> None:
    yardstick.yardstick(device)
    training, clip, ours = TRAININGS[device][model], CLIPPING[clipping], OURS[device]
    with one_rank(device):
        steps, memory = made(training, device, clip)
        calls = {way: each.whole for way, each in steps.items()}
        times = measure.take_turns(benchmark, calls, device, turns=training.turns, iterations=training.steps)
        parts = {way: parts_of(steps[way], device) for way in ("torch-fused", ours)}
        hdet, syncing = steps[ours].hdet, steps[SYNCING].hdet
        if hdet is None or hdet.history or syncing is None or len(syncing.history) != syncing.last_epoch:
            raise RuntimeError(f"T = {SYNC_EVERY[0]} and T = 1 were to be measured, but other steps had a sync")
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
        "amortised": {str(every): amortised(times, ours, every) for every in SYNC_EVERY},
        "sync": {"ms": statistics.median(syncs) * 1e3, "bytes": seen.bytes, "collectives": seen.collectives},
        "torch's update ms": alone * 1e3,
        "least ratio": least,
        "parts": parts,
    }
    told = ", ".join(f"T = {every}: {found['ratio']:.4f}" for every, found in info["amortised"].items())
    print(f"a sync takes {info['sync']['ms']:.3f} ms; with it, {told}")
    print(f"torch's update alone takes {alone * 1e3:.3f} ms: the ratio is {least:.4f} at least")
    print("peak MiB " + ", ".join(f"{way}: {found['peak MiB']:.1f}" for way, found in memory.items()))
