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


def _built(rank: int, odd: str, source: str, optimizer_type: str) -> tuple[str, bool, str]:
    """Sync once; rank 1 has the ``odd`` model."""
    model = _model("ba" if odd == "order" and rank == 1 else "ab")
    if odd == "strides" and rank == 1:
        model["a"].weight.data = model["a"].weight.data.t().contiguous().t()
    if odd == "tied" and rank == 1:
        model["b"].weight = model["a"].weight
    if odd == "tied by memory" and rank == 1:
        model["b"].weight.data = model["a"].weight.data
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
        for _ in range(2):
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
        ("nothing", "names", "ours"),
        ("nothing", "wrapped", "torch"),
    ],
)


@pytest.mark.parametrize("case", [case for case in CASES.cases if case[0] != "nothing"], ids=str)
def test_another_layout_is_an_error_that_names_ranks_and_tensors(case: tuple[str, str, str]) -> None:
    for message, unchanged, _ in CASES[case]:
        assert message.startswith("the replicas disagree on the layout of parameters and buffers (rank 0: "), message
        assert "; rank 1: " in message
        assert "Nothing was averaged" in message
        assert unchanged
        if case[0] == "order":
            assert "rank 0: tensor 0 parameter a.weight: float32 (4, 4)" in message
            assert "rank 1: tensor 0 parameter b.weight: float32 (4, 4)" in message
        if case[0] == "tied by memory":
            assert "tensor 1 parameter 1 tied to parameter 0" in message


@pytest.mark.parametrize("source", ["names", "wrapped"])
def test_the_same_layout_is_averaged(source: str) -> None:
    for message, unchanged, _ in CASES["nothing", source, "torch" if source == "wrapped" else "ours"]:
        assert (message, unchanged) == ("", False)
