"""Row-wise Adagrad: every backend against its equations in float64, row by row, and what must stay untouched."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hdet_kernels.ops.rowwise import RowGradient, RowWiseArguments, arithmetic, row_gradient, rowwise_adagrad_
from hdet_kernels.ops.table import HyperTable
from tests.ops.cases import BACKENDS, BF16, FP16, FP32, FP64, assert_same, interpreted, naming

HEIGHT = 23

#: Options: the hyperparameters, and whether weight decay is decoupled.
OPTIONS: dict[str, tuple[dict[str, float], bool]] = {
    "plain": ({"lr": 0.1, "eps": 1e-8}, False),
    "penalty": ({"lr": 0.1, "eps": 1e-3, "weight_decay": 0.3, "lr_decay": 0.5}, False),
    "decoupled": ({"lr": 0.1, "eps": 1e-8, "weight_decay": 0.3, "maximize": 1}, True),
}

TOLERANCE = {FP64: 1e-13, FP32: 1e-6, BF16: 1e-2, FP16: 2e-3}


class Case:
    """An embedding table with its state, on which three steps were made, and the gradient of the next."""

    def __init__(self, kind: str, width: int, dtype: torch.dtype, device: str, options: str = "plain") -> None:
        generator = torch.Generator().manual_seed(width)
        self.numbers, self.decoupled = OPTIONS[options]
        self.param = torch.randn(HEIGHT, width, generator=generator).to(dtype).to(device)
        self.sums = torch.rand(HEIGHT, generator=generator).to(arithmetic(dtype)).to(device)
        self.steps = torch.full((1,), 3.0, device=device)
        self.table = HyperTable(2, torch.device(device))
        self.table.write([{}, self.numbers])
        rows = torch.tensor([4, 0, 22, 4, 7, 4, 0])
        values = torch.randn(len(rows), width, generator=generator).to(dtype)
        sparse = torch.sparse_coo_tensor(rows[None], values, (HEIGHT, width), check_invariants=True)
        if kind == "coalesced":
            sparse = sparse.coalesce()
        self.grad = (sparse if kind != "dense" else torch.randn(HEIGHT, width, generator=generator).to(dtype)).to(
            device
        )

    def step(self, backend: str, **options: Any) -> None:
        gradient = row_gradient(self.grad, self.param.dtype)
        given = RowWiseArguments(self.param, self.sums, self.steps, self.table.tensor, 1, *gradient, **options)
        rowwise_adagrad_(given._replace(decoupled=self.decoupled), backend=backend)

    def expected(self, scale: float = 1.0) -> tuple[Tensor, Tensor]:
        """Return table and sums after the step, in float64, computed row by row."""
        w, s = self.param.double().cpu().clone(), self.sums.double().cpu().clone()
        gradients: dict[int, Tensor] = {}
        if self.grad.is_sparse:
            for row, value in zip(self.grad._indices()[0].tolist(), self.grad._values().double().cpu(), strict=True):
                gradients[row] = gradients.get(row, torch.zeros_like(value)) + value
        else:
            gradients = dict(enumerate(self.grad.double().cpu()))
        h = {"lr_decay": 0.0, "weight_decay": 0.0, "maximize": 0.0} | self.numbers
        rate = h["lr"] / (1 + 3 * h["lr_decay"])
        for row, g in gradients.items():
            g = g / scale * (-1 if h["maximize"] else 1)
            if not self.decoupled:
                g = g + h["weight_decay"] * w[row]
            s[row] += (g * g).mean()
            if self.decoupled:
                w[row] *= 1 - rate * h["weight_decay"]
            w[row] -= rate * g / (s[row].sqrt() + h["eps"])
        return w, s

    def assert_close(self, expected: tuple[Tensor, Tensor]) -> None:
        tolerance = TOLERANCE[self.param.dtype]
        torch.testing.assert_close(self.param.double().cpu(), expected[0], rtol=tolerance, atol=tolerance)
        narrow = TOLERANCE[self.sums.dtype]
        torch.testing.assert_close(self.sums.double().cpu(), expected[1], rtol=narrow, atol=narrow)


#: dtype, width and options of the cases of each kind of gradient. Triton's interpreter gets the first two of them.
CASES = [(FP32, 8, "penalty"), (BF16, 6, "decoupled"), (FP64, 5, "penalty"), (FP16, 3, "plain"), (FP32, 1, "decoupled")]


@pytest.mark.parametrize("kind", ["repeated", "coalesced", "dense"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_step_is_that_of_the_equations(backend: tuple[str, str], kind: str) -> None:
    where, device = backend
    for dtype, width, options in CASES[: 2 if interpreted(backend) else None]:
        with naming(dtype, width, options):
            case = Case(kind, width, dtype, device, options)
            before, expected = case.param.clone(), case.expected()
            case.step(where)
            case.assert_close(expected)
            assert case.steps.item() == 4
            if kind != "dense":
                others = [row for row in range(HEIGHT) if row not in (0, 4, 7, 22)]
                assert_same([case.param[others]], [before[others]])


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_that_are_wider_than_a_block(backend: tuple[str, str]) -> None:
    where, device = backend
    case = Case("repeated", 1500, FP32, device, "penalty")
    expected = case.expected()
    case.step(where)
    case.assert_close(expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_scaled_gradients_and_skipped_steps(backend: tuple[str, str]) -> None:
    where, device = backend
    case = Case("repeated", 6, FP32, device)
    expected, kept = case.expected(scale=4.0), [case.param.clone(), case.sums.clone()]
    scale, found = torch.full((1,), 4.0, device=device), torch.ones(1, device=device)
    case.step(where, grad_scale=scale, found_inf=found)
    assert_same([case.param, case.sums], kept)
    assert case.steps.item() == 3
    case.step(where, grad_scale=scale, found_inf=found.zero_())
    case.assert_close(expected)
    assert case.steps.item() == 4


@pytest.mark.parametrize("backend", BACKENDS)
def test_stochastic_rounding_gives_the_bits_of_plain_torch(backend: tuple[str, str]) -> None:
    """The mean square is summed in another order, so a few of the updates differ in float32."""
    where, device = backend
    case, plain = Case("repeated", 64, BF16, device), Case("repeated", 64, BF16, "cpu")
    before, exact = plain.param.clone(), plain.expected()[0]
    case.step(where, stochastic_rounding=True)
    plain.step("torch", stochastic_rounding=True)
    touched = [0, 4, 7, 22]
    differ = (case.param.cpu() != plain.param)[touched].float().mean()
    assert differ < 0.02
    nearest = exact.to(BF16)
    assert (plain.param != nearest)[touched].float().mean() > 0.1, "some are rounded to the farther neighbour"
    off = (plain.param.double() - exact).abs()[touched]
    assert (off <= 2 * (exact[touched].abs() * 2**-8).clamp(min=1e-6)).all()
    assert not torch.equal(plain.param, before)


def test_a_gradient_of_another_dtype_is_read_in_that_of_the_arithmetic() -> None:
    case = Case("repeated", 4, BF16, "cpu")
    case.grad = case.grad.float()
    assert row_gradient(case.grad, BF16).values.dtype == FP32
    expected = case.expected()
    case.step("cpp")
    case.assert_close(expected)


def test_a_gradient_without_entries_counts_the_step() -> None:
    case = Case("repeated", 4, FP32, "cpu")
    case.grad = torch.sparse_coo_tensor(
        torch.zeros(1, 0, dtype=torch.int64), torch.zeros(0, 4), (HEIGHT, 4), check_invariants=True
    )
    before = case.param.clone()
    case.step("cpp")
    assert_same([case.param], [before])
    assert case.steps.item() == 4


def test_bad_arguments_change_nothing() -> None:
    case = Case("dense", 4, FP32, "cpu")
    kept = [case.param.clone(), case.sums.clone(), case.steps.clone()]
    values, rows = torch.ones(1, 4), torch.tensor([0])

    def refused(message: str, gradient: RowGradient, param: Tensor = case.param, sums: Tensor = case.sums) -> None:
        with pytest.raises(ValueError, match=message):
            rowwise_adagrad_(RowWiseArguments(param, sums, case.steps, case.table.tensor, 1, *gradient))

    refused("names rows 0 to 23 of an embedding table of 23", RowGradient(torch.ones(2, 4), torch.tensor([0, 23])))
    refused("names rows -1 to -1", RowGradient(values, rows - 1))
    refused(r"values of shape \(1, 3\), expected \(1, 4\)", RowGradient(torch.ones(1, 3), rows))
    refused(r"expected \(23, 4\)", RowGradient(values))
    refused("must be a contiguous matrix", RowGradient(values, rows), case.param.T)
    refused("one a row", RowGradient(values, rows), sums=case.sums.double())
    assert_same([case.param, case.sums, case.steps], kept)
