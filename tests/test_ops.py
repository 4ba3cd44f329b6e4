"""The step operation itself: every backend against the plain torch text, on hand-made flat buffers."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hdet_kernels import ops
from hdet_kernels.buckets import Slot
from hdet_kernels.ops import backends as registry
from hdet_kernels.ops import reference
from hdet_kernels.ops.chunks import CHUNK, ChunkTable
from hdet_kernels.ops.reference import Row
from hdet_kernels.ops.table import COLUMNS, HyperTable, Staged

RULES: dict[str, tuple[str, dict[str, float]]] = {
    "sgd": ("sgd", {"lr": 0.1}),
    "sgd-decay": ("sgd", {"lr": 0.1, "weight_decay": 0.1}),
    "sgd-momentum": ("sgd", {"lr": 0.1, "momentum": 0.9, "dampening": 0.3}),
    "sgd-nesterov": ("sgd", {"lr": 0.1, "momentum": 0.9, "nesterov": 1}),
    "adam": ("adam", {"lr": 0.01, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.1}),
    "adam-amsgrad": ("adam", {"lr": 0.01, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "amsgrad": 1}),
    "adamw": ("adamw", {"lr": 0.01, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1}),
    "adamw-amsgrad": ("adamw", {"lr": 0.01, "beta1": 0.8, "beta2": 0.95, "eps": 1e-6, "amsgrad": 1, "maximize": 1}),
    "adagrad": ("adagrad", {"lr": 0.1, "lr_decay": 0.1, "weight_decay": 0.01, "eps": 1e-10}),
    "lion": ("lion", {"lr": 0.01, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1, "maximize": 1}),
}
SIZES = {
    "one": (1,),
    "empty-between": (5, 0, 3),
    "chunk": (CHUNK,),
    "odd": (CHUNK + 1, CHUNK + 9, 2 * CHUNK - 1),
}
DTYPES = {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.bfloat16, "fp16": torch.float16}
#: Around gradients and states: what is read from there shows in the result.
POISON = float("nan")
#: Around parameters: what is written there shows by not being this any more (a NaN would stay a NaN).
SENTINEL = 7.0


def available(name: str, device: str) -> object:
    """The backend on the device as a test parameter; skipped, with the reason, where it cannot run."""
    reason = registry.backends()[name]
    if reason == "ok" and device == "cuda" and not torch.cuda.is_available():
        reason = "torch finds no usable NVIDIA GPU"
    marks = [pytest.mark.skipif(reason != "ok", reason=f"{name} on {device}: {reason}")]
    if device == "cuda":
        marks.append(pytest.mark.gpu)
    return pytest.param((name, device), id=f"{name}-{device}", marks=marks)


BACKENDS = [available("torch", "cpu"), available("torch", "cuda"), available("cpp", "cpu"), available("cuda", "cuda")]


@dataclass
class Case:
    """Flat buffers with marked neighbours around every slot, and gradients with NaN around them, every other one at an
    address that is no multiple of 16."""

    rule: str
    param: Tensor
    states: list[Tensor | None]
    steps: Tensor
    chunks: ChunkTable
    grads: list[Tensor | None]
    gap: Tensor

    def flats(self) -> list[Tensor]:
        return [self.param, *(state for state in self.states if state is not None)]

    def assert_neighbours_untouched(self) -> None:
        assert (self.param[self.gap] == SENTINEL).all(), "something was written beside a slot"
        for state in self.flats()[1:]:
            assert state[self.gap].isnan().all(), "something was written beside a slot of the state"

    def step(self, table: HyperTable, backend: str, **scalars: Tensor) -> None:
        grads = self.chunks.match(self.grads)
        ops.step(
            self.rule,
            self.param,
            self.states,
            self.steps,
            table.tensor,
            self.chunks,
            grads,
            backend=backend,
            **scalars,
        )


def make_case(
    rule: str, sizes: tuple[int, ...], dtype: torch.dtype, device: str, *, optional: bool, rows: tuple[int, ...] = ()
) -> Case:
    unit = 128 // dtype.itemsize
    slots, end = [], unit
    for size in sizes:
        slots.append(Slot(0, end, size, (size,), (1,)))
        end += -(-size // unit) * unit + unit
    gap = torch.ones(end, dtype=torch.bool)
    for slot in slots:
        gap[slot.offset : slot.offset + slot.numel] = False
    generator = torch.Generator().manual_seed(sum(sizes))

    def flat(low: float, around: float) -> Tensor:
        values = torch.rand(end, generator=generator, dtype=torch.float64) * 0.5 + low
        return values.masked_fill(gap, around).to(device, dtype)

    names = ops.STATES[rule]
    states = [flat(0.1, POISON) if optional or name not in ops.OPTIONAL_STATES else None for name in names]
    grads: list[Tensor | None] = []
    for index, size in enumerate(sizes):
        start = unit + index % 2
        around = torch.full((size + 2 * unit,), POISON, dtype=torch.float64)
        around[start : start + size] = torch.randn(size, generator=generator, dtype=torch.float64)
        grads.append(around.to(device, dtype)[start : start + size])
    chunks = ChunkTable(slots, rows or (0,) * len(sizes), torch.empty(0, device=device).device, dtype)
    steps = torch.zeros(len(sizes), device=device)
    return Case(rule, flat(-0.25, SENTINEL), states, steps, chunks, grads, gap.to(device))


def make_table(device: str, *rows: dict[str, float]) -> HyperTable:
    table = HyperTable(len(rows), torch.empty(0, device=device).device)
    table.write(rows)
    return table


def assert_as_accurate(got: Case, plain: Case, truth: Case) -> None:
    """At most twice the error of plain torch in the same dtype, both against float64.

    In float64 the truth itself is rounded, in every operation: there, a few roundings of the result.
    """
    inside = ~plain.gap
    got.assert_neighbours_untouched()
    for mine, theirs, true in zip(got.flats(), plain.flats(), truth.flats(), strict=True):
        exact = true[inside]
        error = (mine.cpu()[inside].double() - exact).abs().max()
        rounding = torch.finfo(mine.dtype).eps * exact.abs().max()
        theirs_error = (theirs[inside].double() - exact).abs().max()
        allowed = 8 * rounding if mine.dtype == torch.float64 else 2 * theirs_error + rounding
        assert error <= allowed, f"error {error:.3g}, allowed {allowed:.3g}"


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES.keys())
@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_step_is_as_accurate_as_plain_torch(
    backend: tuple[str, str], name: str, sizes: tuple[int, ...], dtype: torch.dtype
) -> None:
    rule, row = RULES[name]
    optional = bool(row.get("momentum") or row.get("amsgrad"))
    where, device = backend
    got = make_case(rule, sizes, dtype, device, optional=optional)
    plain = make_case(rule, sizes, dtype, "cpu", optional=optional)
    truth = make_case(rule, sizes, torch.float64, "cpu", optional=optional)
    _copy_slots(plain, truth)
    for case, place, run in ((got, device, where), (plain, "cpu", "torch"), (truth, "cpu", "torch")):
        for _ in range(2):
            case.step(make_table(place, row), run)
    _align(truth, got)
    assert_as_accurate(got, plain, truth)
    counted = 0.0 if rule == "sgd" and not row.get("momentum") else 2.0
    assert got.steps.tolist() == [counted] * len(sizes)


def _copy_slots(source: Case, target: Case) -> None:
    """Give ``target`` (of another dtype, so with other offsets) the values of ``source``, slot by slot."""
    for ours, theirs in zip(target.flats(), source.flats(), strict=True):
        for a, b in zip(target.chunks.entries, source.chunks.entries, strict=True):
            ours[a.offset : a.offset + a.numel] = theirs[b.offset : b.offset + b.numel]
    target.grads = [None if grad is None else grad.to(target.param.dtype) for grad in source.grads]


def _align(truth: Case, like: Case) -> None:
    """Bring the float64 result into the offsets of ``like``."""
    buffers = []
    for flat in truth.flats():
        moved = torch.full((like.param.numel(),), POISON, dtype=torch.float64)
        for a, b in zip(like.chunks.entries, truth.chunks.entries, strict=True):
            moved[a.offset : a.offset + a.numel] = flat[b.offset : b.offset + b.numel]
        buffers.append(moved)
    truth.param, rest = buffers[0], iter(buffers[1:])
    truth.states = [None if state is None else next(rest) for state in truth.states]


@pytest.mark.parametrize("backend", BACKENDS)
def test_each_slot_uses_the_row_of_its_group(backend: tuple[str, str]) -> None:
    where, device = backend
    plain = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8}
    rows = (plain, plain | {"lr": 0.01, "amsgrad": 1, "maximize": 1})
    both = make_case("adamw", (9, 9), torch.float64, device, optional=True, rows=(0, 1))
    both.step(make_table(device, *rows), where)
    for index, row in enumerate(rows):
        alone = make_case("adamw", (9, 9), torch.float64, device, optional=True)
        alone.step(make_table(device, row), where)
        slot = alone.chunks.entries[index]
        for mine, theirs in zip(both.flats(), alone.flats(), strict=True):
            span = slice(slot.offset, slot.offset + slot.numel)
            assert torch.equal(mine[span], theirs[span])


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_slot_without_gradient_and_a_skipped_step_change_nothing(backend: tuple[str, str], name: str) -> None:
    (where, device), (rule, row) = backend, RULES[name]
    case = make_case(rule, (33, 5000), torch.float32, device, optional=True)
    case.grads[1] = None
    before = [flat.clone() for flat in case.flats()]
    inf = torch.ones((), device=device)
    case.step(make_table(device, row), where, found_inf=inf)
    for flat, old in zip(case.flats(), before, strict=True):
        torch.testing.assert_close(flat, old, rtol=0, atol=0, equal_nan=True)
    assert case.steps.tolist() == [0, 0]

    case.step(make_table(device, row), where, found_inf=torch.zeros(1, device=device))
    first, second = (slice(slot.offset, slot.offset + slot.numel) for slot in case.chunks.entries)
    assert not torch.equal(case.param[first], before[0][first])
    for flat, old in zip(case.flats(), before, strict=True):
        assert torch.equal(flat[second], old[second])
    assert case.steps[1] == 0


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_multiplier_scales_the_gradient(backend: tuple[str, str], name: str) -> None:
    (where, device), (rule, row) = backend, RULES[name]
    scaled = make_case(rule, (100,), torch.float64, device, optional=True)
    plain = make_case(rule, (100,), torch.float64, device, optional=True)
    scaled.grads = [grad * 1024 for grad in scaled.grads if grad is not None]
    scaled.step(make_table(device, row), where, multiplier=torch.tensor([2.0**-10], device=device).double())
    plain.step(make_table(device, row), where)
    for mine, theirs in zip(scaled.flats(), plain.flats(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", RULES)
def test_plain_torch_computes_the_same_without_reading_on_the_host(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rule, row = RULES[name]
    rows = (row, row | {"lr": 0.3, "momentum": 0.0, "amsgrad": 0, "maximize": 1, "weight_decay": 0.0})
    results = []
    for free in (True, False):
        monkeypatch.setattr(reference, "_free_to_read", lambda tensor, free=free: free)
        case = make_case(rule, (33, 7), torch.float64, "cpu", optional=True, rows=(0, 1))
        for found in (0.0, 1.0, 0.0):
            half = torch.tensor(0.5, dtype=torch.float64)
            case.step(make_table("cpu", *rows), "torch", found_inf=torch.tensor(found), multiplier=half)
        results.append([*case.flats(), case.steps])
    for host, device in zip(*results, strict=True):
        torch.testing.assert_close(device, host, rtol=1e-15, atol=1e-15, equal_nan=True)


@pytest.mark.parametrize("backend", BACKENDS)
def test_infinite_parameters_without_weight_decay_stay_infinite(backend: tuple[str, str]) -> None:
    where, device = backend
    for rule in ("sgd", "adam", "adagrad"):
        case = make_case(rule, (4,), torch.float32, device, optional=True)
        case.param.fill_(float("-inf"))
        case.step(make_table(device, {"lr": 0.1, "beta1": 0.9, "beta2": 0.9, "eps": 1e-8}), where)
        assert case.param.isneginf().all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_lion_stays_where_its_direction_is_zero(backend: tuple[str, str]) -> None:
    where, device = backend
    case = make_case("lion", (5,), torch.float32, device, optional=True)
    before = case.param.clone()
    for tensor in (case.states[0], case.grads[0]):
        assert tensor is not None
        tensor.zero_()
    case.step(make_table(device, {"lr": 0.1, "beta1": 0.9, "beta2": 0.9}), where)
    assert torch.equal(case.param, before)


@pytest.mark.parametrize("backend", BACKENDS)
def test_nan_gradients_reach_the_largest_second_moment(backend: tuple[str, str]) -> None:
    where, device = backend
    case = make_case("adam", (4,), torch.float32, device, optional=True)
    grad = case.grads[0]
    assert grad is not None
    grad[2] = float("nan")
    slot = case.chunks.entries[0]
    row = {"lr": 0.1, "beta1": 0.9, "beta2": 0.9, "eps": 1e-8, "amsgrad": 1}
    for _ in range(2):
        case.step(make_table(device, row), where)
        grad.zero_()
    largest = case.states[2]
    assert largest is not None
    assert largest[slot.offset : slot.offset + 4].isnan().tolist() == [False, False, True, False]


@pytest.mark.gpu
@pytest.mark.skipif(registry.backends()["cuda"] != "ok", reason=f"cuda: {registry.backends()['cuda']}")
def test_more_elements_than_32_bits_count() -> None:
    count = 2**31 + CHUNK + 5
    chunks = ChunkTable([Slot(0, 0, count, (count,), (1,))], [0], torch.device("cuda", 0), torch.bfloat16)
    param = torch.zeros(count, dtype=torch.bfloat16, device="cuda:0")
    grads = chunks.match([torch.ones_like(param)])
    steps = torch.zeros(1, device="cuda:0")
    table = make_table("cuda:0", {"lr": 0.5}).tensor
    ops.step("sgd", param, [None], steps, table, chunks, grads, backend="cuda")
    assert (param == -0.5).all()


def test_gradients_of_another_layout_are_brought_into_place() -> None:
    slot = Slot(0, 0, 24, (2, 3, 4), (12, 1, 3))
    chunks = ChunkTable([slot], [0], torch.device("cpu"), torch.float32)
    kept = torch.randn(24).as_strided(slot.shape, slot.stride)
    other = torch.randn(2, 3, 4, dtype=torch.float64)
    assert chunks.match([kept]).tensors[0] is kept
    (moved,) = chunks.match([other]).present
    assert (moved.stride(), moved.dtype) == (slot.stride, torch.float32)
    assert torch.equal(moved, other.float())
    ones = ChunkTable([Slot(0, 0, 3, (3, 1), (1, 1))], [0], torch.device("cpu"), torch.float32)
    column = torch.randn(3, 1).as_strided((3, 1), (1, 3))
    assert ones.match([column]).tensors[0] is column, "strides of dimensions of size 1 do not matter"


def test_gradients_that_cannot_be_used_are_refused() -> None:
    chunks = ChunkTable([Slot(0, 0, 4, (4,), (1,))], [0], torch.device("cpu"), torch.float32)
    with pytest.raises(RuntimeError, match=r"sparse=False"):
        chunks.match([torch.ones(4).to_sparse()])
    with pytest.raises(RuntimeError, match=r"\(5,\) on cpu; its parameter is \(4,\)"):
        chunks.match([torch.ones(5)])


def test_chunks_cover_every_slot_once() -> None:
    sizes = (1, 0, CHUNK, CHUNK + 1, 3 * CHUNK)
    chunks = ChunkTable([Slot(0, 0, n, (n,), (1,)) for n in sizes], range(5), torch.device("cpu"), torch.float32)
    assert chunks.chunks.dtype == torch.int32
    assert chunks.chunks.tolist() == [[0, 0], [2, 0], [3, 0], [3, 1], [4, 0], [4, 1], [4, 2]]
    assert chunks.slots.tolist() == [[0, n, row] for row, n in enumerate(sizes)]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_table_is_written_only_when_it_changed(device: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("torch finds no usable NVIDIA GPU")
    staged = Staged((2, 2), torch.float64, torch.device(device))
    assert staged.write([1.0, 2.0, 3.0, 4.0])
    assert not staged.write([1.0, 2.0, 3.0, 4.0])
    staged.tensor.zero_()
    assert not staged.write([1.0, 2.0, 3.0, 4.0]), "equal values must not be copied again"
    seen = []
    for value in range(2000):  # far more copies than are ever in flight: no staging buffer may be overwritten too early
        staged.write([float(value), 0.0, 0.0, 0.0])
        seen.append(staged.tensor[0, 0].clone())
    assert torch.stack(seen).tolist() == list(range(2000))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_tensor_learning_rate_follows_its_tensor(device: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("torch finds no usable NVIDIA GPU")
    table = HyperTable(2, torch.device(device))
    lr = torch.tensor([0.5], device=device)
    rows = [{"lr": lr, "eps": 1e-8}, {"lr": 0.25}]
    table.write(rows)
    lr.fill_(0.125)
    table.write(rows)
    assert table.tensor[:, 0].tolist() == [0.125, 0.25]
    assert table.tensor[:, COLUMNS.index("eps")].tolist() == [1e-8, 0.0]


def test_the_layout_is_that_of_the_c_header() -> None:
    header = (Path(__file__).parents[1] / "csrc" / "table.h").read_text()

    def fields(struct: str, kind: str) -> list[str]:
        body = re.search(rf"struct {struct} {{(.*?)\n}};", header, re.S)
        assert body is not None, f"csrc/table.h has no struct {struct}"
        return re.findall(rf"^\s*{kind} (\w+);", body.group(1), re.M)

    assert tuple(fields("Row", "double")) == COLUMNS == Row._fields
    assert fields("Slot", "int64_t") == ["offset", "count", "row"]
    assert fields("Chunk", "int32_t") == ["slot", "index"]
    assert f"kChunk = {CHUNK};" in header


BAD = {
    "rule": (lambda case: {"rule": "adamax"}, "unknown update rule 'adamax'"),
    "states": (lambda case: {"states": case.states[:1]}, r"exp_avg_sq.*got 1"),
    "missing state": (lambda case: {"states": [None, *case.states[1:]]}, "needs its state buffer 'exp_avg'"),
    "short state": (lambda case: {"states": [case.param[:-1], *case.states[1:]]}, "exp_avg must be a contiguous"),
    "steps": (lambda case: {"steps": case.steps.double()}, "float32 counts"),
    "columns": (lambda case: {"table": torch.zeros(1, 3).double()}, r"columns.*\(1, 3\)"),
    "rows": (lambda case: {"table": torch.zeros(0, len(COLUMNS)).double()}, "at least 1 rows"),
    "multiplier": (lambda case: {"multiplier": torch.ones(2).double()}, "multiplier must be one element"),
    "found_inf": (lambda case: {"found_inf": torch.ones(1).double()}, "found_inf must be one element of torch.float32"),
    "extent": (lambda case: {"param": case.param[:64], "states": [s[:64] for s in case.states]}, "reaches to element"),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_arguments_name_what_was_given_and_expected(what: str) -> None:
    case = make_case("adamw", (100,), torch.float32, "cpu", optional=True)
    change, message = BAD[what]
    arguments = {
        "rule": case.rule,
        "param": case.param,
        "states": case.states,
        "steps": case.steps,
        "table": make_table("cpu", {"lr": 0.1}).tensor,
        "chunks": case.chunks,
        "grads": case.chunks.match(case.grads),
    } | change(case)
    with pytest.raises(ValueError, match=message):
        ops.step(**arguments)


def test_finite_check_and_norm() -> None:
    tensors = [torch.tensor([3.0]), torch.zeros(0), torch.tensor([4], dtype=torch.int64), torch.tensor([[4.0 + 12j]])]
    assert ops.all_finite(tensors).item() is True
    assert ops.grad_norm(tensors).item() == pytest.approx(13.0)
    assert ops.grad_norm(tensors).dtype == torch.float32
    for bad in (float("inf"), float("-inf"), float("nan")):
        assert ops.all_finite([*tensors, torch.tensor([1.0, bad])]).item() is False
    assert ops.all_finite([]).item() is True
    assert ops.grad_norm([]).item() == 0
    assert ops.grad_norm([torch.full((1000,), 300.0, dtype=torch.float16)]).item() == pytest.approx(300 * 1000**0.5)
    assert ops.all_finite([torch.full((1000,), 60000.0, dtype=torch.float16)]).item() is True


class TestBackends:
    def test_every_backend_says_ok_or_why_not(self) -> None:
        state = registry.backends()
        assert list(state) == ["cuda", "triton", "cpp", "torch"]
        assert state["torch"] == "ok"
        assert "no Triton kernels yet" in state["triton"]
        assert all(isinstance(reason, str) and reason for reason in state.values())

    def test_the_fastest_available_is_the_default(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv(registry.ENVIRONMENT, raising=False)
        cpp = registry.backends()["cpp"] == "ok"
        assert registry.resolve("cpu") == ("cpp" if cpp else "torch")
        assert registry.resolve("meta") == "torch"

    def test_precedence_is_argument_then_use_backend_then_environment(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(registry, "_reason", lambda name: None)
        monkeypatch.setenv(registry.ENVIRONMENT, "torch")
        assert registry.resolve("cpu") == "torch"
        registry.use_backend("cpp")
        try:
            assert registry.resolve("cpu") == "cpp"
            assert registry.resolve("cpu", "torch") == "torch"
        finally:
            registry.use_backend(None)
        assert registry.resolve("cpu") == "torch"

    def test_an_unavailable_request_lists_reasons_and_never_falls_back(self, monkeypatch: pytest.MonkeyPatch) -> None:
        reasons = {"cuda": "no GPU here", "cpp": "no compiler here", "triton": "not yet"}
        monkeypatch.setattr(registry, "_reason", reasons.get)
        for ask in (lambda: registry.resolve("cpu", "cpp"), lambda: registry.use_backend("cpp")):
            with pytest.raises(
                RuntimeError, match=r"cpp.*not available.*cuda: no GPU here.*cpp: no compiler.*torch: ok"
            ):
                ask()
        monkeypatch.setenv(registry.ENVIRONMENT, "cuda")
        with pytest.raises(RuntimeError, match=r"'cuda' \(HDET_BACKEND\) is not available"):
            registry.resolve("cpu")

    def test_unknown_and_unfit_backends_are_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(ValueError, match=r"unknown backend 'metal'.*cuda, triton, cpp, torch"):
            registry.resolve("cpu", "metal")
        monkeypatch.setattr(registry, "_reason", lambda name: None)
        with pytest.raises(ValueError, match=r"'cuda' \(backend=\) cannot serve tensors on cpu.*are cpp, torch"):
            registry.resolve("cpu", "cuda")
