"""The pieces that a schema is made of."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from hdet_kernels.schedule.checkpoint.schema import (
    RATE,
    ByName,
    EmptyOr,
    EqualTo,
    Fields,
    Flag,
    FlatTensors,
    InOrder,
    Items,
    Like,
    Maybe,
    Missing,
    Number,
    OneOf,
    Schema,
    TensorOf,
    Text,
    UnknownFields,
    Whole,
    equal,
)

ONES = torch.ones(2, 3)

CASES: list[tuple[Schema, list[Any], list[Any]]] = [
    (Whole(), [0, 10**9], [-1, 1.0, True, "1", None]),
    (Whole(2, 4), [2, 4], [1, 5]),
    (Number(), [0, -1.5], [math.nan, math.inf, True, "x", None, ONES]),
    (Number(0, 1), [0, 1.0], [-0.1, 1.1]),
    (Number(finite=False), [math.nan, -math.inf], [None, "nan"]),
    (Flag(), [True, False], [0, 1, None]),
    (Text(), ["", "a"], [1, None]),
    (Text(("a", "b")), ["a"], ["c"]),
    (Missing("no reason"), [None], [0, {}]),
    (Maybe(Flag()), [None, True], [1]),
    (EmptyOr(Fields({"a": Flag()})), [{}, {"a": True}], [{"a": 1}, []]),
    (Items(Flag()), [[], [True]], [{}, None, [1], True]),
    (Items(Flag(), (0, 2)), [[], [True, True]], [[True]]),
    (Items(Flag(), longest=1), [[], [True]], [[True, True]]),
    (InOrder((Flag(), Text())), [[True, "a"]], [["a", True], [True]]),
    (ByName(Flag()), [{}, {"a": True}], [{1: True}, {"a": 1}, []]),
    (ByName(Flag(), ("a",)), [{"a": True}], [{}, {"b": True}]),
    (TensorOf(), [ONES], [ONES.int(), [1.0], ONES.to("meta"), ONES * math.nan]),
    (TensorOf((2, -1)), [ONES], [ONES.T, ONES[0]]),
    (TensorOf(finite=False), [ONES * math.inf], [ONES.bool()]),
    (TensorOf(integers=True), [ONES.int()], [ONES]),
    (FlatTensors(6), [[ONES.view(-1)], [ONES[0], ONES[1]]], [[ONES], [ONES[0]], ONES]),
    (OneOf(Flag(), Text()), [True, "a"], [1]),
    (RATE, [0.1, torch.tensor(0.1), torch.tensor([0.1])], [-0.1, ONES, torch.tensor(math.nan), None]),
    (EqualTo([1, 2]), [[1, 2]], [[1], ONES, None]),
    (EqualTo(1), [1, 1.0], [True]),
    (Like({"a": [1.0], "_b": 1}), [{"a": [2]}, {"a": [2], "_b": 3, "c": 1}], [{}, {"a": 1}, {"a": []}, []]),
    (Like(math.inf), [1.0, math.inf], [None]),
    (Like([True, "a", None]), [[False, "b", ONES]], [[0, "b", 1], [True, 1, 1]]),
    (Like(ONES), [ONES * 2], [ONES[0], 1.0]),
    (Like(torch.tensor(1.0)), [2.0, torch.tensor(2.0)], ["x", torch.tensor(math.nan)]),
    (Like({"a": 1, "b": 2}, {"a": Whole(1)}, ("b",)), [{"a": 3, "b": 2}], [{"a": 0, "b": 2}, {"a": 3, "b": 3}]),
]


@pytest.mark.parametrize(("schema", "good", "bad"), CASES, ids=[repr(case[0])[:40] for case in CASES])
def test_a_schema_takes_what_fits_and_names_what_does_not(schema: Schema, good: list[Any], bad: list[Any]) -> None:
    for value in good:
        schema.check(value, "here")
    for value in bad:
        with pytest.raises(ValueError, match="here"):
            schema.check(value, "here")


def test_fields_names_what_is_missing_and_what_nobody_knows() -> None:
    schema = Fields({"a": Flag(), "b": Flag(), "c": Flag()}, optional=frozenset("c"))
    schema.check({"a": True, "b": True}, "x")
    with pytest.raises(ValueError, match=r"has no x\.a, x\.b: load an undamaged checkpoint"):
        schema.check({}, "x")
    with pytest.raises(UnknownFields) as caught:
        schema.check({"a": True, "b": True, "d": 1, "e": 1}, "x")
    assert caught.value.args == ("x.d", "x.e")
    with pytest.raises(ValueError, match=r"x\.b must be True or False, got 3"):
        schema.check({"a": True, "b": 3}, "x")


def test_a_path_leads_to_the_value() -> None:
    with pytest.raises(
        ValueError, match=r"the checkpoint's x\[1\]\.lr/0 must be a finite number of at least 0, got -2"
    ):
        Items(ByName(Number(0))).check([{"lr/0": 1}, {"lr/0": -2}], "x")
    with pytest.raises(ValueError, match=r"got a list of 1000000 entries"):
        Items(Flag(), (2,)).check([0] * 10**6, "x")


def test_equal_values() -> None:
    assert equal(1, 1.0)
    assert equal([{"a": ()}], [{"a": ()}])
    assert not equal(True, 1)
    assert not equal(ONES, 1)
    assert not equal([ONES], [ONES + 1])
