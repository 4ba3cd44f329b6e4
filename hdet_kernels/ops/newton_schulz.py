"""Muon's orthogonalisation: the Newton–Schulz iteration, for all matrices of one shape at once.

With X the matrix divided by its norm, as [m, n] with m ≤ n (a taller one is transposed)::

    A = X·Xᵀ
    B = b·A + c·A·A
    X ← a·X + B·X

The numbers are those of torch.optim.Muon: X, A and B are rounded to bfloat16 after every product, whose sums are
float32. A and B are symmetric, so that on a GPU half of each of them is computed (:mod:`.triton_gram`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module

import torch
from torch import Tensor

from hdet_kernels.ops.backends import backends, interpreting

#: The least m from which a GPU computes half of A and B. Below it a product is too small for the saving to matter.
#: Not measured: it is the size at which half of the tiles is less than three quarters of all.
LEAST_SIZE = 256

# Keeps NorMuon from dividing by zero.
_TINY = 1e-10

# A product x·xᵀ of a batch, or beta·base + alpha·x·xᵀ.
_Gram = Callable[..., Tensor]


def orthogonalise_(
    x: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float, *, backend: str | None = None
) -> None:
    """Replace each matrix of a batch by the nearest orthogonal one, roughly: its singular values come near 1.

    Args:
        x: The matrices, [count, rows, columns]; bfloat16, or float64, which holds the same numbers.
        coefficients: a, b and c.
        steps: How many times X is replaced.
        eps: The least norm by which a matrix is divided.
        backend: A resolved backend. ``"cuda"`` and ``"triton"`` compute half of the symmetric products; others, and
            matrices below :data:`LEAST_SIZE` on a GPU, all of it.
    """
    if x.numel() == 0:
        return
    if x.device.type == "cpu" and backend != "triton":
        x.copy_(_in_float32(x, coefficients, steps, eps))
    elif x.dtype == torch.bfloat16:
        _in_bfloat16_(x, coefficients, steps, eps, _gram_for(x, backend))
    else:
        rounded = x.bfloat16()
        _in_bfloat16_(rounded, coefficients, steps, eps, _gram_for(x, backend))
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


def _in_bfloat16_(x: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float, gram: _Gram) -> None:
    a, b, c = coefficients
    tall = x.shape[1] > x.shape[2]
    norm = torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp_(min=eps)
    # The steps write from one buffer to the other, and the last one to x.
    other = torch.empty_like(x)
    now, then = (other, x) if steps % 2 else (x, other)
    torch.div(x, norm, out=now)
    for _ in range(steps):
        product = gram(now.mT if tall else now)
        polynomial = gram(product, product, b, c)
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


def _gram_for(x: Tensor, backend: str | None) -> _Gram:
    if backend == "triton" and (interpreting() or min(x.shape[1:]) >= LEAST_SIZE):
        pass
    elif backend != "cuda" or min(x.shape[1:]) < LEAST_SIZE or backends()["triton"] != "ok":
        return _whole_gram
    gram: _Gram = import_module("hdet_kernels.ops.triton_gram").gram
    return gram


def _whole_gram(x: Tensor, base: Tensor | None = None, beta: float = 0.0, alpha: float = 1.0) -> Tensor:
    """Return ``beta·base + alpha·x·xᵀ``."""
    if base is None:
        return torch.bmm(x, x.mT)
    return torch.baddbmm(base, x, x.mT, beta=beta, alpha=alpha)
