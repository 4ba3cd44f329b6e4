"""Run cases: the run with the fault, the resumed run where there is one, and the verdict."""

from __future__ import annotations

import queue
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from tests.chaos import two_hosts
from tests.chaos.configurations import CONFIGURATIONS, Configuration
from tests.chaos.faults import Case, Fault
from tests.chaos.group import Lost, Pool
from tests.chaos.judge import judge
from tests.chaos.plan import FAULTS, make_case
from tests.chaos.record import Record
from tests.chaos.scenario import disturbed, resumed, undisturbed


@dataclass(frozen=True)
class Verdict:
    """The result of one case.

    Attributes:
        case: the case.
        violations: the promises that were broken, in words.
        seconds: time that it took.
    """

    case: Case
    violations: tuple[str, ...]
    seconds: float


class Runner:
    """Runs cases one after the other, in groups of processes that it keeps.

    Args:
        references: undisturbed runs by configuration; several runners may share them.
    """

    def __init__(self, references: dict[tuple[str, str], list[Record]] | None = None) -> None:
        self.pool = Pool()
        self._references = {} if references is None else references

    def reference(self, configuration: str, device: str) -> list[Record]:
        """Return the undisturbed run of a configuration."""
        key = (configuration, device)
        if key not in self._references:
            # The undisturbed run is the same for every fault; a case has its device.
            case = replace(make_case(next(iter(FAULTS)), configuration, 0, device), step=0)
            self._references[key] = self.pool.group(CONFIGURATIONS[configuration].ranks).call(undisturbed, case)
        return self._references[key]

    def run(self, case: Case) -> Verdict:
        """Run one case."""
        fault, configuration = FAULTS[case.fault], CONFIGURATIONS[case.configuration]
        start = time.monotonic()
        size = configuration.ranks
        try:
            expected = self.reference(case.configuration, case.device)
            case = replace(case, collectives=expected[0].collectives.get(case.step, 0))
            with tempfile.TemporaryDirectory() as name:
                lost = fault.expect == "lost"
                if "hosts" in configuration.traits:
                    return self._between_hosts(case, fault, configuration, expected, Path(name), start)
                found = self.pool.group(size).call(
                    disturbed,
                    case,
                    Path(name),
                    continues=fault.expect == "unharmed",
                    expendable=fault.victims(case, configuration) if lost else (),
                )
                if lost or fault.waits:
                    self.pool.discard(size)
                again = None
                if fault.resumes_in(configuration):
                    again = self.pool.group(size).call(resumed, case, Path(name))
            violations = judge(case, fault, configuration, expected, found, again)
        except Lost as error:
            violations = [str(error)]
        if violations:
            self.pool.discard(size)
        return Verdict(case, tuple(violations), time.monotonic() - start)

    def _between_hosts(
        self, case: Case, fault: Fault, configuration: Configuration, expected: list[Record], folder: Path, start: float
    ) -> Verdict:
        gone = fault.victims(case, configuration) if fault.expect == "lost" else []
        found, again = two_hosts.run(case, folder, gone, fault.restarts)
        if fault.resumes_in(configuration) and not fault.restarts:
            again = self.pool.group(configuration.ranks).call(resumed, case, folder)
        violations = judge(case, fault, configuration, expected, found, again or None)
        return Verdict(case, tuple(violations), time.monotonic() - start)

    def close(self) -> None:
        """End all processes."""
        self.pool.close()


def run_all(
    cases: Iterable[Case], *, jobs: int, seconds: float, each: Callable[[Verdict], None] = lambda verdict: None
) -> list[Verdict]:
    """Run cases with several groups at a time; begin none after ``seconds``.

    Args:
        cases: the cases.
        jobs: number of groups that work at the same time.
        seconds: time after which no case is begun.
        each: is called with every verdict.
    """
    waiting: queue.SimpleQueue[Case] = queue.SimpleQueue()
    for case in cases:
        waiting.put(case)
    verdicts: list[Verdict] = []
    references: dict[tuple[str, str], list[Record]] = {}
    lock, deadline = threading.Lock(), time.monotonic() + seconds

    def work() -> None:
        runner = Runner(references)
        try:
            while time.monotonic() < deadline:
                try:
                    case = waiting.get_nowait()
                except queue.Empty:
                    return
                verdict = runner.run(case)
                with lock:
                    verdicts.append(verdict)
                    each(verdict)
        finally:
            runner.close()

    threads = [threading.Thread(target=work) for _ in range(jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return verdicts
