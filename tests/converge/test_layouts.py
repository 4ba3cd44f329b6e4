"""Ranks whose models differ in order, names, strides or ties: an error on all ranks, before anything is averaged."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hdet_kernels as hk
from tests.ranks import Cases


def _model(names: str) -> nn.ModuleDict:
    torch.manual_seed(0)
    layers = {name: nn.Linear(4, 4, bias=False) for name in "ab"}
    return nn.ModuleDict({name: layers[name] for name in names})


def _make_odd(model: nn.ModuleDict, odd: str) -> None:
    if odd == "strides":
        model["a"].weight.data = model["a"].weight.data.t().contiguous().t()
    if odd == "transposed":  # in its place
        model["a"].weight.data = model["a"].weight.data.t()
    if odd == "tied":
        model["b"].weight = model["a"].weight
    if odd == "tied by memory":
        model["b"].weight.data = model["a"].weight.data


def _built(rank: int, odd: str, source: str, optimizer_type: str) -> tuple[str, bool, str]:
    """Sync once; rank 1 has the ``odd`` model. If it becomes odd later, sync once before and once after that."""
    model = _model("ba" if odd == "order" and rank == 1 else "ab")
    if rank == 1:
        _make_odd(model, odd)
    params: Any = {
        "names": model.named_parameters(), "model": model.parameters(), "none": model.parameters(),
        "wrapped": ((("module." if rank else "") + name, param) for name, param in model.named_parameters()),
    }[source]  # fmt: skip
    make: Any = {"ours": hk.FusedSGD, "torch": torch.optim.SGD}[optimizer_type]
    optimizer = make(params, lr=0.1)
    given = model if source == "model" else None
    scheduler = hk.HDETOneCycleLR(optimizer, 0.1, 8, sync_every=2, auto_lr=False, gradients="local", model=given)
    inputs = torch.randn(3, 4, generator=torch.Generator().manual_seed(rank))
    before: list[Tensor] = []
    message = ""
    try:
        for step in range(4 if odd.endswith(" later") else 2):
            if rank == 1 and step == 2:
                _make_odd(model, odd.removesuffix(" later"))
            optimizer.zero_grad()
            loss = sum(layer(inputs).square().mean() for layer in model.values())
            loss.backward()
            optimizer.step()
            before = [param.detach().clone() for param in model.parameters()]
            scheduler.step(loss)
    except RuntimeError as error:
        message = str(error)
    unchanged = all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
    return message, unchanged, str([name for name, _ in model.named_parameters()])


CASES = Cases(
    2,
    _built,
    [
        ("order", "names", "ours"),
        ("order", "names", "torch"),
        ("order", "model", "ours"),
        ("strides", "none", "torch"),
        ("tied", "names", "ours"),
        ("tied by memory", "none", "ours"),
        ("strides later", "none", "torch"),
        ("transposed later", "model", "torch"),
        ("tied by memory later", "none", "torch"),
        ("nothing", "names", "ours"),
        ("nothing", "wrapped", "torch"),
        ("transposed later", "none", "ours"),
    ],
)


#: Fused optimizers bring parameters back into their buffers, where they have the strides that they had.
FINE = [("nothing", "names", "ours"), ("nothing", "wrapped", "torch"), ("transposed later", "none", "ours")]


@pytest.mark.parametrize("case", [case for case in CASES.cases if case not in FINE], ids=str)
def test_another_layout_is_an_error_that_names_ranks_and_tensors(case: tuple[str, str, str]) -> None:
    for message, unchanged, _ in CASES[case]:
        assert message.startswith("the replicas disagree on the layout of parameters and buffers (rank 0: "), message
        assert "; rank 1: " in message
        assert "Nothing was averaged" in message
        assert unchanged
        if case[0] == "order":
            assert "rank 0: tensor 0 parameter a.weight: float32 (4, 4)" in message
            assert "rank 1: tensor 0 parameter b.weight: float32 (4, 4)" in message
        if case[0].startswith("tied by memory"):
            assert "tensor 1 parameter 1 tied to parameter 0" in message


@pytest.mark.parametrize("case", FINE, ids=str)
def test_the_same_layout_is_averaged(case: tuple[str, str, str]) -> None:
    for message, unchanged, _ in CASES[case]:
        assert (message, unchanged) == ("", False)
