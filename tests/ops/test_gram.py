"""The symmetric products in Triton: against float64, symmetric to the bit, for sizes that fill no tile; and scaling.

Run as a program, this file compiles the kernels for GPUs and prints what it uses. It runs in a process of its own,
because Triton chooses between its compiler and its interpreter once, when it is imported.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest
import torch

from hdet_kernels.ops import backends
from tests.ops.cases import available

triton = pytest.importorskip("triton", reason=f"triton: {backends.backends()['triton']}")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from hdet_kernels.ops.triton import newton_schulz as triton_gram  # noqa: E402

# By compute capability (A100, H100 and H200, B200), the instruction that multiplies.
PRODUCTS = {80: "mma.sync", 90: "wgmma", 100: "tcgen05.mma"}


@pytest.mark.parametrize("backend", [available("triton", "cuda"), available("triton", "cpu")])
def test_products_are_those_of_float64_and_symmetric(backend: tuple[str, str]) -> None:
    _, device = backend
    generator = torch.Generator().manual_seed(0)
    for size, inner in ((1, 1), (70, 33)) if device == "cpu" else ((1, 1), (40, 33), (300, 130), (1100, 3000)):
        x = (torch.randn(2, size, inner, generator=generator) / inner**0.5).to(device, torch.float16)
        exact, identity = x.double(), torch.eye(size, dtype=torch.float64, device=device)
        empty = torch.full((5, 2, size, size), torch.nan, dtype=torch.float16, device=device).unbind()
        product = triton_gram.symmetric_product(x, x, empty[0])
        transposed = x.mT.contiguous().mT
        assert torch.equal(triton_gram.symmetric_product(transposed, transposed, empty[1]), product)
        polynomial = triton_gram.symmetric_product(
            product, product, empty[2], alpha=0.01, base=product, beta=-0.75, diagonal=3.0
        )
        squared = triton_gram.symmetric_product(product, product, empty[3])
        cubed = triton_gram.symmetric_product(product, polynomial, empty[4])
        exactly = product.double()
        for got, expected in (
            (product, exact @ exact.mT),
            (polynomial, -0.75 * exactly + 0.01 * exactly @ exactly + 3 * identity),
            (squared, exactly @ exactly),
            (cubed, exactly @ polynomial.double()),
        ):
            # Rounded to float16 once, after sums in float32. The last product is symmetric up to roundings of the
            # polynomial, and so is its lower triangle where it mirrors the upper one.
            bound = 2**-9 if got is cubed else 1e-5
            assert got is cubed or torch.equal(got, got.mT)
            allowed = 2**-11 * expected.abs() + bound * expected.abs().max()
            assert ((got.double() - expected).abs() <= allowed).all()


@pytest.mark.parametrize("backend", [available("triton", "cuda"), available("triton", "cpu")])
def test_matrices_are_divided_by_their_norms_also_in_place(backend: tuple[str, str]) -> None:
    _, device = backend
    apart = torch.randn(3, 7 * 700 + 12, generator=torch.Generator().manual_seed(1)).to(device, torch.bfloat16)
    x = apart[:, : 7 * 700].unflatten(1, (7, 700))  # gaps between the matrices
    behind = apart[:, 7 * 700 :].clone()
    norms = torch.tensor([0.5, 3.0, 1e-7], device=device)
    expected = 32 * x.double() / norms.double().view(-1, 1, 1)
    got = triton_gram.scale(x, torch.empty(x.shape, dtype=torch.float16, device=device), 32.0, norms)
    assert got[2].isinf().any()  # beyond the range of float16
    torch.testing.assert_close(got[:2].double(), expected[:2], rtol=2**-10, atol=0)
    in_place = triton_gram.scale(x, x.view(torch.float16), 32.0, norms)
    assert torch.equal(in_place, got)
    triton_gram.scale(in_place, x, 0.125)
    assert torch.equal(x, got.mul(0.125).bfloat16())
    assert torch.equal(apart[:, 7 * 700 :], behind)


def compiled(target: int) -> dict[str, object]:
    """Compile the products as they are launched on contiguous matrices of a multiple of 16 rows and columns."""
    kernel = triton_gram._product
    constants = {"x_column": 1, "y_column": 1, "TILE": triton_gram.TILE, "INNER": triton_gram.INNER}
    types = dict.fromkeys(("x", "y", "base", "out"), "*fp16") | dict.fromkeys(("alpha", "beta", "diagonal"), "fp32")
    types |= dict.fromkeys(("size", "inner", "x_batch", "x_row", "y_batch", "y_row"), "i32")
    types |= dict.fromkeys(constants, "constexpr")
    names = kernel.arg_names
    aligned = ("x", "y", "base", "out", "size", "inner", "x_batch", "x_row", "y_batch", "y_row")
    source = ASTSource(
        kernel,
        {name: types[name] for name in names},
        {(names.index(name),): value for name, value in constants.items()},
        {(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    options = {"num_warps": triton_gram.WARPS, "num_stages": triton_gram.STAGES}
    made = triton.compile(source, target=GPUTarget("cuda", target, 32), options=options)
    return {"multiplies": PRODUCTS[target] in made.asm["ptx"], "shared bytes": made.metadata.shared}


def compiled_scaling(target: int) -> int:
    """Compile the scaling as it is launched on aligned matrices, and return how many loads and stores are whole."""
    kernel = triton_gram._scale
    types = {"x": "*bf16", "out": "*fp16", "norms": "*fp32", "factor": "fp32", "length": "i32"}
    types |= {"x_batch": "i32", "out_batch": "i32", "BLOCK": "constexpr"}
    names = kernel.arg_names
    aligned = ("x", "out", "norms", "length", "x_batch", "out_batch")
    source = ASTSource(
        kernel,
        {name: types[name] for name in names},
        {(names.index("BLOCK"),): triton_gram.BLOCK},
        {(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    made = triton.compile(source, target=GPUTarget("cuda", target, 32), options={"num_warps": triton_gram.SCALE_WARPS})
    return min(len(re.findall(rf"{kind}\.global\S*\.v4\.b32", made.asm["ptx"])) for kind in ("ld", "st"))


@pytest.mark.full
def test_the_kernels_compile_for_gpus_to_pipelined_matrix_products_and_wide_loads() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    command = [sys.executable, "-m", "tests.ops.test_gram"]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    products, scaling = json.loads(ran.stdout.splitlines()[-1])
    assert scaling  # 16 bytes at a time
    for target, found in products.items():
        assert found["multiplies"], target
        # More than the two tiles of one step of the sum: the next ones are loaded meanwhile.
        assert found["shared bytes"] > 2 * 2 * triton_gram.TILE * triton_gram.INNER, target


if __name__ == "__main__":
    print(json.dumps([{target: compiled(target) for target in PRODUCTS}, compiled_scaling(90)]))
