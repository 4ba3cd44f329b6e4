"""Steps with a split master: the same numbers, bit for bit, as with a float32 copy of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from hdet_kernels import ops
from hdet_kernels.ops.halves import read_halves, write_halves
from hdet_kernels.ops.torch.companding import BLOCKS_PER_CHUNK
from hdet_kernels.split_master import joined, split
from tests.ops.cases import (
    BACKENDS,
    BF16,
    FP16,
    FP32,
    INTERPRETER_IN_FULL,
    RULES,
    Case,
    Precision,
    assert_same,
    available,
    case_of,
    interpreted,
    make_case,
    make_table,
    naming,
)

# An odd start, an empty slot, and more than a chunk.
SIZES = (5, 0, 2051, 64)
STATES = {"fp32": FP32, "bf16": BF16, "int8": torch.uint8}
GAP = 77


def split_of(case: Case) -> Case:
    """Return the same case with its master split, and marks beside the slots."""
    assert case.master is not None
    param, low = split(case.master)
    low[..., case.gap] = GAP
    states = [None if state is None else state.clone() for state in case.states]
    return replace(case, param=param, master=low, states=states, steps=case.steps.clone())


def full_of(case: Case) -> Tensor:
    assert case.master is not None
    return joined(case.param, case.master)[..., ~case.gap]


def stepped(case: Case, where: str, row: dict[str, float], steps: int) -> list[Tensor]:
    """Take steps, and return the states with the scales of those that are codes."""
    coded = [state is not None and state.dtype == torch.uint8 for state in case.states]
    numel = BLOCKS_PER_CHUNK * len(case.chunks.chunks)
    scales = [torch.zeros(numel, device=case.param.device) if codes else None for codes in coded]
    step = ops.Step(
        case.rule,
        case.param,
        case.states,
        case.steps,
        make_table(str(case.param.device), *[row | {"seed": 5}] * case.rows).tensor,
        case.chunks,
        master=case.master,
        rows=case.rows,
        scales=scales,
        backend=where,
    )
    for _ in range(steps):
        step(case.chunks.match(case.grads))
    return [flat for flat in (*case.states, *scales) if flat is not None]


def check_twins(backend: tuple[str, str], name: str, state: str, rows: int = 1, steps: int = 3) -> None:
    """Assert that steps with a split master give the numbers of steps with a float32 copy.

    Triton's compiler chooses for each kernel which products and sums it fuses. There last bits differ, and so does a
    code where the random number falls between.
    """
    where, device = backend
    copy = case_of(name, SIZES, Precision(BF16, STATES[state], (BF16, FP32), master=True), device)
    assert copy.master is not None
    if state == "int8":
        copy.states = [None if state is None else torch.zeros_like(state) for state in copy.states]
    if rows > 1:
        copy.master = copy.master + torch.arange(rows, device=device)[:, None] / 16
        copy.param, copy.rows = copy.master.to(BF16), rows
    ours = split_of(copy)
    theirs, mine = (stepped(each, where, RULES[name][1], steps) for each in (copy, ours))
    assert ours.master is not None
    full, expected = full_of(ours), copy.master[..., ~copy.gap]
    if backend == ("triton", "cuda"):
        if state != "int8":
            torch.testing.assert_close(full, expected, rtol=1e-5, atol=1e-5)
        for own, other in zip([full, *mine], [expected, *theirs], strict=True):
            different = (own.double() - other.double()).abs() > 1e-2 * other.double().abs()
            assert different.float().mean() < 0.01
    else:
        assert_same([full], [expected])
        assert_same([ours.param], [split(copy.master)[0]])
        assert_same(mine, theirs)
    assert_same([ours.steps], [copy.steps])
    assert (ours.master[..., ours.gap] == GAP).all(), "something was written beside a slot"


# By rule, one dtype of the state and a number of replicas; Triton's interpreter has one of them.
SOME = {
    "sgd": ("fp32", 1),
    "adam-amsgrad": ("bf16", 2),
    "adamw": ("int8", 1),
    "lion": ("fp32", 3),
    "adagrad": ("int8", 2),
}


def every_of(name: str, backend: tuple[str, str]) -> list[tuple[str, int]]:
    states = [state for state in STATES if state != "int8" or not RULES[name][1].get("amsgrad")]
    combinations = [(state, rows) for state in states for rows in (1, 2, 5)]
    number = list(RULES).index(name) % 6
    return combinations[number : number + 1] if interpreted(backend) else combinations


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_split_master_is_trained_like_a_copy(backend: tuple[str, str]) -> None:
    for name in ["adamw"] if interpreted(backend) else SOME:
        with naming(name, *SOME[name]):
            check_twins(backend, name, *SOME[name], steps=1 if interpreted(backend) else 3)


@pytest.mark.full
@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_split_master_is_trained_like_a_copy_in_every_combination(backend: tuple[str, str], name: str) -> None:
    for state, rows in every_of(name, backend):
        with naming(state, rows):
            check_twins(backend, name, state, rows, steps=2)


@pytest.mark.parametrize("backend", INTERPRETER_IN_FULL)
def test_extreme_masters_and_what_other_code_writes(backend: tuple[str, str]) -> None:
    """A step by -gradient: what is not finite stays so, and a lower half left behind makes no NaN."""
    where, device = backend
    largest, infinity = torch.finfo(FP32).max, float("inf")
    tie = 1 + 2.0**-8  # between the bf16 numbers 1 and 1 + 2⁻⁷
    start = [largest, -largest, infinity, float("nan"), 1.0, -1.0, 0.0, 2.0**-140, tie, -tie, 1.0, 2.0]
    grads = [0.0, 0.0, 0.0, 0.0, float("nan"), infinity, 0.0, 0.0, 0.0, 0.0, 2.0**-12, 2.0**-10]
    expected = torch.tensor(start) - torch.tensor(grads)
    case = make_case("sgd", (len(start),), BF16, device, optional=False, grads=(FP32,), master=True)
    (grad,), span = case.grads, case.span(0)
    assert grad is not None
    assert case.master is not None
    case.master[span] = torch.tensor(start, device=device)
    grad.copy_(torch.tensor(grads))
    case, table = split_of(case), make_table(device, {"lr": 1.0})
    assert case.master is not None
    case.step(table, where)
    assert_same([joined(case.param[span], case.master[span])], [expected])
    assert_same([case.param[span]], [split(expected)[0]])
    assert case.param[span][8:10].tolist() == [1 + 2.0**-7, -1 - 2.0**-7], "ties are rounded away from zero"

    grad.zero_()
    written = torch.tensor([0.0, -0.0, infinity, -infinity, 3.0, float("nan")], dtype=BF16)
    for low in (-(2**15), -3, 5, 2**15 - 1):
        case.param[span][:6] = written.to(device)
        case.master[span] = low
        case.step(table, where)
        with naming(low):
            assert_same([case.param[span][:6]], [written])
            assert torch.equal(case.param[span][:5].signbit().cpu(), written[:5].signbit())


def test_only_bf16_has_a_split_master() -> None:
    case = make_case("sgd", (5,), FP16, "cpu", optional=False, master=True)
    with pytest.raises(ValueError, match=r"master must be a contiguous torch.float32 buffer .* got torch.int16"):
        replace(case, master=case.param.view(torch.int16).clone()).bound(make_table("cpu", {"lr": 1.0}), "torch")


PLAIN = [available("cpp", "cpu"), available("torch", "cpu")]


def bits(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Random bits: numbers of every size, infinities, NaNs and zeros among them."""
    generator = torch.Generator().manual_seed(0)
    found = torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8, generator=generator)
    return found.flatten(-2).view(dtype)


@pytest.mark.parametrize("backend", PLAIN)
@pytest.mark.parametrize("shape", [(70_001,), (0,), (3, 1001)], ids=str)
def test_halves_and_masters_are_those_of_the_equations(backend: tuple[str, str], shape: tuple[int, ...]) -> None:
    param, low = bits(shape, torch.bfloat16), bits(shape, torch.int16)
    for number in (0.0, -0.0, torch.inf, -torch.inf):  # whose lower half other code has not written
        param[..., :: 7 + int(number == 0)] = number
    found = read_halves(param, low, backend=backend[0])
    assert torch.equal(found.view(torch.int32), joined(param, low).view(torch.int32))
    out = torch.empty(shape)
    assert read_halves(param, low, out=out, backend=backend[0]) is out
    assert torch.equal(out.view(torch.int32), found.view(torch.int32))
    master = bits(shape, torch.float32)
    write_halves(master, param, low, backend=backend[0])
    for mine, expected in zip((param, low), split(master), strict=True):
        assert torch.equal(mine.view(torch.int16), expected.view(torch.int16))


@pytest.mark.parametrize("backend", PLAIN)
def test_a_part_of_several_rows_is_read_and_written(backend: tuple[str, str]) -> None:
    param, low = bits((3, 50), torch.bfloat16), bits((3, 50), torch.int16)
    before = param.clone(), low.clone()
    part = (half[:, 10:20] for half in (param, low))
    write_halves(torch.ones(10).expand(3, 10), *part, backend=backend[0])
    assert (read_halves(param[:, 10:20], low[:, 10:20], backend=backend[0]) == 1).all()
    for half, old in zip((param, low), before, strict=True):
        for kept in (slice(10), slice(20, None)):
            assert torch.equal(half[:, kept].view(torch.int16), old[:, kept].view(torch.int16))


@pytest.mark.parametrize("backend", [available("cpp", "cpu")])
def test_the_operators_check_before_they_write(backend: tuple[str, str]) -> None:
    param, low, master = torch.ones(4, dtype=torch.bfloat16), torch.zeros(4, dtype=torch.int16), torch.full((4,), 2.0)
    operators = torch.ops.hdet_kernels
    for name, wrong in {"low": (param, low[:3], master), "master": (param, low, master.double())}.items():
        with pytest.raises(RuntimeError, match=f"{name} (must have 4 elements|has another dtype)"):
            operators.join_halves(*wrong)
        with pytest.raises(RuntimeError, match=name):
            operators.split_into_halves(wrong[2], *wrong[:2])
    assert param.tolist() == [1.0] * 4
    assert master.tolist() == [2.0] * 4
