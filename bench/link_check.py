"""Does the cost model hold? Real gloo collectives of 2, 4 and 8 ranks over slow links, beside what was predicted.

python bench/link_check.py        # some ten minutes; writes bench/results/cost_check.json

The constants are taken from point-to-point messages between two ranks: α is half of a ping-pong of 4 bytes, β comes
from 20 MB that one rank sends to the other. No collective is used for that, so all of them are predictions. The local
passes of converge over 20 MB, in one process alone, give seconds a byte; ranks that share a core take turns.

gloo's AllReduce is a ring, like the model's, with two particulars (its allreduce.cc and the tcp transport):

- It asks before it sends: data leave when the receiver's word that it is ready has arrived. A hop takes 2α.
- Every rank's chunk c = B/N travels in segments s of at most half a chunk and 1 MB, two under way at once, so that the
  hop of one hides behind the bytes of the other. One phase of N−1 rounds takes
  max((N−1)·c/β + 2α, (N−1)·(2α + s/β)); an AllReduce is two of them, an all-gather one (c: what each rank gives).

These two were put in after a first look at the faster link, where the plain ring had missed small messages by half; the
slower link was measured after that.

The two-phase exchange of compressed values is tried in two ways. By gloo's all_to_all and all_gather, predicted as
2α + (N−1)·c/β and one phase as above. That is the best case: gloo posts a send before the receive there, so the word
that a rank is ready may wait behind the data that it sends, and then the two directions of a connection take turns. And
by single messages, receives posted first, all at once in both phases: 2·(2α + (N−1)·c/β).

«textbook» is the plain formula of ``cost_model.py``. A time is that of the last rank, and the fastest of the
repetitions, for probes and collectives alike: what else the machine does can only add to it. The record has the median
too. ``limited_links.py`` makes the links, and says what it needs for that.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cost_model
import torch
import torch.distributed as dist
from cost_model import ROW_BYTES, Link
from limited_links import over_links, require_namespaces

import hdet_kernels as hk
from hdet_kernels.converge import Report
from hdet_kernels.ensemble import SingleReplica

RESULT = Path(__file__).parent / "results" / "cost_check.json"
RANKS = (2, 4, 8)
PROBE_BYTES = 20_000_000
MAX_SEGMENT = 1_048_576

#: Mb/s, ms one way, and the sizes in bytes that are tried on it.
LINKS = (
    (100, 2.0, (4_096, 65_536, 1_000_000, 8_000_000, 64_000_000)),
    (25, 20.0, (4_096, 65_536, 1_000_000, 8_000_000)),
)
OPERATIONS = ("all_reduce", "converge", "all_reduce behind work", "two-phase", "two-phase, receives first")

Plan = list[tuple[str, int, int]]
Times = dict[tuple[str, int], list[float]]


def gloo_phase(ranks: int, chunk: float, link: Link) -> float:
    """N−1 rounds, in each of which every rank hands a chunk to its neighbour."""
    segment = min(chunk / 2, MAX_SEGMENT)
    asked = 2 * link.hop
    return max(
        (ranks - 1) * chunk / link.bandwidth + asked,
        (ranks - 1) * (asked + segment / link.bandwidth),
    )


def predicted(operation: str, ranks: int, nbytes: int, link: Link, local: float, cores: int) -> float:
    """Seconds; ``local``: seconds a byte of converge's own passes over memory. A two-phase exchange is of ``nbytes``
    one-byte values. Of an AllReduce behind work, half of which the work hides, it is what is still waited for."""
    reduce = 2 * gloo_phase(ranks, nbytes / ranks, link)
    if operation == "all_reduce":
        return reduce
    if operation == "converge":
        row = gloo_phase(ranks, ROW_BYTES, link)
        return row + reduce + local * nbytes * max(1.0, ranks / cores)
    if operation == "two-phase":
        chunk = nbytes / ranks
        return 2 * link.hop + (ranks - 1) * chunk / link.bandwidth + gloo_phase(ranks, chunk, link)
    if operation == "two-phase, receives first":
        return 2 * (2 * link.hop + (ranks - 1) / ranks * nbytes / link.bandwidth)
    return reduce / 2


def textbook(operation: str, ranks: int, nbytes: int, link: Link) -> float:
    """By the formulas of the cost model, without gloo's particulars and without local passes."""
    reduce = cost_model.ring(ranks, nbytes, link)
    return {
        "all_reduce": reduce,
        "converge": reduce + cost_model.all_gather(ranks, ROW_BYTES, link),
        "two-phase": cost_model.two_phase(ranks, nbytes, link),
        "two-phase, receives first": cost_model.two_phase(ranks, nbytes, link),
        "all_reduce behind work": reduce / 2,
    }[operation]


def plan(sizes: tuple[int, ...]) -> Plan:
    """What is measured, and how often each."""
    found: Plan = []
    for size in sizes:
        often = 20 if size < 1_000_000 else 5 if size < 8_000_000 else 3 if size < 64_000_000 else 2
        operations = OPERATIONS if 1_000_000 <= size < 64_000_000 else OPERATIONS[:2]
        found += [(operation, size, often) for operation in operations]
    return found


def measure_point_to_point(rank: int) -> Times:
    """The probes: rank 0 sends, rank 1 answers."""
    small, large = torch.zeros(1), torch.zeros(PROBE_BYTES // 4)

    def exchange(message: torch.Tensor) -> None:
        first, then = (dist.send, dist.recv) if rank == 0 else (dist.recv, dist.send)
        first(message, 1 - rank)
        then(small, 1 - rank)

    return {
        ("ping-pong", 4): timed(lambda: exchange(small), 300),
        ("send", PROBE_BYTES): timed(lambda: exchange(large), 3),
    }


def measure_collectives(rank: int, ranks: int, planned: Plan, link: Link) -> Times:
    found: Times = {}
    for operation, size, often in planned:
        call = prepare(operation, ranks, size, link)
        if size <= 1_000_000:
            call()
        found[operation, size] = timed(call, often)
    return found


def prepare(operation: str, ranks: int, size: int, link: Link) -> Callable[[], float | None]:
    if operation == "converge":
        converger = hk.Converger(hk.Buckets([torch.ones(size // 4)]), hk.ProcessEnsemble())
        return lambda: _wait_for(converger)
    if operation.startswith("two-phase"):
        given = torch.ones(ranks, size // ranks, dtype=torch.uint8)
        taken = torch.empty_like(given)
        return lambda: (_by_messages if operation.endswith("first") else _by_collectives)(given, taken)
    tensor = torch.ones(size // 4)
    if operation == "all_reduce":
        return lambda: dist.all_reduce(tensor)
    hidden = predicted("all_reduce", ranks, size, link, 0.0, 1) / 2

    def behind() -> float:
        work = dist.all_reduce(tensor, async_op=True)
        time.sleep(hidden)
        start = time.perf_counter()
        work.wait()
        return time.perf_counter() - start

    return behind


def _wait_for(converger: hk.Converger) -> None:
    converger.converge(Report(step=0))


def _by_collectives(given: torch.Tensor, taken: torch.Tensor) -> None:
    dist.all_to_all_single(taken, given)
    dist.all_gather(list(taken.unbind(0)), taken[0].clone())


def _by_messages(given: torch.Tensor, taken: torch.Tensor) -> None:
    rank, ranks = dist.get_rank(), len(given)
    others = [(rank + step) % ranks for step in range(1, ranks)]
    for phase in (0, 1):
        messages = [dist.irecv(taken[peer], peer, tag=phase) for peer in reversed(others)]
        messages += [dist.isend(given[rank if phase else peer], peer, tag=phase) for peer in others]
        for message in messages:
            message.wait()


def timed(call: Callable[[], float | None], often: int) -> list[float]:
    """Seconds of each call, or what the call itself says it waited."""
    times = []
    for _ in range(often):
        start = time.perf_counter()
        waited = call()
        times.append(time.perf_counter() - start if waited is None else waited)
    return times


def local_seconds_a_byte() -> float:
    """Converge's own passes over fp32 parameters: the control row, and the division by the number of replicas."""
    torch.set_num_threads(1)
    flat = torch.ones(PROBE_BYTES // 4)
    converger = hk.Converger(hk.Buckets([flat]), SingleReplica())

    def passes() -> None:
        converger.converge(Report(step=0))
        flat.div_(2)

    passes()
    return min(timed(passes, 15)) / PROBE_BYTES


def check(rate: float, delay: float, sizes: tuple[int, ...], local: float, cores: int) -> dict[str, Any]:
    """Probe a link, then predict and measure on it."""
    probes = over_links(2, rate, delay / 1e3, measure_point_to_point)[0]
    ping, sent = (min(times) for times in probes.values())
    link = Link(f"{rate} Mb/s, {delay:g} ms", ping / 2, PROBE_BYTES / (sent - ping))
    entries = []
    for ranks in RANKS:
        planned = plan(sizes)
        of_ranks = over_links(ranks, rate, delay / 1e3, measure_collectives, ranks, planned, link)
        for operation, size, often in planned:
            last = [max(times) for times in zip(*(found[operation, size] for found in of_ranks), strict=True)]
            measured = min(last)
            guess = predicted(operation, ranks, size, link, local, cores)
            plain = textbook(operation, ranks, size, link)
            entries.append(
                {
                    "operation": operation,
                    "ranks": ranks,
                    "bytes": size,
                    "repetitions": often,
                    "measured s": round(measured, 6),
                    "median s": round(statistics.median(last), 6),
                    "predicted s": round(guess, 6),
                    "error": round(guess / measured - 1, 4),
                    "textbook s": round(plain, 6),
                    "textbook error": round(plain / measured - 1, 4),
                }
            )
            print(_line(link, entries[-1]), flush=True)
    return {
        "rate Mb/s": rate,
        "delay ms": delay,
        "fitted": {"hop s": round(link.hop, 7), "bytes/s": round(link.bandwidth)},
        "checks": entries,
    }


def _line(link: Link, entry: dict[str, Any]) -> str:
    cells = (
        link.name,
        entry["operation"],
        str(entry["ranks"]),
        f"{entry['bytes']:,}".replace(",", " "),
        f"{entry['measured s'] * 1e3:.1f}",
        f"{entry['predicted s'] * 1e3:.1f}",
        f"{entry['error']:+.1%}",
        f"{entry['textbook error']:+.1%}",
    )
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure gloo over limited links and compare with the cost model.")
    parser.add_argument("--output", type=Path, default=RESULT, help="where the record goes")
    arguments = parser.parse_args()
    require_namespaces()
    load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    local = local_seconds_a_byte()
    print("| link | operation | ranks | bytes | measured ms | predicted ms | error | textbook error |")
    print("|---|---|---:|---:|---:|---:|---:|---:|")
    record = {
        "command": "python bench/link_check.py",
        "date": datetime.date.today().isoformat(),
        "torch": torch.__version__,
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
