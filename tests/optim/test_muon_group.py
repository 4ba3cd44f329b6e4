"""MuonGroup: pieces of bounded size, and the factors of the learning rate."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hdet_kernels as hk
from hdet_kernels.optim import muon
from hdet_kernels.optim.muon import MuonGroup, Orthogonal
from hdet_kernels.stack import StackedParameter

SHAPES = ((4, 6), (6, 4), (4, 6), (4, 6), (5, 5), (4, 6), (3,))


def trained(stacked: bool, options: dict[str, object]) -> tuple[list[torch.Tensor], MuonGroup]:
    generator = torch.Generator().manual_seed(0)
    params: list[torch.Tensor] = []
    for shape in SHAPES:
        value = torch.randn(shape, generator=generator)
        params.append(
            StackedParameter(value.expand(3, *shape).clone(), shares_gradient=False) if stacked else nn.Parameter(value)
        )
    optimizer = hk.FusedMuon(params, 0.02, **options)
    for _ in range(3):
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator)
        optimizer.step()
    group = optimizer._flat_groups[0]
    assert isinstance(group, MuonGroup)
    return [param.detach().clone() for param in params], group


@pytest.mark.parametrize("stacked", [False, True], ids=["plain", "stack"])
def test_pieces_of_any_size_give_the_same_numbers(stacked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, object] = {"normuon": True, "state_dtype": torch.bfloat16}
    whole, group = trained(stacked, options)
    assert len(group._pieces) == 3
    assert [len(piece.slots) * len(piece.replicas) for piece in group._pieces] == ([12, 3, 3] if stacked else [4, 1, 1])
    for elements, counts in ((1, (1, 1, 1)), (2 * 24, (2, 1, 1))):
        monkeypatch.setattr(muon, "PIECE_ELEMENTS", elements)
        parts, group = trained(stacked, options)
        for mine, other in zip(parts, whole, strict=True):
            assert torch.equal(mine, other)
        # The scratch memory is that of one piece.
        held = {piece.update.untyped_storage().data_ptr(): piece.update for piece in group._pieces}
        assert len(held) == 1
        assert max(len(piece.slots) for piece in group._pieces) == counts[0]
        (scratch,) = held.values()
        assert scratch.untyped_storage().nbytes() <= 2 * max(elements + 16, 32) + 64


def test_changed_settings_take_effect_at_the_next_step() -> None:
    params = [nn.Parameter(torch.eye(4)) for _ in range(2)]
    optimizer = hk.FusedMuon(params, 0.5, weight_decay=0.0)
    for expected in (1.0, 0.2 * 4**0.5):
        before = params[0].detach().clone()
        for param in params:
            param.grad = torch.eye(4)
        optimizer.step()
        moved = (before - params[0].detach()).diagonal().mean() / 0.5
        assert 0.6 * expected < moved < 1.3 * expected
        optimizer.param_groups[0]["adjust_lr_fn"] = "match_rms_adamw"


def test_ratios_are_those_of_torch() -> None:
    for name in (None, "original", "match_rms_adamw"):
        settings = Orthogonal((1.0, 0.0, 0.0), 5, 1e-7, name, False, 0.95)
        for shape in ((4, 9), (9, 4), (3, 3)):
            assert settings.ratio(shape) == pytest.approx(torch.optim._muon._adjust_lr(1.0, name, torch.Size(shape)))
