"""The compiled operators: the checks of their arguments, and results that do not depend on the number of threads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hdet_kernels.ops.compiled import SCRATCH_BYTES
from hdet_kernels.ops.pack import MOST_ROWS
from tests.ops.cases import RULES, Case, available, make_case, make_table
from tests.ops.operator_cases import pack_arguments, step_arguments

ROOT = Path(__file__).parents[2]
COMPILED = [available("cpp", "cpu"), available("cuda", "cuda")]


def arguments(case: Case, row: dict[str, float]) -> list[Any]:
    """Return the arguments of the step operator, with all scalars."""
    scalars = torch.ones(1), torch.ones((), dtype=torch.float64), torch.zeros(1)
    return step_arguments(case, "cpp", make_table("cpu", row).tensor, *scalars)


# By name: the position of an argument, the change that makes it wrong, and a part of the message.
WRONG = {
    "master": (2, lambda value: torch.ones(5), "master must have"),
    "state dtype": (3, lambda value: value.double(), "state has another dtype"),
    "state size": (3, lambda value: value[:-1], r"state must have \d+ elements"),
    "state missing": (3, lambda value: None, "state 1 is given and one before it is not"),
    "scales missing": (3, lambda value: value.byte(), "state 0 must have scales if it is uint8 codes"),
    "scales": (6, lambda value: torch.zeros(8), "state 0 must have scales if it is uint8 codes, and else none"),
    "steps": (9, lambda value: value.double(), "steps has another dtype"),
    "columns": (10, lambda value: value[:, :3].contiguous(), "must have 13 columns"),
    "slots": (11, lambda value: value[:, :2].contiguous(), "slots must have 3 columns"),
    "chunks": (12, lambda value: value.int(), "chunks has another dtype"),
    "gradients": (13, lambda value: value[:1], "gradients must have 2 rows, got 1"),
    "scratch": (14, lambda value: value[:-1], "scratch must have 256 elements, got 255"),
    "grad_scale": (15, lambda value: torch.ones(2), "grad_scale must have 1 elements, got 2"),
    "norm": (16, lambda value: value.float(), "norm has another dtype"),
    "norms": (16, lambda value: value.expand(3).contiguous(), "norm must have one element, or .* got 3 for 1 rows"),
    "found_inf": (17, lambda value: torch.ones(2), "found_inf must have 1 elements, got 2"),
    "rule": (0, lambda value: 17, "unknown rule 17"),
    "replicas": (19, lambda value: 5, r"param has \d+ elements, which are not 5 rows"),
    "table of replicas": (19, lambda value: 2, "equally many rows for each of 2 replicas, got 1"),
}


@pytest.mark.parametrize("backend", [available("cpp", "cpu")])
@pytest.mark.parametrize("what", WRONG)
def test_the_operator_checks_its_arguments(backend: tuple[str, str], what: str) -> None:
    case = make_case("adamw", (33, 5), torch.float32, backend[1], optional=True)
    given = arguments(case, RULES["adamw"][1])
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
    tensors, *both = pack_arguments(*backend)
    given = both[name == "unpack"]
    given[position] = change(given[position])
    before = [tensor.clone() for tensor in tensors]
    with pytest.raises(RuntimeError, match=message):
        getattr(torch.ops.hdet_kernels, name)(*given)
    assert all(map(torch.equal, tensors, before))


@pytest.mark.parametrize("backend", [available("cpp", "cpu")])
def test_the_operator_takes_floating_parameters_only(backend: tuple[str, str]) -> None:
    case = make_case("sgd", (33,), torch.float32, backend[1], optional=False)
    given = arguments(case, {"lr": 0.1})
    given[1] = case.param.nan_to_num().to(torch.int32)
    with pytest.raises(RuntimeError, match="float32, float64, bfloat16 or float16"):
        torch.ops.hdet_kernels.step_(*given)


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
