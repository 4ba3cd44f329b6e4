"""Check the cost model: measure averages of 2, 4 and 8 gloo ranks over slow links, and predict them.

python -m bench.link_check        # about ten minutes; writes bench/results/cost_check.json

Latency and bandwidth come from point-to-point messages between two ranks: α is half of a ping-pong of 4 bytes, β comes
from 20 MB sent one way. No collective is used for that, so that all results are predictions. The local memory passes
are timed in one process over 20 MB; ranks that share a core take turns.

gloo's all-reduce is a ring as in ``cost_model.py``, with two differences:

- It asks the receiver before it sends, so that a hop takes 2α.
- Every chunk c = B/N travels in segments s of at most half a chunk and 1 MB, two at a time. One phase of N−1 rounds
  takes max((N−1)·c/β + 2α, (N−1)·(2α + s/β)). An all-reduce has two phases, an all-gather one.

The gather of the control rows is measured alone too, in turns with gloo's all-gather, which is a ring. A hop takes 2α
there as well: the receiver is ready when both sides come to the exchange.

Both differences were found on the faster link, where the plain ring was off by half for small messages; the slower link
was measured afterwards. The record has both predictions: ``predicted`` follows gloo, ``textbook`` is the plain ring.

A time is that of the slowest rank in the fastest repetition, since other work on the machine can only add to it.
``limited_links.py`` creates the links and lists its requirements.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import hdet_kernels as hk
from bench import cost_model
from bench.cost_model import ROW_BYTES, Link, Network
from bench.limited_links import over_links, require_namespaces
from bench.provenance import provenance
from hdet_kernels.converge import Report
from hdet_kernels.ensemble import SingleReplica

RESULT = Path(__file__).parent / "results" / "cost_check.json"
RANKS = (2, 4, 8)
PROBE_BYTES = 20_000_000
MAX_SEGMENT = 1_048_576
GATHERS = 30

# Mb/s, ms one way, and the sizes in bytes that are averaged over it.
LINKS = (
    (100, 2.0, (4_096, 65_536, 1_000_000, 8_000_000, 64_000_000)),
    (25, 20.0, (4_096, 65_536, 1_000_000, 8_000_000)),
)


def gloo_phase(ranks: int, chunk: float, link: Link) -> float:
    """Return the seconds of N−1 rounds in which every rank sends a chunk to its neighbour."""
    segment = min(chunk / 2, MAX_SEGMENT)
    asked = 2 * link.hop
    return max(
        (ranks - 1) * chunk / link.bandwidth + asked,
        (ranks - 1) * (asked + segment / link.bandwidth),
    )


def predicted(ranks: int, nbytes: int, link: Link, local: float, cores: int) -> float:
    """Return the seconds of an average over gloo; ``local`` is the time of the local memory passes for each byte."""
    row = predicted_gather(ranks, link)
    return row + 2 * gloo_phase(ranks, nbytes / ranks, link) + local * nbytes * max(1.0, ranks / cores)


def predicted_gather(ranks: int, link: Link) -> float:
    """Return the seconds of the gather of the control rows over gloo, where a hop takes 2α."""
    return cost_model.control_row_over_gloo(ranks, Network(link.name, replace(link, hop=2 * link.hop)))


def textbook(ranks: int, nbytes: int, link: Link) -> float:
    """Return the seconds of an average by the plain ring of the cost model, without local memory passes."""
    network = Network(link.name, link)
    return cost_model.allreduce(ranks, nbytes, network, "ring") + cost_model.control_row_over_gloo(ranks, network)


def repetitions(size: int) -> int:
    """Return how often an average of ``size`` bytes is measured."""
    return 20 if size < 1_000_000 else 5 if size < 8_000_000 else 3 if size < 64_000_000 else 2


def measure_point_to_point(rank: int) -> dict[str, list[float]]:
    """Return the seconds of a small and of a large message from rank 0 to rank 1 and an answer of 4 bytes."""
    small, large = torch.zeros(1), torch.zeros(PROBE_BYTES // 4)

    def exchange(message: torch.Tensor) -> None:
        first, then = (dist.send, dist.recv) if rank == 0 else (dist.recv, dist.send)
        first(message, 1 - rank)
        then(small, 1 - rank)

    return {"ping-pong": timed(lambda: exchange(small), 300), "send": timed(lambda: exchange(large), 3)}


def measure_averages(rank: int, sizes: tuple[int, ...]) -> dict[int, list[float]]:
    """Return the seconds of each average, by its size in bytes."""
    found = {}
    for size in sizes:
        converger = hk.Converger(hk.Buckets([torch.ones(size // 4)]), hk.ProcessEnsemble())

        def average(converger: hk.Converger = converger) -> None:
            converger.converge(Report(step=0))

        if size <= 1_000_000:
            average()
        found[size] = timed(average, repetitions(size))
    return found


def measure_gathers(rank: int) -> dict[str, list[float]]:
    """Return the seconds of each gather of control rows, and of each all-gather of gloo of as many bytes, in turns."""
    ensemble, row = hk.ProcessEnsemble(), torch.full((1, ROW_BYTES // 8), float(rank), dtype=torch.float64)
    table = torch.empty(ensemble.size, *row.shape, dtype=row.dtype)
    found: dict[str, list[float]] = {"gather": [], "ring": []}
    for _ in range(GATHERS):
        found["gather"] += timed(lambda: ensemble.gather(row), 1)
        found["ring"] += timed(lambda: ensemble.collect(table, row).wait(), 1)
    return found


def timed(call: Callable[[], None], often: int) -> list[float]:
    """Return the seconds of each of ``often`` calls."""
    times = []
    for _ in range(often):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return times


def local_seconds_a_byte() -> float:
    """Time the local memory passes of an average: the control row's checksum and the division by the replicas."""
    torch.set_num_threads(1)
    flat = torch.ones(PROBE_BYTES // 4)
    converger = hk.Converger(hk.Buckets([flat]), SingleReplica())

    def passes() -> None:
        converger.converge(Report(step=0))
        flat.div_(2)

    passes()
    return min(timed(passes, 15)) / PROBE_BYTES


def check(rate: float, delay: float, sizes: tuple[int, ...], local: float, cores: int) -> dict[str, Any]:
    """Measure a link's latency and bandwidth, then predict and measure averages over it."""
    probes = over_links(2, rate, delay / 1e3, measure_point_to_point)[0]
    ping, sent = min(probes["ping-pong"]), min(probes["send"])
    link = Link(f"{rate} Mb/s, {delay:g} ms", ping / 2, PROBE_BYTES / (sent - ping))
    entries, gathers = [], []
    for ranks in RANKS:
        gathers.append(check_gather(ranks, rate, delay, link))
        of_ranks = over_links(ranks, rate, delay / 1e3, measure_averages, sizes)
        for size in sizes:
            slowest = [max(times) for times in zip(*(found[size] for found in of_ranks), strict=True)]
            measured = min(slowest)
            guess, plain = predicted(ranks, size, link, local, cores), textbook(ranks, size, link)
            entry = {
                "operation": "converge",
                "ranks": ranks,
                "bytes": size,
                "repetitions": len(slowest),
                "measured s": round(measured, 6),
                "median s": round(statistics.median(slowest), 6),
                "predicted s": round(guess, 6),
                "error": round(guess / measured - 1, 4),
                "textbook s": round(plain, 6),
                "textbook error": round(plain / measured - 1, 4),
            }
            entries.append(entry)
            print(f"{link.name}, {ranks} ranks, {size} bytes: {measured:.4f} s, predicted {guess:.4f} s", flush=True)
    return {
        "rate Mb/s": rate,
        "delay ms": delay,
        "fitted": {"hop s": round(link.hop, 7), "bytes/s": round(link.bandwidth)},
        "checks": entries,
        "gathers": gathers,
    }


def check_gather(ranks: int, rate: float, delay: float, link: Link) -> dict[str, Any]:
    """Measure and predict the gather of the control rows."""
    of_ranks = over_links(ranks, rate, delay / 1e3, measure_gathers)
    fastest = {
        name: min(max(times) for times in zip(*(found[name] for found in of_ranks), strict=True))
        for name in ("gather", "ring")
    }
    guess = predicted_gather(ranks, link)
    print(f"{link.name}, {ranks} ranks, control rows: {fastest}, predicted {guess:.4f} s", flush=True)
    return {
        "ranks": ranks,
        "repetitions": GATHERS,
        "measured s": round(fastest["gather"], 6),
        "predicted s": round(guess, 6),
        "error": round(guess / fastest["gather"] - 1, 4),
        "ring s": round(fastest["ring"], 6),
        "ring predicted s": round(gloo_phase(ranks, ROW_BYTES, link), 6),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure gloo over limited links and compare with the cost model.")
    parser.add_argument("--output", type=Path, default=RESULT, help="file of the record")
    arguments = parser.parse_args()
    require_namespaces("bench.link_check")
    load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    local = local_seconds_a_byte()
    record = {
        **provenance("python -m bench.link_check"),
        "machine": f"{platform.machine()}, Linux",
        "cores": cores,
        "nice": os.nice(0),
        "load before": round(load, 2),
        "local s/byte": float(f"{local:.4g}"),
        "links": [check(*link, local, cores) for link in LINKS],
    }
    record["load after"] = round(os.getloadavg()[0], 2)
    arguments.output.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
