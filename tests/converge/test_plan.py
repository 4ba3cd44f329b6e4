"""The plan of a sync is a pure function of the handshake and the request; tested by tables, field by field."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any, get_args

import numpy as np
import pytest

from hdet_kernels.converge import AverageState, Merge
from hdet_kernels.converge.plan import AverageRequest, Plan, best, compared, decide
from tests.converge.agreements import agreement

NAN, INF = math.nan, math.inf
SICK = {"healthy": [True, False, True]}


def plain(plan: Plan) -> dict[str, Any]:
    """The fields of a plan; arrays as lists."""
    values = {field.name: getattr(plan, field.name) for field in dataclasses.fields(plan)}
    return {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in values.items()}


def decided(
    seen: dict[str, Any], asked: dict[str, Any], merge: Merge = "mean", compresses: bool = False
) -> dict[str, Any]:
    return plain(decide(agreement(**seen), AverageRequest(**asked), merge=merge, compresses=compresses))


#: The plan of three healthy replicas on local gradients, where nothing else differs.
USUAL: dict[str, Any] = {
    "healthy": [True, True, True],
    "included": [True, True, True],
    "taken": None,
    "shared": False,
    "params": True,
    "compressed": False,
    "remembered": False,
    "state": True,
    "counts": False,
    "integers": False,
    "uneven_state": False,
    "rescaled": False,
    "masks": False,
    "keeps_nonfinite": False,
    "no_mean": False,
    "heals": False,
}
LEFT_OUT = {"healthy": [True, False, True], "included": [True, False, True]}

#: By name: the agreement, the request, and how the plan differs from the usual one.
PLANS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "nothing special": ({}, {}, {}),
    # Which gradients there are
    "shared gradients": ({"shared": True}, {}, {"shared": True, "state": False}),
    "gradients not shown": ({"shared": None}, {}, {"shared": None}),
    "not shown, known to be shared": ({"shared": None}, {"known_shared": True}, {"shared": True, "state": False}),
    "not shown, known to be local": ({"shared": None}, {"known_shared": False}, {"shared": False}),
    "shown against what was known": ({"shared": False}, {"known_shared": True}, {}),
    "shown shared, known local": ({"shared": True}, {"known_shared": False}, {"shared": True, "state": False}),
    # Whether state is averaged
    "state asked for": ({"shared": True}, {"average_state": True}, {"shared": True}),
    "state not asked for": ({}, {"average_state": False}, {"state": False}),
    "no state": ({"has_state": False}, {}, {"state": False}),
    "state for a replica left out": (
        {"shared": True, **SICK},
        {},
        {"shared": True, **LEFT_OUT},
    ),
    "state left out in spite of average_state=False": (SICK, {"average_state": False}, LEFT_OUT),
    "state that heals": ({}, {"average_state": False, "heals": True}, {}),
    "nothing to heal with": ({"has_state": False}, {"average_state": False, "heals": True}, {"state": False}),
    "state that differs": ({"shared": True, "state_apart": True}, {}, {"shared": True}),
    "state that differs, not asked for": (
        {"shared": True, "state_apart": True},
        {"average_state": False},
        {"shared": True, "state": False},
    ),
    "state that differs and is not here": (
        {"shared": True, "state_apart": True},
        {"include_state": False},
        {"shared": True, "state": False, "heals": True},
    ),
    # State that has no mean
    "no mean": ({"no_mean": True, "has_state": False}, {}, {"state": False}),
    "no mean, and apart": (
        {"no_mean": True, "has_state": False, "state_apart": True},
        {},
        {"state": False, "no_mean": True},
    ),
    # State that not all have
    "uneven state": ({"same_state": False}, {}, {"state": False, "uneven_state": True}),
    "uneven state asked for": (
        {"same_state": False, "shared": True},
        {"average_state": True},
        {"shared": True, "state": False, "uneven_state": True},
    ),
    "uneven state not asked for": ({"same_state": False}, {"average_state": False}, {"state": False}),
    "uneven state, shared gradients": ({"same_state": False, "shared": True}, {}, {"shared": True, "state": False}),
    "uneven state of a replica left out": (
        {"same_state": False, "shared": True, **SICK},
        {},
        {"shared": True, "state": False, "heals": True, **LEFT_OUT},
    ),
    "no state counts as even": ({"same_state": False, "has_state": False}, {}, {"state": False}),
    # Step counts and integers
    "other counts": ({"same_counts": False}, {}, {"counts": True}),
    "other counts without the state": ({"same_counts": False}, {"average_state": False}, {"state": False}),
    "other counts without any state": ({"same_counts": False, "has_state": False}, {}, {"state": False}),
    "other integers": ({"same_integers": False}, {}, {"integers": True}),
    "other integers without the state": (
        {"same_integers": False},
        {"average_state": False},
        {"integers": True, "state": False},
    ),
    # Parameters that are equal already
    "equal, and to be skipped": (
        {"equal": True, "shared": True},
        {"skip_if_equal": True},
        {"shared": True, "state": False, "params": False},
    ),
    "equal, not to be skipped": ({"equal": True, "shared": True}, {}, {"shared": True, "state": False}),
    "not equal": ({"shared": True}, {"skip_if_equal": True}, {"shared": True, "state": False}),
    "equal with local gradients": ({"equal": True}, {"skip_if_equal": True}, {}),
    "equal with unknown gradients": ({"equal": True, "shared": None}, {"skip_if_equal": True}, {"shared": None}),
    "equal, known to be shared": (
        {"equal": True, "shared": None},
        {"skip_if_equal": True, "known_shared": True},
        {"shared": True, "state": False, "params": False},
    ),
    "equal, but one is left out": (
        {"equal": True, "shared": True, **SICK},
        {"skip_if_equal": True},
        {"shared": True, **LEFT_OUT},
    ),
    # Not of the plan
    "other consensus": ({"same_consensus": False}, {}, {}),
    "other outer start": ({"same_outer": False}, {"outer": False}, {}),
    "everything in full": ({}, {"in_full": True}, {}),
}


@pytest.mark.parametrize("name", PLANS)
def test_what_is_averaged(name: str) -> None:
    seen, asked, changes = PLANS[name]
    found = decided(seen, asked)
    assert found == {**USUAL, **changes}
    flags = ("params", "compressed", "remembered", "state", "counts", "integers", "uneven_state")
    assert all(type(found[flag]) is bool for flag in flags), "plain booleans, for checkpoints and messages"


@pytest.mark.parametrize(
    ("seen", "asked", "compressed", "remembered"),
    [
        ({}, {}, True, False),
        ({"same_consensus": False}, {}, False, True),
        (SICK, {}, False, True),
        ({"same_consensus": False, **SICK}, {}, False, True),
        ({}, {"in_full": True}, False, False),
        ({"same_consensus": False}, {"in_full": True}, False, False),
        ({"equal": True, "shared": True}, {"skip_if_equal": True}, False, False),
        ({"equal": True, "shared": True, **SICK}, {"skip_if_equal": True}, False, True),
    ],
    ids=[
        "difference", "no common consensus", "left out", "left out, no common consensus", "asked for in full",
        "in full, no consensus", "nothing to send", "equal, but one is left out",
    ],
)  # fmt: skip
def test_when_parameters_are_compressed(
    seen: dict[str, Any], asked: dict[str, Any], compressed: bool, remembered: bool
) -> None:
    found, without = decided(seen, asked, compresses=True), decided(seen, asked, compresses=False)
    assert (found["compressed"], found["remembered"]) == (compressed, remembered)
    assert found == {**without, "compressed": compressed, "remembered": remembered}, "nothing else depends on it"
    assert (without["compressed"], without["remembered"]) == (False, False)


def test_state_is_averaged_exactly_for_one_of_three_reasons() -> None:
    for average_state, shared, sick, heals in itertools.product(
        ("auto", True, False), (None, True, False), (False, True), (False, True)
    ):
        wanted = {"auto": shared is not True, True: True, False: False}[average_state]
        seen = {"shared": shared, **(SICK if sick else {})}
        found = decided(seen, {"average_state": average_state, "heals": heals})
        assert found["state"] is any((wanted, sick, heals)), (average_state, shared, sick, heals)


def test_the_healthy_replicas_are_included() -> None:
    plan = decided({"healthy": [False, True, False, True]}, {})
    assert (plan["healthy"], plan["included"]) == ([False, True, False, True],) * 2


# merge="best"


def test_the_best_replica_alone_is_included() -> None:
    seen = {"healthy": [True, True, False], "losses": [3.0, 2.0, 1.0]}
    best_plan, mean_plan = decided(seen, {}, merge="best"), decided(seen, {}, merge="mean")
    assert best_plan == {**mean_plan, "taken": 1, "included": [False, True, False]}
    assert (mean_plan["taken"], mean_plan["included"]) == (None, [True, True, False])
    assert best_plan["healthy"] == [True, True, False]


def test_the_first_replica_can_be_the_best() -> None:
    plan = decided({"losses": [1.0, 2.0, 3.0]}, {}, merge="best")
    assert (plan["taken"], plan["included"]) == (0, [True, False, False])


def test_without_a_loss_the_best_is_the_mean() -> None:
    seen = {"losses": [NAN, NAN, NAN]}
    assert decided(seen, {}, merge="best") == decided(seen, {}, merge="mean")


@pytest.mark.parametrize(
    ("losses", "probes", "healthy", "expected"),
    [
        ([3.0, 1.0, 2.0], [NAN] * 3, [True] * 3, 1),
        ([3.0, 1.0, 2.0], [NAN] * 3, [True, False, True], 2),
        ([2.0, 1.0, 1.0], [NAN] * 3, [True] * 3, 1),
        ([1.0, 1.0, 1.0], [NAN] * 3, [True] * 3, 0),
        ([1.0, 2.0, 3.0], [3.0, 2.0, 1.0], [True] * 3, 2),
        ([1.0, 2.0, 3.0], [3.0, 2.0, 1.0], [True, True, False], 1),
        ([1.0, 2.0, 3.0], [INF, 2.0, 2.5], [False, True, True], 1),
        ([1.0, 2.0, 3.0], [NAN, 2.0, NAN], [True] * 3, 1),
        ([-1.0, 0.0, 5.0], [NAN] * 3, [True] * 3, 0),
        ([NAN, INF, -INF], [NAN] * 3, [True] * 3, None),
        ([NAN, INF, 7.0], [NAN] * 3, [True] * 3, 2),
        ([NAN, INF, 7.0], [NAN] * 3, [True, True, False], None),
        ([1.0, 1.0, 1.0], [INF] * 3, [True] * 3, None),
        ([NAN] * 3, [NAN] * 3, [True] * 3, None),
        ([4.0], [NAN], [True], 0),
    ],
)
def test_the_best_replica(losses: list[float], probes: list[float], healthy: list[bool], expected: int | None) -> None:
    found = best(agreement(losses=losses, probes=probes, healthy=healthy))
    assert found == expected
    assert type(found) is type(expected), "a plain number, for checkpoints"


@pytest.mark.parametrize(
    ("probes", "by_probe"),
    [([NAN, NAN], False), ([0.5, 0.1], True), ([NAN, 0.1], True), ([INF, NAN], True), ([INF, INF], True)],
)
def test_replicas_are_compared_by_the_probe_if_there_is_one(probes: list[float], by_probe: bool) -> None:
    losses, seen = np.array([1.0, 2.0]), np.array(probes)
    assert compared(losses, seen) is (seen if by_probe else losses)


# The request


def test_the_defaults_of_a_request() -> None:
    assert dataclasses.asdict(AverageRequest()) == {
        "call": "sync",
        "average_state": "auto",
        "include_state": True,
        "known_shared": None,
        "needs_shared": False,
        "needs_loss": False,
        "skip_if_equal": False,
        "in_full": False,
        "heals": False,
        "outer": True,
        "agreed": None,
    }
    assert get_args(AverageState) == (get_args(AverageState)[0], bool)
    assert get_args(get_args(AverageState)[0]) == ("auto",)


@pytest.mark.parametrize("cls", [AverageRequest, Plan])
def test_requests_and_plans_are_immutable(cls: type) -> None:
    value = (
        AverageRequest()
        if cls is AverageRequest
        else decide(agreement(), AverageRequest(), merge="mean", compresses=False)
    )
    with pytest.raises(dataclasses.FrozenInstanceError):
        value.params = False  # type: ignore[misc]


@pytest.mark.parametrize(
    ("known", "shown", "shared"),
    [
        (None, None, None), (None, True, True), (None, False, False), (True, None, True), (False, None, False),
        (True, False, False), (False, True, True),
    ],
)  # fmt: skip
def test_what_the_handshake_shows_of_the_gradients_counts_first(
    known: bool | None, shown: bool | None, shared: bool | None
) -> None:
    assert AverageRequest(known_shared=known).shared(agreement(shared=shown)) is shared


def test_local_gradients_are_an_error_where_shared_ones_are_needed() -> None:
    needs = AverageRequest(needs_shared=True)
    with pytest.raises(RuntimeError) as error:
        needs.check_gradients(agreement(shared=False))
    assert str(error.value) == (
        "the hypergradient controller needs gradients that are averaged over the replicas at every step, but they "
        "differ: wrap the model in DistributedDataParallel, or use the regression controller"
    )
    with pytest.raises(RuntimeError, match="hypergradient"):
        AverageRequest(needs_shared=True, known_shared=False).check_gradients(agreement(shared=None))
    needs.check_gradients(agreement(shared=True))
    needs.check_gradients(agreement(shared=None))
    AverageRequest().check_gradients(agreement(shared=False))
