"""The promises that every fault must leave intact. Each function returns the broken ones, in words."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

import torch

from tests.chaos.configurations import TOTAL, Configuration
from tests.chaos.faults import Case, Fault, pattern
from tests.chaos.group import GROUP_TIMEOUT
from tests.chaos.record import Failure, Record

Records = Sequence[Record | None]

#: What a sync says that fails because of a lost process.
LOST = "{who} (?:has ended|did not come|came and then gave no sign|raised)"
#: What it says of a process that has ended. Not to be said of one that lives.
ENDED = re.compile(r"rank (\d+) has ended")
#: What an error says of a step that was begun in the backward pass.
HALF = "parameters have taken this step: go on from a checkpoint"
#: The parts that a sync changes together.
WHOLE = ("parameters", "buffers", "optimizer", "scheduler")


def judge(
    case: Case,
    fault: Fault,
    configuration: Configuration,
    undisturbed: Sequence[Record],
    disturbed: Records,
    resumed: Records | None,
) -> list[str]:
    """Return what the runs of one case break.

    Args:
        case: the case.
        fault: its fault.
        configuration: its configuration.
        undisturbed: the records of all ranks without a fault.
        disturbed: those with the fault; None for a process that ended.
        resumed: those of the run that was resumed afterwards, if there was one.
    """
    victims = fault.victims(case, configuration)
    found = _who_ended(fault, victims, disturbed)
    here = {rank: record for rank, record in enumerate(disturbed) if record is not None}
    found += _fired(fault, victims, here)
    found += _equal_after_syncs(configuration, here)
    for rank, record in here.items():
        said = _as_expected(case, fault, configuration, record, rank in victims)
        said += _all_or_nothing(record, undisturbed[rank], fault)
        shared = "shared" in configuration.traits
        said += _same_steps(case, fault, record, undisturbed[rank], rank in victims, shared)
        found += [f"rank {rank}: {text}" for text in said]
    if fault.expect == "healed":
        found += _healed(case, fault, configuration, here)
    if fault.expect == "lost":
        found += _named(case, fault, configuration, {rank: here[rank] for rank in here if rank not in victims})
    if resumed is not None:
        found += _resumed(undisturbed, resumed)
        found += _equal_after_syncs(configuration, {rank: r for rank, r in enumerate(resumed) if r is not None})
    return found


def _who_ended(fault: Fault, victims: list[int], disturbed: Records) -> list[str]:
    ended = [rank for rank, record in enumerate(disturbed) if record is None]
    wrong = [rank for rank in ended if fault.expect != "lost" or rank not in victims]
    return [f"rank {rank} ended without a result" for rank in wrong]


def _fired(fault: Fault, victims: list[int], here: dict[int, Record]) -> list[str]:
    silent = [rank for rank in victims if rank in here and not here[rank].fired]
    if fault.on == "all" and fault.expect == "lost" and len(silent) < len(victims):
        return []  # the first that died took away what the others would have died of
    return [f"rank {rank}: the fault has not acted" for rank in silent if fault.late or fault.expect != "lost"]


def _as_expected(case: Case, fault: Fault, configuration: Configuration, record: Record, victim: bool) -> list[str]:
    """Check which calls of a rank failed, with which message, and how far it came."""
    failures, expect = record.failures, fault.expect
    ends = record.step == TOTAL
    raised = "; ".join(f"{f.call} after step {f.step}: {f.kind}: {f.message}" for f in failures)
    if expect == "healed" or (expect in ("unharmed", "rejected") and not victim):
        return [f"failed: {raised}"] if failures else [] if ends else [f"ended at step {record.step}"]
    found, said = [], pattern(fault.message or "", case, configuration)
    if expect == "unharmed":
        if fault.message and not (failures and said.search(failures[0].message)):
            found.append(f"the message does not match {fault.message!r}: {raised}")
        return found if ends else [*found, f"ended at step {record.step}: {raised}"]
    if expect == "lost" and not failures:
        return [] if ends else [f"ended at step {record.step} without an error"]
    if not failures:
        return [f"nothing was refused, and the run went on to step {record.step}"]
    if expect in ("refused", "rejected"):
        kinds = ("RuntimeError", "NoneSound", "ValueError", "TypeError") if expect == "refused" else None
        if kinds and failures[0].kind not in kinds:
            found.append(f"expected a clear error, got {raised}")
        if expect == "rejected" and failures[0].call != "load":
            found.append(f"the checkpoint was taken: {raised}")
    if (fault.then_in(configuration) == "retry" or expect == "rejected") and not ends:
        found.append(f"ended at step {record.step}: {raised}")
    if expect != "lost" and fault.message and not said.search(failures[0].message):
        found.append(f"the message does not match {fault.message!r} for rank {case.victim}: {raised}")
    late = [f.seconds for f in failures if f.seconds > GROUP_TIMEOUT * 0.8]
    return [*found, *(f"an error came after {seconds:.0f} s" for seconds in late)]


def _all_or_nothing(record: Record, undisturbed: Record, fault: Fault) -> list[str]:
    """Check that a call that failed left everything as before the call, or as after it."""

    def whole(failure: Failure) -> bool:
        done = undisturbed.digests.get(failure.step, {})
        return bool(done) and all(failure.digests.get(part) == done[part] for part in WHOLE)

    # A step of the optimizer whose hook raises is a step; whether it was whole shows in the end of the run.
    # One that in_backward has begun cannot be taken back: its error says how much of it was made.
    half = [f for f in record.failures if f.call == "optimizer" and (fault.then == "go on" or HALF in f.message)]
    judged = [f for f in record.failures if f not in half]
    return [
        f"{f.call} failed after step {f.step} and changed {', '.join(f.changed)}: {f.kind}: {f.message}"
        for f in judged
        if f.changed and not whole(f)
    ]


def _same_steps(case: Case, fault: Fault, record: Record, undisturbed: Record, victim: bool, shared: bool) -> list[str]:
    """Check that every finished step is that of the undisturbed run, up to the fault if it changes the run."""
    if fault.at == "build" and fault.expect == "refused" and (victim or shared):
        return []  # with shared gradients the others step by those of the victim
    healed = fault.expect == "healed"
    # A fault that all ranks refuse is still in the values of the victim.
    last = case.step - 1 if healed or (fault.expect == "refused" and fault.then == "stop") else TOTAL
    if fault.at == "load" and fault.expect == "refused":
        last = TOTAL if not victim else -1
    skipped = {"setting"} if fault.then == "go on" else set()
    found = []
    for step, digests in record.digests.items():
        done = undisturbed.digests[step]
        if step <= last and (wrong := [p for p in digests if digests[p] != done[p] and p not in skipped]):
            found.append(f"{', '.join(wrong)} after step {step} are not those of the undisturbed run")
    return found[:2]


def _equal_after_syncs(configuration: Configuration, here: dict[int, Record]) -> list[str]:
    """Check that the ranks that hold the same part of different replicas are equal after every sync."""
    found = []
    overlaps = "overlap" in configuration.traits
    for step in sorted({step for record in here.values() for step in record.consensus}):
        if overlaps and step != TOTAL:
            continue  # the average has only begun
        for part in range(configuration.shards):
            holders = [r for r in here if r % configuration.shards == part and step in here[r].consensus]
            seen = {r: here[r].consensus[step] for r in holders}
            if len({entry[0] for entry in seen.values()}) > 1:
                found.append(f"ranks {sorted(seen)} differ after the sync at step {step}")
            found += [f"the rows of rank {r} differ after the sync at step {step}" for r, e in seen.items() if not e[1]]
    return found[:2]


def _healed(case: Case, fault: Fault, configuration: Configuration, here: dict[int, Record]) -> list[str]:
    """Check who was left out, that the mean is that of the others, and that everything is finite in the end."""
    found = [f"rank {rank} is not finite in the end" for rank, record in here.items() if not record.finite]
    first = {configuration.replica_of(rank) for rank in fault.victims(case, configuration)}
    expected = sorted(replica + case.row for replica in first) if fault.excluded else []
    for rank, record in here.items():
        if record.excluded.get(case.step) != expected:
            found.append(f"rank {rank}: replicas {record.excluded.get(case.step)} were left out, not {expected}")
    if {"outer", "overlap"} & configuration.traits or len(here) < configuration.ranks or found:
        return found
    rough = bool({"masters", "compress"} & configuration.traits)
    for part in range(configuration.shards):
        ranks = [rank for rank in here if rank % configuration.shards == part]
        before = torch.cat([here[rank].vectors[0] for rank in ranks])
        after = torch.cat([here[rank].vectors[1] for rank in ranks])
        healthy = [number for number in range(len(before)) if number not in expected]
        mean = before[healthy].mean(dim=0).expand_as(after)
        close = torch.isclose(after, mean, rtol=2e-2 if rough else 1e-5, atol=2e-2 if rough else 1e-6)
        if not close.all():
            found.append(f"the sync at step {case.step} is not the mean of replicas {healthy}")
    return found


def _named(case: Case, fault: Fault, configuration: Configuration, survivors: dict[int, Record]) -> list[str]:
    """Check that a sync that failed names the lost rank and no other one. Errors of backward passes are torch's own."""
    victims = fault.victims(case, configuration)  # of several, one may still live when the first is missed
    said = [pattern(fault.message or LOST, replace(case, victim=victim), configuration) for victim in victims]
    texts = {r: f.message for r, record in survivors.items() for f in record.failures[:1] if f.call == "scheduler"}
    found = [
        f"rank {rank} says that others than the victims have ended: {text}"
        for rank, text in texts.items()
        if not set(map(int, ENDED.findall(text))) <= set(victims)
    ]
    silent = {rank: text for rank, text in texts.items() if not any(each.search(text) for each in said)}
    if configuration.shards > 1 and len(silent) < len(texts):
        return found  # a rank that shares no group with the lost one knows only that its neighbours have failed
    return [*found, *(f"rank {rank} does not name rank {case.victim}: {text}" for rank, text in silent.items())]


def _resumed(undisturbed: Sequence[Record], resumed: Records) -> list[str]:
    """Check that the resumed run equals the undisturbed one."""
    found = []
    for rank, record in enumerate(resumed):
        if record is None:
            found.append(f"rank {rank} ended in the resumed run")
            continue
        raised = "; ".join(f"{f.call} after step {f.step}: {f.kind}: {f.message}" for f in record.failures)
        if record.failures or record.step != TOTAL:
            found.append(f"rank {rank}: the resumed run ended at step {record.step}: {raised}")
        for step, digests in record.digests.items():
            done = undisturbed[rank].digests[step]
            if wrong := [part for part in digests if digests[part] != done[part]]:
                found.append(f"rank {rank}: {', '.join(wrong)} after step {step} of the resumed run are not those of "
                             "the undisturbed one")  # fmt: skip
                break
    return found
