"""The symmetric products in Triton: against float64, symmetric to the bit, for sizes that fill no tile.

Run as a program, this file compiles the kernel for GPUs and prints what it uses. It runs in a process of its own,
because Triton chooses between its compiler and its interpreter once, when it is imported.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

from hdet_kernels.ops import backends
from tests.ops.cases import available

triton = pytest.importorskip("triton", reason=f"triton: {backends.backends()['triton']}")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from hdet_kernels.ops import triton_gram  # noqa: E402

# By compute capability (A100, H100 and H200, B200), the instruction that multiplies.
PRODUCTS = {80: "mma.sync", 90: "wgmma", 100: "tcgen05.mma"}


@pytest.mark.parametrize("backend", [available("triton", "cuda"), available("triton", "cpu")])
def test_products_are_those_of_float64_and_symmetric(backend: tuple[str, str]) -> None:
    _, device = backend
    generator = torch.Generator().manual_seed(0)
    for size, inner in ((1, 1), (40, 33)) if device == "cpu" else ((1, 1), (40, 33), (300, 130), (256, 512)):
        x = torch.randn(2, size, inner, generator=generator).to(device, torch.bfloat16)
        exact = x.double()
        product = triton_gram.gram(x)
        polynomial = triton_gram.gram(product, product, -0.75, 0.01)
        of_product = product.double()
        transposed = triton_gram.gram(x.mT.contiguous().mT)
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


def compiled(target: int) -> dict[str, object]:
    """Compile the kernel as it is launched on contiguous matrices of a multiple of 16 rows and columns."""
    kernel = triton_gram._gram
    constants = {"column_stride": 1, "TILE": triton_gram.TILE, "INNER": triton_gram.INNER, "WIDE": False}
    types = dict.fromkeys(("x", "base", "out"), "*bf16") | dict.fromkeys(("beta", "alpha"), "fp32")
    types |= dict.fromkeys(("size", "inner", "row_stride"), "i32") | {"batch_stride": "i64"}
    types |= dict.fromkeys(constants, "constexpr")
    names = kernel.arg_names
    aligned = ("x", "base", "out", "size", "inner", "batch_stride", "row_stride")
    source = ASTSource(
        kernel,
        {name: types[name] for name in names},
        {(names.index(name),): value for name, value in constants.items()},
        {(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    options = {"num_warps": triton_gram.WARPS, "num_stages": triton_gram.STAGES}
    made = triton.compile(source, target=GPUTarget("cuda", target, 32), options=options)
    return {"multiplies": PRODUCTS[target] in made.asm["ptx"], "shared bytes": made.metadata.shared}


@pytest.mark.full
def test_the_kernel_compiles_for_gpus_to_pipelined_matrix_products() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    command = [sys.executable, "-m", "tests.ops.test_gram"]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    for target, found in json.loads(ran.stdout.splitlines()[-1]).items():
        assert found["multiplies"], target
        # More than the two tiles of one step of the sum: the next ones are loaded meanwhile.
        assert found["shared bytes"] > 2 * 2 * triton_gram.TILE * triton_gram.INNER, target


if __name__ == "__main__":
    print(json.dumps({target: compiled(target) for target in PRODUCTS}))
