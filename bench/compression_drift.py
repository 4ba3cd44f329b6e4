"""Measure how far the consensus drifts from the exact mean over many compressed syncs.

    python -m bench.compression_drift [--out FILE]

Four gloo ranks. Between two syncs every replica moves by one common random step and a tenth of it of its own; the exact
mean is summed in fp64. The distance of the consensus from it is given in units of the root mean square of the common
step: at 1 the consensus is off by one whole step. Without compression it drifts by the rounding of fp32.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import hdet_kernels as hk
from bench.records import provenance
from hdet_kernels.converge import Report

RANKS, ELEMENTS, SYNCS = 4, 2**16, 1000
STEP, OWN_STEP = 1e-3, 1e-4
REPORTED_SYNCS = (10, 100, 1000)
FORMATS: dict[str, dict[str, Any]] = {"fp32": {}, "bf16": {"compress": "bf16"}, "int8": {"compress": "int8"}}


def drift(rank: int, options: dict[str, Any]) -> dict[str, Any]:
    """Return the distance after each of :data:`REPORTED_SYNCS`, and the bytes of one sync."""
    start = torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(0)) * 0.02
    params, exact = start.clone(), start.double()
    converger = hk.Converger(hk.Buckets([params]), hk.ProcessEnsemble(), **options)
    found: dict[str, float] = {}
    for sync in range(1, SYNCS + 1):
        common = torch.Generator().manual_seed(sync)
        own = torch.Generator().manual_seed(sync * RANKS + rank + 10**6)
        before = params.double()
        params += torch.randn(ELEMENTS, generator=common) * STEP + torch.randn(ELEMENTS, generator=own) * OWN_STEP
        # The sum in fp32 is rounded; that rounding is not an error of the average.
        moved = params.double() - before
        dist.all_reduce(moved)
        exact += moved / RANKS
        outcome = converger.converge(Report(step=sync))
        if sync in REPORTED_SYNCS:
            distance = float((params.double() - exact).square().mean().sqrt())
            found[str(sync)] = distance / STEP
    return {"drift": found, "bytes": outcome.bytes, "in full": 4 * ELEMENTS}


def _rank(rank: int, store: str, results: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    for name, options in FORMATS.items():
        found = drift(rank, options)
        if rank == 0:
            results.put((name, found))


def measured() -> dict[str, Any]:
    """Return the result of :func:`drift` for each format."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [context.Process(target=_rank, args=(rank, f"{folder}/store", results)) for rank in range(RANKS)]
        for process in ranks:
            process.start()
        found = dict(results.get(timeout=600) for _ in FORMATS)
        for process in ranks:
            process.join()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write a JSON file")
    arguments = parser.parse_args()
    found = measured()
    for name, entry in found.items():
        distances = ", ".join(f"{distance:.2g} after {sync}" for sync, distance in entry["drift"].items())
        print(f"{name}: {entry['bytes'] / entry['in full']:.3f} of the bytes; {distances}")
    if arguments.out is not None:
        record = {
            **provenance(f"python -m bench.compression_drift --out {arguments.out.name}"),
            "ranks": RANKS,
            "elements": ELEMENTS,
            "ways": found,
        }
        arguments.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
