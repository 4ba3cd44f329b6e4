"""The operators as torch sees them: schemas, fake kernels, and being traced by torch.compile."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hdet_kernels.buckets import Piece
from hdet_kernels.ops import STATES
from hdet_kernels.ops.chunks import flat_gradients
from hdet_kernels.ops.pack import PieceTable
from hdet_kernels.ops.wire import FORMATS, Wire
from tests.ops.cases import BF16, FP32, RULES, Case, assert_same, available, make_case, make_table

#: The backends whose operators are written in Python; test_native.py has the compiled ones.
WRITTEN = [
    available("torch", "cpu"),
    available("torch", "cuda"),
    available("triton", "cuda"),
    available("triton", "cpu"),
]
EVERYWHERE = [*WRITTEN, available("cpp", "cpu"), available("cuda", "cuda")]
SIZES = (1030, 0, 5)


def operators_of(backend: str) -> tuple[Any, Any, Any]:
    if backend == "torch":
        from hdet_kernels.ops import reference as module
    else:
        from hdet_kernels.ops import triton_kernels as module
    return module._operators()


def small_case(name: str, device: str, *, reduced: bool = False) -> Case:
    rule, row = RULES[name]
    optional = bool(row.get("momentum") or row.get("amsgrad"))
    dtype = BF16 if reduced else FP32
    case = make_case(rule, SIZES, dtype, device, optional=optional, state=FP32, master=reduced, grads=(FP32, BF16))
    for flat in case.flats():
        flat.nan_to_num_(0.5)  # opcheck compares by equality
    return case


def tables_of(case: Case, backend: str) -> list[Any]:
    """What a backend's step takes after the hyperparameters and before the scalars."""
    grads = case.chunks.match(case.grads)
    on_device = case.chunks.point_at(grads)
    if backend == "torch":
        return [case.chunks.slots, on_device, [slot.offset for slot in case.chunks.entries], flat_gradients(grads)]
    from hdet_kernels.ops.triton_kernels import dtypes_of

    return [case.chunks.slots, case.chunks.chunks, on_device, dtypes_of(grads)]


def arguments(case: Case, backend: str, table: Tensor, *scalars: Tensor | None) -> list[Any]:
    flats = [case.param, case.master, *[*case.states, None, None][:3], case.steps]
    return [list(STATES).index(case.rule), *flats, table, *tables_of(case, backend), *scalars, False, 1]


def reading(case: Case, backend: str) -> list[Any]:
    grads = case.chunks.match(case.grads)
    return [case.chunks.chunks, flat_gradients(grads) if backend == "torch" else case.chunks.point_at(grads), 1]


@pytest.mark.parametrize("reduced", [False, True], ids=["fp32", "bf16-master"])
@pytest.mark.parametrize("name", ["sgd", "adamw-amsgrad", "lion"])
@pytest.mark.parametrize("backend", WRITTEN)
def test_opcheck_of_a_step(backend: tuple[str, str], name: str, reduced: bool) -> None:
    where, device = backend
    case = small_case(name, device, reduced=reduced)
    scalars = [torch.ones(1, device=device), torch.ones(1, device=device).double(), torch.zeros(1, device=device)]
    for given in (scalars, [None, None, None]):
        table = make_table(device, RULES[name][1]).tensor
        torch.library.opcheck(operators_of(where)[0], arguments(case, where, table, *given))


@pytest.mark.parametrize("backend", WRITTEN)
def test_opcheck_of_norm_and_finite(backend: tuple[str, str]) -> None:
    where, device = backend
    case = small_case("sgd", device)
    for operator in operators_of(where)[1:]:
        torch.library.opcheck(operator, reading(case, where))


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("backend", EVERYWHERE)
def test_opcheck_of_a_compressed_average(backend: tuple[str, str], format: str) -> None:
    where, device = backend
    wire = Wire(format, 1500, 2, torch.device(device), backend=where)
    x, consensus, error, target = torch.randn(4, 1500, device=device)
    number, sent, row = FORMATS.index(format), wire.empty().zero_(), wire.empty().zero_()[0]
    for given in (error, None):
        merged = None if given is None else torch.randn(wire.shard, device=device)
        torch.library.opcheck(wire._encode, (number, x, consensus, given, sent))
        torch.library.opcheck(wire._merge, (number, sent, 2.0, merged, row))
        torch.library.opcheck(wire._decode, (number, sent, consensus, None if given is None else target))


@pytest.mark.parametrize("backend", EVERYWHERE)
def test_a_compiled_function_averages_like_an_eager_one(backend: tuple[str, str]) -> None:
    where, device = backend
    wire = Wire("int8", 1500, 1, torch.device(device), backend=where)
    encode, merge, decode = wire._encode, wire._merge, wire._decode

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


PACKING = [*WRITTEN, available("cpp", "cpu"), available("cuda", "cuda")]


def packing_operators(backend: str) -> tuple[Any, Any]:
    if backend in ("cpp", "cuda"):
        return torch.ops.hdet_kernels.pack.default, torch.ops.hdet_kernels.unpack.default
    if backend == "torch":
        from hdet_kernels.ops import reference_pack as module
    else:
        from hdet_kernels.ops import triton_pack as module
    return module._operators()


def packing(backend: str, device: str) -> tuple[list[Tensor], list[Any], list[Any]]:
    """Tensors of two rows, what they are packed with (both rows, over 3) and unpacked with (halved)."""
    tensors = [torch.randn(2, 70, device=device).to(kind) for kind in (FP32, BF16)]
    table = PieceTable([70, 70], [Piece(1, 3, 40), Piece(0, 0, 70)], 2, tensors[0].device, FP32)
    staging = torch.zeros(table.numel, device=device)
    if backend == "torch":
        return tensors, [tensors, *table.spans, 3, 3.0, staging], [tensors, *table.spans, 2.0, staging]
    tables = [table.chunks, table.point_at(table.match(tensors)), table.strides]
    return tensors, [*tables, 3, 3.0, staging], [*tables, 2, 2.0, staging]


@pytest.mark.parametrize("backend", PACKING)
def test_opcheck_of_pack_and_unpack(backend: tuple[str, str]) -> None:
    tensors, *given = packing(*backend)
    for operator, arguments in zip(packing_operators(backend[0]), given, strict=True):
        torch.library.opcheck(operator, arguments)
    assert len(tensors) == 2  # alive until here


@pytest.mark.parametrize("backend", PACKING)
def test_a_compiled_function_packs_and_unpacks_like_an_eager_one(backend: tuple[str, str]) -> None:
    pack, unpack = packing_operators(backend[0])
    results = []
    for compiled in (False, True):
        torch.manual_seed(0)
        tensors, to, back = packing(*backend)

        def average(to: list[Any] = to, back: list[Any] = back) -> Tensor:
            pack(*to)
            total = to[-1].sum()  # reads what was packed
            unpack(*back)
            return total

        run = torch.compile(average, fullgraph=True, backend="aot_eager") if compiled else average
        results.append([run(), to[-1], *tensors])
    assert_same(*results)
    assert torch.equal(results[1][2][0], results[1][2][1]), "the rows of a tensor that was unpacked are equal"


@pytest.mark.parametrize("backend", WRITTEN)
def test_a_compiled_function_steps_like_an_eager_one(backend: tuple[str, str]) -> None:
    where, device = backend
    step, norm, finite = operators_of(where)
    row = RULES["adamw"][1] | {"max_grad_norm": 1.0}
    results = []
    for compiled in (False, True):
        case = small_case("adamw", device)
        table = make_table(device, row).tensor
        rule, *flats = arguments(case, where, table, None, None, None)[:8]
        tables, grads = tables_of(case, where), reading(case, where)

        def train(
            flats: list[Any] = flats, rule: int = rule, tables: list[Any] = tables, grads: list[Any] = grads
        ) -> tuple[Tensor, Tensor]:
            total = norm(*grads)
            step(rule, *flats, *tables, None, total, (~finite(*grads)).float(), False, 1)
            return total, flats[0].sum()  # reads what the step wrote

        run = torch.compile(train, fullgraph=True, backend="aot_eager") if compiled else train
        outputs = [value for _ in range(2) for value in run()]
        assert case.steps.tolist() == [2, 2, 2]
        results.append([*case.flats(), *outputs])
    assert_same(*results)
