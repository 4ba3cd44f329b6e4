"""One operation, several backends: validated here, then dispatched.

:class:`Step` updates flat parameters by one of the rules, :func:`grad_norm` and :func:`all_finite` read the gradients
once. All of them walk a :class:`~hdet_kernels.ops.chunks.ChunkTable`, so that the number of launches does not depend on
the number of tensors, and none of them waits for the device. :mod:`hdet_kernels.ops.wire` has the parts of a compressed
average.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hdet_kernels.ops.backends import resolve
from hdet_kernels.ops.chunks import ChunkTable, MatchedGradients
from hdet_kernels.ops.table import COLUMNS

#: The rules and the names of their state buffers, which are torch.optim's. The order is that of ``csrc/rules.h``.
STATES: dict[str, tuple[str, ...]] = {
    "sgd": ("momentum_buffer",),
    "adam": ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
    "adamw": ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
    "adagrad": ("sum",),
    "lion": ("exp_avg",),
}

#: State buffers that a rule can do without: no momentum, no amsgrad.
OPTIONAL_STATES = frozenset({"momentum_buffer", "max_exp_avg_sq"})

#: The dtypes that the state of parameters can have. fp16 has too few exponents for squares of gradients.
STATE_DTYPES: dict[torch.dtype, tuple[torch.dtype, ...]] = {
    torch.float32: (torch.float32, torch.bfloat16),
    torch.float64: (torch.float64,),
    torch.bfloat16: (torch.float32, torch.bfloat16),
    torch.float16: (torch.float32,),
}

DTYPES = tuple(STATE_DTYPES)

_MODULES = {"torch": "reference", "triton": "triton_kernels", "cpp": "native", "cuda": "native"}

#: Parameters that can have a float32 master.
MASTERED = (torch.bfloat16, torch.float16)


class Scalars(NamedTuple):
    """What a step reads on the device beside the tables, each one element or ``None``.

    MatchedGradients are divided by ``grad_scale`` (float32). ``norm`` (dtype of the table) is that of the gradients as they
    are stored; where it is given and the row's ``max_grad_norm`` is not 0, they are also multiplied by
    ``min(1, max_grad_norm / (norm/grad_scale + 1e-6))``. It may have K elements, each for a K-th of the rows of the
    table: slots with row q are clipped by ``norm[q // (len(table) / K)]``. If ``found_inf`` (float32) is above zero
    nothing changes.
    """

    grad_scale: Tensor | None = None
    norm: Tensor | None = None
    found_inf: Tensor | None = None

    def on(self, device: torch.device) -> Scalars:
        """The same on another device, without waiting for it."""
        given = (self.grad_scale, self.norm, self.found_inf)
        if all(scalar is None or scalar.device == device for scalar in given):
            return self
        return Scalars(*(None if scalar is None else scalar.to(device, non_blocking=True) for scalar in given))


@dataclass(frozen=True)
class StepArguments:
    """What a step works on, the gradients apart; :class:`Step` says what each is."""

    rule: str
    param: Tensor
    states: Sequence[Tensor | None]
    steps: Tensor
    table: Tensor
    chunks: ChunkTable
    master: Tensor | None
    stochastic_rounding: bool
    rows: int

    @property
    def flats(self) -> tuple[Any, ...]:
        """The arguments with which the step operator of every backend begins (``operators.FLATS``)."""
        states = [*self.states, None, None][:3]
        return list(STATES).index(self.rule), self.param, self.master, *states, self.steps, self.table


class Step:
    """One step of ``rule``, in place, for every slot of ``chunks`` that has a gradient; checked once, called often.

    ``param`` [n] and each of ``states`` [n] (``None`` for an optional one that is not in use) are flat buffers laid
    out alike. ``steps`` [slots] float32 counts the steps of each slot and is advanced by the step, so that a skipped
    slot or step does not advance its bias correction; for ``"sgd"`` it is negative until the first step with momentum,
    which is the one without dampening. ``table`` [rows, columns] has the hyperparameters.

    ``master`` [n] float32 holds bf16 or fp16 parameters in full: the rule updates it, and the parameter is its
    rounding. Where a parameter is no longer that rounding, someone has written it (``load_state_dict``, averaging),
    and the master follows. With ``stochastic_rounding`` what is stored as bf16 is rounded up or down with the
    probability that makes the expectation exact. The random bits depend only on the row's ``seed``, the step count and
    the position, so a run can be repeated bit for bit.

    With ``rows`` > 1 that many replicas share the gradients and with them the states: ``param`` and ``master`` are
    [rows, n], everything else is that of one replica, but for the table, which has equally many rows for each: replica
    r steps a slot of row g with row r·G + g, G = len(table)/rows. What acts on the parameter is each replica's own
    (learning rate, decoupled weight decay, ε, bias correction, seed); what acts on gradient and states is replica 0's
    (betas, momentum, dampening, nesterov, amsgrad, maximize, clipping), so that the states are those that it would have
    alone. Weight decay as an L2 penalty (sgd, adam, adagrad) differs by replica and cannot be shared through a state:
    the caller keeps it at 0 where there is one. Without one (sgd without momentum) it is each replica's own too.
    """

    def __init__(
        self,
        rule: str,
        param: Tensor,
        states: Sequence[Tensor | None],
        steps: Tensor,
        table: Tensor,
        chunks: ChunkTable,
        *,
        master: Tensor | None = None,
        stochastic_rounding: bool = False,
        rows: int = 1,
        backend: str | None = None,
    ) -> None:
        work = StepArguments(rule, param, states, steps, table, chunks, master, stochastic_rounding, rows)
        _check(work)
        self.chunks, self._table, self._rows = chunks, table, rows
        self.backend = resolve(param.device, backend)
        self._run: Callable[[MatchedGradients, Scalars], None] = _implementation(self.backend).bind_step(work)

    def __call__(self, grads: MatchedGradients, scalars: Scalars = Scalars()) -> None:  # noqa: B008 (frozen)
        if len(grads.table) != len(self.chunks.entries):
            raise ValueError(f"the chunk table has {len(self.chunks.entries)} slots, got {len(grads.table)} gradients")
        _check_scalars(scalars, self._table, self._rows)
        self._run(grads, scalars)


def grad_norm(
    chunks: ChunkTable, grads: MatchedGradients, *, rows: int | None = None, backend: str | None = None
) -> Tensor:
    """√(Σ g²) over all gradients, a scalar on their device, summed in float64 (float32 on devices without it), in the
    same order every time. With ``rows``: [rows], over the gradients of each; the slots come row by row, equally many
    for each."""
    _check_rows(chunks, rows)
    norms: Tensor = _implementation(resolve(chunks.device, backend)).grad_norm(chunks, grads, rows or 1)
    return norms.squeeze(0) if rows is None else norms


def all_finite(
    chunks: ChunkTable, grads: MatchedGradients, *, rows: int | None = None, backend: str | None = None
) -> Tensor:
    """A bool scalar on the device of the gradients: whether every element of them is finite. With ``rows``: [rows], as
    of :func:`grad_norm`."""
    _check_rows(chunks, rows)
    finite: Tensor = _implementation(resolve(chunks.device, backend)).all_finite(chunks, grads, rows or 1)
    return finite.squeeze(0) if rows is None else finite


def _implementation(backend: str) -> ModuleType:
    """The module of a backend: each has ``bind_step``, ``grad_norm``, ``all_finite``, ``pack``, ``unpack``,
    ``wire_operators`` and ``add_noise_``."""
    return import_module(f"hdet_kernels.ops.{_MODULES[backend]}")


def _check(work: StepArguments) -> None:
    rule, param, states, master = work.rule, work.param, work.states, work.master
    steps, table, chunks, rows = work.steps, work.table, work.chunks, work.rows
    if rule not in STATES:
        raise ValueError(f"unknown update rule {rule!r}; choose one of {', '.join(STATES)}")
    if param.dtype not in DTYPES:
        raise TypeError(f"parameters must be one of {DTYPES}, got {param.dtype}")
    if rows < 1:
        raise ValueError(f"rows must be at least 1, got {rows}")
    if param.shape[:-1] != (rows,) and not (rows == 1 and param.dim() == 1):
        raise ValueError(f"with rows={rows} the parameters must be [{rows}, n], got shape {tuple(param.shape)}")
    names = STATES[rule]
    if len(states) != len(names):
        raise ValueError(f"{rule} has state buffers {names}, got {len(states)} of them (None for one not in use)")
    numel = param.shape[-1]
    flats: dict[str, tuple[Tensor, tuple[torch.dtype, ...]]] = {"param": (param, (param.dtype,))}
    for name, state in zip(names, states, strict=True):
        if state is not None:
            flats[name] = (state, STATE_DTYPES[param.dtype])
        elif name not in OPTIONAL_STATES:
            raise ValueError(f"{rule} needs its state buffer {name!r}, got None")
    state_dtypes = [None if state is None else state.dtype for state in states]
    if len(set(state_dtypes) - {None}) > 1:
        raise ValueError(f"the states must have one dtype, got {state_dtypes}")
    if master is not None:
        if param.dtype not in MASTERED:
            raise ValueError(f"only bf16 and fp16 parameters have a master, these are {param.dtype}")
        flats["master"] = (master, (torch.float32,))
    if work.stochastic_rounding and (master is not None or param.dtype == torch.float16):
        raise ValueError(
            "stochastic rounding is for bf16 parameters without master, got "
            f"{param.dtype} {'with' if master is not None else 'without'} master"
        )
    for name, (tensor, dtypes) in flats.items():
        shape = tuple(param.shape) if name in ("param", "master") else (numel,)
        if tensor.shape != shape or tensor.dtype not in dtypes or not tensor.is_contiguous():
            expected = " or ".join(map(str, dtypes))
            raise ValueError(
                f"{name} must be a contiguous {expected} buffer of shape {shape} for parameters of shape "
                f"{tuple(param.shape)}, got {tensor.dtype} of shape {tuple(tensor.shape)}"
                f"{'' if tensor.is_contiguous() else ', not contiguous'}"
            )
    if chunks.dtype != param.dtype:
        raise ValueError(f"the chunk table is for parameters of {chunks.dtype}, got {param.dtype}")
    if chunks.extent > numel:
        raise ValueError(f"the chunk table reaches to element {chunks.extent}, the parameters have {numel}")
    if steps.shape != (len(chunks.entries),) or steps.dtype != torch.float32 or not steps.is_contiguous():
        raise ValueError(
            f"steps must be {len(chunks.entries)} contiguous float32 counts, "
            f"got {steps.dtype} of shape {tuple(steps.shape)}"
        )
    if table.dim() != 2 or table.shape[1] != len(COLUMNS) or table.shape[0] < rows * chunks.row_count:
        raise ValueError(
            f"the hyperparameter table must have {len(COLUMNS)} columns and at least {rows * chunks.row_count} rows, "
            f"got shape {tuple(table.shape)}"
        )
    if table.shape[0] % rows:
        raise ValueError(
            f"the hyperparameter table must have equally many rows for each of {rows} replicas, got {table.shape[0]}"
        )
    everything = {name: tensor for name, (tensor, _) in flats.items()}
    for name, tensor in (everything | {"steps": steps, "table": table, "chunks": chunks.chunks}).items():
        _check_together(name, tensor, param.device)


def _check_scalars(scalars: Scalars, table: Tensor, rows: int) -> None:
    for name, scalar, dtype in (
        ("grad_scale", scalars.grad_scale, torch.float32),
        ("norm", scalars.norm, table.dtype),
        ("found_inf", scalars.found_inf, torch.float32),
    ):
        if scalar is None:
            continue
        parts = scalar.numel() if name == "norm" and rows == 1 else 1
        if scalar.numel() != parts or scalar.dtype != dtype:
            raise ValueError(
                f"{name} must be one element of {dtype}, got {scalar.dtype} of shape {tuple(scalar.shape)}"
                f"{f': {rows} replicas share a gradient, and so its norm' if name == 'norm' and rows > 1 else ''}"
            )
        if parts != 1 and (parts == 0 or len(table) % parts or not scalar.is_contiguous()):
            raise ValueError(
                f"norm must have one element, or contiguous ones for equally many of the {len(table)} rows of the "
                f"hyperparameter table, got shape {tuple(scalar.shape)}"
            )
        _check_together(name, scalar, table.device)


def _check_rows(chunks: ChunkTable, rows: int | None) -> None:
    if rows is None:
        return
    slots, pieces = len(chunks.entries), len(chunks.chunks)
    if rows < 1 or slots % rows or pieces % rows:
        raise ValueError(
            f"slots and chunks must be equally many for each of rows={rows} rows, got {slots} slots and {pieces} chunks"
        )


def _check_together(name: str, tensor: Tensor, device: torch.device) -> None:
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device} and the parameters on {device}; they must be together")
