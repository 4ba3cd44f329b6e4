"""Processes that die, stop, hang or are slow, at every moment of a step and of a sync, and collectives that raise."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

from tests.chaos.collectives import When
from tests.chaos.faults import Fault, Injected, Scene


def send(name: signal.Signals) -> Callable[[], None]:
    """Return a function that sends a signal to this process."""
    return lambda: os.kill(os.getpid(), name)


def raises(error: BaseException) -> Callable[[], None]:
    """Return a function that raises."""

    def act() -> None:
        raise error

    return act


KILL, STOP, TERMINATE = send(signal.SIGKILL), send(signal.SIGSTOP), send(signal.SIGTERM)
INJECTED, OUT_OF_MEMORY = raises(Injected("out of the blue")), raises(MemoryError("out of memory"))
CABLE, INTERRUPT = raises(Injected("the cable was pulled out")), raises(KeyboardInterrupt())
ABORTED = raises(RuntimeError("NCCL communicator was aborted"))
RESET = raises(ConnectionResetError("connection reset by peer"))


def at_once(act: Callable[[], Any]) -> Callable[[Scene], None]:
    return lambda scene: act()


def inside(place: str, act: Callable[[], Any]) -> Callable[[Scene], None]:
    """Act once in what the user wrote: ``in_loss``, ``in_probe`` or ``in_setter``."""
    return lambda scene: setattr(scene.here, place, scene.once(act))


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


def at_collective(where: str, act: Callable[[], Any], when: When = "before") -> Callable[[Scene], None]:
    """Act at the first, a middle or the last collective of a sync."""

    def arm(scene: Scene) -> None:
        count = max(scene.case.collectives, 1)
        middle = 1 + scene.random.randrange(count)
        number = {"first": 1, "middle": middle, "last": count}[where]
        scene.sabotage.arm(number, scene.once(act), when)

    return arm


def first_of(act: Callable[[], Any], *names: str) -> Callable[[Scene], None]:
    """Act at the first collective of some names."""
    return lambda scene: scene.sabotage.arm(1, scene.once(act), only=names)


def broadcast(scene: Scene) -> None:
    """Let the integer buffers differ, so that they are broadcast, and let that fail."""
    for buffer in scene.here.own.buffers():
        if not buffer.is_floating_point():
            buffer.add_(1 + scene.rank)
    first_of(CABLE, "broadcast")(scene)


def while_saving(scene: Scene) -> None:
    """Write half of a checkpoint, then die."""
    whole = scene.here.save(scene.folder, f"unfinished{scene.rank}.pt").read_bytes()
    cut = scene.random.randrange(1, len(whole) - 1)
    (scene.folder / f"unfinished{scene.rank}.pt").write_bytes(whole[:cut])
    KILL()


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
    lost("killed in the probe", "sync", inside("in_probe", KILL), needs="probe", steps="inner", late=True),
    lost("killed in a setter", "sync", inside("in_setter", KILL), needs="setter", steps="inner", late=True),
    lost("killed while saving", "after", while_saving, steps="any"),
    lost("terminated in the forward pass", "forward", inside("in_loss", TERMINATE), steps="any", late=True),
    lost("exits in the forward pass", "forward", inside("in_loss", lambda: os._exit(3)), steps="any", late=True),
    lost("two are killed before a sync", "sync", at_once(KILL), on="two"),
    lost("two are killed after the handshake", "sync", at_collective("first", KILL, "after"), on="two", late=True),
    lost("all are killed in a sync", "sync", at_collective("middle", KILL), on="all", late=True),
    lost("raises in the forward pass and ends", "forward", raise_in_loss(Injected), steps="any", late=True),
    lost("out of memory in the forward pass", "forward", raise_in_loss(MemoryError), steps="any", late=True),
    lost("interrupted in a collective", "sync", at_collective("middle", INTERRUPT), late=True),
    lost("stopped before a sync", "sync", at_once(STOP), waits=True),
    lost("stopped in a sync", "sync", at_collective("middle", STOP, "after"), waits=True, late=True),
    # Not with overlap: its process groups are made at the first sync, with the long timeout.
    lost("stopped in the forward pass", "forward", inside("in_loss", STOP), waits=True, late=True, steps="any",
         without="overlap"),
    lost("hangs in the probe", "sync", inside("in_probe", STOP), waits=True, needs="probe", steps="inner", late=True),
    lost("hangs in a collective", "sync", at_collective("first", sleep(FOREVER)), waits=True, late=True),
    Fault("stopped and continued before a sync", "unharmed", "sync", at_once(STOP)),
    Fault("stopped and continued in a sync", "unharmed", "sync", at_collective("middle", STOP), late=True),
    Fault("stopped and continued in the forward pass", "unharmed", "forward", inside("in_loss", STOP), steps="any",
          late=True),
    Fault("slow in the forward pass", "unharmed", "forward", inside("in_loss", sleep(0.2)), steps="any", late=True),
    Fault("slow in a collective", "unharmed", "sync", at_collective("middle", sleep(0.2)), late=True),
]  # fmt: skip

#: Collectives that raise on every rank: nothing has changed, and the next try succeeds. What travels in compressed form
#: needs an average before it.
RAISING: dict[str, tuple[Callable[[Scene], None], str]] = {
    "handshake": (first_of(CABLE, "_all_gather"), ""),
    "an all-reduce": (first_of(CABLE, "all_reduce"), ""),
    "an all-to-all": (first_of(CABLE, "all_to_all_single"), "compress"),
    "a collective": (at_collective("middle", ABORTED), ""),
    "the last collective": (at_collective("last", RESET), ""),
    "a collective without memory": (at_collective("middle", OUT_OF_MEMORY), ""),
}

COLLECTIVES = [
    lost("handshake raises, and the process ends", "sync", first_of(CABLE, "_all_gather"), late=True),
    lost("a collective raises, and the process ends", "sync", at_collective("middle", ABORTED), late=True,
         message="{who}: NCCL communicator|{who} did not come"),
    lost("the last collective raises, and the process ends", "sync", at_collective("last", RESET), late=True),
    lost("a finished collective raises, and the process ends", "sync", at_collective("middle", CABLE, "after"),
         late=True),
    # It edits the buffers, which with overlap are seen until the average lands.
    lost("a broadcast of counts raises, and the process ends", "sync", broadcast, late=True, needs="local",
         without="overlap"),
    *(
        Fault(f"{name} raises on all ranks once", "unharmed", "sync", act, on="all", then="retry", late=True,
              without="overlap", needs=needs, steps="last" if needs == "compress" else "sync")
        for name, (act, needs) in RAISING.items()
    ),
    lost("a collective raises, and the process stays", "sync", at_collective("middle", CABLE), late=True, waits=True),
]  # fmt: skip
