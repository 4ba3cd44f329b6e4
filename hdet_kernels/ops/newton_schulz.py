"""Muon's orthogonalisation: the Newton–Schulz iteration, for all matrices of one shape at once.

With X the matrix divided by its norm, as [m, n] with m ≤ n (a taller one is transposed)::

    A = X·Xᵀ
    B = b·A + c·A·A
    X ← a·X + B·X

torch.optim.Muon rounds X, A and B to bfloat16 after every product, whose sums are float32, and so does this module. For
larger matrices on a GPU, :mod:`.gram_iteration` evaluates the same polynomials in float16, with less work and smaller
rounding errors.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hdet_kernels.ops.backends import backends, interpreting
from hdet_kernels.ops.gram_iteration import orthogonalise_ as iterate_on_gram_
from hdet_kernels.ops.gram_iteration import segments as gram_segments

#: The least m for which a GPU iterates on the Gram matrix: the smallest that was measured. On an H200 the products of
#: one step on 32 square matrices took 0.82 of the time of whole ones by cuBLAS, both with 256 and with 512 rows.
LEAST_SIZE = 256

# Keeps NorMuon from dividing by zero.
_TINY = 1e-10


def orthogonalise_(
    x: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float, *, backend: str | None = None
) -> None:
    """Replace each matrix of a batch by the nearest orthogonal one, roughly: its singular values come near 1.

    Args:
        x: The matrices, [count, rows, columns]; bfloat16, or float64, which holds the same numbers.
        coefficients: a, b and c.
        steps: How many times X is replaced.
        eps: The least norm by which a matrix is divided.
        backend: A resolved backend. ``"cuda"`` and ``"triton"`` iterate on the Gram matrix, from :data:`LEAST_SIZE` on.
    """
    if x.numel() == 0:
        return
    if x.device.type == "cpu" and backend != "triton":
        x.copy_(_in_float32(x, coefficients, steps, eps))
        return
    rounded = x.bfloat16()  # bfloat16 stays where it is
    segments = gram_segments(x.shape[1:], coefficients, steps) if _has_kernels(x, backend) else None
    if segments is None:
        _in_bfloat16_(rounded, coefficients, steps, eps)
    else:
        _in_float16_(rounded, coefficients, eps, segments)
    if rounded is not x:
        x.copy_(rounded)


def normalise_rows_(x: Tensor, squares: Sequence[Tensor], beta2: float, keep: Tensor) -> None:
    """Apply NorMuon (arXiv 2510.05491) to the orthogonalised matrices O.

    Each row is divided by the root of the mean of its squares over the steps, and the result has the norm of O::

        v ← β₂·v + (1 − β₂)·mean(O², over columns)
        N = O / (√v + 1e-10)
        O ← N·‖O‖/‖N‖

    Args:
        x: The matrices O, [count, rows, columns].
        squares: v in parts of the batch, each [part of count, rows, 1].
        beta2: β₂.
        keep: bool [count, 1, 1], where v is updated; elsewhere it stays as it is.
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


def _in_float16_(x: Tensor, coefficients: tuple[float, float, float], eps: float, segments: Sequence[int]) -> None:
    rows_first = x if x.stride(2) == 1 else x.mT
    if rows_first.stride()[1:] == (rows_first.shape[2], 1):
        iterate_on_gram_(rows_first, coefficients, eps, segments)
    else:
        without_gaps = x.contiguous()
        iterate_on_gram_(without_gaps, coefficients, eps, segments)
        x.copy_(without_gaps)


def _in_bfloat16_(x: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> None:
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


def _in_float32(x: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
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


def _has_kernels(x: Tensor, backend: str | None) -> bool:
    """Return whether ``x`` is iterated by the kernels in Triton."""
    if backend == "triton" and interpreting():
        return True
    rows, columns = x.shape[1:]
    # Triton loads 16 bytes at a time, and the next tiles meanwhile, if it knows that rows begin at multiples of that.
    large = min(rows, columns) >= LEAST_SIZE and rows % 16 == columns % 16 == 0
    return large and backend in ("cuda", "triton") and backends()["triton"] == "ok"
