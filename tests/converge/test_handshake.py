"""The handshake: the exchange of reports, the conclusions from them, and the errors that name those who disagree."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from hdet_kernels.converge.agreement import Agreement, conclude, left_out, name_ranks, none_sound
from hdet_kernels.converge.handshake import (
    COLUMNS,
    Report,
    check_same_everywhere,
    exchange_reports,
    short_hash,
)
from hdet_kernels.converge.summary import TensorSummary
from hdet_kernels.ensemble import RowEnsemble
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
        "moments": torch.tensor([7.0], dtype=torch.float64),
        "coded": torch.tensor(0),
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


NAN, INF = math.nan, math.inf


def columns(**changes: list[Any]) -> dict[str, np.ndarray]:
    """The gathered columns of two equal replicas, or of as many as are given; nested lists have several parts."""
    count = max((len(values) for values in changes.values()), default=2)
    usual = {
        "nonfinite": 0.0,
        "masks": 0.0,
        "loss_sum": 2.0,
        "loss_count": 2.0,
        "probe": NAN,
        "gradients": NAN,
        "consensus": NAN,
        "outer": NAN,
    }
    found = {}
    for name in COLUMNS:
        values = changes.get(name, list(range(count)) if name == "rank" else [usual.get(name, 5.0)] * count)
        array = np.array(values, dtype=np.float64)
        found[name] = array if array.ndim == 2 else array[:, None]
    return found


def concluded(**changes: list[Any]) -> Agreement:
    return conclude(columns(**changes))


def test_two_equal_replicas() -> None:
    found = concluded()
    assert found.losses.tolist() == [1.0, 1.0]
    assert np.isnan(found.probes).all()
    assert found.healthy.tolist() == [True, True]
    assert found.ranks.tolist() == [[0.0], [1.0]]
    assert found.shared is None
    assert found.equal
    assert found.has_state
    assert (found.same_state, found.same_counts, found.same_integers) == (True, True, True)
    assert (found.same_consensus, found.same_outer) == (False, False), "NaN: nothing is remembered"


@pytest.mark.parametrize(
    ("column", "values", "field", "expected"),
    [
        ("checksum", [1.0, 2.0], "equal", False),
        ("state", [0.0, 0.0], "has_state", False),
        ("state", [0.0, 7.0], "has_state", True),
        ("state", [0.0, 7.0], "same_state", False),
        ("counts", [1.0, 2.0], "same_counts", False),
        ("integers", [1.0, 2.0], "same_integers", False),
        ("consensus", [4.0, 4.0], "same_consensus", True),
        ("consensus", [4.0, 5.0], "same_consensus", False),
        ("consensus", [4.0, NAN], "same_consensus", False),
        ("outer", [4.0, 4.0], "same_outer", True),
        ("outer", [4.0, 5.0], "same_outer", False),
        ("outer", [INF, INF], "same_outer", False),
        ("gradients", [4.0, 4.0], "shared", True),
        ("gradients", [4.0, 5.0], "shared", False),
        ("gradients", [4.0, NAN], "shared", None),
        ("gradients", [NAN], "shared", True),
        ("nonfinite", [0.0, 0.0], "nonfinite_alike", False),
        ("nonfinite", [7.0, 7.0], "nonfinite_alike", True),
        ("nonfinite", [0.0, 7.0], "nonfinite_alike", False),
        ("masks", [0.0, 0.0], "masks_changed", False),
        ("masks", [0.0, 1.0], "masks_changed", True),
        ("checksum", [1e38, 0.6e38], "may_overflow", False),
        ("checksum", [1e38, 0.8e38], "may_overflow", True),
        ("checksum", [1e38, NAN], "may_overflow", False),
        ("rest", [2e38, 2e38], "may_overflow", True),
        ("consensus", [1e38, 1e38], "may_overflow", True),
        ("checksum", [1.7e308, 1.7e308], "may_overflow", True),
    ],
    ids=str,
)
def test_a_column_and_what_follows(column: str, values: list[float], field: str, expected: bool | None) -> None:
    assert getattr(concluded(**{column: values}), field) is expected


@pytest.mark.parametrize(
    ("changes", "healthy"),
    [
        ({"checksum": [1.0, NAN, 1.0]}, [True, False, True]),
        ({"rest": [1.0, INF, 1.0]}, [True, False, True]),
        ({"loss_sum": [1.0, NAN, 1.0]}, [True, False, True]),
        ({"loss_sum": [1.0, NAN, 1.0], "loss_count": [1.0, 0.0, 1.0]}, [True, True, True]),
        ({"probe": [1.0, INF, 1.0]}, [True, False, True]),
        ({"nonfinite": [0.0, 7.0, 0.0]}, [True, False, True]),
        ({"nonfinite": [7.0, 7.0, 7.0]}, [True, True, True]),
        ({"nonfinite": [7.0, 7.0, 8.0]}, [False, False, False]),
        ({"checksum": [[1.0, 1.0], [1.0, NAN]]}, [True, False]),
        ({"loss_sum": [[1.0, 1.0], [NAN, 1.0]], "loss_count": [[1.0, 1.0]] * 2}, [True, False]),
    ],
    ids=[
        "parameters",
        "state",
        "loss",
        "no loss recorded",
        "probe",
        "a buffer",
        "by design",
        "all",
        "one shard",
        "loss of one shard",
    ],
)
def test_who_is_healthy(changes: dict[str, list[Any]], healthy: list[bool]) -> None:
    if len(healthy) == 2:  # [replicas, parts]
        changes = {"rank": [[0, 1], [2, 3]], **changes}
    filled = {name: [[5.0, 5.0]] * 2 for name in COLUMNS} if len(healthy) == 2 else {}
    assert concluded(**{**filled, **changes}).healthy.tolist() == healthy


def test_losses_are_means_over_steps_and_shards_and_missing_where_none_was_recorded() -> None:
    found = concluded(loss_sum=[6.0, 0.0], loss_count=[3.0, 0.0])
    assert found.losses[0] == 2.0
    assert np.isnan(found.losses[1])
    parts = {name: [[1.0, 1.0]] * 2 for name in COLUMNS}
    found = concluded(
        **{**parts, "loss_sum": [[2.0, 6.0], [4.0, 4.0]], "loss_count": [[2.0, 2.0]] * 2, "probe": [[1.0, 3.0]] * 2}
    )
    assert found.losses.tolist() == [2.0, 2.0]
    assert found.probes.tolist() == [2.0, 2.0]


LOWER = "resume from the last checkpoint with a lower learning rate, or find the batch that caused it"


@pytest.mark.parametrize(
    ("changes", "names", "message"),
    [
        (
            {"checksum": [NAN, INF]},
            [["parameter a"], ["parameter a", "state b", "buffer c", "buffer d"]],
            f"parameter a on ranks 0, 1, state b on rank 1, buffer c on rank 1, 1 more tensors. Nothing {{}} {LOWER}",
        ),
        ({"loss_sum": [NAN, NAN]}, [[], []], f"the loss on ranks 0, 1. Nothing {{}} {LOWER}"),
        (
            {"rest": [NAN, 1.0], "loss_sum": [1.0, NAN]},
            [["state b"], []],
            f"state b on rank 0, the loss on rank 1. Nothing {{}} {LOWER}",
        ),
        (
            {"nonfinite": [4.0, 5.0]},
            [["buffer c"], ["buffer c"]],
            "buffer c on ranks 0, 1. Nothing {} where buffers are not finite differs between the replicas; keep them "
            "finite, or pass averaging=hk.Averaging(buffers=False)",
        ),
    ],
    ids=["parameters", "losses", "one of each", "buffers"],
)
def test_without_a_healthy_replica_the_tensors_are_named(
    changes: dict[str, list[Any]], names: list[list[str]], message: str
) -> None:
    assert not concluded(**changes).healthy.any()
    assert str(none_sound(columns(**changes), names, 3)) == (
        f"no replica is sound at step 3; not finite: {message.format('was overwritten:')}"
    )


@pytest.mark.parametrize(
    ("chosen", "text"),
    [([True, False], "rank 4"), ([True, True], "ranks 4, 7"), ([False, False], "ranks ")],
)
def test_ranks_by_name(chosen: list[bool], text: str) -> None:
    assert name_ranks(np.array(chosen), np.array([[4.0], [7.0]])) == text


def test_ranks_of_shards_by_name() -> None:
    ranks = np.array([[0.0, 1.0], [2.0, 3.0]])
    assert name_ranks(np.array([False, True]), ranks) == "ranks 2, 3"
    assert name_ranks(np.array([[False, True], [False, False]]), ranks) == "rank 1"


def test_replicas_of_stacks_by_name() -> None:
    two_each = np.array([[0.0], [0.0], [3.0], [3.0]])
    assert (
        name_ranks(np.array([False, True, True, True]), two_each) == "replica 1 of rank 0 and replicas 2, 3 of rank 3"
    )
    assert name_ranks(np.array([True, False, True, True]), np.zeros((4, 1))) == "replicas 0, 2, 3"


LEFT_OUT: dict[str, tuple[dict[str, list[Any]], str]] = {
    "equal": ({"stepped": [4, 4]}, "no"),
    "unknown": ({"stepped": [4, NAN]}, "no"),
    "an overflow of one replica": ({"stepped": [4, 3], "loss_count": [4, 4], "gradients": [1.0, 2.0]}, "maybe"),
    "shared gradients": ({"stepped": [4, 3], "loss_count": [4, 4], "gradients": [1.0, 1.0]}, "yes"),
    "a loss is missing too": ({"stepped": [4, 3], "loss_count": [4, 3]}, "yes"),
    "two losses for a step": ({"stepped": [4, 3, 4], "loss_count": [8, 6, 8]}, "yes"),
    "losses of uneven batches": ({"stepped": [4, 3], "loss_count": [9, 8]}, "maybe"),
    "no losses": ({"stepped": [4, 3], "loss_count": [0, 0]}, "maybe"),
    "parts of a replica": ({"stepped": [[4, 3], [4, 3]]}, "no"),
}


@pytest.mark.parametrize(("changes", "expected"), LEFT_OUT.values(), ids=LEFT_OUT)
def test_steps_that_were_left_out(changes: dict[str, list[Any]], expected: str) -> None:
    assert left_out(columns(**changes)) == expected
