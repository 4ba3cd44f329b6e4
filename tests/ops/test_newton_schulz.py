"""The batched Newton–Schulz iteration against torch.optim.Muon's, matrix by matrix, and NorMuon's rows."""

from __future__ import annotations

import pytest
import torch
from torch.optim._muon import _zeropower_via_newtonschulz

from hdet_kernels.ops import newton_schulz
from hdet_kernels.ops.newton_schulz import orthogonalise_
from hdet_kernels.ops.torch.newton_schulz import normalise_rows_
from tests.ops.cases import BACKENDS
from tests.optim.cases import choose_backends

COEFFICIENTS = (3.4445, -4.775, 2.0315)


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # on CPUs without products of bfloat16
@pytest.mark.parametrize("backend", choose_backends(BACKENDS, "cpp-cpu"))
def test_a_batch_has_the_numbers_of_torch(backend: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums may be formed in another order, so that some roundings to bfloat16 differ."""
    where, device = backend
    # The kernels take part, small and odd as the matrices are.
    monkeypatch.setattr(newton_schulz, "_has_kernels", lambda x, backend: backend in ("cuda", "triton"))
    generator = torch.Generator().manual_seed(0)
    for rows, columns, steps in ((6, 10, 5), (10, 6, 4), (9, 9, 5), (1, 5, 5), (33, 40, 5)):
        given = torch.randn(3, rows, columns, generator=generator)
        given[1] *= 1e-9  # its norm is below eps
        expected = torch.stack([_zeropower_via_newtonschulz(each, COEFFICIENTS, steps, 1e-7) for each in given])
        apart = torch.zeros(3, rows * columns + 5, dtype=torch.bfloat16, device=device)
        x = apart[:, : rows * columns].unflatten(1, (rows, columns)).copy_(given)  # gaps between the matrices
        orthogonalise_(x, COEFFICIENTS, steps, 1e-7, backend=where)
        spreads = expected.float().square().mean((1, 2), keepdim=True).sqrt()
        assert ((x.cpu().float() - expected.float()).abs() <= 0.1 * spreads).all()
        assert not apart[:, rows * columns :].any()


def test_matrices_of_odd_sizes_are_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(newton_schulz, "backends", lambda: {"triton": "ok"})
    for rows, columns, expected in (
        (256, 272, True),
        (4096, 256, True),
        (240, 512, False),
        (512, 240, False),
        (260, 512, False),
        (512, 1000, False),
    ):
        assert newton_schulz._has_kernels(torch.empty(1, rows, columns), "cuda") == expected
        assert not newton_schulz._has_kernels(torch.empty(1, rows, columns), "torch")


def test_other_layouts_and_float64_have_the_same_numbers() -> None:
    given = torch.randn(2, 6, 10, generator=torch.Generator().manual_seed(1)).bfloat16()
    expected, wide = given.clone(), given.double()
    columns_first = given.mT.contiguous().mT
    for each in (expected, wide, columns_first):
        orthogonalise_(each, COEFFICIENTS, 5, 1e-7, backend="torch")
    assert torch.equal(columns_first, expected)
    assert torch.equal(wide, expected.double())


def test_singular_values_come_near_one() -> None:
    x = torch.randn(2, 16, 48, generator=torch.Generator().manual_seed(2)).bfloat16()
    orthogonalise_(x, COEFFICIENTS, 5, 1e-7, backend="torch")
    values = torch.linalg.svdvals(x.float())
    assert values.min() > 0.6
    assert values.max() < 1.3
    empty = torch.empty(2, 0, 4, dtype=torch.bfloat16)
    orthogonalise_(empty, COEFFICIENTS, 5, 1e-7)


def test_rows_that_are_left_out_keep_their_state() -> None:
    x = torch.randn(4, 3, 5, generator=torch.Generator().manual_seed(3))
    squares = torch.rand(2, 2, 3, 1, generator=torch.Generator().manual_seed(4))
    before, norms = squares.clone(), torch.linalg.vector_norm(x, dim=(1, 2))
    keep = torch.tensor([True, False, False, True]).view(-1, 1, 1)
    expected = 0.8 * before.flatten(0, 1) + 0.2 * x.square().mean(2, keepdim=True)
    normalise_rows_(x, list(squares), 0.8, keep)
    torch.testing.assert_close(squares.flatten(0, 1), torch.where(keep, expected, before.flatten(0, 1)))
    torch.testing.assert_close(torch.linalg.vector_norm(x, dim=(1, 2)), norms)
