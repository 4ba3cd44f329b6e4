"""Newton–Schulz in plain torch: the iteration as torch.optim.Muon writes it, and NorMuon's rows.

X, A and B are rounded to bfloat16 after every product, whose sums are float32. :mod:`hdet_kernels.ops.newton_schulz`
has the equations.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# Keeps NorMuon from dividing by zero.
_TINY = 1e-10


def in_bfloat16_(x: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> None:
    """Replace each matrix of a bfloat16 batch, in two buffers that the steps write in turn."""
    a, b, c = coefficients
    tall = x.shape[1] > x.shape[2]
    norm = torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp_(min=eps)
    # The steps write from one buffer to the other, and the last one to x.
    other = torch.empty_like(x)
    now, then = (other, x) if steps % 2 else (x, other)
    torch.div(x, norm, out=now)
    for _ in range(steps):
        wide = now.mT if tall else now
        product = torch.bmm(wide, wide.mT)
        polynomial = torch.baddbmm(product, product, product, beta=b, alpha=c)
        if tall:
            torch.baddbmm(now, now, polynomial.mT, beta=a, out=then)
        else:
            torch.baddbmm(now, polynomial, now, beta=a, out=then)
        now, then = then, now


def in_float32(x: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """Return the same numbers without products of bfloat16, for which most CPUs have no instructions.

    On one without them (Neoverse-N1) a product of bfloat16 took 250 times as long as one of float32.
    """
    a, b, c = coefficients
    tall = x.shape[1] > x.shape[2]
    now = _rounded(x.mT.float() if tall else x.float())
    norm = torch.linalg.vector_norm(now, dim=(1, 2), keepdim=True).clamp_(min=eps)
    now = _rounded(now / _rounded(norm))
    for _ in range(steps):
        product = _rounded(torch.bmm(now, now.mT))
        polynomial = _rounded(torch.baddbmm(product, product, product, beta=b, alpha=c))
        now = _rounded(torch.baddbmm(now, polynomial, now, beta=a))
    return now.mT if tall else now


def _rounded(x: Tensor) -> Tensor:
    return x.bfloat16().float()


def normalise_rows_(x: Tensor, squares: Sequence[Tensor], beta2: float, keep: Tensor) -> None:
    """Apply NorMuon (arXiv 2510.05491) to the orthogonalised matrices O.

    Each row is divided by the root of the mean of its squares over the steps, and the result has the norm of O::

        v ← β₂·v + (1 − β₂)·mean(O², over columns)
        N = O / (√v + 1e-10)
        O ← N·‖O‖/‖N‖

    ``x`` are the matrices O, [count, rows, columns], and ``squares`` is v in parts of the batch, each [part of count,
    rows, 1]. It is updated where ``keep``, bool [count, 1, 1], says so.
    """
    before = torch.cat(list(squares))
    means = x.to(before.dtype).square().mean(2, keepdim=True)
    after = before.lerp(means, 1 - beta2)
    written = torch.where(keep, after, before).split([len(part) for part in squares])
    for part, new in zip(squares, written, strict=True):
        part.copy_(new)
    sizes = 1 / (after.sqrt() + _TINY)
    # ‖O‖ and ‖N‖, up to the root of the number of columns.
    norm, scaled = (sums.sum(1, keepdim=True).sqrt() for sums in (means, means * sizes.square()))
    x.mul_(sizes * (norm / (scaled + _TINY)))
