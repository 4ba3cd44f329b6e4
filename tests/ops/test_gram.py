"""The symmetric products in Triton: against float64, symmetric to the bit, for sizes that fill no tile."""

from __future__ import annotations

import pytest
import torch

from hdet_kernels.ops import backends
from tests.ops.cases import available

pytest.importorskip("triton", reason=f"triton: {backends.backends()['triton']}")

from hdet_kernels.ops.triton_gram import gram


@pytest.mark.parametrize("backend", [available("triton", "cuda"), available("triton", "cpu")])
def test_products_are_those_of_float64_and_symmetric(backend: tuple[str, str]) -> None:
    _, device = backend
    generator = torch.Generator().manual_seed(0)
    for size, inner in ((1, 1), (40, 33)) if device == "cpu" else ((1, 1), (40, 33), (300, 130), (256, 512)):
        x = torch.randn(2, size, inner, generator=generator).to(device, torch.bfloat16)
        exact = x.double()
        product = gram(x)
        polynomial = gram(product, product, -0.75, 0.01)
        of_product = product.double()
        transposed = gram(x.mT.contiguous().mT)
        assert torch.equal(product, product.mT)
        assert torch.equal(polynomial, polynomial.mT)
        assert torch.equal(transposed, product)
        for got, expected in (
            (product, exact @ exact.mT),
            (polynomial, -0.75 * of_product + 0.01 * of_product @ of_product),
        ):
            # Rounded to bfloat16 once, after sums in float32.
            allowed = 2**-8 * expected.abs() + 1e-5 * expected.abs().max()
            assert ((got.double() - expected).abs() <= allowed).all()
