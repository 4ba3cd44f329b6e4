"""Numbers in parameter groups: read, written, replaced, spread over replicas, and which of them share moments."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hdet_kernels.optim.group_entries import (
    PER_REPLICA,
    PER_REPLICA_BASE,
    forget_per_replica,
    read_entry,
    replace_entry,
    replica_groups,
    shares_moments,
    split_key,
    write_entry,
    write_per_replica,
)


def adam_group() -> dict[str, Any]:
    return {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.01, "steps": 7, "amsgrad": False}


@pytest.mark.parametrize(("key", "parts"), [("lr", ("lr", None)), ("betas[1]", ("betas", 1)), ("a[b]", ("a[b]", None))])
def test_a_key_has_a_name_and_an_index(key: str, parts: tuple[str, int | None]) -> None:
    assert split_key(key) == parts


def test_read() -> None:
    expected = {"lr": 0.1, "betas[0]": 0.9, "betas[1]": 0.99, "steps": 7.0, "weight_decay": 0.01}
    values = {key: read_entry(adam_group(), key) for key in expected}
    assert values == expected
    assert {type(value) for value in values.values()} == {float}
    for shape in ((), (1,)):
        assert read_entry({"lr": torch.full(shape, 0.25)}, "lr") == 0.25


@pytest.mark.parametrize("key", ["decay", "amsgrad", "betas", "betas[2]", "eps[0]", "several"])
def test_reading_anything_but_a_number_is_refused(key: str) -> None:
    with pytest.raises(ValueError, match=f"'{key}'".replace("[", r"\[")):
        read_entry(adam_group() | {"several": torch.zeros(2)}, key)


def test_numbers_are_written_and_tensors_filled_in_place() -> None:
    """torch's capturable Adam takes betas as tensors, and a captured graph reads those."""
    group = adam_group()
    write_entry(group, "lr", 0.5)
    write_entry(group, "betas[0]", 0.5)
    assert (group["lr"], group["betas"]) == (0.5, (0.5, 0.99))
    write_entry(group, "betas[1]", 0.75)
    assert group["betas"] == (0.5, 0.75)
    rate, first, second = torch.tensor(0.1), torch.tensor(0.9), torch.tensor(0.99)
    held: dict[str, Any] = {"lr": rate, "betas": (first, second)}
    for value in (0.5, torch.tensor(0.25)):
        write_entry(held, "lr", value)
        write_entry(held, "betas[1]", value)
        assert rate.item() == second.item() == float(value)
    assert held["lr"] is rate
    assert held["betas"][0] is first
    assert held["betas"][1] is second


def test_replacing_leaves_the_tensor_that_was_there_alone() -> None:
    first, second = torch.tensor(0.9), torch.tensor(0.99)
    group = {"lr": first, "betas": (first, second)}
    replace_entry(group, "lr", 0.5)
    replace_entry(group, "betas[1]", 0.5)
    assert group == {"lr": 0.5, "betas": (first, 0.5)}
    assert (first.item(), second.item()) == (pytest.approx(0.9), pytest.approx(0.99))


def test_each_replica_sees_the_values_written_for_it() -> None:
    group = adam_group()
    write_per_replica(group, "lr", 0.1, (0.05, 0.2))
    write_per_replica(group, "betas[1]", 0.99, (0.98, 0.995))
    assert group[PER_REPLICA] == {"lr": (0.05, 0.2), "betas[1]": (0.98, 0.995)}
    assert group[PER_REPLICA_BASE] == {"lr": 0.1, "betas[1]": 0.99}
    seen = replica_groups(group, 2)
    assert [(each["lr"], each["betas"]) for each in seen] == [(0.05, (0.9, 0.98)), (0.2, (0.9, 0.995))]
    assert (group["lr"], group["betas"]) == (0.1, (0.9, 0.99))
    group["lr"] = 0.3  # written since then: it applies to all
    assert [each["lr"] for each in replica_groups(group, 2)] == [0.3, 0.3]


@pytest.mark.parametrize(("held", "base"), [(torch.tensor(0.1), 0.1), (0.1, torch.tensor(0.1))], ids=["held", "base"])
def test_a_tensor_is_not_compared_with_its_base(held: Any, base: Any) -> None:
    group = {"lr": held}
    write_per_replica(group, "lr", base, (0.05, 0.2))
    assert group[PER_REPLICA_BASE] == {"lr": None}


def test_forgetting_keeps_values_that_the_user_wrote() -> None:
    groups = [adam_group(), adam_group() | {PER_REPLICA: {"eps": (1e-8, 1e-6)}}]
    for group in groups:
        write_per_replica(group, "lr", 0.1, (0.05, 0.2))
    forget_per_replica(groups)
    assert PER_REPLICA not in groups[0]
    assert groups[1][PER_REPLICA] == {"eps": (1e-8, 1e-6)}
    assert not any(PER_REPLICA_BASE in group for group in groups)


@pytest.mark.parametrize(
    ("rule", "change", "shares"),
    [
        ("adamw", {}, True),
        ("adamw", {"lr": 0.5, "weight_decay": 0.5}, True),
        ("adamw", {"beta1": 0.5}, False),
        ("adamw", {"max_grad_norm": 1.0}, False),
        ("sgd", {"momentum": 0.5}, False),
        ("sgd", {"lr": 0.5}, True),
        *((rule, {"common": {"weight_decay": 0.1}}, False) for rule in ("sgd", "adam", "adagrad")),
    ],
    ids=str,
)
def test_which_replicas_share_moments(rule: str, change: dict[str, Any], shares: bool) -> None:
    """By what differs for the second replica, or is common to both: weight decay that acts on the moments."""
    row = {"lr": 0.1, "weight_decay": 0.0, "beta1": 0.9, "beta2": 0.99, "momentum": 0.9, "max_grad_norm": 0.0}
    row |= change.get("common", {})
    other = row | {name: value for name, value in change.items() if name != "common"}
    assert shares_moments(rule, [row, other], 1) == shares
