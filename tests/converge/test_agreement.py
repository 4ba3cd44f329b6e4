"""Conclusions from the columns of the handshake, by tables, and the errors that name replicas and tensors."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from hdet_kernels.converge.agreement import Agreement, conclude, left_out, name_ranks, none_sound
from hdet_kernels.converge.handshake import COLUMNS

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
