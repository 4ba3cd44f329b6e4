"""Faults in real processes: a fixed selection, and more of them in ``make test-full``. ``make chaos`` runs hundreds."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from tests.chaos.plan import cases, make_case, spelled
from tests.chaos.runner import Runner
from tests.chaos.two_hosts import missing

#: At least one of every way to end, and every configuration that the catalogue is about.
QUICK = (
    "nan in a parameter/ddp/1",
    "another base value/ddp/1",
    "probe raises/local/1",
    "killed after the handshake/local/1",
    "checkpoint cut off/stacks/1",
    "the last collective raises on all ranks once/hsdp/1",
    "an all-to-all raises on all ranks once/compress/1",
    "-inf in a loss/overlap/1",
    "error in consensus/outer/1",
    "all parts in another order/masters/1",
)
#: Further kinds of faults, and a draw of the catalogue.
MORE = (
    "inf in a gradient/local/1",
    "another model: other names/local/1",
    "a collective raises on all ranks once/local/1",
    "optimizer's state lacks a moment/local/1",
    "back from an older checkpoint/local/1",
    "nan in a buffer/stacks/1",
    "forward raises once/stacks/1",
    "a meta tensor as loss/stacks/1",
    "inf in a probe/ddp/1",
    "no gradient for a parameter/local/1",
    "another model: another order of equal shapes/local/1",
    "another model: tied layers/local/1",
    "setter raises/local/1",
    "converge alone/local/1",
    "nan in a batch under shared gradients/stacks/1",
    "another number of rows/stacks/1",
    "step of -1/stacks/1",
    "scheduler's state has a wrong type/stacks/1",
    "field of a newer version/stacks/1",
    "parts in another order/stacks/1",
    "inf in a first moment/hsdp/1",
    "loaded after another one/overlap/1",
)
FULL = (*MORE, *(case.spelled for case in itertools.islice(cases(seed=5, hosts=False), 50)))


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    found = Runner()
    yield found
    found.close()


@pytest.mark.parametrize("case", [*QUICK, *(pytest.param(case, marks=pytest.mark.full) for case in FULL)])
def test_a_fault_breaks_no_promise(case: str, runner: Runner) -> None:
    assert runner.run(spelled(case)).violations == ()


@pytest.mark.full
@pytest.mark.parametrize("kind", ["link cut before a sync", "rank killed, and torchrun starts all again"])
def test_a_fault_between_two_hosts_breaks_no_promise(kind: str, runner: Runner) -> None:
    if reason := missing():
        pytest.skip(reason)
    assert runner.run(make_case(kind, "two hosts", 1)).violations == ()


@pytest.mark.gpu
@pytest.mark.parametrize("case", [case for case in (*QUICK, *MORE) if "/hsdp/" not in case])
def test_a_fault_breaks_no_promise_on_a_gpu(case: str, runner: Runner) -> None:
    assert runner.run(spelled(case, device="cuda")).violations == ()
