"""The settings of an average: each is checked by itself and with the others, when the object is made."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

import hdet_kernels as hk
from hdet_kernels.converge import Averaging, Report
from hdet_kernels.ensemble import SingleReplica


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("compress", "fp8", ValueError),
        ("overlap_steps", -1, ValueError),
        ("overlap_steps", 1.5, ValueError),
        ("backup", 1, ValueError),
        ("bucket_bytes", 0, ValueError),
        ("outer", 0.7, TypeError),
        ("merge", "worst", ValueError),
        ("merge", None, ValueError),
        ("state", "sometimes", ValueError),
        ("buffers", None, ValueError),
    ],
)
def test_a_bad_value_is_refused_by_name(name: str, value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=f"^{name} must be .*got "):
        Averaging(**{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [("lr", 0.0), ("lr", math.inf), ("momentum", 1.0), ("momentum", -0.1), ("nesterov", 1)],
)
def test_a_bad_constant_of_the_outer_step_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{name} must .*got {value}"):
        hk.Outer(**{name: value})


@pytest.mark.parametrize(
    "options",
    [
        {"merge": "best", "compress": "int8"},
        {"merge": "best", "outer": hk.Outer()},
        {"overlap_steps": 1, "outer": hk.Outer()},
        {"overlap_steps": 1, "merge": "best"},
    ],
    ids=str,
)
def test_what_does_not_go_together(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"leave one of the two out|pass overlap_steps=0"):
        Averaging(**options)


def test_a_converger_that_cannot_overlap_does_not_start() -> None:
    converger = hk.Converger([torch.zeros(3)], SingleReplica(), outer=hk.Outer())
    with pytest.raises(ValueError, match="pass overlap_steps=0"):
        converger.start(Report(step=1))


def test_numbers_become_plain_ones() -> None:
    settings = Averaging(overlap_steps=np.int64(2), bucket_bytes=np.int32(64))
    assert (type(settings.overlap_steps), type(settings.bucket_bytes)) == (int, int)
    assert Averaging() == Averaging(None, 0, True, None, None, "mean", "auto", True)
