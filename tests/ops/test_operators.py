"""The compiled operators as torch sees them: schemas, fake kernels, tracing by torch.compile; their own checks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hdet_kernels.ops import STATES
from hdet_kernels.ops.compiled import SCRATCH_BYTES
from hdet_kernels.ops.pack import MOST_ROWS, Pack
from hdet_kernels.ops.wire import FORMATS, Wire
from hdet_kernels.tensors import Piece
from tests.ops.cases import (
    BF16,
    FP32,
    RULES,
    Case,
    assert_same,
    available,
    make_case,
    make_table,
)

ROOT = Path(__file__).parents[2]
SIZES = (1030, 0, 5)
OPERATORS = torch.ops.hdet_kernels
COMPILED = [available("cpp", "cpu"), available("cuda", "cuda")]

# A rule without states in fp32, and one with all states in bf16 with a master; other combinations in make test-full.
STEPS = [
    pytest.param("sgd", False, id="sgd-fp32"),
    pytest.param("adamw-amsgrad", True, id="adamw-amsgrad-bf16-master"),
    pytest.param("sgd", True, id="sgd-bf16-master", marks=pytest.mark.full),
    pytest.param("adamw-amsgrad", False, id="adamw-amsgrad-fp32", marks=pytest.mark.full),
    pytest.param("lion", False, id="lion-fp32", marks=pytest.mark.full),
    pytest.param("lion", True, id="lion-bf16-master", marks=pytest.mark.full),
]
EACH_FORMAT = [pytest.param("bf16", marks=pytest.mark.full), "int8"]


def step_arguments(case: Case, table: Tensor, *scalars: Tensor | None) -> list[Any]:
    """Return the arguments of the step operator, with three ``scalars``."""
    flats = [case.param, case.master, *[*case.states, None, None][:3], None, None, case.steps]
    on_device = case.chunks.point_at(case.chunks.match(case.grads))
    scratch = torch.zeros(SCRATCH_BYTES * len(case.chunks.entries), dtype=torch.uint8, device=case.param.device)
    tables = [case.chunks.slots, case.chunks.chunks, on_device, scratch]
    return [list(STATES).index(case.rule), *flats, table, *tables, *scalars, False, 1]


def norm_arguments(case: Case) -> list[Any]:
    """Return the arguments of the norm operator."""
    return [case.chunks.chunks, case.chunks.point_at(case.chunks.match(case.grads)), 1]


def pack_arguments(device: str) -> tuple[list[Tensor], list[Any], list[Any]]:
    """Return tensors of two rows, the arguments to pack them (both rows, over 3), and to unpack them (halved)."""
    tensors = [torch.randn(2, 70, device=device).to(kind) for kind in (FP32, BF16)]
    table = Pack([70, 70], [Piece(1, 3, 40), Piece(0, 0, 70)], tensors[0].device, FP32, rows=2)
    staging = torch.zeros(table.numel, device=device)
    tables = [table.chunks, table.point_at(table.match(tensors)), table.strides]
    return tensors, [*tables, 3, 3.0, staging], [*tables, 2, 2.0, staging]


def small_case(name: str, device: str, *, master: bool = False) -> Case:
    rule, row = RULES[name]
    optional = bool(row.get("momentum") or row.get("amsgrad"))
    dtype = BF16 if master else FP32
    case = make_case(rule, SIZES, dtype, device, optional=optional, state=FP32, master=master, grads=(FP32, BF16))
    for flat in case.flats():
        flat.nan_to_num_(0.5)  # opcheck compares by equality
    return case


@pytest.mark.parametrize(("name", "master"), STEPS)
@pytest.mark.parametrize("backend", COMPILED)
def test_opcheck_of_a_step(backend: tuple[str, str], name: str, master: bool) -> None:
    device = backend[1]
    case = small_case(name, device, master=master)
    scalars = [torch.ones(1, device=device), torch.ones(1, device=device).double(), torch.zeros(1, device=device)]
    for given in (scalars, [None, None, None]):
        table = make_table(device, RULES[name][1]).tensor
        torch.library.opcheck(OPERATORS.step_.default, step_arguments(case, table, *given))


@pytest.mark.parametrize("backend", COMPILED)
def test_opcheck_of_the_norm(backend: tuple[str, str]) -> None:
    device = backend[1]
    case = small_case("sgd", device)
    torch.library.opcheck(OPERATORS.grad_norm.default, norm_arguments(case))


@pytest.mark.parametrize("format", EACH_FORMAT)
@pytest.mark.parametrize("backend", COMPILED)
def test_opcheck_of_a_compressed_average(backend: tuple[str, str], format: str) -> None:
    device = backend[1]
    wire = Wire(format, 1500, 2, torch.device(device), backend=backend[0])
    x, consensus, error, target = torch.randn(4, 1500, device=device)
    number, sent, row = FORMATS.index(format), wire.empty().zero_(), wire.empty().zero_()[0]
    for given in (error, None):
        merged = None if given is None else torch.randn(wire.shard, device=device)
        torch.library.opcheck(OPERATORS.encode.default, (number, x, consensus, given, sent))
        torch.library.opcheck(OPERATORS.merge.default, (number, sent, 2.0, merged, row))
        torch.library.opcheck(OPERATORS.decode.default, (number, sent, consensus, None if given is None else target))


@pytest.mark.parametrize("backend", COMPILED)
def test_opcheck_of_pack_and_unpack(backend: tuple[str, str]) -> None:
    tensors, *given = pack_arguments(backend[1])
    for operator, arguments in zip((OPERATORS.pack.default, OPERATORS.unpack.default), given, strict=True):
        torch.library.opcheck(operator, arguments)
    assert len(tensors) == 2  # keeps them alive until here


@pytest.mark.parametrize("backend", COMPILED)
def test_a_compiled_function_steps_like_an_eager_one(backend: tuple[str, str]) -> None:
    device = backend[1]
    step, norm = OPERATORS.step_.default, OPERATORS.grad_norm.default
    row = RULES["adamw"][1] | {"max_grad_norm": 1.0}
    results = []
    for compiled in (False, True):
        case = small_case("adamw", device)
        table = make_table(device, row).tensor
        rule, *flats = step_arguments(case, table, None, None, None)
        tables, flats = flats[9:13], flats[:9]
        grads = norm_arguments(case)

        def train(
            flats: list[Any] = flats, rule: int = rule, tables: list[Any] = tables, grads: list[Any] = grads
        ) -> tuple[Tensor, Tensor]:
            total = norm(*grads)
            step(rule, *flats, *tables, None, total, (~total.isfinite()).float(), False, 1)
            return total, flats[0].sum()  # reads what the step wrote

        run = torch.compile(train, fullgraph=True, backend="aot_eager") if compiled else train
        outputs = [value for _ in range(2) for value in run()]
        assert case.steps.tolist() == [2, 2, 2]
        results.append([*case.flats(), *outputs])
    assert_same(*results)


@pytest.mark.parametrize("backend", COMPILED)
def test_a_compiled_function_averages_like_an_eager_one(backend: tuple[str, str]) -> None:
    device = backend[1]
    wire = Wire("int8", 1500, 1, torch.device(device), backend=backend[0])
    encode, merge, decode = OPERATORS.encode.default, OPERATORS.merge.default, OPERATORS.decode.default

    def average(x: Tensor, consensus: Tensor, error: Tensor, sent: Tensor, merged: Tensor) -> Tensor:
        encode(1, x, consensus, error, sent)
        merge(1, sent, 1.0, None, merged[0])
        decode(1, merged, consensus, None)
        return consensus.sum()  # reads what was decoded

    results = []
    for call in (average, torch.compile(average, fullgraph=True, backend="aot_eager")):
        x, consensus, error = torch.randn(3, 1500, generator=torch.Generator().manual_seed(0)).to(device)
        sent, merged = wire.empty(), wire.empty()
        results.append([call(x, consensus, error, sent, merged), consensus, error, sent, merged])
    assert_same(*results)


@pytest.mark.parametrize("backend", COMPILED)
def test_a_compiled_function_packs_and_unpacks_like_an_eager_one(backend: tuple[str, str]) -> None:
    pack, unpack = OPERATORS.pack.default, OPERATORS.unpack.default
    results = []
    for compiled in (False, True):
        torch.manual_seed(0)
        tensors, to, back = pack_arguments(backend[1])

        def average(to: list[Any] = to, back: list[Any] = back) -> Tensor:
            pack(*to)
            total = to[-1].sum()  # reads what was packed
            unpack(*back)
            return total

        run = torch.compile(average, fullgraph=True, backend="aot_eager") if compiled else average
        results.append([run(), to[-1], *tensors])
    assert_same(*results)
    assert torch.equal(results[1][2][0], results[1][2][1]), "unpacking makes the rows of a tensor equal"


def cpp_arguments(case: Case, row: dict[str, float]) -> list[Any]:
    """Return the arguments of the step operator, with all scalars."""
    scalars = torch.ones(1), torch.ones((), dtype=torch.float64), torch.zeros(1)
    return step_arguments(case, make_table("cpu", row).tensor, *scalars)


# By name: the position of an argument, the change that makes it wrong, and a part of the message.
WRONG = {
    "param dtype": (1, lambda value: value.nan_to_num().int(), "float32, float64, bfloat16 or float16"),
    "master": (2, lambda value: torch.ones(5), "master must have"),
    "state dtype": (3, lambda value: value.double(), "state has another dtype"),
    "state size": (3, lambda value: value[:-1], r"state must have \d+ elements"),
    "state missing": (3, lambda value: None, "state 1 is given and one before it is not"),
    "scales missing": (3, lambda value: value.byte(), "state 0 must have scales if it is uint8 codes"),
    "scales": (6, lambda value: torch.zeros(8), "state 0 must have scales if it is uint8 codes, and else none"),
    "codes of amsgrad": (5, lambda value: value.byte(), "the largest second moment of amsgrad cannot be uint8 codes"),
    "steps": (8, lambda value: value.double(), "steps has another dtype"),
    "columns": (9, lambda value: value[:, :3].contiguous(), "must have 13 columns"),
    "slots": (10, lambda value: value[:, :2].contiguous(), "slots must have 3 columns"),
    "chunks": (11, lambda value: value.int(), "chunks has another dtype"),
    "gradients": (12, lambda value: value[:1], "gradients must have 2 rows, got 1"),
    "scratch": (13, lambda value: value[:-1], "scratch must have 256 elements, got 255"),
    "grad_scale": (14, lambda value: torch.ones(2), "grad_scale must have 1 elements, got 2"),
    "norm": (15, lambda value: value.float(), "norm has another dtype"),
    "norms": (15, lambda value: value.expand(3).contiguous(), "norm must have one element, or .* got 3 for 1 rows"),
    "found_inf": (16, lambda value: torch.ones(2), "found_inf must have 1 elements, got 2"),
    "rule": (0, lambda value: 17, "unknown rule 17"),
    "replicas": (18, lambda value: 5, r"param has \d+ elements, which are not 5 rows"),
    "table of replicas": (18, lambda value: 2, "equally many rows for each of 2 replicas, got 1"),
}


@pytest.mark.parametrize("backend", [available("cpp", "cpu")])
@pytest.mark.parametrize("what", WRONG)
def test_the_operator_checks_its_arguments(backend: tuple[str, str], what: str) -> None:
    case = make_case("adamw", (33, 5), torch.float32, backend[1], optional=True)
    given = cpp_arguments(case, RULES["adamw"][1])
    position, change, message = WRONG[what]
    given[position] = change(given[position])
    before = [flat.clone() for flat in case.flats()]
    with pytest.raises(RuntimeError, match=message):
        torch.ops.hdet_kernels.step_(*given)
    for flat, old in zip(case.flats(), before, strict=True):
        torch.testing.assert_close(flat, old, rtol=0, atol=0, equal_nan=True)


WRONG_PACKING = {
    "chunks": ("pack", 0, lambda value: value[:, :3].contiguous(), "chunks must have 4 columns"),
    "places": ("pack", 1, lambda value: value.int(), "places has another dtype"),
    "strides": ("pack", 2, lambda value: value[:-1], "strides must have 2 elements, got 1"),
    "staging dtype": ("pack", 5, lambda value: value.half(), "staging buffer must be float32 or float64"),
    "staging layout": ("unpack", 5, lambda value: value.repeat(2)[::2], "staging buffer must be contiguous"),
    "rows": ("unpack", 3, lambda value: 65, "rows must be 1 to 64, got 65"),
}


@pytest.mark.parametrize("backend", [available("cpp", "cpu")])
@pytest.mark.parametrize("what", WRONG_PACKING)
def test_the_packing_operators_check_their_arguments(backend: tuple[str, str], what: str) -> None:
    name, position, change, message = WRONG_PACKING[what]
    tensors, *both = pack_arguments(backend[1])
    given = both[name == "unpack"]
    given[position] = change(given[position])
    before = [tensor.clone() for tensor in tensors]
    with pytest.raises(RuntimeError, match=message):
        getattr(torch.ops.hdet_kernels, name)(*given)
    assert all(map(torch.equal, tensors, before))


@pytest.mark.parametrize("backend", [available("cpp", "cpu")])
def test_threads_do_not_change_the_result(backend: tuple[str, str]) -> None:
    results = []
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            case = make_case("adamw", (100_000, 3, 50_001), torch.float32, "cpu", optional=True)
            case.step(make_table("cpu", RULES["adamw"][1]), "cpp")
            results.append(case)
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        for mine, theirs in zip(other.flats(), results[0].flats(), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=0, equal_nan=True)


def test_constants_are_those_of_the_headers() -> None:
    assert f"constexpr int kMostRows = {MOST_ROWS};" in (ROOT / "csrc" / "pack.h").read_text()
    assert f"kScratchBytes = {SCRATCH_BYTES};" in (ROOT / "csrc" / "step.h").read_text()
