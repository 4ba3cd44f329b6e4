"""Numbers in parameter groups: read, written, replaced, and spread over replicas."""

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
    split_key,
    write_entry,
    write_per_replica,
)


def adam_group() -> dict[str, Any]:
    return {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.01, "steps": 7, "amsgrad": False}


@pytest.mark.parametrize(("key", "parts"), [("lr", ("lr", None)), ("betas[1]", ("betas", 1)), ("a[b]", ("a[b]", None))])
def test_a_key_has_a_name_and_an_index(key: str, parts: tuple[str, int | None]) -> None:
    assert split_key(key) == parts


@pytest.mark.parametrize(
    ("key", "expected"),
    [("lr", 0.1), ("betas[0]", 0.9), ("betas[1]", 0.99), ("steps", 7.0), ("weight_decay", 0.01)],
)
def test_read(key: str, expected: float) -> None:
    value = read_entry(adam_group(), key)
    assert type(value) is float
    assert value == expected


@pytest.mark.parametrize("shape", [(), (1,)])
def test_read_a_tensor(shape: tuple[int, ...]) -> None:
    assert read_entry({"lr": torch.full(shape, 0.25)}, "lr") == 0.25


def test_reading_a_tensor_of_several_numbers_is_refused() -> None:
    with pytest.raises(ValueError, match="'lr' must be a number, the group holds"):
        read_entry({"lr": torch.zeros(2)}, "lr")


def test_write_a_number() -> None:
    group = adam_group()
    write_entry(group, "lr", 0.5)
    assert group["lr"] == 0.5


@pytest.mark.parametrize(("key", "expected"), [("betas[0]", (0.5, 0.99)), ("betas[1]", (0.9, 0.5))])
def test_write_one_entry_of_a_tuple(key: str, expected: tuple[float, float]) -> None:
    group = adam_group()
    write_entry(group, key, 0.5)
    assert group["betas"] == expected
    assert isinstance(group["betas"], tuple)


def test_a_tensor_is_filled_in_place() -> None:
    rate = torch.tensor(0.1)
    group = {"lr": rate}
    write_entry(group, "lr", 0.5)
    assert group["lr"] is rate
    assert rate.item() == 0.5
    write_entry(group, "lr", torch.tensor(0.25))
    assert group["lr"] is rate
    assert rate.item() == 0.25


def test_a_tensor_in_a_tuple_is_filled_in_place() -> None:
    """torch's capturable Adam takes betas as tensors, and a captured graph reads those."""
    first, second = torch.tensor(0.9), torch.tensor(0.99)
    group = {"betas": (first, second)}
    write_entry(group, "betas[1]", 0.5)
    assert group["betas"][0] is first
    assert group["betas"][1] is second
    assert second.item() == 0.5


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("decay", "'decay' is not a key .* it has eps, lr, steps, weight_decay"),
        ("amsgrad", "'amsgrad' must be a number, the group holds False"),
        ("betas", "'betas' must be a number"),
        ("betas[2]", r"'betas\[2\]' does not exist: the group holds betas=\(0.9, 0.99\)"),
        ("eps[0]", r"'eps\[0\]' does not exist"),
    ],
)
def test_reading_anything_but_a_number_is_refused(key: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_entry(adam_group(), key)


def test_replacing_leaves_the_tensor_that_was_there_alone() -> None:
    first, second = torch.tensor(0.9), torch.tensor(0.99)
    group = {"lr": first, "betas": (first, second)}
    replace_entry(group, "lr", 0.5)
    replace_entry(group, "betas[1]", 0.5)
    assert group == {"lr": 0.5, "betas": (first, 0.5)}
    assert (first.item(), second.item()) == (pytest.approx(0.9), pytest.approx(0.99))


def test_values_of_replicas_are_written_with_the_number_they_are_spread_around() -> None:
    group = adam_group()
    write_per_replica(group, "lr", 0.1, (0.05, 0.2))
    write_per_replica(group, "betas[1]", 0.99, (0.98, 0.995))
    assert group[PER_REPLICA] == {"lr": (0.05, 0.2), "betas[1]": (0.98, 0.995)}
    assert group[PER_REPLICA_BASE] == {"lr": 0.1, "betas[1]": 0.99}


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
