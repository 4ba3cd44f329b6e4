"""Options of precision, gradients and backend that all fused optimizers share."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from hdet_kernels.optim import FusedAdamW
from hdet_kernels.optim.options import Options


@pytest.mark.parametrize(
    ("options", "masters"),
    [
        ({}, True),
        ({"master_weights": True}, True),
        ({"master_weights": "split"}, True),
        ({"master_weights": False}, False),
        ({"stochastic_rounding": True}, False),
    ],
    ids=str,
)
def test_which_parameters_have_masters(options: dict[str, Any], masters: bool) -> None:
    made = Options(**options)
    assert [made.has_master(dtype) for dtype in (torch.bfloat16, torch.float16)] == [masters] * 2
    assert not any(made.has_master(dtype) for dtype in (torch.float32, torch.float64))


def test_dtype_of_the_state() -> None:
    for given in (torch.float32, torch.bfloat16):
        made = Options(state_dtype=given)
        assert [made.state_dtype_for(dtype) for dtype in (torch.float32, torch.bfloat16)] == [given] * 2
        assert made.state_dtype_for(torch.float64) == torch.float64
    for spelled in ("int8", torch.int8):
        made = Options(state_dtype=spelled)
        assert made == Options(state_dtype=torch.int8)
        assert made.rounds_stochastically
        assert [made.state_dtype_for(dtype) for dtype in (torch.float32, torch.bfloat16)] == [torch.uint8] * 2


@pytest.mark.parametrize(
    ("dtype", "options", "message"),
    [
        (torch.bfloat16, {"master_weights": True, "stochastic_rounding": True}, "exclude each other.*choose one"),
        (torch.float16, {"stochastic_rounding": True}, "parameter 0 is torch.float16.*bfloat16"),
        (torch.float16, {"state_dtype": torch.bfloat16}, "parameter 0 is torch.float16, whose state"),
        (torch.float64, {"state_dtype": torch.bfloat16}, "parameter 0 is torch.float64, whose state"),
        (torch.float32, {"state_dtype": torch.float16}, 'state_dtype must be torch.float32, torch.bfloat16 or "int8"'),
        (torch.float64, {"state_dtype": "int8"}, "parameter 0 is torch.float64, whose state cannot be int8"),
        (torch.float16, {"state_dtype": "int8"}, "parameter 0 is torch.float16, whose state cannot be int8"),
        (torch.float32, {"gradients": "flat"}, "gradients must be one of 'autograd', 'fixed', got 'flat'"),
        (torch.float32, {"master_weights": "yes"}, 'master_weights must be True, False, "split" or None to choose'),
        (torch.bfloat16, {"master_weights": "split", "stochastic_rounding": True}, "'split' and .*exclude each other"),
        (torch.float32, {"stochastic_rounding": None}, "stochastic_rounding must be True or False, got None"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_bad_options_are_refused_before_anything_moves(
    dtype: torch.dtype, options: dict[str, Any], message: str
) -> None:
    param = nn.Parameter(torch.ones(3, dtype=dtype))
    address = param.data_ptr()
    with pytest.raises(ValueError, match=message):
        FusedAdamW([param], **options)
    assert param.data_ptr() == address


def test_float32_and_float64_parameters_have_no_master() -> None:
    for dtype in (torch.float32, torch.float64):
        param = nn.Parameter(torch.ones(3, dtype=dtype))
        optimizer = FusedAdamW([param], master_weights=True)
        param.grad = torch.ones_like(param)
        optimizer.step()
        assert set(optimizer.state[param]) == {"step", "exp_avg", "exp_avg_sq"}
        assert optimizer.state[param]["exp_avg"].dtype == dtype


@pytest.mark.parametrize("option", [{"master_weights": "split"}, {"stochastic_rounding": True}], ids=str)
def test_an_option_without_effect_is_told_once(option: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    for dtype, state, told in (
        (torch.float32, torch.float32, True),
        (torch.bfloat16, torch.float32, False),
        (torch.float32, torch.bfloat16, "split" in option.values()),
        (torch.float32, "int8", True),
    ):
        caplog.clear()
        module = nn.Linear(3, 2)
        optimizer = FusedAdamW(module.parameters(), lr=0.1, state_dtype=state, **option)
        module.to(dtype)
        for _ in range(2):
            module(torch.ones(4, 3, dtype=dtype)).sum().backward()
            optimizer.step()
        assert ["has no effect: the parameters are torch.float32" in text for text in caplog.messages] == [True] * told
