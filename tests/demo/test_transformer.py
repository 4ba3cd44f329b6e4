"""The demo's language model."""

from __future__ import annotations

import torch

from hdet_kernels.demo.transformer import ByteTransformer


def test_prediction_does_not_depend_on_later_bytes() -> None:
    torch.manual_seed(0)
    model = ByteTransformer(width=16, heads=2, layers=2, context=8)
    text = torch.randint(256, (3, 8))
    changed = text.clone()
    changed[:, 5:] = (changed[:, 5:] + 1) % 256
    before, after = model(text), model(changed)
    assert before.shape == (3, 8, 256)
    torch.testing.assert_close(before[:, :5], after[:, :5])
    assert not torch.equal(before[:, 5:], after[:, 5:])
