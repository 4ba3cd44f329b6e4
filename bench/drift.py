"""How far the consensus is from the exact mean after many compressed syncs.

    python bench/drift.py [--out FILE]

Four gloo ranks. Between two syncs every replica moves by the same random step and a tenth of its own; the exact mean of
all these is summed in fp64. The distance of the consensus to it is given in units of what one sync moves (root mean
square): 1 is to be one sync behind or ahead. What is not compressed drifts by the rounding of fp32.
"""

from __future__ import annotations

import argparse
import datetime
import json
import multiprocessing
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import hdet_kernels as hk
from hdet_kernels.converge import Report

RANKS, ELEMENTS, SYNCS = 4, 2**16, 1000
STEP, OWN = 1e-3, 1e-4
MARKS = (10, 100, 1000)
WAYS: dict[str, dict[str, Any]] = {"fp32": {}, "bf16": {"compress": "bf16"}, "int8": {"compress": "int8"}}


def drift(rank: int, options: dict[str, Any]) -> dict[str, Any]:
    """The distance after the syncs of :data:`MARKS`, and the bytes of a compressed sync."""
    start = torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(0)) * 0.02
    params, exact = start.clone(), start.double()
    converger = hk.Converger(hk.Buckets([params]), hk.ProcessEnsemble(), **options)
    found: dict[str, float] = {}
    for sync in range(1, SYNCS + 1):
        moves = []
        for replica in range(RANKS):
            common = torch.Generator().manual_seed(sync)
            own = torch.Generator().manual_seed(sync * RANKS + replica + 10**6)
            move = torch.randn(ELEMENTS, generator=common) * STEP + torch.randn(ELEMENTS, generator=own) * OWN
            moves.append(move)
        before = params.double()
        params += moves[rank]
        # What the replicas really moved by: a sum in fp32 is rounded, and that is no fault of the average.
        moved = params.double() - before
        dist.all_reduce(moved)
        exact += moved / RANKS
        outcome = converger.converge(Report(step=sync))
        if sync in MARKS:
            distance = float((params.double() - exact).square().mean().sqrt())
            found[str(sync)] = distance / STEP
    return {"drift": found, "bytes": outcome.bytes, "in full": 4 * ELEMENTS}


def _rank(rank: int, store: str, results: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    for way, options in WAYS.items():
        found = drift(rank, options)
        if rank == 0:
            results.put((way, found))


def measured() -> dict[str, Any]:
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [context.Process(target=_rank, args=(rank, f"{folder}/store", results)) for rank in range(RANKS)]
        for process in ranks:
            process.start()
        found = dict(results.get(timeout=600) for _ in WAYS)
        for process in ranks:
            process.join()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write a JSON file")
    arguments = parser.parse_args()
    found = measured()
    for way, entry in found.items():
        distances = ", ".join(f"{distance:.2g} after {sync}" for sync, distance in entry["drift"].items())
        print(f"{way}: {entry['bytes'] / entry['in full']:.3f} of the bytes; {distances}")
    if arguments.out is not None:
        record = {
            "command": f"python bench/drift.py --out {arguments.out.name}",
            "date": datetime.date.today().isoformat(),
            "torch": torch.__version__,
            "ranks": RANKS,
            "elements": ELEMENTS,
            "ways": found,
        }
        arguments.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
