"""A step with bound arguments gives the bits of the operator, and leaves to the operator what torch is to see."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hdet_kernels.ops import Scalars
from hdet_kernels.ops.bound_step import BoundStep
from tests.ops.cases import FP32, RULES, Case, assert_same, available, make_case, make_table
from tests.ops.operator_cases import step_arguments

COMPILED = [available("cpp", "cpu"), available("cuda", "cuda")]
#: Positions of the operator's arguments: its tensors from param to scratch, and the scalars after them.
TENSORS, SCALARS = slice(1, 15), slice(15, 18)


def made(backend: tuple[str, str], *scalars: Tensor | None, master: bool = False) -> tuple[Case, list[Any], BoundStep]:
    """Return a case, the arguments of the operator, and the same bound."""
    dtype = torch.bfloat16 if master else FP32
    case = make_case("adamw", (33, 5, 3000), dtype, backend[1], optional=True, state=FP32, master=master)
    given = step_arguments(case, backend[0], make_table(backend[1], RULES["adamw"][1]).tensor, *scalars)
    return case, given, BoundStep(backend[1], given[0], given[TENSORS], given[18], given[19])


@pytest.mark.parametrize("master", [False, True])
@pytest.mark.parametrize("backend", COMPILED)
def test_the_results_are_those_of_the_operator(backend: tuple[str, str], master: bool) -> None:
    device = backend[1]
    scale, found = torch.full((1,), 2.0, device=device), torch.zeros(1, device=device)
    norm = torch.tensor(3.0, dtype=torch.float64, device=device)
    given_each = [Scalars(), Scalars(scale, norm, found), Scalars(scale), Scalars(), Scalars(found_inf=found + 1)]
    both = []
    for bound in (True, False):
        case, given, step = made(backend, None, None, None, master=master)
        for scalars in given_each:
            if bound:
                assert step.run(scalars)
            else:
                torch.ops.hdet_kernels.step_(*given[:15], *scalars, *given[18:])
        both.append([*case.flats(), case.steps])
    assert_same(*both)
    assert both[0][-1].tolist() == [4.0] * 3, "the last of five steps was skipped"


@pytest.mark.parametrize("backend", COMPILED)
def test_several_norms_are_those_of_parts_of_the_table(backend: tuple[str, str]) -> None:
    device = backend[1]
    norms = torch.tensor([1.0, 100.0], dtype=torch.float64, device=device)
    rows = [RULES["adamw"][1] | {"max_grad_norm": 1.0}] * 2
    both = []
    for bound in (True, False):
        case = make_case("adamw", (33, 5), FP32, device, optional=True, table_rows=(0, 1))
        given = step_arguments(case, backend[0], make_table(device, *rows).tensor, None, norms, None)
        if bound:
            assert BoundStep(device, given[0], given[TENSORS], given[18], given[19]).run(Scalars(norm=norms))
        else:
            torch.ops.hdet_kernels.step_(*given)
        both.append(case.flats())
    assert_same(*both)


@pytest.mark.parametrize("backend", [available("cpp", "cpu")])
def test_nothing_runs_on_tensors_that_got_other_memory(backend: tuple[str, str]) -> None:
    case, given, step = made(backend, None, None, None)
    moved = given[3]
    before = [flat.clone() for flat in case.flats()]
    moved.data = moved.data.clone()
    assert not step.run(Scalars())
    assert_same(case.flats(), before)


@pytest.mark.parametrize("backend", [available("cpp", "cpu")])
def test_arguments_that_do_not_fit_are_left_to_the_operator(backend: tuple[str, str]) -> None:
    class Own(Tensor):
        pass

    _, given, _ = made(backend, None, None, None)
    short = [*given[TENSORS][:-1], given[14][:-1]]
    strange = [given[1].as_subclass(Own), *given[2:15]]
    for tensors in (short, strange):
        assert not BoundStep("cpu", given[0], tensors, given[18], given[19]).run(Scalars())
    assert not BoundStep("cpu", 17, given[TENSORS], given[18], given[19]).run(Scalars())


@pytest.mark.parametrize("backend", [available("cpp", "cpu")])
def test_a_step_that_fails_says_why(backend: tuple[str, str]) -> None:
    _, given, _ = made(backend, None, None, None)
    given[3:6] = [None] * 3
    step = BoundStep("cpu", given[0], given[TENSORS], given[18], given[19])
    with pytest.raises(RuntimeError, match="this rule needs 2 state buffers, got 0"):
        step.run(Scalars())


@pytest.mark.parametrize("backend", COMPILED)
def test_dispatch_modes_see_the_operator(backend: tuple[str, str]) -> None:
    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    seen: list[str] = []
    case = make_case("adamw", (33, 5), FP32, backend[1], optional=True)
    with Names():
        case.step(make_table(backend[1], RULES["adamw"][1]), backend[0])
    assert "hdet_kernels.step_.default" in seen
