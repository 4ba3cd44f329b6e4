"""Check the cost model: measure averages of 2, 4 and 8 gloo ranks over slow links, and predict them.

python -m bench.link_check        # about ten minutes; writes bench/results/cost_check.json

Latency and bandwidth come from point-to-point messages between two ranks: α is half of a ping-pong of 4 bytes, β comes
from 20 MB sent one way. No collective is used for that, so that all results are predictions. The local memory passes
are timed in one process over 20 MB; ranks that share a core take turns.

gloo's all-reduce is a ring as in ``cost_model.py``, with two differences:

- It asks the receiver before it sends, so that a hop takes 2α.
- Every chunk c = B/N travels in segments s of at most half a chunk and 1 MB, two at a time. One phase of N−1 rounds
  takes max((N−1)·c/β + 2α, (N−1)·(2α + s/β)). An all-reduce has two phases, an all-gather one.

The record has both predictions: ``predicted`` follows gloo, ``textbook`` is the plain ring. A time is that of the
slowest rank in the fastest repetition, since other work on the machine can only add to it.

Every rank has a network namespace with one interface, a TUN device. The kernel limits its sending rate (tc, token
bucket). This process forwards the packets from device to device and delays each of them. Requirements: Linux, user
namespaces, ``ip``, ``tc`` and /dev/net/tun; neither root nor netem, bridge or veth.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import fcntl
import json
import os
import pickle
import platform
import select
import shutil
import statistics
import struct
import subprocess
import sys
import tempfile
import time
import traceback
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import hdet_kernels as hk
from bench import cost_model
from bench.cost_model import ROW_BYTES, Link, Network
from bench.records import provenance
from hdet_kernels.converge import Report
from hdet_kernels.ensemble import SingleReplica

# Environment variable that is set in the process that may create networks.
INSIDE = "HDET_LIMITED_LINKS"
DEVICE, MTU, BURST = "link0", 9000, "20kb"


def require_namespaces(module: str) -> None:
    """Restart ``python -m module`` in a user namespace that may create networks, or exit with the reason why not."""
    if platform.system() != "Linux":
        sys.exit("limited links need network namespaces, which only Linux has")
    missing = [tool for tool in ("unshare", "ip", "tc") if shutil.which(tool) is None]
    if missing:
        sys.exit(f"limited links need {', '.join(missing)}: install util-linux and iproute2")
    if not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        sys.exit("limited links need /dev/net/tun, readable and writable: load the tun module, or run as another user")
    if os.environ.get(INSIDE):
        return
    tried = subprocess.run(["unshare", "-rn", "true"], capture_output=True, text=True)
    if tried.returncode:
        sys.exit(f"limited links need user and network namespaces, which this machine refuses: {tried.stderr.strip()}")
    os.environ[INSIDE] = "1"
    os.execvp("unshare", ["unshare", "-rn", sys.executable, "-m", module, *sys.argv[1:]])


def over_links(ranks: int, rate: float, delay: float, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Return ``[function(rank, *args) for rank in range(ranks)]``, each call in a process of one gloo group.

    Args:
        ranks: Number of processes.
        rate: Mb/s that each of them can send.
        delay: Seconds that every packet travels.
    """
    devices: dict[int, int] = {}
    pipes: dict[int, int] = {}
    children: list[int] = []
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(ranks):
            devices[rank + 1] = _device(rank, rate)  # moves this process into the new namespace
            reading, writing = os.pipe()
            child = os.fork()
            if child == 0:
                os.close(reading)
                _be_rank(rank, ranks, f"{folder}/store", writing, function, args)
            os.close(writing)
            children.append(child)
            pipes[reading] = rank
        try:
            answers = _carry(devices, pipes, delay)
        finally:
            for child in children:
                os.kill(child, 9)  # a finished rank sleeps until then
                os.waitpid(child, 0)
            for descriptor in (*devices.values(), *pipes):
                os.close(descriptor)
    for rank, (good, answer) in sorted(answers.items()):
        if not good:
            sys.exit(f"rank {rank} of {ranks} failed:\n{answer}")
    return [answers[rank][1] for rank in range(ranks)]


def _device(rank: int, rate: float) -> int:
    """Create a network namespace with a TUN device of ``rate`` Mb/s, and return the device's file descriptor."""
    new_network_namespace, tun_set_interface, tun_without_header = 0x40000000, 0x400454CA, 0x1001
    if ctypes.CDLL(None, use_errno=True).unshare(new_network_namespace):
        sys.exit(f"no network namespace for rank {rank}: {os.strerror(ctypes.get_errno())}")
    try:
        device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        fcntl.ioctl(device, tun_set_interface, struct.pack("16sH22x", DEVICE.encode(), tun_without_header))
        for command in (
            f"ip address add 10.0.0.{rank + 1}/24 dev {DEVICE}",
            f"ip link set {DEVICE} mtu {MTU} up",
            "ip link set lo up",
            f"tc qdisc add dev {DEVICE} root tbf rate {rate}mbit burst {BURST} limit 8mb",
        ):
            subprocess.run(command.split(), check=True, capture_output=True, text=True)
        # An idle connection must not fall back to slow start. No packet is lost on these links, so that the simplest
        # congestion control is the most predictable.
        Path("/proc/sys/net/ipv4/tcp_slow_start_after_idle").write_text("0")
        Path("/proc/sys/net/ipv4/tcp_congestion_control").write_text("reno")
    except (OSError, subprocess.CalledProcessError) as error:
        detail = f": {error.stderr.strip()}" if isinstance(error, subprocess.CalledProcessError) else ""
        sys.exit(f"cannot create a limited link: {error}{detail}")
    return device


def _carry(devices: dict[int, int], pipes: dict[int, int], delay: float) -> dict[int, tuple[bool, Any]]:
    """Forward every packet to the device of its receiver after ``delay`` seconds, until all ranks have answered.

    The last byte of the destination address is the key of the receiver in ``devices``.
    """
    in_flight: deque[tuple[float, int, bytes]] = deque()
    received = dict.fromkeys(pipes, b"")
    open_pipes = set(pipes)
    while open_pipes:
        timeout = max(0.0, in_flight[0][0] - time.monotonic()) if in_flight else 1.0
        ready, _, _ = select.select([*devices.values(), *open_pipes], [], [], timeout)
        for descriptor in ready:
            if descriptor in pipes:
                received[descriptor] += (part := os.read(descriptor, 1 << 16))
                if not part:
                    open_pipes.remove(descriptor)
            else:
                due = time.monotonic() + delay
                for packet in _packets(descriptor):
                    if packet[0] >> 4 == 4 and packet[19] in devices:
                        in_flight.append((due, devices[packet[19]], packet))
        while in_flight and in_flight[0][0] <= time.monotonic():
            _, device, packet = in_flight.popleft()
            os.write(device, packet)
        if any(received[pipe] and not pickle.loads(received[pipe])[0] for pipe in pipes if pipe not in open_pipes):
            break  # the other ranks would wait for the failed one
    return {pipes[pipe]: pickle.loads(text) for pipe, text in received.items() if text and pipe not in open_pipes}


def _packets(device: int) -> list[bytes]:
    """Read at most 16 waiting packets."""
    found = []
    try:
        while len(found) < 16:
            found.append(os.read(device, MTU))
    except BlockingIOError:
        pass
    return found


def _be_rank(rank: int, ranks: int, store: str, answer: int, function: Callable[..., Any], args: Any) -> None:
    set_signal_at_parents_death, kill = 1, 9
    ctypes.CDLL(None).prctl(set_signal_at_parents_death, kill)
    try:
        torch.set_num_threads(1)
        os.environ["GLOO_SOCKET_IFNAME"] = DEVICE
        dist.init_process_group(
            "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=ranks,
            timeout=datetime.timedelta(seconds=120),
        )
        found: tuple[bool, Any] = (True, function(rank, *args))
        dist.barrier()  # no rank closes its connections while another still receives
    except BaseException:
        found = (False, traceback.format_exc())
    with os.fdopen(answer, "wb") as pipe:
        pipe.write(pickle.dumps(found))
    time.sleep(3600)


RESULT = Path(__file__).parent / "results" / "cost_check.json"
RANKS = (2, 4, 8)
PROBE_BYTES = 20_000_000
MAX_SEGMENT = 1_048_576

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
    rows = 2 * gloo_phase(ranks, ROW_BYTES, link)  # the control rows, and the gather that confirms
    return rows + 2 * gloo_phase(ranks, nbytes / ranks, link) + local * nbytes * max(1.0, ranks / cores)


def textbook(ranks: int, nbytes: int, link: Link) -> float:
    """Return the seconds of an average by the plain ring of the cost model, without local memory passes."""
    network = Network(link.name, link)
    return cost_model.allreduce(ranks, nbytes, network, "ring") + cost_model.control_row(ranks, network)


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
    entries = []
    for ranks in RANKS:
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
