"""Processes that die, stop, hang or are slow, at every moment of a step and of a sync."""

from __future__ import annotations

import io
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import torch

from tests.chaos.collectives import When
from tests.chaos.faults import Fault, Injected, Scene, traits
from tests.chaos.replica import PARTS


def send(name: signal.Signals) -> Callable[[], None]:
    """Return a function that sends a signal to this process."""
    return lambda: os.kill(os.getpid(), name)


KILL, STOP, TERMINATE = send(signal.SIGKILL), send(signal.SIGSTOP), send(signal.SIGTERM)


def at_once(act: Callable[[], Any]) -> Callable[[Scene], None]:
    return lambda scene: act()


def in_loss(act: Callable[[], Any]) -> Callable[[Scene], None]:
    """Act in the user's loss function."""

    def arm(scene: Scene) -> None:
        scene.here.in_loss = scene.once(act)

    return arm


def raise_in_loss(error: type[Exception]) -> Callable[[Scene], None]:
    """Raise in the user's loss function, throughout one pass: a stack calls it again, replica by replica."""

    def arm(scene: Scene) -> None:
        this = scene.here.passes + 1

        def act() -> None:
            if scene.here.passes == this:
                scene.fired = True
                raise error("out of the blue")

        scene.here.in_loss = act

    return arm


def in_probe(act: Callable[[], Any]) -> Callable[[Scene], None]:
    def arm(scene: Scene) -> None:
        scene.here.in_probe = scene.once(act)

    return arm


def in_setter(act: Callable[[], Any]) -> Callable[[Scene], None]:
    def arm(scene: Scene) -> None:
        scene.here.in_setter = scene.once(act)

    return arm


def at_collective(where: str, act: Callable[[], Any], when: When = "before") -> Callable[[Scene], None]:
    """Act at the first, a middle or the last collective of a sync."""

    def arm(scene: Scene) -> None:
        count = max(scene.case.collectives, 1)
        middle = 1 + scene.random.randrange(count)
        number = {"first": 1, "middle": middle, "last": count}[where]
        scene.sabotage.arm(number, scene.once(act), when)

    return arm


def while_saving(scene: Scene) -> None:
    """Write half of a checkpoint, then die."""
    replica, file = scene.here, io.BytesIO()
    parts = (replica.own, replica.optimizer, replica.scheduler)
    torch.save({name: part.state_dict() for name, part in zip(PARTS, parts, strict=True)}, file)
    whole = file.getvalue()
    cut = scene.random.randrange(1, len(whole) - 1)
    (scene.folder / f"unfinished{scene.rank}.pt").write_bytes(whole[:cut])
    KILL()


def interrupt() -> None:
    raise KeyboardInterrupt


def run_out_of_memory() -> None:
    raise MemoryError("out of memory")


def raise_injected() -> None:
    raise Injected("out of the blue")


def sleep(seconds: float) -> Callable[[], None]:
    return lambda: time.sleep(seconds)


#: Longer than any short timeout; the others have left long before it ends.
FOREVER = 600.0


def lost(name: str, at: Any, act: Callable[[Scene], None], **options: Any) -> Fault:
    """Return a fault that ends in a lost process."""
    return Fault(name, "lost", at, act, then="leave", **options)


FAULTS = [
    lost("killed before a step", "forward", at_once(KILL), steps="any"),
    lost("killed before the update", "gradients", at_once(KILL), steps="any"),
    lost("killed before a sync", "sync", at_once(KILL)),
    lost("killed after a sync", "after", at_once(KILL)),
    lost("killed before the handshake", "sync", at_collective("first", KILL), late=True),
    lost("killed after the handshake", "sync", at_collective("first", KILL, "after"), late=True),
    lost("killed before a collective", "sync", at_collective("middle", KILL), late=True),
    lost("killed after a collective", "sync", at_collective("middle", KILL, "after"), late=True),
    lost("killed before the last collective", "sync", at_collective("last", KILL), late=True),
    lost("killed after the last collective", "sync", at_collective("last", KILL, "after"), late=True),
    lost("killed in the probe", "sync", in_probe(KILL), needs=traits("probe"), steps="inner", late=True),
    lost("killed in a setter", "sync", in_setter(KILL), needs=traits("setter"), steps="inner", late=True),
    lost("killed while saving", "after", while_saving, steps="any"),
    lost("terminated in the forward pass", "forward", in_loss(TERMINATE), steps="any", late=True),
    lost("exits in the forward pass", "forward", in_loss(lambda: os._exit(3)), steps="any", late=True),
    lost("two are killed before a sync", "sync", at_once(KILL), on="two"),
    lost("two are killed after the handshake", "sync", at_collective("first", KILL, "after"), on="two", late=True),
    lost("all are killed in a sync", "sync", at_collective("middle", KILL), on="all", late=True),
    lost("raises in the forward pass and ends", "forward", raise_in_loss(Injected), steps="any", late=True),
    lost("out of memory in the forward pass", "forward", raise_in_loss(MemoryError), steps="any", late=True),
    lost("interrupted in a collective", "sync", at_collective("middle", interrupt), late=True),
    lost("stopped before a sync", "sync", at_once(STOP), waits=True),
    lost("stopped in a sync", "sync", at_collective("middle", STOP, "after"), waits=True, late=True),
    # Not with overlap: its process groups are made at the first sync, with the long timeout.
    lost(
        "stopped in the forward pass",
        "forward",
        in_loss(STOP),
        waits=True,
        late=True,
        steps="any",
        without=traits("overlap"),
    ),
    lost("hangs in the probe", "sync", in_probe(STOP), waits=True, needs=traits("probe"), steps="inner", late=True),
    lost("hangs in a collective", "sync", at_collective("first", sleep(FOREVER)), waits=True, late=True),
    Fault("stopped and continued before a sync", "unharmed", "sync", at_once(STOP)),
    Fault("stopped and continued in a sync", "unharmed", "sync", at_collective("middle", STOP), late=True),
    Fault("stopped and continued in the forward pass", "unharmed", "forward", in_loss(STOP), steps="any", late=True),
    Fault("slow in the forward pass", "unharmed", "forward", in_loss(sleep(0.2)), steps="any", late=True),
    Fault("slow in a collective", "unharmed", "sync", at_collective("middle", sleep(0.2)), late=True),
]
