"""Run gloo ranks on this machine, each behind its own link of a given rate and delay.

Every rank has a network namespace with one interface, a TUN device. The kernel limits its sending rate (tc, token
bucket). This process forwards the packets from device to device and delays each of them. Requirements: Linux, user
namespaces, ``ip``, ``tc`` and /dev/net/tun; neither root nor netem, bridge or veth.
"""

from __future__ import annotations

import ctypes
import datetime
import fcntl
import os
import pickle
import platform
import select
import shutil
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
