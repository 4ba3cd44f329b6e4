"""The step of replicas that share one gradient: every backend against a plain torch step of each replica alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hdet_kernels import ops
from hdet_kernels.ops import Scalars
from hdet_kernels.ops.chunks import CHUNK, ChunkTable
from hdet_kernels.tensors import Slot
from tests.ops.cases import (
    BACKENDS,
    BF16,
    COUPLED,
    FP32,
    FP64,
    PRECISIONS,
    RULES,
    SIZES_OF_A_ROW,
    SOME_OR_EVERY,
    alone,
    assert_as_accurate,
    assert_same,
    available,
    interpreted,
    make_case,
    make_table,
    naming,
    replicas_of,
    rows_for,
    share,
    stacked,
)

# For Triton's interpreter, which is slow: a whole block of every width, and one that lacks an element.
INTERPRETED_SIZES = (1024 + 1, 1024 - 1)

# The number of replicas, and the elements by which rows are longer than their slots. With an odd length only the first
# row lies at an address that allows vectors. The kernels load 4 rows together: 3 are fewer, 8 are twice as many, and 5
# leave a remainder.
REPLICAS = {"one": (1, 0), "two-odd": (2, 3), "three": (3, 0), "five": (5, 0), "eight": (8, 0), "many": (17, 0)}

# Without Triton on a GPU, whose compiler fuses products and sums kernel by kernel.
EXACT = [backend for backend in BACKENDS if backend.id != "triton-cuda"]

# Rules with which large numbers of replicas are tested.
SEVERAL = ("sgd-nesterov", "adamw-amsgrad", "lion")

# In the interpreter, beside every rule in fp32: the precisions and replicas that differ most.
INTERPRETED = (
    ("fp32", "one"),
    ("fp32", "two-odd"),
    ("bf16-master", "five"),
    ("fp32-grad-mixed", "three"),
    ("bf16-state-bf16", "three"),
    ("fp64", "three"),
)


def check_replicas(backend: tuple[str, str], name: str, kind: str, count: str) -> None:
    """Assert that two steps of a stack are as accurate as those of each replica alone by plain torch."""
    where, device = backend
    rows, extra = REPLICAS[count]
    sizes = INTERPRETED_SIZES if interpreted(backend) else SIZES_OF_A_ROW
    got = stacked(replicas_of(name, PRECISIONS[kind], device, rows, extra, sizes))
    table = make_table(device, *rows_for(name, rows))
    for _ in range(2):
        got.case.step(table, where)
    plains = replicas_of(name, PRECISIONS[kind], "cpu", rows, extra, sizes)
    for row, (plain, hyper) in enumerate(zip(plains, rows_for(name, rows), strict=True)):
        truth = plain.in_float64()
        for case in (plain, truth):
            for _ in range(2):
                case.step(make_table("cpu", hyper), "torch")
        assert_as_accurate(got.replica(row), plain, truth)  # the states too: those of replica 0 are those of all
        assert got.case.steps.tolist() == plain.steps.tolist()


@SOME_OR_EVERY
@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_replica_steps_as_it_would_alone(backend: tuple[str, str], name: str, every: bool) -> None:
    """Some: by compiled backends two precisions with each rule, which cover all, and every number with Lion.

    Every: all precisions with three replicas, and other numbers of replicas in fp32, large ones with three rules.
    """
    combinations = [("fp32", "three")]
    if interpreted(backend):
        combinations += list(INTERPRETED if every else INTERPRETED[1:3]) if name == "adamw" else []
    elif every:
        combinations = [(kind, "three") for kind in PRECISIONS]
        combinations += [("fp32", n) for n, (rows, _) in REPLICAS.items() if rows < 8 or name in SEVERAL]
    elif backend[0] != "torch":
        combinations = [(kind, "three") for kind in share(list(RULES).index(name) % 6, 6, list(PRECISIONS))]
        combinations += [("fp32", count) for count in REPLICAS] if name == "lion" else []
    for kind, count in combinations:
        with naming(kind, count):
            check_replicas(backend, name, kind, count)


ROUNDED = [
    "bf16-state-bf16",
    pytest.param("bf16-state-fp32", marks=pytest.mark.full),
    pytest.param("fp32-state-bf16", marks=pytest.mark.full),
]


@pytest.mark.parametrize("label", ROUNDED)
@pytest.mark.parametrize("backend", EXACT)
def test_stochastic_rounding_is_that_of_the_replica_alone(backend: tuple[str, str], label: str) -> None:
    where, device = backend
    hyper, sizes = rows_for("adamw", 3), INTERPRETED_SIZES
    replicas = replicas_of("adamw", PRECISIONS[label], device, 3, extra=1, sizes=sizes)
    got = stacked(replicas)
    # One step: by the next, states that are rounded by another seed would differ.
    got.case.step(make_table(device, *hyper), where, stochastic_rounding=True)
    for row, case in enumerate(replicas):
        case.step(make_table(device, hyper[row]), where, stochastic_rounding=True)
        assert_same([got.case.param[row]], [case.param])
    assert_same(got.replica(0).flats(), replicas[0].flats())


@pytest.mark.parametrize("backend", BACKENDS)
def test_each_replica_steps_each_group_with_its_own_row(backend: tuple[str, str]) -> None:
    where, device = backend
    case = make_case("sgd", (9, 1025, 3), FP64, device, optional=False, table_rows=(1, 0, 1))
    got = stacked([alone(case, 0) for _ in range(3)])
    before = got.case.param.clone()
    rates = [0.5, 0.25, 1.0, 2.0, 4.0, 8.0]  # replica by replica, two groups each
    got.case.step(make_table(device, *({"lr": rate} for rate in rates)), where)
    for row in range(3):
        for slot, group in enumerate(case.chunks.table_rows):
            span, grad = case.span(slot), case.grads[slot]
            assert grad is not None
            assert torch.equal(got.case.param[row, span], before[row, span] - rates[2 * row + group] * grad)
        got.replica(row).assert_neighbours_untouched()


# Rules with hyperparameters that act on gradient and states, and other values for another replica.
DECIDED = {
    "sgd": ({"lr": 0.1, "momentum": 0.9, "nesterov": 1, "dampening": 0.0}, {"momentum": 0.3, "nesterov": 0}),
    "sgd-off": ({"lr": 0.1, "weight_decay": 0.5}, {"momentum": 0.3, "weight_decay": 0.5}),
    "lion": ({"lr": 0.1, "beta1": 0.9, "beta2": 0.99}, {"beta1": 0.1, "beta2": 0.2}),
    "adagrad": ({"lr": 0.1, "eps": 1e-10}, {"maximize": 1}),
    "adam": (
        {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "amsgrad": 1},
        {"amsgrad": 0, "maximize": 1, "max_grad_norm": 0.1},
    ),
}


@pytest.mark.parametrize("name", DECIDED)
@pytest.mark.parametrize("backend", EXACT)
def test_hyperparameters_of_gradient_and_states_are_those_of_replica_0(backend: tuple[str, str], name: str) -> None:
    where, device = backend
    row, others = DECIDED[name]
    row = row | {"maximize": 1, "max_grad_norm": 2.0} if name != "adagrad" else row
    rule = name.removesuffix("-off")
    results = []
    for second in (row, row | {"maximize": 0, "max_grad_norm": 0.0, **others}):
        got = stacked([alone(make_case(rule, (100, 7), FP64, device, optional=True), r) for r in range(2)])
        scalars = Scalars(norm=torch.tensor(9.0, dtype=FP64, device=device))
        got.case.step(make_table(device, row, second), where, scalars)
        results.append(got.case.flats())
    assert_same(*results)


@pytest.mark.parametrize("backend", BACKENDS)
def test_each_replica_corrects_the_bias_of_its_own_betas(backend: tuple[str, str]) -> None:
    where, device = backend
    case = make_case("adam", (33,), FP64, device, optional=False)
    got, before = stacked([alone(case, 0) for _ in range(2)]), case.param
    row = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "eps": 1e-3}
    got.case.step(make_table(device, row, row | {"beta1": 0.5, "beta2": 0.75}), where)
    m, v = got.case.states[:2]
    assert m is not None
    assert v is not None
    for replica, (beta1, beta2) in enumerate([(0.9, 0.99), (0.5, 0.75)]):
        expected = before - 0.1 / (1 - beta1) * m / (v.sqrt() / (1 - beta2) ** 0.5 + 1e-3)
        span = case.span(0)
        torch.testing.assert_close(got.case.param[replica, span], expected[span], rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("rule", ["sgd", *COUPLED])
@pytest.mark.parametrize("backend", EXACT)
def test_the_states_include_the_l2_penalty_of_replica_0(backend: tuple[str, str], rule: str) -> None:
    where, device = backend
    row = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "momentum": 0.9, "weight_decay": 0.5}
    replicas = [alone(make_case(rule, (100, 7), FP32, device, optional=True), r) for r in range(2)]
    got = stacked(replicas)
    got.case.step(make_table(device, row, row | {"weight_decay": 0.0}), where)
    replicas[0].step(make_table(device, row), where)
    assert_same(got.replica(0).flats(), replicas[0].flats())


@pytest.mark.parametrize("name", ["sgd-decay", "sgd-momentum", "adamw", "lion"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_skipped_step_and_a_slot_without_gradient_change_nothing(backend: tuple[str, str], name: str) -> None:
    (where, device), (rule, row) = backend, RULES[name]
    case = make_case(rule, (33, 600, 0), FP32, device, optional=True)
    case.grads[1] = None
    got = stacked([alone(case, r) for r in range(3)])
    table, before = make_table(device, row, row, row), [flat.clone() for flat in got.case.flats()]
    got.case.step(table, where, Scalars(found_inf=torch.ones((), device=device)))
    assert_same(got.case.flats(), before)
    assert got.case.steps.tolist() == [0, 0, 0]
    got.case.step(table, where, Scalars(found_inf=torch.zeros((), device=device)))
    assert got.case.steps.abs().tolist() == [1, 0, 1], "one step, however many replicas"
    for flat, old in zip(got.case.flats(), before, strict=True):
        assert torch.equal(flat[..., case.span(1)], old[..., case.span(1)])
    assert (got.case.param[:, case.span(0)] != before[0][:, case.span(0)]).any(dim=1).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_norm_clips_its_part_of_the_table(backend: tuple[str, str]) -> None:
    where, device = backend
    norms = torch.tensor([4.0, 16.0], dtype=FP64, device=device)
    case = make_case("sgd", (33, 7, 5, 600), FP64, device, optional=False, table_rows=(0, 1, 2, 3))
    before = case.param.clone()
    rows = [{"lr": 0.5, "max_grad_norm": limit} for limit in (1.0, 0.0, 1.0, 64.0)]
    case.step(make_table(device, *rows), where, Scalars(norm=norms))
    for slot, factor in enumerate([1 / (4 + 1e-6), 1.0, 1 / (16 + 1e-6), 1.0]):
        span, grad = case.span(slot), case.grads[slot]
        assert grad is not None
        torch.testing.assert_close(case.param[span], before[span] - 0.5 * factor * grad, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("backend", [available("cuda", "cuda"), available("triton", "cuda")])
def test_rows_of_more_elements_than_32_bits_count(backend: tuple[str, str]) -> None:
    where, device = backend
    count = 2**30 + CHUNK + 8
    chunks = ChunkTable([Slot(0, 0, count, (count,), (1,))], [0], torch.device("cuda", 0), BF16)
    param = torch.zeros(3, count, dtype=BF16, device=device)
    table = make_table("cuda:0", *({"lr": rate} for rate in (0.5, 1.0, 2.0))).tensor
    step = ops.Step("sgd", param, [None], torch.zeros(1, device=device), table, chunks, rows=3, backend=where)
    step(chunks.match([torch.ones(count, dtype=BF16, device=device)]))
    for row, rate in zip(param, (0.5, 1.0, 2.0), strict=True):
        assert (row == -rate).all()


def arguments() -> dict[str, Any]:
    case = stacked(replicas_of("adamw", PRECISIONS["bf16-master"], "cpu", 2)).case
    row = {"lr": 0.1}
    return {
        "rule": "adamw",
        "param": case.param,
        "states": case.states,
        "steps": case.steps,
        "table": make_table("cpu", row, row).tensor,
        "chunks": case.chunks,
        "master": case.master,
        "rows": 2,
        "backend": "torch",
    }


#: A change to the arguments, and the argument that the message names.
BAD: dict[str, tuple[Any, str]] = {
    "no rows": (lambda given: {"rows": 0}, "rows"),
    "other rows": (lambda given: {"rows": 3}, "rows=3 the parameters"),
    "flat parameters": (lambda given: {"param": given["param"].view(-1)}, "parameters"),
    "one row": (lambda given: {"rows": 1}, "rows=1 the parameters"),
    "states of each": (lambda given: {"states": [torch.zeros(given["param"].shape), *given["states"][1:]]}, "exp_avg"),
    "master of one": (lambda given: {"master": given["master"][0]}, "master"),
    "strided": (lambda given: {"master": given["master"].T.contiguous().T}, "master"),
    "few rows": (lambda given: {"table": given["table"][:1]}, "at least 2 rows"),
    "uneven rows": (lambda given: {"table": given["table"].repeat(2, 1)[:3]}, "rows for each of 2 replicas"),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_arguments_name_what_was_given_and_expected(what: str) -> None:
    given = arguments()
    change, message = BAD[what]
    with pytest.raises(ValueError, match=message):
        ops.Step(**given | change(given))


def test_bad_norms_name_what_was_given_and_expected() -> None:
    given = arguments()
    grads = given["chunks"].match([torch.zeros(slot.numel) for slot in given["chunks"].entries])
    with pytest.raises(ValueError, match=r"norm must be one element .*shape \(2,\): 2 replicas share a gradient"):
        ops.Step(**given)(grads, Scalars(norm=torch.ones(2).double()))
    one = given | {"rows": 1, "param": given["param"][0], "master": given["master"][0]}
    ones = torch.ones(4, dtype=FP64)
    for norm in (ones[:3], ones[:0], ones[::2]):
        with pytest.raises(ValueError, match=r"equally many of the 2 rows .* got shape \(\d,\)"):
            ops.Step(**one)(grads, Scalars(norm=norm))
