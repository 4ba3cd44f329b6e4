"""Collectives that raise, on one rank or on all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.chaos.faults import Fault, Injected, Scene, traits
from tests.chaos.faults_processes import at_collective, run_out_of_memory


def cable() -> None:
    raise Injected("the cable was pulled out")


def backend_error() -> None:
    raise RuntimeError("NCCL communicator was aborted")


def reset() -> None:
    raise ConnectionResetError("connection reset by peer")


def first_of(act: Callable[[], Any], *names: str) -> Callable[[Scene], None]:
    """Act at the first collective of some names."""
    return lambda scene: scene.sabotage.arm(1, scene.once(act), only=names)


def with_uneven_counts(scene: Scene) -> None:
    """Let the integer buffers differ, so that they are broadcast, and let that fail."""
    for buffer in scene.here.own.buffers():
        if not buffer.is_floating_point():
            buffer.add_(1 + scene.rank)


def broadcast(scene: Scene) -> None:
    with_uneven_counts(scene)
    scene.sabotage.arm(1, scene.once(cable), only=["broadcast"])


FAULTS = [
    *(
        Fault(
            f"{name} raises, and the process ends", "lost", "sync", act, then="leave", late=True, needs=traits(needs),
            message=message,
        )
        for name, act, needs, message in (
            ("handshake", first_of(cable, "_gathered"), "", None),
            ("a collective", at_collective("middle", backend_error), "", "{who}: NCCL communicator|{who} did not come"),
            ("the last collective", at_collective("last", reset), "", None),
            ("a finished collective", at_collective("middle", cable, "after"), "", None),
        )
    ),
    Fault(  # it edits the buffers, which with overlap are seen until the average lands
        "a broadcast of counts raises, and the process ends", "lost", "sync", broadcast, then="leave", late=True,
        needs=traits("local"), without=traits("overlap"),
    ),
    *(
        Fault(
            f"{name} raises on all ranks once", "unharmed", "sync", act, on="all", then="retry", late=True,
            without=traits("overlap"), needs=traits(needs),
        )
        for name, act, needs in (
            ("handshake", first_of(cable, "_gathered"), ""),
            ("an all-reduce", first_of(cable, "all_reduce", "trade"), ""),  # over gloo, halves are traded
            ("an all-to-all", first_of(cable, "all_to_all_single"), "compress"),
            ("a collective", at_collective("middle", backend_error), ""),
            ("the last collective", at_collective("last", reset), ""),
            ("a collective without memory", at_collective("middle", run_out_of_memory), ""),
        )
    ),
    Fault(
        "a collective raises, and the process stays", "lost", "sync", at_collective("middle", cable), then="leave",
        late=True, waits=True,
    ),
]  # fmt: skip
