"""Faults between two hosts: a link is cut, a host is gone, a rank dies and torchrun starts all again."""

from __future__ import annotations

from functools import partial

from tests.chaos.faults import Fault, Scene
from tests.chaos.faults_processes import KILL, at_collective, at_once, lost
from tests.chaos.two_hosts import cut, kill_host

#: Seconds for which a link is cut: longer than the short timeout of the groups, shorter than the long one.
MOMENT = 8.0
#: What is said where the other side cannot be known to have ended.
NETWORK = "network .*; this rank (last completed sync at step|has completed none)"
GONE = "{who} has ended|connections to .*{who}|the store of the process group cannot be reached"


def victim_alone(scene: Scene) -> None:
    """Kill one of the ranks, all of which will end."""
    if scene.rank == scene.case.victim:
        KILL()


FAULTS = [
    Fault("link cut before a sync", "refused", "sync", at_once(cut), needs="hosts", waits=True, message=NETWORK),
    Fault("link cut in a sync", "refused", "sync", at_collective("middle", cut), needs="hosts", waits=True, late=True,
          message=NETWORK),
    Fault("link cut for a moment", "unharmed", "sync", at_once(partial(cut, MOMENT)), needs="hosts"),
    Fault("link cut for longer than the timeout", "refused", "sync", at_once(partial(cut, MOMENT)), needs="hosts",
          waits=True, message=NETWORK),
    lost("host killed before a sync", "sync", at_once(kill_host), on="host", needs="hosts", message=GONE),
    lost("rank killed, and torchrun starts all again", "sync", victim_alone, on="all", needs="hosts", waits=True,
         restarts=1),
]  # fmt: skip
