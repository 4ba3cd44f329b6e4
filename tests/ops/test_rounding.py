"""Numbers that are stored in fewer bits than they were computed in: rounding to nearest, stochastically, masters."""

from __future__ import annotations

import pytest
import torch

from hdet_kernels.ops.torch.rounding import random_bits, round_stochastically, rounding_key
from tests.ops.cases import (
    BACKENDS,
    BF16,
    FP16,
    FP32,
    INTERPRETER_IN_FULL,
    ON_CPU,
    PRECISIONS,
    RULES,
    SOME_OR_EVERY,
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

# Two whole blocks, a whole block at an address that allows no vectors, odd tails.
SIZES = (2048 + 3, 1024 + 1, 33)


def on_a_grid(case: Case) -> None:
    """Make every number of the case a multiple of 2⁻¹¹ below ½ (in bf16, rounded to its 8 bits).

    These are few enough bits for float32 arithmetic to be exact, even in squares, and too many for bf16 and fp16 after
    a step.
    """
    generator = torch.Generator().manual_seed(5)
    for flat in case.flats():
        values = torch.randint(1, 2**10, flat.shape, generator=generator) * 2.0**-11
        flat.copy_(torch.where(case.gap.cpu(), flat.cpu().float(), values))
    for grad in case.grads:
        assert grad is not None
        grad.copy_(torch.randint(1, 2**10, grad.shape, generator=generator) * 2.0**-11)


# Rules whose float32 arithmetic is exact on the grid. Adam's update has a root and a quotient, so its learning rate is
# 0 and only its states are compared.
EXACT: dict[str, tuple[str, dict[str, float]]] = {
    "sgd": ("sgd", {"lr": 0.125}),
    "sgd-momentum": ("sgd", {"lr": 0.125, "momentum": 0.5}),
    "adam-states": ("adam", {"lr": 0.0, "beta1": 0.5, "beta2": 0.5, "eps": 1.0, "amsgrad": 1}),
    "lion": ("lion", {"lr": 2.0**-10, "beta1": 0.5, "beta2": 0.5}),
}
KINDS = {
    "bf16-stochastic": (BF16, BF16, True),
    "fp32-state-bf16-stochastic": (FP32, BF16, True),
    "bf16-nearest": (BF16, BF16, False),
    "fp16-nearest": (FP16, FP32, False),
}


def check_bits(backend: tuple[str, str], name: str, kind: str) -> None:
    """Assert that two steps of a backend give the bits of plain torch."""
    (where, device), (rule, row), (dtype, state, stochastic) = backend, EXACT[name], KINDS[kind]
    rows = (row | {"seed": 1}, row | {"seed": 2**32 - 1})
    results = []
    for run, place in ((where, device), ("torch", "cpu")):
        case = make_case(rule, SIZES, dtype, place, optional=True, table_rows=(0, 1, 0), state=state, grads=(FP32,))
        on_a_grid(case)
        step = case.bound(make_table(place, *rows), run, stochastic_rounding=stochastic)
        for _ in range(2):
            step(case.chunks.match(case.grads))
        case.assert_neighbours_untouched()
        results.append([*case.flats(), case.steps])
    assert_same(*results)


@SOME_OR_EVERY
@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("backend", [backend for backend in BACKENDS if backend.id != "torch-cpu"])
def test_every_backend_rounds_exact_arithmetic_to_the_same_bits(
    backend: tuple[str, str], name: str, every: bool
) -> None:
    """In the interpreter each rule with one kind of rounding, and with another one in every."""
    one = share((list(EXACT).index(name) + every) % len(KINDS), len(KINDS), list(KINDS))
    for kind in one if interpreted(backend) else KINDS:
        with naming(kind):
            check_bits(backend, name, kind)


@pytest.mark.parametrize("backend", BACKENDS)
def test_stochastic_rounding_picks_one_of_the_two_neighbours(backend: tuple[str, str]) -> None:
    where, device = backend
    case = make_case("sgd", (2050,), BF16, device, optional=False, grads=(FP32,))
    (grad,), span = case.grads, case.span(0)
    assert grad is not None
    exact = (case.param[span].float() - grad * 0.5).cpu()
    case.step(make_table(device, {"lr": 0.5, "seed": 9}), where, stochastic_rounding=True)
    got = case.param[span].float().cpu()
    low = (exact.view(torch.int32) & -65536).view(FP32)
    high = (low.view(torch.int32) + 65536).view(FP32)
    up = got == high
    assert ((got == low) | up).all()
    assert up.any()
    assert (got == low)[low != exact].any()
    assert (got == low)[low == exact].all(), "a number that bf16 can hold is not rounded"


@pytest.mark.parametrize(
    "momentum", [pytest.param(0.0, id="sgd", marks=pytest.mark.full), pytest.param(0.5, id="sgd-momentum")]
)
@pytest.mark.parametrize("backend", INTERPRETER_IN_FULL)
def test_an_update_too_small_for_bf16_is_made_in_the_mean(backend: tuple[str, str], momentum: float) -> None:
    where, device = backend
    count, rounds, update, spacing = 8192, 6, 2.0**-12, 2.0**-7
    moved = {}
    for stochastic in (False, True):
        case = make_case("sgd", (count,), BF16, device, optional=bool(momentum))
        (grad,), span = case.grads, case.span(0)
        assert grad is not None
        case.param[span] = 1.5
        grad.fill_(-1.0)  # upwards, where the spacing of bf16 does not change
        # The momentum is 1 from the first step on: with dampening 0.5 the new gradient replaces what decays.
        row = {"lr": update, "momentum": momentum, "dampening": 0.5, "seed": 4}
        step = case.bound(make_table(device, row), where, stochastic_rounding=stochastic)
        for _ in range(rounds):
            step(case.chunks.match(case.grads))
        moved[stochastic] = (case.param[span].double() - 1.5).mean().item()
    assert moved[False] == 0, "rounding to nearest loses every one of these updates"
    chance = update / spacing
    error = spacing * (rounds * chance * (1 - chance) / count) ** 0.5
    assert abs(moved[True] - rounds * update) < 4 * error


@pytest.mark.parametrize("backend", BACKENDS)
def test_random_bits_depend_on_seed_step_and_position_alone(backend: tuple[str, str]) -> None:
    where, device = backend

    def run(seed: int, *, steps: int = 1, sizes: tuple[int, ...] = (1030, 33)) -> Case:
        case = make_case("adamw", sizes, BF16, device, optional=False)
        for flat in case.flats():
            flat.fill_(1.0)
        for grad in case.grads:
            assert grad is not None
            grad.fill_(0.625)
        row = {"lr": 0.001, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "seed": seed}
        case.steps.fill_(steps - 1)
        case.step(make_table(device, row), where, stochastic_rounding=True)
        return case

    first = run(1)
    assert_same(first.flats(), run(1).flats())
    for other in (run(2), run(1, steps=2)):
        for mine, theirs in zip(first.flats(), other.flats(), strict=True):
            assert not torch.equal(mine, theirs)
    # The same positions have the same bits in one slot and in two.
    joined = run(1, sizes=(first.span(1).stop - first.span(0).start,))
    assert_same([joined.param[first.span(1)]], [first.param[first.span(1)]])
    ups = [flat[first.span(0)] == flat[first.span(0)].max() for flat in first.flats()]
    assert not torch.equal(ups[0], ups[1]), "parameters and states have bits of their own"
    assert not torch.equal(ups[1], ups[2])


@pytest.mark.parametrize("backend", BACKENDS)
def test_stochastic_rounding_keeps_infinities_and_nan(backend: tuple[str, str]) -> None:
    where, device = backend
    case = make_case("sgd", (6,), BF16, device, optional=False, grads=(FP32,))
    (grad,), span = case.grads, case.span(0)
    assert grad is not None
    case.param[span] = 0.0
    nan = torch.tensor([0x7F800001, 0x7FFFFFFF], dtype=torch.int32).view(FP32)
    grad.copy_(torch.cat([torch.tensor([float("inf"), float("-inf"), float("nan"), 3.4e38]), nan]))
    case.step(make_table(device, {"lr": -1.0}), where, stochastic_rounding=True)
    got = case.param[span].tolist()
    assert got[:2] == [float("inf"), float("-inf")]
    assert case.param[span].isnan().tolist() == [False, False, True, False, True, True]
    assert got[3] == float("inf") or 3.3e38 < got[3] < 3.4e38


def test_rounding_is_up_with_the_probability_of_what_is_cut_off() -> None:
    noise = torch.arange(2**16)
    for part in (0, 1, 0x4000, 0xFFFF):
        value = torch.tensor(0x3F800000 + part, dtype=torch.int32).view(FP32).expand(2**16)
        assert (round_stochastically(value, noise) > 1).sum().item() == part


def test_random_bits_are_uniform_and_independent() -> None:
    """Of neighbours that share a hash, of streams, of steps, and of positions one hash and one block apart."""
    count = 2**16
    like = torch.empty(count)
    sources = [(7, 0), (7, 2), (7, 3), (8, 0), (rounding_key(torch.tensor(7.0), torch.tensor(1.0)), 0)]
    columns = [random_bits(key, stream, 0, like).view(-1, 4) for key, stream in sources]
    for halves in columns:
        for bit in range(16):
            ones = ((halves >> bit) & 1).double().mean(0)
            assert ((ones - 0.5).abs() * 2 * (count / 4) ** 0.5 < 5).all(), f"bit {bit}"
    uniform = torch.cat(columns, dim=1).double() / 2**16
    for values in (uniform, (uniform < 0.03).double(), (uniform < 0.5).double()):
        values = (values - values.mean(0)) / values.std(0)
        correlation = values.T @ values / len(values)
        correlation.fill_diagonal_(0)
        assert correlation.abs().max() * len(values) ** 0.5 < 5.5
        for lag in (1, 64):
            shifted = (values[lag:] * values[:-lag]).mean(0)
            assert shifted.abs().max() * len(values) ** 0.5 < 5.5


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("backend", [backend for backend in ON_CPU if backend.id == "cpp-cpu"])
def test_every_16_bit_number_and_every_tie_is_converted_as_torch_does(
    backend: tuple[str, str], dtype: torch.dtype
) -> None:
    where, device = backend
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    still = make_case("sgd", (every.numel(),), dtype, device, optional=False)
    (zeros,), span = still.grads, still.span(0)
    assert zeros is not None
    zeros.zero_()
    still.param[span] = every
    still.step(make_table(device, {"lr": 1.0}), where)
    number = ~every.isnan()
    assert torch.equal(still.param[span].isnan(), ~number)
    assert torch.equal(still.param[span].view(torch.int16)[number], every.view(torch.int16)[number])

    low = every[every.isfinite()].float()
    middle = low + (low - torch.nextafter(low.to(dtype), torch.tensor(0.0, dtype=dtype)).float()) / 2
    up, nowhere = torch.tensor(float("inf")), torch.tensor([float("nan"), float("inf"), -float("inf"), 3.4e38, 1e-45])
    values = torch.cat([middle, torch.nextafter(middle, up), torch.nextafter(middle, -up), nowhere])
    values = values[values != 0]
    for row in ({"lr": -1.0}, {"lr": -1.0, "momentum": 0.5}):
        case = make_case("sgd", (values.numel(),), dtype, device, optional=True, state=FP32, grads=(FP32,))
        (grad,), span = case.grads, case.span(0)
        assert grad is not None
        case.param[span] = 0.0
        grad.copy_(values)
        case.step(make_table(device, row), where)
        torch.testing.assert_close(case.param[span], values.to(dtype), rtol=0, atol=0, equal_nan=True)


MASTERED = {name: precision for name, precision in PRECISIONS.items() if precision.master}


def check_master(backend: tuple[str, str], name: str, precision: Precision) -> None:
    """Assert that the master is updated as fp32 parameters are, and that the parameter is its rounding."""
    (where, device), (rule, row) = backend, RULES[name]
    case = case_of(name, SIZES, precision, device)
    assert case.master is not None
    single = make_case(rule, SIZES, FP32, device, optional=case.states[-1] is not None)
    spans = [(case.span(index), single.span(index)) for index in range(len(SIZES))]
    single.states = [
        None if state is None else torch.zeros_like(single.param, dtype=state.dtype) for state in case.states
    ]
    for mine, theirs in spans:
        single.param[theirs] = case.master[mine]
        for a, b in zip(single.states, case.states, strict=True):
            if a is not None and b is not None:
                a[theirs] = b[mine]
    single.grads = case.grads
    for one in (case, single):
        step = one.bound(make_table(device, row), where)
        for _ in range(3):
            step(one.chunks.match(one.grads))
    for mine, theirs in spans:
        assert_same([case.master[mine]], [single.param[theirs]])
        assert_same([case.param[mine]], [case.master[mine].to(case.param.dtype)])
        for a, b in zip(single.states, case.states, strict=True):
            if a is not None and b is not None:
                assert_same([b[mine]], [a[theirs]])


MASTERED_RULES = ("sgd-momentum", "adamw-amsgrad", "adagrad", "lion")


@SOME_OR_EVERY
@pytest.mark.parametrize("name", MASTERED_RULES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_master_is_trained_like_fp32_parameters(backend: tuple[str, str], name: str, every: bool) -> None:
    """Some: each rule with one precision. Every: with the others."""
    one = list(MASTERED)[MASTERED_RULES.index(name) % len(MASTERED)]
    for kind in [kind for kind in MASTERED if kind != one] if every else [one]:
        with naming(kind):
            check_master(backend, name, MASTERED[kind])


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_master_takes_the_value_of_an_overwritten_parameter(backend: tuple[str, str], dtype: torch.dtype) -> None:
    where, device = backend
    case = make_case("sgd", (1030, 5), dtype, device, optional=False, state=FP32, grads=(dtype,), master=True)
    assert case.master is not None
    row = make_table(device, {"lr": 2.0**-10})
    for grad in case.grads:
        assert grad is not None
        grad.fill_(1.0)
    case.step(row, where)
    span, before = case.span(0), case.master.clone()
    written = slice(span.start + 7, span.stop, 11)
    case.param[written] = 0.5
    case.param[span.start] = -0.0 if case.param[span.start] != 0 else 1.0
    expected = before - 2.0**-10
    expected[written] = 0.5 - 2.0**-10
    expected[span.start] = case.param[span.start].float() - 2.0**-10
    case.step(row, where)
    for index in range(2):
        assert_same([case.master[case.span(index)]], [expected[case.span(index)]])
        assert_same([case.param[case.span(index)]], [expected[case.span(index)].to(dtype)])
    case.assert_neighbours_untouched()
