"""The handshake: the exchange of reports, and the errors that name those who disagree."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from hdet_kernels.converge.agreement import Agreement
from hdet_kernels.converge.handshake import (
    COLUMNS,
    Report,
    check_same_everywhere,
    exchange_reports,
    row_bytes,
    short_hash,
)
from hdet_kernels.converge.summary import TensorSummary
from hdet_kernels.ensemble import RowEnsemble, SingleReplica
from tests.converge.threads import ThreadEnsemble, run_threads

NAN, INF = math.nan, math.inf


def test_a_hash_does_not_depend_on_the_order_of_names_and_fits_into_fp64() -> None:
    assert short_hash({"a": 1, "b": [2.5]}) == short_hash({"b": [2.5], "a": 1}) != short_hash({"a": 1, "b": [2.4]})
    assert 0 <= short_hash("x") < 2**48
    assert int(float(short_hash("x"))) == short_hash("x")


# The exchange


def summary(**changes: Any) -> TensorSummary:
    usual: dict[str, Any] = {
        "layout": 1,
        "state": 2,
        "counts": 3,
        "integers": torch.tensor([4]),
        "checksum": torch.tensor([5.0], dtype=torch.float64),
        "rest": torch.tensor([6.0], dtype=torch.float64),
        "nonfinite": torch.tensor([0]),
        "masks": False,
        "consensus": NAN,
        "outer": NAN,
        "describe": _described,
    }
    return TensorSummary(**{**usual, **changes})


def _described(name: str) -> Mapping[str, Any]:
    raise AssertionError(f"{name} is described only where it differs")


REPORT = Report(step=4, loss_sum=3.0, loss_count=2, settings={"seed": 0, "spread": 0.3}, bases={"lr/0": "1e-3"})


def exchange(reports: list[Report], summaries: list[TensorSummary] | None = None, needs_loss: bool = False) -> Any:
    def run(ensemble: ThreadEnsemble) -> Any:
        own = summaries[ensemble.replica] if summaries else summary()
        try:
            return exchange_reports(ensemble, reports[ensemble.replica], own, needs_loss=needs_loss)
        except RuntimeError as error:
            return str(error)

    found = run_threads(len(reports), run)
    return found[0] if all(isinstance(each, Agreement) for each in found) or len(set(found)) == 1 else found


def test_all_replicas_come_to_the_same_agreement() -> None:
    reports = [replace(REPORT, loss_sum=float(rank), probe=1.0 / (rank or NAN), gradients=7.0) for rank in range(3)]
    found = exchange(reports, needs_loss=True)
    assert found.losses.tolist() == [0.0, 0.5, 1.0]
    assert found.probes.tolist() == [INF, 1.0, 0.5], "a probe that is not finite is infinite: the replica is bad"
    assert found.healthy.tolist() == [False, True, True]
    assert found.shared is True
    assert found.ranks.tolist() == [[0.0], [1.0], [2.0]]


ODD_ONE: dict[str, tuple[Report, str]] = {
    "settings": (
        replace(REPORT, settings={"seed": 1, "spread": 0.3}),
        "the replicas disagree on the settings (ranks 0, 2: seed 0; rank 1: seed 1): all replicas must build the "
        "scheduler with the same arguments. Nothing was averaged.",
    ),
    "a missing setting": (
        replace(REPORT, settings={"seed": 0}),
        "the replicas disagree on the settings (ranks 0, 2: spread 0.3; rank 1: spread None): all",
    ),
    "step": (
        replace(REPORT, step=9),
        "the replicas disagree on the step (ranks 0, 2: step 4; rank 1: step 9): a replica stepped more often, or",
    ),
    "base values": (
        replace(REPORT, bases={"lr/0": "2e-3"}),
        "the replicas disagree on the base values (ranks 0, 2: lr/0 1e-3; rank 1: lr/0 2e-3): all replicas must be",
    ),
    "probe": (replace(REPORT, failed=True), "probe() raised on rank 1. Nothing was averaged."),
    "loss": (
        replace(REPORT, loss_count=0, loss_sum=0.0),
        "no loss was recorded since the last sync on rank 1: call scheduler.step(loss), or scheduler.record_loss(loss)",
    ),
    "settings before step": (replace(REPORT, settings={}, step=9), "the replicas disagree on the settings ("),
}


@pytest.mark.parametrize("name", ODD_ONE)
def test_the_odd_one_is_named_on_every_process(name: str) -> None:
    odd, message = ODD_ONE[name]
    assert exchange([REPORT, odd, REPORT], needs_loss=True).startswith(message)


def test_a_missing_loss_is_no_error_where_none_is_needed() -> None:
    found = exchange([REPORT, replace(REPORT, loss_count=0, loss_sum=0.0)])
    assert np.isnan(found.losses).tolist() == [False, True]
    assert found.healthy.all()


def test_another_layout_is_described() -> None:
    def describe(name: str) -> Mapping[str, Any]:
        return {"tensors": 2, "weight": "float32 (2, 3)"} if name == "layout" else {}

    def describe_odd(name: str) -> Mapping[str, Any]:
        return {"tensors": 2, "weight": "float32 (3, 2)"} if name == "layout" else {}

    summaries = [summary(describe=describe), summary(layout=9, describe=describe_odd)]
    assert exchange([REPORT, REPORT], summaries) == (
        "the replicas disagree on the layout of parameters and buffers (rank 0: weight float32 (2, 3); rank 1: weight "
        "float32 (3, 2)): all replicas must build the same model and optimizer. Nothing was averaged."
    )


def test_rows_of_one_process_have_losses_and_numbers_of_their_own() -> None:
    ensemble = RowEnsemble(2)
    sums = torch.tensor([2.0, 6.0])
    rows = summary(
        nonfinite=torch.zeros(2),
        integers=torch.tensor([4, 4]),
        checksum=torch.tensor([5.0, NAN]),
        rest=torch.tensor([6.0, 6.0]),
    )
    found = exchange_reports(ensemble, replace(REPORT, loss_sum=sums), rows, needs_loss=True)
    assert found.losses.tolist() == [1.0, 3.0]
    assert found.healthy.tolist() == [True, False]
    assert found.ranks.tolist() == [[0.0], [0.0]], "both are held by rank 0"
    assert row_bytes(ensemble) == 2 * row_bytes(SingleReplica()) == 2 * 8 * len(COLUMNS)


def test_values_that_must_be_the_same_everywhere() -> None:
    def run(ensemble: ThreadEnsemble) -> str:
        check_same_everywhere(ensemble, {"replicas": 2}, "the stack", "build it alike")
        try:
            check_same_everywhere(ensemble, {"a": 1, "b": 0.5 * ensemble.rank}, "the stack", "build it alike")
        except RuntimeError as error:
            return str(error)
        return ""

    message = "the replicas disagree on the stack (rank 0: b 0; rank 1: b 0.5): build it alike. Nothing was averaged."
    assert run_threads(2, run) == [message] * 2


def test_only_the_first_three_differences_are_shown() -> None:
    def run(ensemble: ThreadEnsemble) -> str:
        with pytest.raises(RuntimeError) as error:
            check_same_everywhere(ensemble, dict.fromkeys("abcde", ensemble.rank), "names", "do not")
        return str(error.value)

    assert "(rank 0: a 0, b 0, c 0; rank 1: a 1, b 1, c 1)" in run_threads(2, run)[0]
