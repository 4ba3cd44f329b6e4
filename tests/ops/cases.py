"""Cases that the tests of kernels share: backends, rules, precisions, and flat buffers with marked memory around slots.

``make test`` runs a covering choice of the combinations: every backend with every rule and with every precision.
``make test-full`` runs all of them. Tests with many combinations have one item for each backend and rule, and loop over
the rest within :func:`naming`, so that collecting them is quick and a failure still names its combination.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from hdet_kernels import ops
from hdet_kernels.ops import Scalars
from hdet_kernels.ops import backends as registry
from hdet_kernels.ops.chunks import CHUNK, ChunkTable
from hdet_kernels.ops.table import HyperTable
from hdet_kernels.tensors import Slot

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
    "muon": ("muon", {"lr": 0.02, "momentum": 0.95, "nesterov": 1}),
    "muon-move": ("muon", {"lr": 0.02, "weight_decay": 0.1}),
}


@dataclass(frozen=True)
class Precision:
    """The dtypes of parameters, states and gradients. The slots take the dtypes ``grads`` in turn."""

    param: torch.dtype
    state: torch.dtype
    grads: tuple[torch.dtype, ...]
    master: bool = False


FP32, FP64, BF16, FP16 = torch.float32, torch.float64, torch.bfloat16, torch.float16

PRECISIONS = {
    "fp32": Precision(FP32, FP32, (FP32,)),
    "fp64": Precision(FP64, FP64, (FP64,)),
    "fp32-grad-bf16": Precision(FP32, FP32, (BF16,)),
    "fp32-grad-mixed": Precision(FP32, FP32, (FP16, FP32, BF16)),
    "fp32-state-bf16": Precision(FP32, BF16, (FP32,)),
    "bf16-state-bf16": Precision(BF16, BF16, (BF16,)),
    "bf16-state-fp32": Precision(BF16, FP32, (BF16,)),
    "bf16-grad-mixed": Precision(BF16, BF16, (FP32, BF16)),
    "bf16-master": Precision(BF16, FP32, (BF16,), master=True),
    "bf16-master-state-bf16": Precision(BF16, BF16, (BF16,), master=True),
    "fp16-state-fp32": Precision(FP16, FP32, (FP16,)),
    "fp16-master": Precision(FP16, FP32, (FP16,), master=True),
}


NO_SCALARS = Scalars()

# The value around gradients and states: a kernel that reads it gives a wrong result.
POISON = float("nan")

# The value around parameters: a kernel that writes there changes it (a NaN would stay a NaN).
SENTINEL = 7.0


def available(name: str, device: str) -> Any:
    """Return a test parameter for the backend on the device; it is skipped, with the reason, where it cannot run."""
    reason = registry.backends()[name]
    if reason == "ok" and device == "cuda" and not torch.cuda.is_available():
        reason = "torch finds no usable NVIDIA GPU"
    if reason == "ok" and (name, device) == ("triton", "cpu") and not registry.interpreting():
        reason = "the kernels are compiled for the GPU here (TRITON_INTERPRET is not set)"
    marks = [pytest.mark.skipif(reason != "ok", reason=f"{name} on {device}: {reason}")]
    if device == "cuda":
        marks.append(pytest.mark.gpu)
    if (name, device) == ("triton", "cpu"):
        # The interpreter uses numpy, which warns of quotients in lanes that are masked out.
        marks.append(pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter"))
    return pytest.param((name, device), id=f"{name}-{device}", marks=marks)


BACKENDS = [
    available("torch", "cpu"),
    available("torch", "cuda"),
    available("cpp", "cpu"),
    available("cuda", "cuda"),
    available("triton", "cuda"),
    available("triton", "cpu"),
]


# All but Triton's interpreter, which takes a tenth of a second for a small step. For tests of the optimizers, where the
# arithmetic is not in question. On a GPU, Triton's kernels take part.
QUICK = [backend for backend in BACKENDS if backend.id != "triton-cpu"]

# All, but Triton's interpreter in make test-full alone: for tests whose steps it would make slow.
INTERPRETER_IN_FULL = [
    *QUICK,
    *(pytest.param(*b.values, id=b.id, marks=[*b.marks, pytest.mark.full]) for b in BACKENDS if b.id == "triton-cpu"),
]

# The backends that run without a GPU.
ON_CPU = [backend for backend in BACKENDS if backend.id.endswith("-cpu")]


#: A test over many combinations: a covering choice of them in make test, all of them in make test-full.
SOME_OR_EVERY = pytest.mark.parametrize(
    "every", [pytest.param(False, id="some"), pytest.param(True, id="every", marks=pytest.mark.full)]
)


@contextmanager
def naming(*labels: object) -> Iterator[None]:
    """Put the labels of a combination in front of the message of a failed assertion."""
    try:
        yield
    except AssertionError as error:
        raise AssertionError(f"{'-'.join(map(str, labels))}: {error}") from error


def interpreted(backend: tuple[str, str]) -> bool:
    """Return whether the backend is Triton's interpreter, which takes about a second for a case."""
    return backend == ("triton", "cpu")


def share(position: int, count: int, items: Sequence[str]) -> list[str]:
    """Return the items of test number ``position`` of ``count``; together the tests have every item once."""
    return [item for index, item in enumerate(items) if index % count == position]


@dataclass
class Case:
    """Flat buffers with marked memory around every slot, and gradients with NaN around them.

    Every other gradient lies at an address that is no multiple of 16. With ``rows`` > 1 parameters and master are
    [rows, n].
    """

    rule: str
    param: Tensor
    states: list[Tensor | None]
    steps: Tensor
    chunks: ChunkTable
    grads: list[Tensor | None]
    gap: Tensor
    master: Tensor | None = None
    rows: int = 1

    def flats(self) -> list[Tensor]:
        return [flat for flat in (self.param, *self.states, self.master) if flat is not None]

    def span(self, index: int) -> slice:
        slot = self.chunks.entries[index]
        return slice(slot.offset, slot.offset + slot.numel)

    def assert_neighbours_untouched(self) -> None:
        assert (self.param[self.gap] == SENTINEL).all(), "something was written beside a slot"
        if self.master is not None:
            assert (self.master[self.gap] == SENTINEL).all(), "something was written beside a slot of the master"
        for state in self.states:
            assert state is None or state[self.gap].isnan().all(), "something was written beside a slot of the state"

    def bound(self, table: HyperTable, backend: str, *, stochastic_rounding: bool = False) -> ops.Step:
        return ops.Step(
            self.rule,
            self.param,
            self.states,
            self.steps,
            table.tensor,
            self.chunks,
            master=self.master,
            stochastic_rounding=stochastic_rounding,
            rows=self.rows,
            backend=backend,
        )

    def step(
        self,
        table: HyperTable,
        backend: str,
        scalars: Scalars = NO_SCALARS,
        *,
        stochastic_rounding: bool = False,
    ) -> None:
        step = self.bound(table, backend, stochastic_rounding=stochastic_rounding)
        step(self.chunks.match(self.grads), scalars)

    def in_float64(self) -> Case:
        """Return a case with the same numbers in float64, at the same offsets; the master becomes the parameter."""
        chunks = ChunkTable(self.chunks.entries, self.chunks.table_rows, torch.device("cpu"), FP64)
        return replace(
            self,
            param=(self.param if self.master is None else self.master).to(FP64, copy=True),
            states=[None if state is None else state.to(FP64, copy=True) for state in self.states],
            steps=self.steps.clone(),
            chunks=chunks,
            grads=[None if grad is None else grad.double() for grad in self.grads],
            master=None,
        )


def make_case(
    rule: str,
    sizes: tuple[int, ...],
    dtype: torch.dtype,
    device: str,
    *,
    optional: bool,
    table_rows: tuple[int, ...] = (),
    state: torch.dtype | None = None,
    grads: Sequence[torch.dtype] = (),
    master: bool = False,
) -> Case:
    """Return a case with random numbers.

    Args:
        rule: The update rule.
        sizes: The elements of each slot.
        dtype: The dtype of the parameters.
        device: The device.
        optional: Whether optional states are given.
        table_rows: For each slot, its row of the hyperparameter table; row 0 by default.
        state: The dtype of the states; ``dtype`` by default.
        grads: The dtypes of the gradients, which slots take in turn; ``dtype`` by default.
        master: Whether there is a master.
    """
    unit = 128 // dtype.itemsize
    slots, end = [], unit
    for size in sizes:
        slots.append(Slot(0, end, size, (size,), (1,)))
        end += -(-size // unit) * unit + unit
    gap = torch.ones(end, dtype=torch.bool)
    for slot in slots:
        gap[slot.offset : slot.offset + slot.numel] = False
    generator = torch.Generator().manual_seed(sum(sizes))

    def flat(low: float, around: float, kind: torch.dtype) -> Tensor:
        values = torch.rand(end, generator=generator, dtype=FP64) * 0.5 + low
        return values.masked_fill(gap, around).to(device, kind)

    in_full = flat(-0.25, SENTINEL, FP32 if master else dtype)
    gradients: list[Tensor | None] = []
    for index, size in enumerate(sizes):
        kind = grads[index % len(grads)] if grads else dtype
        start = 16 + index % 2
        around = torch.full((size + 32,), POISON, dtype=FP64)
        around[start : start + size] = torch.randn(size, generator=generator, dtype=FP64)
        gradients.append(around.to(device, kind)[start : start + size])
    names = ops.STATES[rule]
    states = [
        flat(0.1, POISON, state or dtype) if optional or name not in ops.OPTIONAL_STATES else None for name in names
    ]
    chunks = ChunkTable(slots, table_rows or (0,) * len(sizes), torch.empty(0, device=device).device, dtype)
    steps = torch.zeros(len(sizes), device=device)
    # A copy: a parameter must not share the memory of its master if they have the same dtype.
    param = in_full.to(dtype, copy=True)
    return Case(rule, param, states, steps, chunks, gradients, gap.to(device), in_full if master else None)


def case_of(name: str, sizes: tuple[int, ...], precision: Precision, device: str) -> Case:
    """Return a case for an entry of RULES, with the optional states only if the entry uses them."""
    rule, row = RULES[name]
    return make_case(
        rule,
        sizes,
        precision.param,
        device,
        optional=bool(row.get("momentum") or row.get("amsgrad")),
        state=precision.state,
        grads=precision.grads,
        master=precision.master,
    )


def make_table(device: str, *table_rows: dict[str, float]) -> HyperTable:
    """Return a hyperparameter table with the given rows."""
    table = HyperTable(len(table_rows), torch.empty(0, device=device).device)
    table.write(table_rows)
    return table


def assert_as_accurate(got: Case, plain: Case, truth: Case) -> None:
    """Assert that the error is at most twice that of plain torch in the same precision, both against float64.

    One rounding of the arithmetic is added, because plain torch may happen to be exact. In float64 the truth itself is
    rounded in every operation; there a few roundings of the result are allowed.
    """
    inside = ~plain.gap
    got.assert_neighbours_untouched()
    exact = [*truth.flats(), truth.param] if plain.master is not None else truth.flats()
    for mine, theirs, true in zip(got.flats(), plain.flats(), exact, strict=True):
        error = (mine.cpu().double() - true)[inside].abs().max()
        theirs_error = (theirs.double() - true)[inside].abs().max()
        largest = true[inside].abs().max()
        if mine.dtype == FP64:
            allowed = 8 * torch.finfo(FP64).eps * largest
        else:
            allowed = 2 * theirs_error + torch.finfo(FP32).eps * largest
        assert error <= allowed, f"error {error:.3g}, allowed {allowed:.3g}"


def assert_same(mine: Sequence[Tensor], theirs: Sequence[Tensor]) -> None:
    """Assert that tensors are equal bit for bit, except for the payload of a NaN."""
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True, check_device=False)


# A whole chunk and odd ones, one at an address that allows no vectors, an empty slot and a single element.
SIZES_OF_A_ROW = (CHUNK + 1, CHUNK + 9, 0, 1)


# The rules whose weight decay enters a state, where replicas with different decays cannot share it.
COUPLED = ("adam", "adagrad")


@dataclass
class Stack:
    """A :class:`Case` whose parameters and masters are [rows, n]."""

    case: Case

    def replica(self, row: int) -> Case:
        master = None if self.case.master is None else self.case.master[row]
        return replace(self.case, param=self.case.param[row], master=master, rows=1)


def lengthened(flat: Tensor | None, extra: int, value: float) -> Tensor | None:
    return None if flat is None else torch.nn.functional.pad(flat, (0, extra), value=value)


def alone(case: Case, row: int, extra: int = 0) -> Case:
    """Return replica ``row`` alone: the case with parameters of its own, and flats longer by ``extra`` elements."""
    param, master = (lengthened(flat, extra, SENTINEL) for flat in (case.param, case.master))
    for flat in (param, master):
        if flat is not None and row > 0:
            flat += (flat != SENTINEL) * (row / 16)
    assert param is not None
    states = [lengthened(state, extra, POISON) for state in case.states]
    gap = torch.nn.functional.pad(case.gap, (0, extra), value=True)
    return replace(case, param=param, states=states, master=master, gap=gap, steps=case.steps.clone())


def stacked(replicas: list[Case]) -> Stack:
    first = replicas[0]
    masters = [case.master for case in replicas if case.master is not None]
    states = [None if state is None else state.clone() for state in first.states]
    param = torch.stack([case.param for case in replicas])
    master = torch.stack(masters) if masters else None
    steps, rows = first.steps.clone(), len(replicas)
    return Stack(replace(first, param=param, master=master, states=states, steps=steps, rows=rows))


def replicas_of(
    name: str, precision: Precision, device: str, rows: int, extra: int = 0, sizes: tuple[int, ...] = SIZES_OF_A_ROW
) -> list[Case]:
    case = case_of(name, sizes, precision, device)
    return [alone(case, row, extra) for row in range(rows)]


def rows_for(name: str, rows: int) -> list[dict[str, float]]:
    """Return the hyperparameters of each replica; those that act on the parameter differ."""
    rule, row = RULES[name]
    made = []
    for replica in range(rows):
        own = {"lr": row["lr"] * (1 + replica / 2), "eps": row.get("eps", 0.0) * 10**replica, "seed": 3.0 + replica}
        if "lr_decay" in row:
            own["lr_decay"] = row["lr_decay"] * (1 + replica)
        coupled = rule in COUPLED or bool(row.get("momentum"))
        own["weight_decay"] = 0.0 if coupled else row.get("weight_decay", 0.0) * (1 + replica)
        made.append(row | own)
    return made
