"""The harness: its catalogue, plan and digests, and a judge that finds what it is there for."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tests.chaos.configurations import CONFIGURATIONS, SYNC, TOTAL
from tests.chaos.faults import Fault
from tests.chaos.group import Pool
from tests.chaos.judge import judge
from tests.chaos.plan import ALL, FAULTS, cases, make_case, spelled
from tests.chaos.record import Failure, Record, digest
from tests.chaos.scenario import disturbed, undisturbed

VALUES = [
    0.0, -0.0, math.nan, 1, True, "1", None, [], [1.0], (1.0, 2.0), [1.0, [2.0]], {"a": 1}, {"b": 1}, {"a": {"b": 1}},
    torch.zeros(2), torch.zeros(2, 1), torch.zeros(2, dtype=torch.float64), torch.tensor([0.0, -0.0]),
    torch.tensor([0.0, math.nan]), torch.zeros(0), torch.zeros((), dtype=torch.int64),
]  # fmt: skip


def test_digests_are_equal_exactly_if_all_bits_are() -> None:
    assert len({digest(value) for value in VALUES}) == len(VALUES)
    again = [value.clone() if isinstance(value, torch.Tensor) else value for value in VALUES]
    assert [digest(value) for value in VALUES] == [digest(value) for value in again]
    square = torch.arange(4.0).reshape(2, 2)
    assert digest(square.t()) == digest(square.t().contiguous())


def test_a_plan_has_every_kind_first_every_configuration_soon_and_is_repeated_by_its_seed() -> None:
    planned, again, other = (list(itertools.islice(cases(seed), 500)) for seed in (0, 0, 4))
    assert planned == again != other
    assert len(ALL) == len(FAULTS) >= 75
    assert {case.fault for case in planned[: len(FAULTS)]} == set(FAULTS)
    assert {case.configuration for case in planned} == set(CONFIGURATIONS)
    assert len(set(planned)) == 500
    on_gpu = list(itertools.islice(cases(0, device="cuda"), 500))
    assert {case.configuration for case in on_gpu} == set(CONFIGURATIONS) - {"hsdp", "two hosts"}
    assert {case.fault for case in on_gpu} == {name for name, fault in FAULTS.items() if "hosts" not in fault.needs}
    assert [case for case in planned[len(FAULTS) :] if case.configuration == "two hosts"] == []
    assert {case.configuration for case in itertools.islice(cases(0, hosts=False), 500)} == set(CONFIGURATIONS) - {
        "two hosts"
    }


def test_cases_lie_within_the_run() -> None:
    for fault, (name, configuration), seed in itertools.product(ALL, CONFIGURATIONS.items(), range(5)):
        if fault.fits(configuration):
            case = make_case(fault.name, name, seed)
            old, good = case.saved
            assert spelled(case.spelled) == case
            assert 0 <= case.victim < configuration.ranks
            assert 1 <= case.step <= TOTAL
            assert old // SYNC < good // SYNC if fault.at == "load" else 0 <= old <= good < case.step


LOCAL = CONFIGURATIONS["local"]
PARTS = ("parameters", "buffers", "optimizer", "scheduler", "setting")


def run_of(seed: str = "") -> Record:
    """Return the record of an undisturbed rank."""
    return Record(
        digests={step: {part: f"{part} {step}{seed}" for part in PARTS} for step in range(TOTAL + 1)},
        consensus={step: (f"mean {step}", True) for step in (4, 8, 12)},
        finite=True,
        fired=True,
        step=TOTAL,
    )


def failure(**changes: Any) -> Failure:
    text = "the replicas disagree on the settings (ranks 0, 2: seed 0; rank 1: seed 5)"
    found = Failure("scheduler", 3, "RuntimeError", text, [], {}, 0.1)
    return replace(found, **changes)


def verdict(fault: str | Fault, records: list[Record | None], again: list[Record | None] | None = None) -> list[str]:
    kind = FAULTS[fault] if isinstance(fault, str) else fault
    case = replace(make_case(kind.name, "local", 0), victim=1, step=8)
    return judge(case, kind, LOCAL, [run_of()] * 3, records, again)


def refused(**changes: Any) -> list[Record | None]:
    """Return three ranks that stopped at the first sync."""
    steps = {step: digests for step, digests in run_of().digests.items() if step < 4}
    return [Record(digests=dict(steps), failures=[failure(**changes)], fired=True, step=3) for _ in range(3)]


def test_nothing_is_found_where_nothing_is_wrong() -> None:
    three: list[Record | None] = [run_of() for _ in range(3)]
    assert verdict("a text as loss", three) == []
    assert verdict("another setting: seed", refused(), three) == []
    assert verdict("killed before a sync", [*refused(message="rank 1 did not come")[:1], None, run_of()], three) == []


def test_a_step_that_is_not_that_of_the_undisturbed_run() -> None:
    wrong = run_of()
    wrong.digests[9]["buffers"] = "others"
    assert verdict("a text as loss", [run_of(), run_of(), wrong]) == [
        "rank 2: buffers after step 9 are not those of the undisturbed run"
    ]


def test_ranks_that_differ_after_a_sync() -> None:
    wrong = run_of()
    wrong.consensus[8] = ("another mean", True)
    assert verdict("a text as loss", [run_of(), wrong, run_of()]) == ["ranks [0, 1, 2] differ after the sync at step 8"]


def test_a_state_between_before_and_after() -> None:
    assert "changed parameters" in verdict("another setting: seed", refused(changed=["parameters"]))[0]
    after = run_of().digests[8]
    whole = run_of()
    whole.failures = [failure(step=8, changed=["parameters"], digests=after)]
    assert verdict("setter raises", [run_of(), whole, run_of()]) == []
    whole.failures = [failure(step=8, changed=["parameters"], digests={**after, "optimizer": "half"})]
    assert "changed parameters" in verdict("setter raises", [run_of(), whole, run_of()])[0]


def test_an_error_that_names_nobody() -> None:
    assert "does not match" in verdict("another setting: seed", refused(message="something is wrong"))[0]
    assert "does not match" in verdict("another setting: seed", refused(message="disagree on the seed: ranks 0, 2"))[0]
    lost = [refused(message="timed out")[0], None, refused(message="rank 1 raised Injected")[0]]
    assert verdict("killed before a sync", lost) == ["rank 0 does not name rank 1: timed out"]


def test_a_fault_that_is_not_noticed_or_has_not_acted() -> None:
    three: list[Record | None] = [run_of() for _ in range(3)]
    assert "nothing was refused" in verdict("another setting: seed", three)[0]
    assert "nothing was refused" in verdict("step of -1", three)[0]
    silent = run_of()
    silent.fired = False
    assert verdict("slow in a collective", [run_of(), silent, run_of()]) == ["rank 1: the fault has not acted"]


def test_a_process_that_ends_without_need() -> None:
    assert verdict("a text as loss", [None, run_of(), run_of()]) == ["rank 0 ended without a result"]
    assert verdict("killed before a sync", [None, None, run_of()]) == ["rank 0 ended without a result"]


def test_a_resumed_run_that_is_another_one() -> None:
    three: list[Record | None] = [run_of() for _ in range(3)]
    assert (
        "not those of the undisturbed one" in verdict("another setting: seed", refused(), [run_of("!"), *three[1:]])[0]
    )
    stopped = run_of()
    stopped.step = 5
    assert "ended at step 5" in verdict("another setting: seed", refused(), [*three[:2], stopped])[0]


def test_a_real_run_is_not_taken_for_what_it_is_not(tmp_path: Path) -> None:
    """A replica that is left out is neither unharmed nor refused."""
    pool = Pool()
    try:
        case = make_case("nan in a parameter", "outer", 1)
        fault, outer = FAULTS[case.fault], CONFIGURATIONS["outer"]
        expected = pool.group(outer.ranks).call(undisturbed, case)
        found = pool.group(outer.ranks).call(disturbed, case, tmp_path)
    finally:
        pool.close()
    assert judge(case, fault, outer, expected, found, None) == []
    for wrong in (replace(fault, expect="unharmed"), replace(fault, expect="refused"), replace(fault, excluded=False)):
        assert judge(case, wrong, outer, expected, found, None) != []
