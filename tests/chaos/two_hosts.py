"""Two hosts: network namespaces with two ranks in each, started by torchrun, and a link between them that can be cut.

Each host is a network namespace with one interface. Both are plugged into a bridge in a third namespace, the switch,
where a port that is down is a cable that was pulled out: the hosts keep their addresses, and nothing arrives. All
addresses exist in these namespaces only.

``python -m tests.chaos.two_hosts CASE COLLECTIVES FOLDER`` is what torchrun runs on every rank.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import IO

from tests.chaos.faults import Case
from tests.chaos.group import CASE_TIMEOUT, GROUP_TIMEOUT, Leave, Lost
from tests.chaos.record import Record

RANKS, PER_HOST = 4, 2
#: How long a process may take to end after its last word, in seconds.
END = 20.0

_NAMES = re.compile(r"hdet-(\d+)-\d+-(?:host[01]|switch)")
_NUMBERS = itertools.count()


def ip(*words: str) -> str:
    """Return what ``ip`` prints. Raises OSError with what it says if it fails."""
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"ip {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


@dataclass(frozen=True)
class Hosts:
    """Two namespaces and the switch between them.

    Args:
        prefix: of the names of the three namespaces.
    """

    prefix: str

    def __getitem__(self, host: int) -> str:
        return f"{self.prefix}-host{host}"

    @property
    def switch(self) -> str:
        return f"{self.prefix}-switch"

    def make(self) -> None:
        """Make the namespaces and plug the hosts in."""
        for name in (self.switch, self[0], self[1]):
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        ip("-n", self.switch, "link", "add", "bridge", "type", "bridge")
        ip("-n", self.switch, "link", "set", "bridge", "up")
        for host in range(2):
            port = f"port{host}"
            ip("-n", self.switch, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", self[host])
            ip("-n", self.switch, "link", "set", port, "master", "bridge", "up")
            ip("-n", self[host], "addr", "add", f"10.77.0.{1 + host}/24", "dev", "eth0")
            ip("-n", self[host], "link", "set", "eth0", "up")

    def end(self) -> None:
        """Kill what runs in the namespaces, and remove them."""
        for name in (self[0], self[1], self.switch):
            with contextlib.suppress(OSError):
                kill(name)
                ip("netns", "del", name)


def kill(name: str) -> None:
    """Kill every process in a namespace, this one last."""
    pids = [int(pid) for pid in ip("netns", "pids", name).split()]
    for pid in sorted(pids, key=lambda pid: pid == os.getpid()):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def cut(seconds: float | None = None) -> None:
    """Pull out the cable of the host of this process, and plug it in again after some seconds, if they are given."""
    where = ["ip", "-n", os.environ["CHAOS_SWITCH"], "link", "set", os.environ["CHAOS_PORT"]]
    time.sleep(1.0)  # the others may still be in what they did together
    subprocess.run([*where, "down"], check=True)
    if seconds is not None:
        subprocess.Popen(["sh", "-c", f"sleep {seconds}; {' '.join(where)} up"], start_new_session=True)


def kill_host() -> None:
    """Kill every process of the host of this process."""
    kill(os.environ["CHAOS_HOST"])


@contextlib.contextmanager
def hosts() -> Iterator[Hosts]:
    """Yield two hosts that end with the block. Those of runs that were killed are removed first."""
    for match in _NAMES.finditer(ip("netns", "list")):
        if not Path(f"/proc/{match[1]}").exists():
            with contextlib.suppress(OSError):
                kill(match[0])
                ip("netns", "del", match[0])
    made = Hosts(f"hdet-{os.getpid()}-{next(_NUMBERS)}")
    try:
        made.make()
        yield made
    finally:
        made.end()


@cache
def missing() -> str:
    """Return why there can be no two hosts on this machine; nothing if there can."""
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        return "network namespaces need Linux and root"
    if shutil.which("ip") is None:
        return "there is no command ip (Debian package iproute2)"
    try:
        with hosts():
            return ""
    except OSError as error:
        return f"no network namespaces can be made: {error}"


def run(case: Case, folder: Path, lost: Collection[int], restarts: int) -> tuple[list[Record | None], list[Record]]:
    """Make the run with the fault.

    Args:
        case: the case.
        folder: of its files.
        lost: ranks that may end without a record.
        restarts: how often torchrun may start all ranks again.

    Returns:
        The records of the first attempt, by rank, and those of the last one, if it is another.
    """
    with hosts() as made, contextlib.ExitStack() as open_files:
        logs = [open_files.enter_context((folder / f"log{host}").open("wb")) for host in range(2)]
        agents = [_start(made, host, case, folder, restarts, logs[host]) for host in range(2)]
        wanted = [f"record{restarts}.{rank}" for rank in range(RANKS) if restarts or rank not in lost]
        until = time.monotonic() + 2 * CASE_TIMEOUT
        while not all((folder / name).exists() for name in wanted):
            ended = all(agent.poll() is not None for agent in agents)
            if (ended or time.monotonic() > until) and not all((folder / name).exists() for name in wanted):
                said = "".join(f"\nhost {host}:\n{(folder / f'log{host}').read_text()[-2000:]}" for host in range(2))
                silent = [name for name in wanted if not (folder / name).exists()]
                raise Lost(f"no {', '.join(silent)} within {2 * CASE_TIMEOUT:.0f} s, or torchrun ended{said}")
            time.sleep(0.1)
        ends = {name: _read(folder / name)[1] for name in wanted}
        until = time.monotonic() + END
        while alive := [name for name, pid in ends.items() if _runs(pid)]:
            if time.monotonic() > until:
                raise Lost(f"the processes of {', '.join(alive)} have not ended within {END:.0f} s")
            time.sleep(0.1)
    first = [folder / f"record0.{rank}" for rank in range(RANKS)]
    found = [_read(path)[0] if path.exists() else None for path in first]
    return found, [_read(folder / name)[0] for name in wanted] if restarts else []


def _start(made: Hosts, host: int, case: Case, folder: Path, restarts: int, log: IO[bytes]) -> subprocess.Popen[bytes]:
    settings = {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")])),
        "GLOO_SOCKET_IFNAME": "eth0",
        "OMP_NUM_THREADS": "1",
        "CHAOS_HOST": made[host],
        "CHAOS_SWITCH": made.switch,
        "CHAOS_PORT": f"port{host}",
    }
    if restarts:
        settings["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", str(PER_HOST)]
    torchrun += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "10.77.0.1:29400", "--rdzv-id", "chaos"]
    # An agent that hears nothing of the other one for long gives up: not while a link is cut for a moment.
    patience = "last_call_timeout=1,keep_alive_interval=5,keep_alive_max_attempt=12"
    torchrun += ["--rdzv-conf", f"is_host={1 - host},{patience}"]
    torchrun += ["--local-addr", f"10.77.0.{1 + host}", "--max-restarts", str(restarts), "--monitor-interval", "0.1"]
    script = ["-m", "tests.chaos.two_hosts", case.spelled, str(case.collectives), str(folder)]
    command = ["ip", "netns", "exec", made[host], *torchrun, *script]
    environment = {**os.environ, **settings}
    return subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)


def _runs(pid: int) -> bool:
    """Return whether a process has not ended; a torchrun that waits for the other host has not noticed its end."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def _read(path: Path) -> tuple[Record, int]:
    found: tuple[Record, int] = pickle.loads(path.read_bytes())
    return found


def main() -> int:
    """Run on one rank, as torchrun does; return the exit code."""
    import torch
    import torch.distributed as dist

    from tests.chaos.plan import spelled
    from tests.chaos.scenario import disturbed, resumed

    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    case, folder = replace(spelled(sys.argv[1]), collectives=int(sys.argv[2])), Path(sys.argv[3])
    began = folder / f"began{rank}"  # torchrun counts the restarts of a host that follows the other one as none
    life = int(began.exists())
    began.touch()
    dist.init_process_group("gloo", timeout=timedelta(seconds=GROUP_TIMEOUT))
    code = 0
    try:
        record = (resumed if life else disturbed)(rank, case, folder)
    except Leave as leaving:
        record, code = leaving.value, 1
    unfinished = folder / f"unfinished record {rank}"
    unfinished.write_bytes(pickle.dumps((record, os.getpid())))
    unfinished.rename(folder / f"record{life}.{rank}")
    return code


if __name__ == "__main__":
    sys.exit(main())
