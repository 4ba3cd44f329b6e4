"""How far moments and steps with state in 8 bits are from those with float32 state, for neighbours of all sizes.

The documentation has these numbers in a table (``docs/usage/optimizers.md``).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import hdet_kernels as hk
from hdet_kernels.ops.torch.companding import BLOCK

#: By size of the gradients of a block beside one that is 1: bounds of the second moment's error, as a root of the mean
#: of squares, and of the share by which steps are too large on average. A little above what the documentation says.
TABLE = {1.0: (0.10, 0.007), 0.1: (0.19, 0.015), 0.01: (0.36, 0.045), 0.001: (0.66, 0.145)}
BLOCKS, WARM, STEPS = 16, 2000, 3000


def observed(state_dtype: Any, mean: float, spread: float) -> tuple[Tensor, Tensor]:
    """Return the mean step of every neighbour, and some of its second moments, [size, …, neighbour]."""
    sizes = torch.tensor(list(TABLE)).repeat_interleave(BLOCKS).view(-1, 1).repeat(1, BLOCK)
    sizes[:, 0] = 1
    param = torch.nn.Parameter(torch.zeros(sizes.numel()))
    optimizer = hk.FusedAdamW([param], lr=1.0, weight_decay=0.0, state_dtype=state_dtype)
    generator, steps, moments = torch.Generator().manual_seed(0), torch.zeros(sizes.shape).double(), []
    for number in range(STEPS):
        param.grad = (torch.randn(sizes.shape, generator=generator).mul_(spread).add_(mean) * sizes).view(-1)
        optimizer.step()
        with torch.no_grad():
            steps += -param.view(sizes.shape) if number >= WARM else 0
            param.zero_()
        if number >= WARM and number % 200 == 0:
            state = hk.optim.decoded_state_dict(optimizer.state_dict())["state"][0]
            moments.append(state["exp_avg_sq"].view(sizes.shape).clone())
    seen = torch.stack(moments)[:, :, 1:].unflatten(1, (len(TABLE), BLOCKS)).transpose(0, 1)
    return steps[:, 1:].unflatten(0, (len(TABLE), BLOCKS)), seen


@pytest.mark.full
@pytest.mark.parametrize(("mean", "spread"), [(1.0, 0.5), (0.1, 1.0)], ids=["steady", "noisy"])
def test_errors_are_those_of_the_table(mean: float, spread: float) -> None:
    (steps, moments), (expected, exact) = (observed(kind, mean, spread) for kind in ("int8", torch.float32))
    for number, (size, (most, too_large)) in enumerate(TABLE.items()):
        error = moments[number] / exact[number] - 1
        assert abs(float(error.mean())) < 0.02, f"{size}: correct on average"
        assert most / 2 < float(error.square().mean().sqrt()) < most, size
        assert -0.001 < float(steps[number].mean() / expected[number].mean()) - 1 < too_large, size
