"""The operators of every backend as torch sees them: schemas, fake kernels, and tracing by torch.compile."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hdet_kernels.ops.wire import FORMATS, Wire
from tests.ops.cases import BACKENDS, BF16, FP32, INTERPRETER_IN_FULL, RULES, Case, assert_same, make_case, make_table
from tests.ops.operator_cases import (
    norm_arguments,
    pack_arguments,
    pack_operators,
    step_arguments,
    step_operators,
    step_tables,
)

SIZES = (1030, 0, 5)

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


def small_case(name: str, device: str, *, master: bool = False) -> Case:
    rule, row = RULES[name]
    optional = bool(row.get("momentum") or row.get("amsgrad"))
    dtype = BF16 if master else FP32
    case = make_case(rule, SIZES, dtype, device, optional=optional, state=FP32, master=master, grads=(FP32, BF16))
    for flat in case.flats():
        flat.nan_to_num_(0.5)  # opcheck compares by equality
    return case


@pytest.mark.parametrize(("name", "master"), STEPS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_opcheck_of_a_step(backend: tuple[str, str], name: str, master: bool) -> None:
    where, device = backend
    case = small_case(name, device, master=master)
    scalars = [torch.ones(1, device=device), torch.ones(1, device=device).double(), torch.zeros(1, device=device)]
    for given in (scalars, [None, None, None]):
        table = make_table(device, RULES[name][1]).tensor
        torch.library.opcheck(step_operators(where)[0], step_arguments(case, where, table, *given))


@pytest.mark.parametrize("backend", BACKENDS)
def test_opcheck_of_the_norm(backend: tuple[str, str]) -> None:
    where, device = backend
    case = small_case("sgd", device)
    torch.library.opcheck(step_operators(where)[1], norm_arguments(case, where))


@pytest.mark.parametrize("format", EACH_FORMAT)
@pytest.mark.parametrize("backend", INTERPRETER_IN_FULL)
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


@pytest.mark.parametrize("backend", INTERPRETER_IN_FULL)
def test_opcheck_of_pack_and_unpack(backend: tuple[str, str]) -> None:
    tensors, *given = pack_arguments(*backend)
    for operator, arguments in zip(pack_operators(backend[0]), given, strict=True):
        torch.library.opcheck(operator, arguments)
    assert len(tensors) == 2  # keeps them alive until here


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_compiled_function_steps_like_an_eager_one(backend: tuple[str, str]) -> None:
    where, device = backend
    step, norm = step_operators(where)
    row = RULES["adamw"][1] | {"max_grad_norm": 1.0}
    results = []
    for compiled in (False, True):
        case = small_case("adamw", device)
        table = make_table(device, row).tensor
        rule, *flats = step_arguments(case, where, table, None, None, None)[:11]
        tables, grads = step_tables(case, where), norm_arguments(case, where)

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


@pytest.mark.parametrize("backend", INTERPRETER_IN_FULL)
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


@pytest.mark.parametrize("backend", INTERPRETER_IN_FULL)
def test_a_compiled_function_packs_and_unpacks_like_an_eager_one(backend: tuple[str, str]) -> None:
    pack, unpack = pack_operators(backend[0])
    results = []
    for compiled in (False, True):
        torch.manual_seed(0)
        tensors, to, back = pack_arguments(*backend)

        def average(to: list[Any] = to, back: list[Any] = back) -> Tensor:
            pack(*to)
            total = to[-1].sum()  # reads what was packed
            unpack(*back)
            return total

        run = torch.compile(average, fullgraph=True, backend="aot_eager") if compiled else average
        results.append([run(), to[-1], *tensors])
    assert_same(*results)
    assert torch.equal(results[1][2][0], results[1][2][1]), "unpacking makes the rows of a tensor equal"
