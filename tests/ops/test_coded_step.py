"""Steps with state in 8 bits: every backend against plain torch, bit for bit where the arithmetic is the same."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from hdet_kernels import ops
from hdet_kernels.ops import Scalars
from hdet_kernels.ops.chunks import CHUNK
from hdet_kernels.ops.torch.companding import BLOCK, BLOCKS_PER_CHUNK, SIGNED_STATES, block_count, decode, first_scales
from tests.ops.cases import (
    BF16,
    FP16,
    FP32,
    INTERPRETER_IN_FULL,
    ON_CPU,
    QUICK,
    RULES,
    Case,
    Precision,
    assert_same,
    case_of,
    interpreted,
    make_case,
    make_table,
    naming,
    share,
)
from tests.optim.cases import choose_backends

CODED_RULES = [name for name, (_, row) in RULES.items() if not row.get("amsgrad")]
COMPILED = [backend for backend in INTERPRETER_IN_FULL if backend.id != "torch-cpu"]

# A block that ends inside of a chunk, an odd position, an empty slot, whole chunks, a chunk that lacks an element.
SIZES = (BLOCK + 1, 3, 0, CHUNK, 2 * CHUNK - 1)
# For Triton's interpreter, which is slow: the same without whole chunks beside the one that is not the last.
INTERPRETED_SIZES = (BLOCK + 1, 3, 0, CHUNK + 5)
KINDS = {
    "fp32": (Precision(FP32, torch.uint8, (FP32,)), False),
    "fp32-grad-mixed": (Precision(FP32, torch.uint8, (FP16, FP32, BF16)), False),
    "bf16-master": (Precision(BF16, torch.uint8, (BF16,), master=True), False),
    "bf16-stochastic": (Precision(BF16, torch.uint8, (BF16,)), True),
}


@dataclass
class CodedCase:
    """A case whose states are codes, all zero at the start, with their scales."""

    case: Case
    scales: list[Tensor | None] = field(default_factory=list)

    @classmethod
    def of(cls, name: str, kind: str, device: str, rows: int = 1, sizes: tuple[int, ...] = SIZES) -> CodedCase:
        precision, _ = KINDS[kind]
        case = case_of(name, sizes, precision, device)
        if rows > 1:
            apart = torch.arange(rows, device=device)[:, None] / 16
            case.param, case.rows = (case.param + apart).to(precision.param), rows
            case.master = None if case.master is None else case.param.float()
        numel = BLOCKS_PER_CHUNK * len(case.chunks.chunks)
        given = [state is not None for state in case.states]
        # What lies beside the slots and behind the last block of a chunk must stay as it is.
        case.states = [torch.full((len(case.gap),), 77, dtype=torch.uint8, device=device) if g else None for g in given]
        scales = [torch.full((numel,), -3.0, device=device) if g else None for g in given]
        coded = cls(case, scales)
        for index, slot in enumerate(case.chunks.entries):
            for state, scale in zip(case.states, scales, strict=True):
                if state is not None and scale is not None:
                    state[case.span(index)] = 0
                    scale[coded.blocks(index, slot.numel)] = 0
        return coded

    def blocks(self, index: int, numel: int) -> slice:
        first = first_scales(slot.numel for slot in self.case.chunks.entries)[index]
        return slice(first, first + block_count(numel))

    def step(self, backend: str, row: dict[str, float], kind: str, scalars: Scalars = Scalars()) -> None:  # noqa: B008
        case = self.case
        table = make_table(str(case.param.device), *[row | {"seed": 5}] * case.rows)
        step = ops.Step(
            case.rule,
            case.param,
            case.states,
            case.steps,
            table.tensor,
            case.chunks,
            master=case.master,
            stochastic_rounding=KINDS[kind][1],
            rows=case.rows,
            scales=self.scales,
            backend=backend,
        )
        step(case.chunks.match(case.grads), scalars)

    def coded(self) -> list[Tensor]:
        return [flat for flat in (*self.case.states, *self.scales) if flat is not None]

    def decoded(self, state: int, index: int) -> Tensor:
        codes, scales = self.case.states[state], self.scales[state]
        assert codes is not None
        assert scales is not None
        span, blocks = self.case.span(index), self.blocks(index, self.case.chunks.entries[index].numel)
        return decode(codes[span], scales[blocks], ops.STATES[self.case.rule][state] in SIGNED_STATES)

    def assert_neighbours_untouched(self) -> None:
        used = torch.zeros(BLOCKS_PER_CHUNK * len(self.case.chunks.chunks), dtype=torch.bool)
        for index, slot in enumerate(self.case.chunks.entries):
            used[self.blocks(index, slot.numel)] = True
        for state, scale in zip(self.case.states, self.scales, strict=True):
            if state is not None and scale is not None:
                assert (state[self.case.gap] == 77).all(), "codes were written beside a slot"
                assert (scale[~used.to(scale.device)] == -3).all(), "scales were written behind those of a slot"


def check_bits(
    backend: tuple[str, str], name: str, kind: str, rows: int = 1, sizes: tuple[int, ...] | None = None
) -> None:
    """Assert that steps give the codes and scales of plain torch, and parameters within float32's rounding.

    The arithmetic of a GPU differs in last bits, and so does a code where the random number falls between.
    """
    (where, device), row = backend, RULES[name][1]
    steps = 2 if interpreted(backend) else 4
    sizes = sizes or (INTERPRETED_SIZES if interpreted(backend) else SIZES)
    mine, plain = CodedCase.of(name, kind, device, rows, sizes), CodedCase.of(name, kind, "cpu", rows, sizes)
    for step in range(steps):
        for case, run in ((mine, where), (plain, "torch")):
            case.step(run, row, kind)
        for own, other in zip(mine.case.grads, plain.case.grads, strict=True):
            assert own is not None
            assert other is not None
            other.copy_(other.roll(step + 1) * 3)
            own.copy_(other)
    mine.assert_neighbours_untouched()
    if device == "cpu":
        assert_same(mine.coded(), plain.coded())
    else:
        for own, other in zip(mine.coded(), plain.coded(), strict=True):
            different = (own.cpu().double() - other.double()).abs() > 1e-5 * other.double().abs()
            assert different.float().mean() < 0.01
    tolerance = 2e-6 if mine.case.param.dtype == FP32 and device == "cpu" else 1e-2
    inside = ~plain.case.gap
    torch.testing.assert_close(
        mine.case.param.cpu()[..., inside], plain.case.param[..., inside], rtol=tolerance, atol=tolerance
    )


def kinds_of(backend: tuple[str, str], name: str) -> list[str]:
    """Return all kinds; for Triton's interpreter one, another for the next rule."""
    return share(list(RULES).index(name) % len(KINDS), len(KINDS), list(KINDS)) if interpreted(backend) else list(KINDS)


@pytest.mark.parametrize("name", CODED_RULES)
@pytest.mark.parametrize("backend", COMPILED)
def test_every_backend_gives_the_same_codes(backend: tuple[str, str], name: str) -> None:
    for kind in kinds_of(backend, name):
        with naming(kind):
            check_bits(backend, name, kind)


@pytest.mark.parametrize("name", ["sgd-nesterov", "adamw", "lion"])
@pytest.mark.parametrize("backend", COMPILED)
def test_replicas_that_share_a_gradient_share_codes(backend: tuple[str, str], name: str) -> None:
    for kind in kinds_of(backend, name):
        with naming(kind):
            check_bits(backend, name, kind, rows=3)


@pytest.mark.parametrize(("name", "kind", "rows"), [("adamw", "bf16-stochastic", 1), ("sgd-nesterov", "fp32", 2)])
@pytest.mark.parametrize("backend", [backend for backend in ON_CPU if backend.id == "triton-cpu"])
def test_the_interpreter_gives_the_same_codes(backend: tuple[str, str], name: str, kind: str, rows: int) -> None:
    """A whole program, a block that ends inside of one, and a gradient at an odd address."""
    check_bits(backend, name, kind, rows, sizes=(1024, BLOCK + 1))


@pytest.mark.parametrize("backend", INTERPRETER_IN_FULL)
def test_a_slot_without_gradient_and_a_skipped_step_change_nothing(backend: tuple[str, str]) -> None:
    where, device = backend
    coded = CodedCase.of("adamw", "fp32", device)
    row = RULES["adamw"][1]
    coded.step(where, row, "fp32")
    before = [flat.clone() for flat in coded.coded()]
    coded.step(where, row, "fp32", Scalars(found_inf=torch.ones(1, device=device)))
    assert_same(coded.coded(), before)
    coded.case.grads[3] = None
    kept = [coded.decoded(state, 3) for state in range(2)]
    coded.step(where, row, "fp32")
    assert_same([coded.decoded(state, 3) for state in range(2)], kept)
    assert not torch.equal(coded.coded()[0], before[0])


@pytest.mark.parametrize("backend", INTERPRETER_IN_FULL)
def test_an_optional_state_that_is_not_in_use_stays_as_it_is(backend: tuple[str, str]) -> None:
    where, device = backend
    coded, row = CodedCase.of("sgd-momentum", "fp32", device), RULES["sgd-momentum"][1]
    coded.step(where, row, "fp32")
    before = [flat.clone() for flat in (coded.case.states[-1], coded.scales[-1]) if flat is not None]
    for _ in range(3):
        coded.step(where, row | {"momentum": 0.0}, "fp32")
    assert_same([flat for flat in (coded.case.states[-1], coded.scales[-1]) if flat is not None], before)


@pytest.mark.parametrize("backend", INTERPRETER_IN_FULL)
def test_a_state_that_is_not_finite_stays_so(backend: tuple[str, str]) -> None:
    where, device = backend
    coded = CodedCase.of("adamw", "fp32", device)
    grad = coded.case.grads[0]
    assert grad is not None
    grad[7] = torch.inf
    coded.step(where, RULES["adamw"][1], "fp32")
    grad[7] = 1.0
    coded.step(where, RULES["adamw"][1], "fp32")
    for state in (0, 1):
        assert coded.decoded(state, 0)[:BLOCK].isnan().all()
        assert coded.decoded(state, 0)[BLOCK:].isfinite().all(), "another block"
    assert coded.case.param[coded.case.span(0)][7].isnan()


@pytest.mark.parametrize("backend", choose_backends(QUICK, "cpp-cpu"))
def test_a_slow_average_arrives_at_its_mean(backend: tuple[str, str]) -> None:
    """With β₂ = 0.999 a step moves the average by less than half a level: to nearest it would stand still."""
    where, device = backend
    coded = CodedCase.of("adamw", "fp32", device)
    row = RULES["adamw"][1] | {"lr": 0.0}
    exact = torch.zeros(CHUNK, dtype=torch.float64)
    generator = torch.Generator().manual_seed(3)
    size = torch.rand(CHUNK, generator=generator, dtype=torch.float64) + 0.5
    for _ in range(1000):
        values = size * torch.randn(CHUNK, generator=generator, dtype=torch.float64)
        coded.case.grads = [None, None, None, values.float().to(device), None]
        exact = 0.999 * exact + 0.001 * values.square()
        coded.step(where, row, "fp32")
    ratio = coded.decoded(1, 3).cpu().double() / exact
    assert abs(ratio.mean().item() - 1) < 0.01
    assert ratio.std().item() < 0.25
    assert ratio.min().item() > 0.3
    assert ratio.max().item() < 2.5


def test_the_maximum_of_amsgrad_in_8_bits_is_refused() -> None:
    coded = CodedCase.of("adamw-amsgrad", "fp32", "cpu")
    with pytest.raises(ValueError, match="amsgrad needs float32 or bfloat16 states, got uint8"):
        coded.step("torch", RULES["adamw-amsgrad"][1], "fp32")


def test_scales_that_do_not_fit_are_refused() -> None:
    row = RULES["adamw"][1]
    for change, message in (
        (lambda scales: [None, *scales[1:]], "exp_avg is torch.uint8 and its scales are missing"),
        (lambda scales: [scales[0][:-1], *scales[1:]], "scales of exp_avg must be"),
        (lambda scales: [scales[0].double(), *scales[1:]], "scales of exp_avg must be"),
        (lambda scales: [*scales, None], "got scales of 4 of them"),
    ):
        coded = CodedCase.of("adamw", "fp32", "cpu")
        coded.scales = change(coded.scales)
        with pytest.raises(ValueError, match=message):
            coded.step("torch", row, "fp32")
    plain = make_case("adamw", (5,), FP32, "cpu", optional=False)
    with pytest.raises(ValueError, match=r"exp_avg is torch.float32 and its scales are given"):
        CodedCase(plain, [torch.zeros(8), None, None]).step("torch", row, "fp32")
