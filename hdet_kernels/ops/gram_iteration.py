"""Newton–Schulz on the Gram matrix, in float16: the way of Muon's orthogonalisation on GPUs.

With X of [m, n], m ≤ n (a taller matrix is multiplied from the other side), the steps of a segment need X once at its
begin and once at its end::

    R = X·Xᵀ
    in every step:  Q = a·I + b·R + c·R·R
                    T ← Q·T             from the second step on; T = Q in the first
                    R ← (Q·R)·Q         but in the last step
    X ← T·X

All but X are symmetric [m, m] matrices that commute, so that half of each product is computed. With α = n/m, in units
of half a product of [m, m] matrices, a segment of s steps takes α for R, 4·s − 3 for its steps and 2·α for the new X.
That is 3·α·k + 4·steps − 3·k for k segments. Segments of one step are the iteration as it is usually written: for five
steps they take 15·α + 5, where 3 + 2 steps take 6·α + 14, and whole products 20·α + 10.

Rounding errors of R make some of its small eigenvalues negative, and every step multiplies these by a². A segment ends
before that matters. Numbers have 11 bits, where bfloat16 has 8: X is scaled so that entries of R, about 1/m and less,
are in the range of float16, and Q is rounded with a on its diagonal, the same Q for T and for R.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module

import numpy as np
import torch
from torch import Tensor

#: X is this times the normalised matrix, and R the square of it times its Gram matrix. Where all singular values are
#: alike, entries of R are about 2¹⁰/m on the diagonal and 2¹⁰/(m·√n) beside it: at m = n = 2¹⁶ that is 2⁻¹⁴, where
#: float16 begins to lose bits. Where one singular value dominates, they reach 2¹⁰, 64 times below the largest number.
SCALE = 32.0

#: The most that rounding errors of R, 2⁻¹¹ of its norm, may become within a segment, and the most steps of one.
GREATEST_ERROR, LONGEST = 0.1, 3

#: The time of half a symmetric product as a share of that of a whole one by cuBLAS: on an H200, 0.66 to 0.72 with 2048
#: rows, 0.75 to 0.80 with 1024, 0.67 to 0.75 with 768. Five steps, one by one and as 3 + 2, took 4.00 and 2.66 ms there
#: for four matrices of [2048, 8192], and 5.25 and 5.69 ms for sixteen of [2048, 2048].
HALF = 0.7


def segments(shape: Sequence[int], coefficients: tuple[float, float, float], steps: int) -> list[int] | None:
    """Return the numbers of steps from one product with X to the next.

    k segments take the time of α·k·(1 + h) + (4·steps − 3·k)·h whole products of [m, m] matrices, where h is
    :data:`HALF`. So there are as few segments as precision allows if α·(1 + h) > 3·h (α > 1.24), else steps alone.

    Args:
        shape: The shape of a matrix.
        coefficients: a, b and c.
        steps: How many steps there are.

    Returns:
        The steps of each segment, or None if the numbers may leave the range of float16.
    """
    if not _in_range(coefficients, steps):
        return None
    longest = 1
    if max(shape) * (1 + HALF) > 3 * HALF * min(shape):
        while longest < LONGEST and coefficients[0] ** (2 * longest) * 2**-11 <= GREATEST_ERROR:
            longest += 1
    count = -(-steps // longest)
    return [steps // count + (index < steps % count) for index in range(count)]


def orthogonalise_(
    x: Tensor, coefficients: tuple[float, float, float], eps: float, steps_of_segments: Sequence[int]
) -> None:
    """Replace each matrix of a batch by the nearest orthogonal one, roughly.

    It takes the memory of another ``x``, and of two [m, m] matrices for each of the batch; four with segments of more
    than one step.

    Args:
        x: The matrices, bfloat16 [count, rows, columns]. Each is without gaps, row by row.
        coefficients: a, b and c.
        eps: The least norm by which a matrix is divided.
        steps_of_segments: The result of :func:`segments`.
    """
    kernels = import_module("hdet_kernels.ops.triton_gram")
    count, rows, columns = x.shape
    tall, size = rows > columns, min(rows, columns)
    norms = torch.linalg.vector_norm(x, dim=(1, 2), dtype=torch.float32).clamp_(min=eps)
    now, then = torch.empty(x.shape, dtype=torch.float16, device=x.device), x.view(torch.float16)
    kernels.scale(x, now, SCALE, norms)
    squares = 4 if max(steps_of_segments, default=1) > 1 else 2
    free = list(torch.empty((squares, count, size, size), dtype=torch.float16, device=x.device))
    for steps in steps_of_segments:
        together = _segment(now.mT if tall else now, coefficients, steps, free, kernels.symmetric_product)
        _multiply(*((now, together) if tall else (together, now)), out=then)
        now, then = then, now
    kernels.scale(now, x, 1 / SCALE)


def _segment(
    x: Tensor,
    coefficients: tuple[float, float, float],
    steps: int,
    squares: Sequence[Tensor],
    product: Callable[..., Tensor],
) -> Tensor:
    """Return T, the product of the Q of ``steps`` steps, in one of the [count, m, m] matrices ``squares``."""
    a, b, c = coefficients
    gram, *free = squares
    product(x, x, gram)
    together: Tensor | None = None
    for step in range(steps):
        factor = product(gram, gram, free.pop(), alpha=c / SCALE**4, base=gram, beta=b / SCALE**2, diagonal=a)
        before, together = together, factor
        if before is not None:
            together = product(factor, before, free.pop())
            free.append(before)
        if step < steps - 1:
            half = product(factor, gram, free.pop())
            product(half, factor, gram)
            free.append(half)
        if factor is not together:
            free.append(factor)
    assert together is not None
    return together


def _multiply(left: Tensor, right: Tensor, out: Tensor) -> None:
    if out.device.type == "cpu":  # for Triton's interpreter: some CPUs multiply float16 at a hundredth of the speed
        out.copy_(torch.bmm(left.float(), right.float()))
    else:
        torch.bmm(left, right, out=out)


@cache
def _in_range(coefficients: tuple[float, float, float], steps: int) -> bool:
    """Return whether eigenvalues of R, Q·R and T stay below half of the largest number of float16."""
    a, b, c = coefficients
    values = np.linspace(0, 1.1, 1101)  # the eigenvalues of R; its norm is at most 1, but for roundings
    with np.errstate(over="ignore", invalid="ignore"):
        for _ in range(steps):
            factors = a + b * values + c * values**2
            later = values * factors**2
            greatest = np.abs([values * factors * SCALE**2, later * SCALE**2, factors**LONGEST]).max()
            if not greatest < 2**15:  # also of NaN
                return False
            values = later
    return True
