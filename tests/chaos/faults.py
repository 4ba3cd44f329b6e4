"""The catalogue of faults: what is injected, where, into which configurations, and how it must end."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tests.chaos.configurations import SYNC, TOTAL, Configuration

if TYPE_CHECKING:
    from tests.chaos.collectives import Sabotage
    from tests.chaos.replica import Replica

#: How a run with the fault must end:
#: unharmed   every rank ends as in the undisturbed run;
#: healed     the victim's replica is left out of one average and is like the others again;
#: refused    every rank gets an error that names the victim, with everything as before; then the run is repeated or
#:            resumed, and ends as the undisturbed one;
#: lost       a process is gone: the others get an error, with everything as before; the resumed run ends as the
#:            undisturbed one;
#: rejected   the victim's checkpoint is refused, with everything as before; with the right one the run ends as the
#:            undisturbed one.
Expect = Literal["unharmed", "healed", "refused", "lost", "rejected"]
#: When the fault acts: while the replica is built; before the gradients, after them, after the update, right before
#: scheduler.step(), after it; or on a checkpoint that was read.
Place = Literal["build", "forward", "gradients", "update", "sync", "after", "load"]
#: What a rank does after an error: the same call again, the next call, end this run, or end the process.
Then = Literal["retry", "go on", "stop", "leave"]


class Injected(Exception):
    """An error that a fault raises in what the user wrote, or in a collective."""


@dataclass(frozen=True)
class Case:
    """One fault in one configuration, with all that the seed decided.

    Attributes:
        fault, configuration: their names.
        seed: repeats everything below.
        victim: the rank.
        row: of the victim's replicas, if it holds several.
        step: the step, from 1, in which the fault acts.
        saved: steps after which checkpoints are written, ascending: an older one and the one to resume from.
        collectives: number of collectives of the sync at ``step`` in the undisturbed run; 0 if there is none.
        device: of the tensors.
        pick: a number that a fault may use as it likes.
    """

    fault: str
    configuration: str
    seed: int
    victim: int
    row: int
    step: int
    saved: tuple[int, int]
    collectives: int
    device: str
    pick: int

    @property
    def spelled(self) -> str:
        """The case as ``--repeat`` takes it."""
        return f"{self.fault}/{self.configuration}/{self.seed}"


@dataclass
class Scene:
    """One rank of a case: what a fault may read and change.

    Attributes:
        mine: whether this rank is a victim.
        build: keyword arguments of :class:`.replica.Replica`, for faults at ``"build"``.
        loss: the loss that ``scheduler.step()`` is about to get.
        states: the checkpoint that was read, for faults at ``"load"``. An exception is raised when it is loaded.
        order: in which its parts are loaded.
        fired: whether the fault has acted on this rank.
    """

    rank: int
    case: Case
    configuration: Configuration
    mine: bool
    folder: Path
    sabotage: Sabotage
    replica: Replica | None = None
    build: dict[str, Any] = field(default_factory=dict)
    loss: Any = None
    states: dict[str, Any] = field(default_factory=dict)
    older: dict[str, Any] = field(default_factory=dict)
    order: tuple[str, ...] = ("model", "optimizer", "scheduler")
    spoil_batch: Callable[[Any], None] | None = None
    fired: bool = False

    @property
    def here(self) -> Replica:
        """The replica, which is built."""
        assert self.replica is not None
        return self.replica

    @property
    def random(self) -> random.Random:
        """A generator that is the same on all ranks."""
        return random.Random(self.case.pick)

    def once(self, act: Callable[[], Any]) -> Callable[[], Any]:
        """Return a function that acts when it is first called."""
        calls: list[None] = []

        def first_time() -> Any:
            calls.append(None)
            if len(calls) == 1:
                self.fired = True
                return act()
            return None

        return first_time


@dataclass(frozen=True)
class Fault:
    """One kind of fault.

    Attributes:
        name: as it is printed.
        expect: how it must end.
        at: when it acts.
        act: injects it, on every victim.
        on: the victims: one rank, two of them, both of a host, or all.
        needs, without: traits of the configurations that it makes sense in.
        message: pattern that the error of every rank that gets one must match; ``{who}`` stands for the victim. For
            ``lost`` there is a default.
        then: what a rank does after an error.
        steps: where it may act: at the end of a cycle (``"sync"``), of one before the last (``"inner"``), of the last
            one, or anywhere.
        excluded: for ``healed``: whether the victim's replica is left out of the mean.
        waits: whether the others wait for the timeout of the group, which is short then.
        late: whether it acts after its place, in a call that is armed there. Then it must be noticed to have acted.
        restarts: how often torchrun starts all ranks again, which then resume.
    """

    name: str
    expect: Expect
    at: Place
    act: Callable[[Scene], None]
    on: Literal["one", "two", "host", "all"] = "one"
    needs: str = ""
    without: str = ""
    message: str | None = None
    then: Then = "stop"
    steps: Literal["sync", "inner", "last", "any"] = "sync"
    excluded: bool = True
    waits: bool = False
    late: bool = False
    restarts: int = 0

    def fits(self, configuration: Configuration) -> bool:
        """Return whether the fault makes sense in a configuration."""
        if self.on == "two" and configuration.replicas < 3:
            return False
        traits = configuration.traits
        if "hosts" in traits and "hosts" not in self.needs.split():
            return False
        return traits.issuperset(self.needs.split()) and traits.isdisjoint(self.without.split())

    def then_in(self, configuration: Configuration) -> Then:
        """Return what a rank does after an error: an overlapped average that failed stays so, and is not repeated."""
        overlapped = "overlap" in configuration.traits and self.expect == "refused" and self.then == "retry"
        return "stop" if overlapped else self.then

    def resumes_in(self, configuration: Configuration) -> bool:
        """Return whether the run ends with an error and is resumed from a checkpoint."""
        return self.expect == "lost" or (self.expect == "refused" and self.then_in(configuration) == "stop")

    @property
    def possible_steps(self) -> list[int]:
        """The steps at which it may act."""
        if self.steps == "any":
            return list(range(2, TOTAL + 1))
        ends = list(range(SYNC, TOTAL + 1, SYNC))
        return {"sync": ends, "inner": ends[:-1], "last": ends[-1:]}[self.steps]

    def victims(self, case: Case, configuration: Configuration) -> list[int]:
        """Return the ranks that the fault acts on."""
        if self.on == "all":
            return list(range(configuration.ranks))
        if self.on == "host":
            return [case.victim // 2 * 2, case.victim // 2 * 2 + 1]
        return [case.victim, (case.victim + 1) % configuration.ranks][: 1 if self.on == "one" else 2]


def pattern(message: str, case: Case, configuration: Configuration) -> re.Pattern[str]:
    """Return the pattern of a fault's message, in which ``{who}`` is the victim by rank, replica or shard."""
    first = configuration.replica_of(case.victim)
    names = {str(case.victim), *(str(first + row) for row in range(configuration.rows))}
    if configuration.shards > 1:
        names |= {str(first), f"{first}.{case.victim % configuration.shards}"}
    one = "|".join(re.escape(name) for name in sorted(names))
    who = rf"(?:rank|replica|process)(?:s|es)? (?:[\d.]+, )*(?:{one})\b"
    return re.compile(message.replace("{who}", who), re.DOTALL)
