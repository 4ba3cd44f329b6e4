"""Options of all fused optimizers: which are refused beside those of ``tests/bad_input``, and when they are read."""

from __future__ import annotations

import io
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

from hdet_kernels.ops.table import HyperTable
from hdet_kernels.optim import FusedAdagrad, FusedAdam, FusedAdamW, FusedLion, FusedMuon, FusedSGD
from hdet_kernels.optim.options import Options

FP16, BF16, FP32, FP64 = torch.float16, torch.bfloat16, torch.float32, torch.float64


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
    assert [made.has_master(dtype) for dtype in (BF16, FP16)] == [masters] * 2
    assert not any(made.has_master(dtype) for dtype in (FP32, FP64))


def test_dtype_of_the_state() -> None:
    for given in (FP32, BF16):
        made = Options(state_dtype=given)
        assert [made.state_dtype_for(dtype) for dtype in (FP32, BF16, FP64)] == [given, given, FP64]
    for spelled in ("int8", torch.int8):
        made = Options(state_dtype=spelled)
        assert made == Options(state_dtype=torch.int8)
        assert made.rounds_stochastically
        assert [made.state_dtype_for(dtype) for dtype in (FP32, BF16)] == [torch.uint8] * 2


@pytest.mark.parametrize(
    ("dtype", "options", "argument"),
    [
        (FP32, {"lr": torch.tensor(1j)}, "lr"),
        (FP32, {"lr": 10**400}, "lr"),
        (FP32, {"max_grad_norm": 10**400}, "max_grad_norm"),
        (FP32, {"amsgrad": torch.ones(2)}, "amsgrad"),
        (FP32, {"amsgrad": True, "state_dtype": "int8"}, "amsgrad"),
        (FP32, {"advance_versions": None}, "advance_versions"),
        (FP32, {"stochastic_rounding": None}, "stochastic_rounding"),
        (BF16, {"master_weights": "split", "stochastic_rounding": True}, "stochastic_rounding"),
        *((dtype, {"state_dtype": state}, "parameter 0") for dtype in (FP16, FP64) for state in (BF16, "int8")),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_bad_options_are_refused_before_anything_moves(
    dtype: torch.dtype, options: dict[str, Any], argument: str
) -> None:
    param = nn.Parameter(torch.ones(3, dtype=dtype))
    address = param.data_ptr()
    with pytest.raises(ValueError, match=argument):
        FusedAdamW([param], **options)
    assert param.data_ptr() == address


@pytest.mark.parametrize("params", [3, nn.Linear(2, 2), [{}], [{"params": None}]], ids=str)
def test_parameters_that_are_none(params: Any) -> None:
    with pytest.raises(TypeError, match=r"model.parameters\(\)"):
        FusedAdamW(params)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("lr", "x"), ("betas", 0.9), ("weight_decay", None), ("amsgrad", "no")),
        *(("rounding_seed", seed) for seed in (-1, 2**32, 1.5, "x", None)),
    ],
)
def test_a_group_that_is_edited_badly_is_refused_at_the_step(name: str, value: Any) -> None:
    param = nn.Parameter(torch.ones(3, dtype=BF16))
    optimizer = FusedAdamW([param], stochastic_rounding=True)
    param.grad = torch.ones_like(param)
    optimizer.param_groups[0][name] = value
    with pytest.raises(ValueError, match=f"{name} must be"):
        optimizer.step()
    assert torch.equal(param, torch.ones_like(param))


def test_numbers_on_an_accelerator_are_not_read() -> None:
    """Groups are checked again when one changed, also while a CUDA graph is captured."""
    optimizer = FusedSGD([nn.Parameter(torch.ones(1))], momentum=0.9, nesterov=True)
    with FakeTensorMode():
        unread = torch.empty((), device="cuda")  # has no value: reading it would raise
    optimizer.check_group({**optimizer.defaults, "lr": unread, "momentum": unread})


@pytest.mark.parametrize("option", [{"master_weights": "split"}, {"stochastic_rounding": True}], ids=str)
def test_an_option_without_effect_is_warned_of_once(option: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    for dtype, state, warned in (
        (FP32, FP32, True),
        (BF16, FP32, False),
        (FP32, BF16, "split" in option.values()),
        (FP32, "int8", True),
    ):
        caplog.clear()
        module = nn.Linear(3, 2)
        optimizer = FusedAdamW(module.parameters(), lr=0.1, state_dtype=state, **option)
        module.to(dtype)
        for _ in range(2):
            module(torch.ones(4, 3, dtype=dtype)).sum().backward()
            optimizer.step()
        assert [next(iter(option)) in text for text in caplog.messages] == [True] * warned


def test_lists_are_frozen_and_tensors_that_change_in_place_are_read_again() -> None:
    param = nn.Parameter(torch.zeros(2))
    optimizer = FusedAdamW([param], lr=0.5, betas=[0.9, 0.99], weight_decay=0.0)  # type: ignore[arg-type]
    assert isinstance(optimizer.param_groups[0]["betas"], tuple)
    rate = torch.tensor(0.5)
    for expected in (-0.5, -1.0, -3.0):
        param.grad = torch.ones(2)
        optimizer.step()
        torch.testing.assert_close(param.detach(), torch.full((2,), expected))
        optimizer.param_groups[0]["lr"] = rate  # of the same value, then of another
        rate.fill_(0.5 if expected > -1.0 else 2.0)


def test_the_table_is_written_only_after_a_change_and_once_for_all_dtypes(monkeypatch: pytest.MonkeyPatch) -> None:
    writes: list[Any] = []
    write = HyperTable.write
    monkeypatch.setattr(HyperTable, "write", lambda table, rows: (writes.append(rows), write(table, rows))[1])
    params = [nn.Parameter(torch.ones(2, dtype=dtype)) for dtype in (FP32, FP64)]
    optimizer = FusedSGD([{"params": [param]} for param in params], lr=0.5)
    for rate, momentum, count in ((0.5, 0, 1), (0.5, 0, 1), (0.25, 0, 2), (0.25, 0, 2), (0.25, 0.9, 3), (0.25, 0.9, 3)):
        optimizer.param_groups[1] |= {"lr": rate, "momentum": momentum}
        optimizer.write_hyperparameters()
        assert len(writes) == count
    assert [row["lr"] for row in writes[-1]] == [0.5, 0.25]
    assert [row["momentum"] for row in writes[-1]] == [0, 0.9]


class Pair(Sequence[float]):
    """A sequence that is neither a list nor a tuple, as the lists of Hydra are."""

    def __init__(self, *values: float) -> None:
        self.values = values

    def __getitem__(self, index: Any) -> Any:
        return self.values[index]

    def __len__(self) -> int:
        return len(self.values)


def hydra_list(*values: float) -> Any:
    return pytest.importorskip("omegaconf", reason="omegaconf is not installed").OmegaConf.create(list(values))


@pytest.mark.parametrize(
    "kind", [list, Pair, deque, lambda *pair: np.array(pair), lambda *pair: torch.tensor(pair), hydra_list]
)
def test_every_sequence_of_two_numbers_is_taken_for_betas(kind: Any) -> None:
    given = kind([0.75, 0.5]) if kind in (list, deque) else kind(0.75, 0.5)
    for make, name in ((FusedAdam, "betas"), (FusedLion, "betas"), (FusedMuon, "adamw_betas")):
        group = make([nn.Parameter(torch.ones(2, 2))], **{name: given}).param_groups[0]
        assert type(group[name]) is tuple
        assert [float(beta) for beta in group[name]] == [0.75, 0.5]
    group = FusedAdam([{"params": [nn.Parameter(torch.ones(2))], "betas": given}]).param_groups[0]
    assert type(group["betas"]) is tuple


def test_a_schedule_of_momentum_may_mix_betas() -> None:
    """torch refuses a number beside a tensor in the constructor only: OneCycleLR writes the first of two tensors."""
    param = nn.Parameter(torch.ones(2))
    optimizer = FusedAdamW([param], betas=(torch.tensor(0.9), torch.tensor(0.99)))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, 10)
    param.grad = torch.ones(2)
    optimizer.step()
    schedule.step()
    assert isinstance(optimizer.param_groups[0]["betas"][0], float)


def test_numbers_of_numpy_are_saved_as_those_of_python() -> None:
    param = nn.Parameter(torch.ones(2))
    optimizer = FusedAdamW([param], lr=np.float64(0.5), betas=(np.float64(0.9), np.float32(0.5)), eps=np.array(1e-3))  # type: ignore[arg-type]
    assert [type(optimizer.param_groups[0][name]) for name in ("lr", "eps")] == [float, float]
    optimizer.param_groups[0]["lr"] = np.float32(0.25)
    param.grad = torch.ones(2)
    optimizer.step()
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)["param_groups"][0]
    assert (saved["lr"], saved["betas"]) == (0.25, (0.9, 0.5))


CLASSES = {
    "SGD": (FusedSGD, {"momentum": 0.9}),
    "Adam": (FusedAdam, {}),
    "AdamW": (FusedAdamW, {}),
    "Adagrad": (FusedAdagrad, {}),
    "Muon": (FusedMuon, {}),
}


@pytest.mark.parametrize("dtype", [FP32, FP64, BF16], ids=str)
@pytest.mark.parametrize("name", CLASSES)
def test_a_learning_rate_in_a_float64_tensor_is_the_same_number(name: str, dtype: torch.dtype) -> None:
    """It gives the bits of a float, here as in torch.optim: what is apart from torch is the rounding of every step."""
    fused, options = CLASSES[name]
    for kind in (fused, getattr(torch.optim, name)):
        ends = []
        for rate in (0.0123, torch.tensor(0.0123, dtype=FP64)):
            param = nn.Parameter(torch.linspace(-5, 5, 12).to(dtype).view(3, 4))
            optimizer = kind([param], lr=rate, **options)
            for step in range(5):
                param.grad = (param.detach() + step).sin()
                optimizer.step()
            ends.append(param.detach().clone())
        assert torch.equal(*ends)
