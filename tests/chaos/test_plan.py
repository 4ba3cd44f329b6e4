"""The catalogue and the plan of fault injection."""

from __future__ import annotations

import itertools

import pytest

from tests.chaos.catalogue import FAULTS
from tests.chaos.configurations import CONFIGURATIONS, SYNC, TOTAL
from tests.chaos.faults import by_name
from tests.chaos.plan import cases, make_case, spelled


def test_there_are_at_least_75_kinds_and_each_fits_somewhere() -> None:
    assert len(FAULTS) >= 75
    for fault in FAULTS.values():
        assert any(fault.fits(configuration) for configuration in CONFIGURATIONS.values()), fault.name


def test_two_faults_have_two_names() -> None:
    first = next(iter(FAULTS.values()))
    with pytest.raises(ValueError, match="two faults are called"):
        by_name([first, first])


def test_a_seed_repeats_a_plan_and_another_one_does_not() -> None:
    first, again, other = (list(itertools.islice(cases(seed), 300)) for seed in (3, 3, 4))
    assert first == again
    assert first != other


def test_a_plan_has_every_kind_first_and_every_configuration_soon() -> None:
    planned = list(itertools.islice(cases(0), 500))
    assert {case.fault for case in planned[: len(FAULTS)]} == set(FAULTS)
    assert {case.configuration for case in planned} == set(CONFIGURATIONS)
    assert len(set(planned)) == 500


def test_there_are_no_sharded_replicas_on_a_gpu() -> None:
    planned = list(itertools.islice(cases(0, device="cuda"), 500))
    assert {case.device for case in planned} == {"cuda"}
    assert {case.configuration for case in planned} == set(CONFIGURATIONS) - {"hsdp"}
    assert {case.fault for case in planned} == set(FAULTS)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_case_can_be_repeated_and_lies_within_the_run(fault: str) -> None:
    for name, configuration in CONFIGURATIONS.items():
        if not FAULTS[fault].fits(configuration):
            continue
        for seed in range(5):
            case = make_case(fault, name, seed)
            assert spelled(case.spelled) == case
            assert 0 <= case.victim < configuration.ranks
            assert 1 <= case.step <= TOTAL
            old, good = case.saved
            if FAULTS[fault].at == "load":
                assert old // SYNC < good // SYNC
            else:
                assert 0 <= old <= good < case.step
