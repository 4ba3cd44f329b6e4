"""The shared checks of arguments: what they accept and return, what they refuse, and what the message says."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from hdet_kernels.checks import (
    check_callable,
    check_choice,
    check_flag,
    check_iterable,
    check_kind,
    check_number,
    check_positive,
    check_sequence,
    check_share,
    check_steps,
    check_whole,
    each,
    keep_plain,
    spell,
    unexpected_keyword,
)


def quantized() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch will move them to another package
        return torch.quantize_per_tensor(torch.tensor(0.5), 0.1, 0, torch.quint8)


NO_NUMBERS: dict[str, Any] = {
    "None": None,
    "text": "0.5",
    "bytes": b"1",
    "flag": True,
    "numpy flag": np.bool_(True),
    "list": [0.5],
    "complex": 1j,
    "array": np.array([0.5]),
    "tensor [1]": torch.tensor([0.5]),
    "tensor of flags": torch.tensor(True),
    "complex tensor": torch.tensor(1j),
    "meta tensor": torch.tensor(0.5, device="meta"),
    "sparse tensor": torch.tensor(0.5).to_sparse(),
    "nested tensor": torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged),
    "quantized tensor": quantized(),
    "array of text": np.array("0.5"),
    "masked number": np.ma.masked,
    "class": float,
}
CHECKS = {"number": check_number, "whole": check_whole, "share": check_share, "positive": check_positive}


@pytest.mark.parametrize("value", NO_NUMBERS.values(), ids=list(NO_NUMBERS))
@pytest.mark.parametrize("check", CHECKS.values(), ids=list(CHECKS))
def test_what_is_not_a_number_raises_a_type_error(check: Callable[..., object], value: Any) -> None:
    with pytest.raises(TypeError, match=r"^rate must be a .*number.*, got .*: leave it out$"):
        check("rate", value, remedy="leave it out")


NUMBERS = [
    0.5,
    np.float32(0.5),
    np.float64(0.5),
    np.array(0.5),
    Fraction(1, 2),
    torch.tensor(0.5),
    torch.tensor(0.5).double(),
]


@pytest.mark.parametrize("value", NUMBERS, ids=lambda value: type(value).__name__)
def test_numbers_of_any_library_become_plain_floats(value: Any) -> None:
    for check in (check_number, check_share, check_positive):
        assert type(check("rate", value)) is float
        assert check("rate", value) == 0.5
    with pytest.raises(ValueError, match="rate must be a whole number, got"):
        check_whole("rate", value)


@pytest.mark.parametrize("value", [3, np.int8(3), np.uint64(3), torch.tensor(3)], ids=lambda v: type(v).__name__)
def test_whole_numbers_of_any_library_become_plain_ints(value: Any) -> None:
    assert type(check_whole("seed", value)) is int
    assert check_whole("seed", value) == 3
    assert type(check_number("rate", value)) is float


BOUNDS: dict[str, tuple[dict[str, float], tuple[float, ...], tuple[float, ...], str]] = {
    "at least": ({"at_least": 0}, (0, 1e300), (-1e-9,), "a finite number of at least 0"),
    "above": ({"above": 0}, (1e-300,), (0, -1), "a finite number above 0"),
    "at most": ({"at_most": 1}, (1, -5), (1.1,), "a finite number of at most 1"),
    "below": ({"below": 1}, (0.999,), (1, 2), "a finite number below 1"),
    "from to": ({"at_least": 0, "at_most": 2}, (0, 2), (-1, 3), "a finite number from 0 to 2"),
    "two": ({"at_least": 0, "below": 1}, (0,), (1, -1), "a finite number of at least 0 and below 1"),
}


@pytest.mark.parametrize("case", BOUNDS.values(), ids=list(BOUNDS))
def test_bounds_of_a_number(case: tuple[dict[str, float], tuple[float, ...], tuple[float, ...], str]) -> None:
    bounds, inside, outside, expected = case
    for value in inside:
        assert check_number("rate", value, **bounds) == value
    for value in (*outside, math.nan, math.inf, -math.inf):
        with pytest.raises(ValueError, match=rf"^rate must be {expected}, got {value}$"):
            check_number("rate", value, **bounds)


def test_a_number_beyond_the_range_of_floats_is_not_finite() -> None:
    with pytest.raises(ValueError, match="rate must be a finite number, got 1000"):
        check_number("rate", 10**400)


@pytest.mark.parametrize("value", [0.0, 0.5, 1.0, 0, 1])
def test_a_share_lies_between_0_and_1(value: float) -> None:
    assert check_share("beta", value) == value


@pytest.mark.parametrize("value", [-1e-9, 1.0000001, math.nan, math.inf])
def test_other_shares_are_refused(value: float) -> None:
    with pytest.raises(ValueError, match=rf"beta must lie between 0 and 1, got {value}"):
        check_share("beta", value)


def test_a_share_below_one() -> None:
    check_share("beta", 0.999, below_one=True)
    with pytest.raises(ValueError, match=r"beta must lie between 0 and 1 \(excluded\), got 1.0"):
        check_share("beta", 1.0, below_one=True)


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_a_positive_number_is_finite(value: float) -> None:
    check_positive("rate", 1e-300)
    with pytest.raises(ValueError, match=f"rate must be a positive number, got {value}"):
        check_positive("rate", value)


@pytest.mark.parametrize("value", [1.0, 0.5, -3, math.nan, math.inf])
def test_whole_numbers_out_of_range(value: Any) -> None:
    check_whole("seed", 0, at_least=0)
    with pytest.raises(ValueError, match="seed must be a whole number of at least 0, got"):
        check_whole("seed", value, at_least=0)


def test_steps_are_whole_and_exact_as_floats() -> None:
    assert check_steps("total_steps", np.int64(7)) == 7
    for value in (0, 1.5, 2**53 + 1, 10**400):
        with pytest.raises(ValueError, match=r"total_steps must be a whole number of at least 1.*, got [01-9]"):
            check_steps("total_steps", value)


def test_whole_numbers_have_no_bounds_of_their_own() -> None:
    assert check_whole("seed", -(10**400)) == -(10**400)
    with pytest.raises(ValueError, match="rows must be a whole number from 1 to 64, got 65: stack fewer"):
        check_whole("rows", 65, at_least=1, at_most=64, remedy="stack fewer")


@pytest.mark.parametrize("value", ["auto", True, False])
def test_choices(value: object) -> None:
    check_choice("average_state", value, ("auto", True, False))


@pytest.mark.parametrize("value", [1, 0, "yes", None])
def test_numbers_are_not_taken_for_booleans(value: object) -> None:
    with pytest.raises(ValueError, match=f"average_state must be one of 'auto', True, False, got {value!r}"):
        check_choice("average_state", value, ("auto", True, False))


def test_a_choice_is_not_compared_with_an_array() -> None:
    with pytest.raises(ValueError, match=r"merge must be one of 'mean', 'best', got an array of shape \(2,\)"):
        check_choice("merge", np.array(["mean", "best"]), ("mean", "best"))


def test_flags() -> None:
    assert check_flag("backup", True) is True
    assert check_flag("backup", np.bool_(False)) is False
    for value in (1, 0, "no", None, torch.tensor(True)):
        with pytest.raises(ValueError, match=r"backup must be True or False, got .*: leave it out"):
            check_flag("backup", value, remedy="leave it out")


def test_callables_and_kinds() -> None:
    check_callable("probe", len, "probe()")
    check_callable("probe", lambda: 1.0, "probe()", takes=0)
    check_callable("apply", print, "apply(value)", takes=1)
    for function, takes in ((lambda batch: 1.0, 0), (lambda: None, 1), (nn.Linear, 1)):
        with pytest.raises(TypeError, match=r"probe must be callable as probe\(\), got .* that takes \("):
            check_callable("probe", function, "probe()", takes=takes)
    with pytest.raises(TypeError, match=r"probe must be callable as probe\(\), got 3: pass a function"):
        check_callable("probe", 3, "probe()", remedy="pass a function")
    assert check_kind("module", module := nn.ReLU(), nn.Module, "a torch.nn.Module") is module
    with pytest.raises(TypeError, match=r"module must be a torch.nn.Module, got \[\]"):
        check_kind("module", [], nn.Module, "a torch.nn.Module")
    with pytest.raises(TypeError, match="got the class ReLU itself: pass an instance"):
        check_kind("module", nn.ReLU, nn.Module, "a torch.nn.Module")


@pytest.mark.parametrize("value", [[1, 2], (1, 2), np.array([1, 2]), torch.tensor([1, 2]), range(1, 3)])
def test_sequences(value: Any) -> None:
    assert check_sequence("bounds", value, "a pair of numbers", length=2) == [1, 2]


NO_SEQUENCES = [None, "ab", b"ab", bytearray(2), {1: 2}, {1, 2}, (n for n in (1, 2)), np.ones((2, 2)), np.array(1), 5]
NO_TENSORS = [torch.ones(2, 2), torch.tensor(1), torch.ones(2).to_sparse(), torch.ones(2, device="meta")]


@pytest.mark.parametrize("value", [*NO_SEQUENCES, *NO_TENSORS])
def test_what_is_no_sequence(value: Any) -> None:
    with pytest.raises(TypeError, match="bounds must be a pair of numbers, got"):
        check_sequence("bounds", value, "a pair of numbers", length=2)


@pytest.mark.parametrize("value", [None, 5, "ab", b"ab", {1: 2}, np.array(1), torch.tensor(1)])
def test_what_cannot_be_iterated(value: Any) -> None:
    with pytest.raises(TypeError, match=r"params must be several tensors, got .*: pass a list"):
        check_iterable("params", value, "several tensors", remedy="pass a list")
    check_iterable("params", iter([]), "several tensors")


def test_an_unexpected_keyword_is_named_with_the_most_similar_one() -> None:
    known = ("momentum", "lr")
    for name, words in (("momentun", "did you mean 'momentum'"), ("x", "it takes momentum, lr")):
        expected = rf"SGD\(\) got an unexpected keyword argument '{name}'; {words}"
        assert re.match(expected, str(unexpected_keyword("SGD", name, known)))
    assert str(unexpected_keyword("SGD", "x", known, "leave it out")).endswith("'x'; leave it out")


def test_a_sequence_of_another_length() -> None:
    with pytest.raises(ValueError, match=r"bounds must be a pair of numbers, got \[1\]: leave it out"):
        check_sequence("bounds", [1], "a pair of numbers", length=2, remedy="leave it out")


def test_one_number_for_each() -> None:
    assert each(check_number, "max_lr", 0.1, 2, "parameter groups", above=0) == [0.1, 0.1]
    assert each(check_number, "max_lr", [np.float64(0.1), 1], 2, "parameter groups", above=0) == [0.1, 1.0]
    with pytest.raises(ValueError, match=r"max_lr must be one number, or a list of 2: one for each of the parameter"):
        each(check_number, "max_lr", [0.1], 2, "parameter groups")
    with pytest.raises(ValueError, match=r"max_lr\[1\] must be a finite number above 0, got -1"):
        each(check_number, "max_lr", [0.1, -1], 2, "parameter groups", above=0)
    with pytest.raises(TypeError, match="max_lr must be a finite number, got a generator"):
        each(check_number, "max_lr", (rate for rate in [0.1]), 2, "parameter groups")


def test_frozen_dataclasses_keep_plain_numbers() -> None:
    @dataclass(frozen=True)
    class Constants:
        rate: float

        def __post_init__(self) -> None:
            keep_plain(self, rate=check_positive("rate", self.rate))

    assert type(Constants(np.float64(0.5)).rate) is float


def test_messages_stay_short() -> None:
    class Broken:
        def __repr__(self) -> str:
            raise RuntimeError("no text")

    assert len(spell("x" * 10**6)) < 140
    assert len(spell(list(range(10**5)))) < 140
    assert len(spell({n: n for n in range(1000)})) < 140
    assert spell(Broken()) == "a Broken"
    assert spell(nn.Sequential(nn.ReLU(), nn.ReLU())) == "a Sequential"
    assert spell(torch.ones(2, 3, device="meta")) == "a tensor of shape (2, 3), torch.float32, on meta"
    assert spell(torch.tensor(2.5)) == "tensor(2.5)"
    assert spell(torch.tensor(2.5).to_sparse()) == "a sparse tensor of shape (), torch.float32, on cpu"
    assert spell(NO_NUMBERS["nested tensor"]) == "a nested tensor, torch.float32, on cpu"
    assert spell(np.float64(2.5)) == "2.5"
    assert spell(nn.ReLU) == "the class ReLU"
