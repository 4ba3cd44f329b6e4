"""Muon's orthogonalisation: the Newton–Schulz iteration, for all matrices of one shape at once.

With X the matrix divided by its norm, as [m, n] with m ≤ n (a taller one is transposed)::

    A = X·Xᵀ
    B = b·A + c·A·A
    X ← a·X + B·X

:mod:`.torch.newton_schulz` has this text. For larger matrices on a GPU, :mod:`.triton.newton_schulz` evaluates the same
polynomials on the Gram matrix in float16, with less work and smaller rounding errors.
"""

from __future__ import annotations

from torch import Tensor

from hdet_kernels.ops.backends import backends, implementation, interpreting
from hdet_kernels.ops.torch.newton_schulz import in_bfloat16_, in_float32

#: The least m for which a GPU iterates on the Gram matrix: the smallest that was measured. On an H200 the products of
#: one step on 32 square matrices took 0.82 of the time of whole ones by cuBLAS, both with 256 and with 512 rows.
LEAST_SIZE = 256


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
        x.copy_(in_float32(x, coefficients, steps, eps))
        return
    rounded = x.bfloat16()  # bfloat16 stays where it is
    done = False
    if _has_kernels(x, backend):
        done = implementation("triton", "newton_schulz").orthogonalise_(rounded, coefficients, steps, eps)
    if not done:
        in_bfloat16_(rounded, coefficients, steps, eps)
    if rounded is not x:
        x.copy_(rounded)


def _has_kernels(x: Tensor, backend: str | None) -> bool:
    """Return whether ``x`` is iterated by the kernels in Triton."""
    if backend == "triton" and interpreting():
        return True
    rows, columns = x.shape[1:]
    # Triton loads 16 bytes at a time, and the next tiles meanwhile, if it knows that rows begin at multiples of that.
    large = min(rows, columns) >= LEAST_SIZE and rows % 16 == columns % 16 == 0
    return large and backend in ("cuda", "triton") and backends()["triton"] == "ok"
