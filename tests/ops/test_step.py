"""The step operation: every backend against plain torch, on flat buffers made by hand."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hdet_kernels import ops
from hdet_kernels.ops import Scalars
from hdet_kernels.ops.chunks import CHUNK, ChunkTable
from hdet_kernels.ops.table import COLUMNS
from hdet_kernels.ops.torch import step as torch_step
from hdet_kernels.tensors import Slot
from tests.ops.cases import (
    BACKENDS,
    BF16,
    FP16,
    FP32,
    FP64,
    POISON,
    PRECISIONS,
    RULES,
    SOME_OR_EVERY,
    Precision,
    assert_as_accurate,
    assert_same,
    available,
    case_of,
    interpreted,
    make_case,
    make_table,
    naming,
    share,
)

SIZES = {
    "one": (1,),
    "empty-between": (5, 0, 3),
    "chunk": (CHUNK,),
    "odd": (CHUNK + 1, CHUNK + 9, 2 * CHUNK - 1),
}
# For Triton's interpreter, which is slow, all kinds of slots in one case: whole blocks, a whole block at an address
# that allows no vectors, a block that lacks one element, and three slots for the mixed gradients.
INTERPRETED_SIZES = (CHUNK + 1, 1024 + 9, 1024 - 1)
# In the interpreter this rule, which has all states, runs in every precision, the others in one more than in make test:
# numbers are read and written in the same way for all rules.
INTERPRETED_RULE = "adamw-amsgrad"
INTERPRETED_PRECISION = "bf16-master-state-bf16"


def rules_of_each_kind() -> list[Any]:
    """Return the entries of RULES as parameters; all but one entry of each rule are left to make test-full."""
    seen: set[str] = set()
    parameters = []
    for name, (rule, _) in RULES.items():
        parameters.append(pytest.param(name, marks=[pytest.mark.full] if rule in seen else []))
        seen.add(rule)
    return parameters


def check_accuracy(backend: tuple[str, str], sizes: tuple[int, ...], name: str, precision: Precision) -> None:
    """Assert that two steps are as accurate as those of plain torch."""
    where, device = backend
    got = case_of(name, sizes, precision, device)
    plain = case_of(name, sizes, precision, "cpu")
    truth = plain.in_float64()
    row = RULES[name][1]
    for case, place, run in ((got, device, where), (plain, "cpu", "torch"), (truth, "cpu", "torch")):
        step = case.bound(make_table(place, row), run)
        for _ in range(2):
            step(case.chunks.match(case.grads))
    assert_as_accurate(got, plain, truth)
    counted = -2.0 if got.rule == "sgd" and not row.get("momentum") else 2.0
    assert got.steps.tolist() == [counted] * len(sizes)


@SOME_OR_EVERY
@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_step_is_as_accurate_as_plain_torch(backend: tuple[str, str], name: str, every: bool) -> None:
    """Some: every rule in every precision, and every size with both, by compiled backends; by others each precision."""
    position, kinds = list(RULES).index(name), list(PRECISIONS)
    if not every and backend[0] in ("torch", "triton"):
        kinds = share(position, len(RULES), kinds)
    elif interpreted(backend) and name != INTERPRETED_RULE:
        kinds = [INTERPRETED_PRECISION]
    for kind in kinds:
        number = (position + list(PRECISIONS).index(kind)) % len(SIZES)
        chosen = list(SIZES.values()) if every else list(SIZES.values())[number : number + 1]
        for sizes in [INTERPRETED_SIZES] if interpreted(backend) else chosen:
            with naming(kind, sizes):
                check_accuracy(backend, sizes, name, PRECISIONS[kind])


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_bound_step_follows_gradients_that_move_appear_disappear_and_change_dtype(backend: tuple[str, str]) -> None:
    where, device = backend
    case = make_case("sgd", (1030, 33), FP32, device, optional=False)
    step = case.bound(make_table(device, {"lr": 0.5}), where)
    expected = case.param.clone()
    kinds = ((FP32, FP32), (FP32, FP32), (BF16, BF16), (None, FP16), (BF16, FP32), (FP16, None))
    for value, pair in enumerate(kinds, start=1):
        case.grads = [
            None if kind is None else torch.full((slot.numel,), float(value), dtype=kind, device=device)
            for slot, kind in zip(case.chunks.entries, pair, strict=True)
        ]
        step(case.chunks.match(case.grads))
        for index, kind in enumerate(pair):
            if kind is not None:
                expected[case.span(index)] -= 0.5 * value
        assert_same([case.param], [expected])


@pytest.mark.parametrize("backend", BACKENDS)
def test_each_slot_uses_the_row_of_its_group(backend: tuple[str, str]) -> None:
    where, device = backend
    plain = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8}
    rows = (plain, plain | {"lr": 0.01, "amsgrad": 1, "maximize": 1})
    both = make_case("adamw", (9, 9), FP64, device, optional=True, table_rows=(0, 1))
    both.step(make_table(device, *rows), where)
    for index, row in enumerate(rows):
        alone = make_case("adamw", (9, 9), FP64, device, optional=True)
        alone.step(make_table(device, row), where)
        span = alone.span(index)
        assert_same([flat[span] for flat in both.flats()], [flat[span] for flat in alone.flats()])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", rules_of_each_kind())
def test_a_slot_without_gradient_and_a_skipped_step_change_nothing(name: str, backend: tuple[str, str]) -> None:
    (where, device), (rule, row) = backend, RULES[name]
    case = make_case(rule, (33, 1100, 0), FP32, device, optional=True)
    case.grads[1] = None
    before = [flat.clone() for flat in case.flats()]
    for skip in (torch.ones((), device=device), torch.full((1,), float("inf"), device=device)):
        case.step(make_table(device, row), where, Scalars(found_inf=skip))
        assert_same(case.flats(), before)
        assert case.steps.tolist() == [0, 0, 0]

    case.step(make_table(device, row), where, Scalars(found_inf=torch.zeros(1, device=device)))
    assert not torch.equal(case.param[case.span(0)], before[0][case.span(0)])
    for flat, old in zip(case.flats(), before, strict=True):
        assert torch.equal(flat[case.span(1)], old[case.span(1)])
    assert case.steps.abs().tolist() == [1, 0, 1], "an empty gradient counts as a step, a missing one does not"


@pytest.mark.parametrize(
    ("rule", "row", "flag"),
    [
        ("sgd", {"lr": 0.1, "momentum": 0.5}, "momentum"),
        ("adamw", {"lr": 0.1, "beta1": 0.9, "beta2": 0.9, "eps": 1e-8, "amsgrad": 1}, "amsgrad"),
    ],
    ids=["momentum", "amsgrad"],
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_group_without_momentum_or_amsgrad_leaves_its_optional_state_alone(
    backend: tuple[str, str], rule: str, row: dict[str, float], flag: str
) -> None:
    where, device = backend
    case = make_case(rule, (1030, 33), FP32, device, optional=True, table_rows=(0, 1))
    alone = make_case(rule, (1030, 33), FP32, device, optional=False, table_rows=(0, 1))
    optional = case.states[-1]
    assert optional is not None
    optional[case.span(0)] = POISON
    without = row | {flag: 0.0}
    case.step(make_table(device, without, row), where)
    alone.step(make_table(device, without, without), where)
    assert optional[case.span(0)].isnan().all()
    assert not optional[case.span(1)].isnan().any()
    assert_same([case.param[case.span(0)]], [alone.param[case.span(0)]])


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_first_step_with_momentum_is_without_dampening_whenever_it_comes(backend: tuple[str, str]) -> None:
    where, device = backend
    case = make_case("sgd", (8,), FP32, device, optional=True)
    (grad,), (buffer,), span = case.grads, case.states, case.span(0)
    assert grad is not None
    assert buffer is not None
    grad.fill_(1.0)
    case.param[span] = 0.0
    counts, buffers, params = [], [], [0.0]
    for momentum in (0.0, 0.0, 0.5, 0.5, 0.0, 0.5):
        case.step(make_table(device, {"lr": 0.125, "momentum": momentum, "dampening": 0.75}), where)
        counts.append(case.steps.item())
        buffers.append(buffer[span][0].item())
        params.append(case.param[span][0].item())
    assert counts == [-1, -2, 3, 4, 5, 6]
    assert buffers[0] == buffers[1] != 1.0
    assert buffers[2:] == [1.0, 0.5 * 1.0 + 0.25, 0.75, 0.5 * 0.75 + 0.25]
    directions = [(before - after) / 0.125 for before, after in itertools.pairwise(params)]
    assert directions == [1.0, 1.0, *buffers[2:4], 1.0, buffers[5]]


def clipped_by_torch(grads: Sequence[Tensor | None], limit: float) -> tuple[list[Tensor], Tensor]:
    params = [torch.nn.Parameter(torch.zeros_like(grad)) for grad in grads if grad is not None]
    for param, grad in zip(params, grads, strict=True):
        param.grad = None if grad is None else grad.clone()
    norm = torch.nn.utils.clip_grad_norm_(params, limit)
    return [param.grad for param in params if param.grad is not None], norm


@pytest.mark.parametrize("what", ["above", "below", "zero", "nan", "inf", "off"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_are_unscaled_and_clipped_as_torch_clips_them(backend: tuple[str, str], what: str) -> None:
    for scale in (None, 1024.0):
        with naming("scale", scale):
            check_clipping(backend, what, scale)


def check_clipping(backend: tuple[str, str], what: str, scale: float | None) -> None:
    where, device = backend
    row = {"lr": 0.5}
    case = make_case("sgd", (100, 7), FP64, device, optional=False)
    plain = make_case("sgd", (100, 7), FP64, "cpu", optional=False)
    for grad in (*case.grads, *plain.grads):
        assert grad is not None
        if what == "zero":
            grad.zero_()
        elif what in ("nan", "inf"):
            grad[3] = float(what)
    limit = {"above": 1.5, "below": 1e4}.get(what, 1.5)
    plain.grads[:], _ = clipped_by_torch(plain.grads, limit if what != "off" else 1e30)
    plain.step(make_table("cpu", row), "torch")

    if scale is not None:
        case.grads = [grad * scale for grad in case.grads if grad is not None]
    norm = ops.grad_norm(case.chunks, case.chunks.match(case.grads), backend=where)
    scalars = Scalars(None if scale is None else torch.tensor(scale, device=device), norm.reshape(1))
    case.step(make_table(device, row | {"max_grad_norm": 0.0 if what == "off" else limit}), where, scalars)
    torch.testing.assert_close(case.param.cpu(), plain.param, rtol=1e-14, atol=1e-14, equal_nan=True)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", rules_of_each_kind())
def test_the_scale_divides_the_gradient(name: str, backend: tuple[str, str]) -> None:
    (where, device), (rule, row) = backend, RULES[name]
    scaled = make_case(rule, (100,), FP64, device, optional=True)
    plain = make_case(rule, (100,), FP64, device, optional=True)
    scaled.grads = [grad * 1024 for grad in scaled.grads if grad is not None]
    scaled.step(make_table(device, row), where, Scalars(grad_scale=torch.tensor([1024.0], device=device)))
    plain.step(make_table(device, row), where)
    assert_same(scaled.flats(), plain.flats())


@pytest.mark.parametrize("stochastic", [False, True], ids=["nearest", "stochastic"])
@pytest.mark.parametrize("name", RULES)
def test_plain_torch_computes_the_same_without_reading_on_the_host(
    name: str, stochastic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rule, row = RULES[name]
    rows = (row, row | {"lr": 0.3, "momentum": 0.0, "amsgrad": 0, "maximize": 1, "weight_decay": 0.0, "seed": 3})
    rows = tuple(row | {"max_grad_norm": 2.0} for row in rows)
    results = []
    for free in (True, False):
        monkeypatch.setattr(torch_step, "_free_to_read", lambda tensor, free=free: free)
        case = make_case(rule, (33, 7), FP32 if stochastic else FP64, "cpu", optional=True, table_rows=(0, 1))
        case.states = [state.to(BF16) if state is not None and stochastic else state for state in case.states]
        for found in (0.0, 1.0, 0.0):
            scalars = Scalars(torch.tensor(2.0), torch.tensor(9.0, dtype=FP64), torch.tensor(found))
            case.step(make_table("cpu", *rows), "torch", scalars, stochastic_rounding=stochastic)
        results.append([*case.flats(), case.steps])
    for host, device in zip(*results, strict=True):
        tolerance = 1e-15 if host.dtype == FP64 else 1e-6 if host.dtype == FP32 else 0
        torch.testing.assert_close(device, host, rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.parametrize("backend", BACKENDS)
def test_infinite_parameters_without_weight_decay_stay_infinite(backend: tuple[str, str]) -> None:
    where, device = backend
    for rule in ("sgd", "adam", "adagrad"):
        case = make_case(rule, (4,), FP32, device, optional=True)
        case.param.fill_(float("-inf"))
        case.step(make_table(device, {"lr": 0.1, "beta1": 0.9, "beta2": 0.9, "eps": 1e-8}), where)
        assert case.param.isneginf().all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_adam_corrects_its_bias_however_near_to_one_the_betas_are(backend: tuple[str, str]) -> None:
    """In Triton at later steps too: rounding βᵗ before subtracting it from 1 would leave eight digits."""
    where, device = backend
    beta1, beta2 = 1 - 1e-7, 1 - 1e-9
    for t in (1, 5) if where == "triton" else (1,):
        case = make_case("adam", (5,), FP64, device, optional=False)
        before, (grad,), span = case.param.clone(), case.grads, case.span(0)
        assert grad is not None
        for state in case.states[:2]:
            assert state is not None
            state.zero_()
        case.steps.fill_(t - 1)
        case.step(make_table(device, {"lr": 0.25, "beta1": beta1, "beta2": beta2, "eps": 1e-30}), where)
        first, second = (math.expm1(t * math.log(beta)) / (beta - 1) for beta in (beta1, beta2))
        update = 0.25 / first * second**0.5 * grad.sign()
        torch.testing.assert_close(before[span] - case.param[span], update, rtol=1e-13, atol=0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_lion_stays_where_its_direction_is_zero(backend: tuple[str, str]) -> None:
    where, device = backend
    case = make_case("lion", (5,), FP32, device, optional=True)
    before = case.param.clone()
    for tensor in (case.states[0], case.grads[0]):
        assert tensor is not None
        tensor.zero_()
    case.step(make_table(device, {"lr": 0.1, "beta1": 0.9, "beta2": 0.9}), where)
    assert torch.equal(case.param, before)


@pytest.mark.parametrize("backend", BACKENDS)
def test_nan_gradients_reach_the_largest_second_moment(backend: tuple[str, str]) -> None:
    where, device = backend
    row = {"lr": 0.1, "beta1": 0.9, "beta2": 0.9, "eps": 1e-8, "amsgrad": 1}
    for dtype in (FP32, FP64, BF16):
        case = make_case("adam", (4,), dtype, device, optional=True)
        grad = case.grads[0]
        assert grad is not None
        grad[2] = float("nan")
        for _ in range(2):
            case.step(make_table(device, row), where)
            grad.zero_()
        for flat in case.flats():
            assert flat[case.span(0)].isnan().tolist() == [False, False, True, False], dtype


@pytest.mark.parametrize("backend", [available("cuda", "cuda"), available("triton", "cuda")])
def test_more_elements_than_32_bits_count(backend: tuple[str, str]) -> None:
    where, device = backend
    count = 2**31 + CHUNK + 5
    chunks = ChunkTable([Slot(0, 0, count, (count,), (1,))], [0], torch.device("cuda", 0), BF16)
    param = torch.zeros(count, dtype=BF16, device=device)
    grads = chunks.match([torch.ones_like(param)])
    table = make_table("cuda:0", {"lr": 0.5}).tensor
    step = ops.Step("sgd", param, [None], torch.zeros(1, device=device), table, chunks, backend=where)
    step(grads)
    assert (param == -0.5).all()
    assert ops.grad_norm(chunks, grads, backend=where).item() == pytest.approx(count**0.5, rel=1e-12)


#: A change to the arguments, and the argument that the message names.
BAD: dict[str, tuple[Any, str]] = {
    "rule": (lambda case: {"rule": "adamax"}, "adamax"),
    "states": (lambda case: {"states": case.states[:1]}, "exp_avg_sq"),
    "missing state": (lambda case: {"states": [None, *case.states[1:]]}, "exp_avg"),
    "short state": (lambda case: {"states": [case.param[:-1], *case.states[1:]]}, "exp_avg"),
    "fp16 state": (lambda case: {"states": [state.half() for state in case.states]}, "exp_avg"),
    "states of two dtypes": (lambda case: {"states": [case.states[0].to(BF16), *case.states[1:]]}, "one dtype"),
    "steps": (lambda case: {"steps": case.steps.double()}, "steps must be a contiguous torch.float32"),
    "columns": (lambda case: {"table": torch.zeros(1, 3).double()}, "columns"),
    "rows": (lambda case: {"table": torch.zeros(0, len(COLUMNS)).double()}, "at least 1 rows"),
    "extent": (lambda case: {"param": case.param[:64], "states": [s[:64] for s in case.states]}, "reaches to element"),
    "chunks": (lambda case: {"param": case.param.half()}, "torch.float16"),
    "master of fp32": (lambda case: {"master": case.param.clone()}, "master"),
    "both precisions": (
        lambda case: {"param": case.param.to(BF16), "master": case.param, "stochastic_rounding": True},
        "with master",
    ),
    "stochastic fp16": (lambda case: {"param": case.param.half(), "stochastic_rounding": True}, "without master"),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_arguments_name_what_was_given_and_expected(what: str) -> None:
    case = make_case("adamw", (100,), FP32, "cpu", optional=True)
    change, message = BAD[what]
    arguments = {
        "rule": case.rule,
        "param": case.param,
        "states": case.states,
        "steps": case.steps,
        "table": make_table("cpu", {"lr": 0.1}).tensor,
        "chunks": case.chunks,
    } | change(case)
    with pytest.raises(ValueError, match=message):
        ops.Step(**arguments)


def test_bad_gradients_and_scalars_name_what_was_given_and_expected() -> None:
    case = make_case("adamw", (100,), FP32, "cpu", optional=True)
    step = case.bound(make_table("cpu", {"lr": 0.1}), "torch")
    grads = case.chunks.match(case.grads)
    two = make_case("adamw", (3, 4), FP32, "cpu", optional=True)
    with pytest.raises(ValueError, match="has 1 slots, got 2 gradients"):
        step(two.chunks.match(two.grads))
    for scalars, message in (
        (Scalars(grad_scale=torch.ones(2)), r"grad_scale must be one element.*shape \(2,\)"),
        (Scalars(norm=torch.ones(())), "norm must be one element of torch.float64, got torch.float32"),
        (Scalars(found_inf=torch.ones(1).double()), "found_inf must be one element of torch.float32"),
        (Scalars(found_inf=torch.ones(1, device="meta")), "found_inf is on meta and the parameters on cpu"),
    ):
        with pytest.raises(ValueError, match=message):
            step(grads, scalars)


def test_scalars_move_to_another_device_only_if_they_are_elsewhere() -> None:
    scalars = Scalars(torch.ones(1), None, torch.zeros(1))
    assert scalars.on(torch.device("cpu")) is scalars
    moved = scalars.on(torch.device("meta"))
    assert (moved.grad_scale.device.type, moved.norm, moved.found_inf.device.type) == ("meta", None, "meta")


def test_every_rule_has_a_case_for_all_backends() -> None:
    assert {rule for rule, _ in RULES.values()} == set(ops.STATES)


def test_the_rules_are_those_of_the_header_in_the_same_order() -> None:
    header = (Path(__file__).parents[2] / "csrc" / "rules.h").read_text()
    assert f"enum class Rule : int64_t {{ {', '.join(ops.STATES)} }};" in header


SPECIAL = (math.nan, math.inf, -math.inf, -0.0, 0.0, 1.0, -1.0)
# The square overflows from 1.9e19 on; multiplied by 1 − β₂ = 0.001 first, only from 5.9e20 on.
HUGE = (1e18, 1e19, -1.8e19, 3e19, -1e20, 5e20, 1e21, -1e25, 3e38)


def stepped(name: str, values: tuple[float, ...], backend: tuple[str, str]) -> tuple[Tensor, ...]:
    """Return the parameter and the states after a step with these gradients, from zero states."""
    (where, device), (rule, row) = backend, RULES[name]
    case = make_case(rule, (len(values),), FP32, device, optional=name.endswith(("momentum", "nesterov", "amsgrad")))
    span = case.span(0)
    case.param[span] = 1.0
    for state in case.states:
        if state is not None:
            state[span] = 0.0
    case.grads = [torch.tensor(values, device=device)]
    case.step(make_table(device, row), where)
    return tuple(flat[span].cpu() for flat in (case.param, *case.states) if flat is not None)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["sgd-nesterov", "adam", "adamw-amsgrad", "adagrad", "lion"])
def test_all_backends_agree_on_nan_infinity_and_overflow(name: str, backend: tuple[str, str]) -> None:
    expected = stepped(name, SPECIAL + HUGE, ("torch", "cpu"))
    for got, want in zip(stepped(name, SPECIAL + HUGE, backend), expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-6, atol=0, equal_nan=True)


def test_lion_makes_nan_of_a_nan_gradient() -> None:
    """torch's sign(NaN) is 0: the parameter would stand still for ever, and the loss would not show it."""
    param, moment = stepped("lion", SPECIAL, ("torch", "cpu"))
    assert param.isnan().tolist() == [True] + [False] * (len(SPECIAL) - 1)
    assert moment.isnan().tolist() == [True] + [False] * (len(SPECIAL) - 1)
    assert moment[1:3].isinf().all()


@pytest.mark.parametrize(
    ("name", "optimizer"),
    [("adam", torch.optim.Adam), ("adamw", torch.optim.AdamW), ("adagrad", torch.optim.Adagrad)],
    ids=["adam", "adamw", "adagrad"],
)
def test_second_moments_overflow_where_those_of_torch_do(name: str, optimizer: Any) -> None:
    row = dict(RULES[name][1])
    if name != "adagrad":
        row["betas"] = (row.pop("beta1"), row.pop("beta2"))
    param = torch.nn.Parameter(torch.ones(len(HUGE)))
    plain = optimizer([param], **row)
    param.grad = torch.tensor(HUGE)
    plain.step()
    known = plain.state[param]
    moments = [known["sum"]] if name == "adagrad" else [known["exp_avg"], known["exp_avg_sq"]]
    for got, want in zip(stepped(name, HUGE, ("torch", "cpu")), (param.detach(), *moments), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-6, atol=0, equal_nan=True)
