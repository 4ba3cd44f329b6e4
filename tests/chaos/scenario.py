"""The run of one rank with a fault in it, and the resumed run. Both record what the judge needs."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.chaos.collectives import Sabotage, set_timeout
from tests.chaos.configurations import CONFIGURATIONS, TOTAL
from tests.chaos.faults import Case, Fault, Scene
from tests.chaos.group import Leave
from tests.chaos.plan import FAULTS
from tests.chaos.record import Failure, Record
from tests.chaos.replica import Replica

#: Timeout of the process groups, in seconds, in a case whose ranks wait for it.
SHORT = 1.5
#: A run that still fails after so many failures is ended.
MOST_FAILURES = 4


class Stopped(Exception):
    """The run has ended with an error."""


class Run:
    """One rank of a case."""

    def __init__(self, rank: int, case: Case, folder: Path, fault: Fault | None) -> None:
        configuration = CONFIGURATIONS[case.configuration]
        self.rank, self.case, self.fault, self.folder = rank, case, fault, folder
        victims = [] if fault is None else fault.victims(case, configuration)
        self.scene = Scene(rank, case, configuration, rank in victims, folder, Sabotage())
        self.record = Record()
        self.last: dict[str, str] = {}  # the digests after the last step

    # Calls that may fail

    def attempt(self, name: str, call: Callable[[], Any]) -> Any:
        """Make a call; record its failure, and do what the fault says after one."""
        then = None if self.fault is None else self.fault.then_in(self.scene.configuration)
        for last in (then != "retry", True):
            before, overlapped = self.before(name), self._average_under_way()
            start = time.monotonic()
            try:
                return call()
            except (Exception, KeyboardInterrupt) as error:
                if overlapped and not self._average_under_way():
                    before = {}  # the average of the sync before was applied, as it was due: a change that is whole
                self._failed(name, error, before, time.monotonic() - start)
                if len(self.record.failures) == MOST_FAILURES or (last and then != "go on"):
                    raise Stopped from error
                if last:
                    return None
        return None

    def _as_if_averaged(self, name: str) -> str:
        """Return the digest of the scheduler if it still took the replicas for equal.

        It does not any more once a step of the optimizer may have begun: what it changes before it fails is unknown.
        """
        assert self.scene.replica is not None
        cycle = self.scene.replica.scheduler.cycle
        cycle.averaged, kept = True, cycle.averaged
        try:
            return self.digests(name)["scheduler"]
        finally:
            cycle.averaged = kept

    def _failed(self, name: str, error: BaseException, before: dict[str, str], seconds: float) -> None:
        replica = self.scene.replica
        after = self.digests(name)
        if name in ("backward", "optimizer"):  # a forward pass may have moved the statistics of BatchNorm
            before = {part: value for part, value in before.items() if part != "buffers"}
        texts = []
        cause: BaseException | None = error
        while cause is not None:
            texts.append(str(cause))
            cause = cause.__cause__
        changed = [part for part in before if before[part] != after[part]]
        if name == "optimizer" and changed == ["scheduler"] and before["scheduler"] == self._as_if_averaged(name):
            changed = []
        step = 0 if replica is None else replica.step
        failure = Failure(name, step, type(error).__name__, " | ".join(texts), changed, after, seconds)
        self.record.failures.append(failure)

    def _average_under_way(self) -> bool:
        replica = self.scene.replica
        return replica is not None and replica.scheduler.cycle.overlapping is not None

    def before(self, name: str) -> dict[str, str]:
        """Return the digests before a call, if it can be one that fails because of the fault."""
        if self.fault is None or (self.fault.at not in ("build", "load") and self.next_step < self.case.step):
            return {}
        return self.last if name in ("backward", "optimizer") else self.digests(name)

    @property
    def next_step(self) -> int:
        return 0 if self.scene.replica is None else self.scene.replica.step + 1

    def digests(self, name: str) -> dict[str, str]:
        """Return the digests around a call; those of the gradients too where it must leave them alone."""
        return {} if self.scene.replica is None else self.scene.replica.digests(gradients=name == "scheduler")

    def fire(self, place: str, step: int) -> None:
        """Inject the fault, if this is its place, its step and its victim."""
        fault, scene = self.fault, self.scene
        if fault is None or fault.at != place or step != self.case.step or not scene.mine:
            return
        if not fault.late:
            scene.fired = True
        if place == "after":
            self.attempt("after", lambda: fault.act(scene))
        else:
            fault.act(scene)

    # The run

    def build(self, **changes: Any) -> Replica:
        """Build model, optimizer and scheduler."""
        scene = self.scene
        scene.replica = None
        built = self.attempt("build", lambda: Replica(scene.configuration, self.rank, self.case.device, **changes))
        assert isinstance(built, Replica)
        scene.replica = built
        self.note(built)
        return built

    def train(self, until: int = TOTAL, save: bool = False) -> None:
        """Train up to a step, with the fault on the way."""
        replica = self.scene.here
        while replica.step < until:
            if save and replica.step in self.case.saved:
                name = "old" if replica.step == self.case.saved[0] else "good"
                replica.save(self.folder, f"{name}{self.rank}.pt")
                if self.case.saved[0] == self.case.saved[1]:
                    replica.save(self.folder, f"good{self.rank}.pt")
            self.one_step(replica)
        self.record.finite = replica.finite()

    def one_step(self, replica: Replica) -> None:
        """Make one step as a user does."""
        scene, step = self.scene, replica.step + 1
        waits = self.fault is not None and self.fault.waits and step == self.case.step
        if waits and self.fault is not None and self.fault.at == "forward":
            self.meet()
        self.fire("forward", step)
        buffers = [buffer.clone() for buffer in replica.own.buffers()]

        def backward() -> Any:
            for buffer, value in zip(replica.own.buffers(), buffers, strict=True):
                buffer.copy_(value)  # BatchNorm has counted a batch whose backward pass failed
            return replica.backward(scene.spoil_batch)

        loss = self.attempt("backward", backward)
        scene.spoil_batch = None
        self.fire("gradients", step)
        self.attempt("optimizer", replica.optimizer.step)
        scene.loss = loss
        if waits and self.fault is not None and self.fault.at != "forward":
            self.meet()
        self.fire("update", step)
        if step == self.case.step:
            self.record.vectors = [replica.vector()]
        self.fire("sync", step)
        given, scene.loss = scene.loss, loss  # a loss that is refused is passed right the second time
        losses = iter((given, loss, loss))
        try:
            self.attempt("scheduler", lambda: replica.scheduler.step(next(losses)))
        finally:
            if "overlap" not in scene.configuration.traits:
                scene.sabotage.disarm()
        if step == self.case.step:
            self.record.vectors.append(replica.vector())
        self.fire("after", step)
        self.note(replica)

    def meet(self) -> None:
        """Wait for the other ranks, then shorten the timeouts: nobody is late now but the victim."""
        dist.barrier()
        set_timeout(SHORT)

    def note(self, replica: Replica, loaded: bool = False) -> None:
        """Record the state after a step, or after a checkpoint was loaded."""
        record, step = self.record, replica.step
        record.step = step
        record.digests[step] = self.last = replica.digests()
        for sync in replica.scheduler.history[-2:]:
            if sync.kind != "manual":
                record.excluded[sync.step], record.collectives[sync.step] = list(sync.excluded), sync.collectives
        if not loaded and replica.scheduler.history and replica.scheduler.history[-1].step == step:
            record.consensus[step] = replica.consensus()

    # Checkpoints

    def read(self, name: str) -> dict[str, Any]:
        """Return this rank's checkpoint of a name."""
        found: dict[str, Any] = torch.load(self.folder / f"{name}{self.rank}.pt", weights_only=True)
        return found

    def load(self) -> None:
        """Build a run anew and load the checkpoint into it, which the fault may have spoilt."""
        scene = self.scene
        self.build()
        scene.states, scene.older = self.read("good"), self.read("old")
        if scene.mine and self.fault is not None:
            scene.fired = True
            self.attempt("load", lambda: self._spoilt(scene))
            if self.fault.expect == "rejected":
                scene.here.load(self.read("good"))
        else:
            scene.here.load(scene.states)
        self.note(scene.here, loaded=True)

    def _spoilt(self, scene: Scene) -> None:
        assert self.fault is not None
        self.fault.act(scene)
        if scene.states:
            scene.here.load(scene.states, scene.order)


@contextlib.contextmanager
def _ended(run: Run) -> Iterator[None]:
    """End a run whatever happened: put the collectives back, and leave the process if the fault says so."""
    try:
        yield
    except Stopped:
        if run.fault is not None and run.fault.then == "leave":
            run.record.fired = run.scene.fired
            raise Leave(run.record) from None
    finally:
        run.scene.sabotage.disarm()
        run.record.fired = run.scene.fired


def disturbed(rank: int, case: Case, folder: Path) -> Record:
    """Make the run with the fault."""
    fault = FAULTS[case.fault]
    run = Run(rank, case, folder, fault)
    with _ended(run):
        if fault.at == "build" and run.scene.mine:
            run.scene.fired = True
            fault.act(run.scene)
        if fault.at == "load":
            run.fault = None
            run.build()
            run.train(until=case.saved[1], save=True)
            run.scene.here.save(folder, f"good{rank}.pt")
            run.fault = fault
            run.load()
        else:
            run.build(**run.scene.build)
        run.train(save=fault.at not in ("build", "load"))
    return run.record


def undisturbed(rank: int, case: Case) -> Record:
    """Make the run without a fault."""
    run = Run(rank, case, Path(), None)
    run.build()
    run.train()
    return run.record


def resumed(rank: int, case: Case, folder: Path) -> Record:
    """Make the rest of the run, from the checkpoint that this rank wrote before the fault."""
    run = Run(rank, case, folder, None)
    with contextlib.suppress(Stopped):
        run.build()
        unfinished = folder / f"unfinished{rank}.pt"
        if unfinished.exists():
            run.attempt("load", lambda: _refused(unfinished))
        if (folder / f"good{rank}.pt").exists():
            run.scene.here.load(run.read("good"))
        run.record.digests.clear()
        run.note(run.scene.here, loaded=True)
        run.train()
    return run.record


def _refused(path: Path) -> None:
    """Read a checkpoint that was not written to its end, which must fail."""
    try:
        torch.load(path, weights_only=True)
    except Exception:
        return
    raise AssertionError(f"{path.name} was cut off and could be read")
