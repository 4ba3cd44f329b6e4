"""Newton–Schulz: torch's iteration matrix by matrix, NorMuon's rows, and the iteration on the Gram matrix in Triton.

Run as a program, this file compiles the kernels for GPUs and prints what it uses. It runs in a process of its own,
because Triton chooses between its compiler and its interpreter once, when it is imported.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache

import pytest
import torch
from torch import Tensor
from torch.optim._muon import _zeropower_via_newtonschulz

from hdet_kernels.ops import newton_schulz
from hdet_kernels.ops.backends import backends
from hdet_kernels.ops.newton_schulz import orthogonalise_
from hdet_kernels.ops.torch.newton_schulz import normalise_rows_
from tests.ops.cases import BACKENDS, available, naming
from tests.optim.cases import choose_backends

triton = pytest.importorskip("triton", reason=f"triton: {backends()['triton']}")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from hdet_kernels.ops.triton import newton_schulz as on_gram  # noqa: E402
from hdet_kernels.ops.triton.newton_schulz import HALF, iterate_, segments  # noqa: E402

COEFFICIENTS = (3.4445, -4.775, 2.0315)
TRITON = [available("triton", "cuda"), available("triton", "cpu")]

# By compute capability (A100, H100 and H200, B200), the instruction that multiplies.
PRODUCTS = {80: "mma.sync", 90: "wgmma", 100: "tcgen05.mma"}


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


def in_float64(x: Tensor, steps: int, eps: float) -> Tensor:
    """Return the iteration as Muon's authors write it, in float64."""
    a, b, c = COEFFICIENTS
    if x.shape[1] > x.shape[2]:
        return in_float64(x.mT, steps, eps).mT
    x = x.double()
    x = x / torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp(min=eps)
    for _ in range(steps):
        product = x @ x.mT
        x = a * x + (b * product + c * product @ product) @ x
    return x


@cache
def batch(rows: int, columns: int, device: str) -> tuple[list[str], Tensor]:
    """Return the names of the matrices, and the matrices."""
    with torch.device(device):
        names, found = zip(*matrices(rows, columns, torch.Generator(device).manual_seed(0)), strict=True)
    return list(names), torch.stack(found).bfloat16()


def matrices(rows: int, columns: int, generator: torch.Generator) -> Iterator[tuple[str, Tensor]]:
    """Yield matrices with singular values that are hard for products of few bits."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    def product(inner: int) -> Tensor:
        return normal(rows, inner) @ normal(inner, columns)

    size = min(rows, columns)
    left, right = torch.linalg.qr(normal(rows, size)).Q, torch.linalg.qr(normal(columns, size)).Q
    yield "normal", normal(rows, columns)
    yield "low rank and noise", product(4) + 0.01 * normal(rows, columns)
    yield "one dominant", product(1) + 1e-3 * normal(rows, columns)
    yield "rank deficient", product(size // 2)
    yield "condition 1e6", left @ torch.logspace(0, -6, size).diag() @ right.mT
    yield "two levels", left @ (1.0 - 0.99 * (torch.arange(size) % 2)).diag() @ right.mT
    yield "diagonal", torch.eye(rows, columns) * torch.logspace(0, -6, columns)
    yield "zero", torch.zeros(rows, columns)
    yield "norm below eps", 1e-12 * normal(rows, columns)
    yield "norm far below eps", 1e-30 * normal(rows, columns)
    yield "heavy tails", normal(rows, columns) ** 5


def assert_near(shape: tuple[int, int], parts: list[int], device: str) -> None:
    """Compare each matrix with its iteration in float64, and the distance with that of the iteration in bfloat16."""
    names, given = batch(*shape, device)
    steps, eps, x = sum(parts), 1e-7, given.clone()
    expected, rounded = in_float64(x, steps, eps), x.clone()
    orthogonalise_(rounded, COEFFICIENTS, steps, eps, backend="torch")
    iterate_(x, COEFFICIENTS, eps, parts)
    # Entries below the range of float16 become 0, which is less than this after five steps.
    unseen = 1e-6 * (shape[0] * shape[1]) ** 0.5
    for name, ours, theirs, exact in zip(names, x, rounded, expected, strict=True):
        with naming(name, *shape, *parts):
            assert ours.isfinite().all()
            distance, allowed = ((each.double() - exact).norm().item() for each in (ours, theirs))
            assert distance <= max(allowed, unseen)


@pytest.mark.parametrize("backend", TRITON)
def test_every_matrix_is_as_near_to_float64_as_in_bfloat16(backend: tuple[str, str]) -> None:
    assert_near((20, 30) if backend[1] == "cpu" else (2048, 8192), [3, 2], backend[1])


def product_in_torch(
    x: Tensor,
    y: Tensor,
    out: Tensor,
    *,
    alpha: float = 1.0,
    base: Tensor | None = None,
    beta: float = 0.0,
    diagonal: float = 0.0,
) -> Tensor:
    """Return :func:`on_gram.symmetric_product` with the same roundings, without an interpreter."""
    total = alpha * (x.float() @ y.float().mT) + diagonal * torch.eye(x.shape[1])
    total = total if base is None else total + beta * base.float()
    return out.copy_(total.triu() + total.triu(1).mT)


@pytest.fixture
def device(backend: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the device of ``backend``. On a CPU, products of large matrices are left to torch."""
    if backend[1] == "cpu":
        monkeypatch.setattr(on_gram, "symmetric_product", product_in_torch)
    return backend[1]


@pytest.mark.full
@pytest.mark.parametrize("backend", TRITON)
def test_many_shapes_and_segments_are_as_near_to_float64_as_in_bfloat16(device: str) -> None:
    shapes = [(150, 70), (63, 64)]
    if device != "cpu":
        shapes += [(96, 384), (8192, 2048), (768, 768), (768, 3072), (3000, 1100), (1023, 1024)]
    for shape in shapes:
        for parts in ([3, 2], [2, 2], [1, 1, 1, 1, 1], [3, 3, 3]):
            assert_near(shape, parts, device)


@pytest.mark.full
@pytest.mark.parametrize("backend", TRITON)
def test_one_singular_value_and_entries_of_one_size_are_within_a_twentieth(device: str) -> None:
    """All entries of R are rounded the same way, so that errors add up; in bfloat16 they come to 0.035."""
    for rows, columns in ((64, 64), (96, 288), (100, 101), (128, 384), (255, 256)):
        x = torch.ones(1, rows, columns, dtype=torch.bfloat16, device=device)
        expected = in_float64(x, 5, 1e-7)
        iterate_(x, COEFFICIENTS, 1e-7, [3, 2])
        assert (x.double() - expected).norm() <= 0.05


@pytest.mark.parametrize("backend", [*TRITON, available("torch", "cpu")])
def test_other_layouts_have_the_same_numbers(backend: tuple[str, str]) -> None:
    """Columns before rows, rows with gaps, and float64 parameters, through the function that chooses the way."""
    where, device = backend
    size = 4 if device == "cpu" else 256
    x = torch.randn(1, size, 2 * size, generator=torch.Generator().manual_seed(1)).to(device, torch.bfloat16)
    expected, in_columns, wide = x.clone(), x.mT.contiguous().mT, x.double()
    with_gaps = torch.zeros(1, size, 2 * size + 1, dtype=torch.bfloat16, device=device)[:, :, : 2 * size].copy_(x)
    for each in (expected, with_gaps, wide, in_columns):
        orthogonalise_(each, COEFFICIENTS, 2, 1e-7, backend=where)
    assert torch.equal(with_gaps, expected)
    assert torch.equal(wide.bfloat16(), expected)
    torch.testing.assert_close(in_columns, expected, rtol=2**-6, atol=1e-3)  # sums in another order


def test_segments_are_as_long_as_precision_allows_and_the_shape_pays() -> None:
    for shape, steps, expected in (
        ((2048, 8192), 5, [3, 2]),
        ((8192, 2048), 5, [3, 2]),
        ((2048, 2048), 5, [1] * 5),
        ((820, 1000), 5, [1] * 5),
        ((800, 1000), 5, [3, 2]),
        ((1, 9), 4, [2, 2]),
        ((1, 9), 7, [3, 2, 2]),
        ((1, 9), 1, [1]),
        ((1, 9), 0, []),
    ):
        assert segments(shape, COEFFICIENTS, steps) == expected
    # Of all ways to divide the steps, these take the least time.
    for columns in range(4, 20):
        for steps in range(1, 8):
            ways = (each for k in range(1, steps + 1) for each in itertools.product((1, 2, 3), repeat=k))
            times = [time(each, columns / 4) for each in ways if sum(each) == steps]
            found = segments((4, columns), COEFFICIENTS, steps)
            assert found is not None
            assert time(found, columns / 4) <= min(times) * (1 + 1e-9)


def time(parts: list[int] | tuple[int, ...], ratio: float) -> float:
    """Return the time of segments in whole products of [m, m] matrices, product by product."""
    found = 0.0
    for steps in parts:
        found += ratio * HALF + ratio  # R and the new X
        found += steps * HALF + (steps - 1) * HALF + (steps - 1) * 2 * HALF  # Q, T and R
    return found


def test_coefficients_decide_how_long_segments_are_and_whether_float16_can_hold_the_numbers() -> None:
    assert segments((4, 16), (4.0, -8.0, 4.0), 5) == [2, 2, 1]
    assert segments((4, 16), (18.0, -40.0, 22.0), 5) is None  # eigenvalues grow beyond all bounds
    assert segments((4, 16), (40.0, 0.0, 0.0), 1) is None
    assert segments((4, 16), (1e308, -1e308, 1e308), 5) is None
    assert segments((4, 16), (1.5, -0.5, 0.0), 99) == [3] * 33


@pytest.mark.parametrize("backend", TRITON)
def test_coefficients_beyond_float16_are_iterated_in_bfloat16(
    backend: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    where, device = backend
    monkeypatch.delattr(on_gram, "iterate_")
    size = 4 if device == "cpu" else 256
    x = torch.randn(1, size, size, generator=torch.Generator().manual_seed(2)).to(device, torch.bfloat16)
    expected = x.clone()
    orthogonalise_(expected, (40.0, 0.0, 0.0), 1, 1e-7, backend="torch")
    orthogonalise_(x, (40.0, 0.0, 0.0), 1, 1e-7, backend=where)
    torch.testing.assert_close(x, expected)


@pytest.mark.parametrize("backend", TRITON)
def test_products_are_those_of_float64_and_symmetric(backend: tuple[str, str]) -> None:
    _, device = backend
    generator = torch.Generator().manual_seed(0)
    for size, inner in ((1, 1), (70, 33)) if device == "cpu" else ((1, 1), (40, 33), (300, 130), (1100, 3000)):
        x = (torch.randn(2, size, inner, generator=generator) / inner**0.5).to(device, torch.float16)
        exact, identity = x.double(), torch.eye(size, dtype=torch.float64, device=device)
        empty = torch.full((5, 2, size, size), torch.nan, dtype=torch.float16, device=device).unbind()
        product = on_gram.symmetric_product(x, x, empty[0])
        transposed = x.mT.contiguous().mT
        assert torch.equal(on_gram.symmetric_product(transposed, transposed, empty[1]), product)
        polynomial = on_gram.symmetric_product(
            product, product, empty[2], alpha=0.01, base=product, beta=-0.75, diagonal=3.0
        )
        squared = on_gram.symmetric_product(product, product, empty[3])
        cubed = on_gram.symmetric_product(product, polynomial, empty[4])
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


@pytest.mark.parametrize("backend", TRITON)
def test_matrices_are_divided_by_their_norms_also_in_place(backend: tuple[str, str]) -> None:
    _, device = backend
    apart = torch.randn(3, 7 * 700 + 12, generator=torch.Generator().manual_seed(1)).to(device, torch.bfloat16)
    x = apart[:, : 7 * 700].unflatten(1, (7, 700))  # gaps between the matrices
    behind = apart[:, 7 * 700 :].clone()
    norms = torch.tensor([0.5, 3.0, 1e-7], device=device)
    expected = 32 * x.double() / norms.double().view(-1, 1, 1)
    got = on_gram.scale(x, torch.empty(x.shape, dtype=torch.float16, device=device), 32.0, norms)
    assert got[2].isinf().any()  # beyond the range of float16
    torch.testing.assert_close(got[:2].double(), expected[:2], rtol=2**-10, atol=0)
    in_place = on_gram.scale(x, x.view(torch.float16), 32.0, norms)
    assert torch.equal(in_place, got)
    on_gram.scale(in_place, x, 0.125)
    assert torch.equal(x, got.mul(0.125).bfloat16())
    assert torch.equal(apart[:, 7 * 700 :], behind)


def compiled(target: int) -> dict[str, object]:
    """Compile the products as they are launched on contiguous matrices of a multiple of 16 rows and columns."""
    kernel = on_gram._product
    constants = {"x_column": 1, "y_column": 1, "TILE": on_gram.TILE, "INNER": on_gram.INNER}
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
    options = {"num_warps": on_gram.WARPS, "num_stages": on_gram.STAGES}
    made = triton.compile(source, target=GPUTarget("cuda", target, 32), options=options)
    return {"multiplies": PRODUCTS[target] in made.asm["ptx"], "shared bytes": made.metadata.shared}


def compiled_scaling(target: int) -> int:
    """Compile the scaling as it is launched on aligned matrices, and return how many loads and stores are whole."""
    kernel = on_gram._scale
    types = {"x": "*bf16", "out": "*fp16", "norms": "*fp32", "factor": "fp32", "length": "i32"}
    types |= {"x_batch": "i32", "out_batch": "i32", "BLOCK": "constexpr"}
    names = kernel.arg_names
    aligned = ("x", "out", "norms", "length", "x_batch", "out_batch")
    source = ASTSource(
        kernel,
        {name: types[name] for name in names},
        {(names.index("BLOCK"),): on_gram.BLOCK},
        {(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    made = triton.compile(source, target=GPUTarget("cuda", target, 32), options={"num_warps": on_gram.SCALE_WARPS})
    return min(len(re.findall(rf"{kind}\.global\S*\.v4\.b32", made.asm["ptx"])) for kind in ("ld", "st"))


@pytest.mark.full
def test_the_kernels_compile_for_gpus_to_pipelined_matrix_products_and_wide_loads() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    command = [sys.executable, "-m", "tests.ops.test_newton_schulz"]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    products, scaling = json.loads(ran.stdout.splitlines()[-1])
    assert scaling  # 16 bytes at a time
    for target, found in products.items():
        assert found["multiplies"], target
        # More than the two tiles of one step of the sum: the next ones are loaded meanwhile.
        assert found["shared bytes"] > 2 * 2 * on_gram.TILE * on_gram.INNER, target


if __name__ == "__main__":
    print(json.dumps([{target: compiled(target) for target in PRODUCTS}, compiled_scaling(90)]))
