"""The fused optimizer step: its rules and dtypes, its arguments and their checks, and the call of a backend.

:class:`Step` updates flat parameters and their states in place by one of the rules in :data:`STATES`. It can clip
gradients by their norm, :func:`grad_norm`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hdet_kernels.ops.backends import implementation, resolve
from hdet_kernels.ops.chunks import ChunkTable, MatchedGradients
from hdet_kernels.ops.table import COLUMNS
from hdet_kernels.ops.torch.companding import BLOCKS_PER_CHUNK

#: The update rules and the names of their state buffers (torch.optim's names). ``csrc/rules.h`` has the same order.
STATES: dict[str, tuple[str, ...]] = {
    "sgd": ("momentum_buffer",),
    "adam": ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
    "adamw": ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
    "adagrad": ("sum",),
    "lion": ("exp_avg",),
    "muon": ("momentum_buffer",),
}

#: State buffers that are absent without momentum or without amsgrad.
OPTIONAL_STATES = frozenset({"momentum_buffer", "max_exp_avg_sq"})

#: By dtype of the parameters, the dtypes that their state can have. The exponent of fp16 is too short for squares of
#: gradients. ``uint8`` are the codes of :mod:`~hdet_kernels.ops.torch.companding`.
STATE_DTYPES: dict[torch.dtype, tuple[torch.dtype, ...]] = {
    torch.float32: (torch.float32, torch.bfloat16, torch.uint8),
    torch.float64: (torch.float64,),
    torch.bfloat16: (torch.float32, torch.bfloat16, torch.uint8),
    torch.float16: (torch.float32,),
}

#: The dtypes of parameters.
DTYPES = tuple(STATE_DTYPES)

#: By dtype of the parameters that can have a float32 master, the dtypes of its buffer: ``float32`` for a copy,
#: ``int16`` for the lower halves of a master that is split (:mod:`hdet_kernels.split_master`).
MASTERED: dict[torch.dtype, tuple[torch.dtype, ...]] = {
    torch.bfloat16: (torch.float32, torch.int16),
    torch.float16: (torch.float32,),
}


class Scalars(NamedTuple):
    """Scalars that a step reads on the device beside the tables, each a tensor or ``None``.

    Gradients are divided by ``grad_scale`` (one float32). ``norm`` (dtype of the hyperparameter table) is the norm of
    the gradients as they are stored. Where it is given and the table's ``max_grad_norm`` is not 0, gradients are also
    multiplied by ``min(1, max_grad_norm / (norm/grad_scale + 1e-6))``. It may have K elements, each for one K-th of the
    hyperparameter table: slots with table row q are clipped by ``norm[q // (len(table) / K)]``. If ``found_inf`` (one
    float32) is above zero, nothing changes.
    """

    grad_scale: Tensor | None = None
    norm: Tensor | None = None
    found_inf: Tensor | None = None

    def on(self, device: torch.device) -> Scalars:
        """Return the same scalars on another device, without waiting for it."""
        if self is NO_SCALARS or all(scalar is None or scalar.device == device for scalar in self):
            return self
        return Scalars(*(None if scalar is None else scalar.to(device, non_blocking=True) for scalar in self))


#: No scalars. Steps that are given this object have nothing to check or to move.
NO_SCALARS = Scalars()


@dataclass(eq=False, repr=False)
class Step:
    """One step of an update rule, in place, for every slot that has a gradient; checked once, called often.

    With ``rows`` > 1 that many replicas share the gradients, and therefore the states. Their ``param`` and ``master``
    are [rows, n], and the table has equally many rows for each replica: replica r steps a slot of table row g with
    table row r·G + g, G = len(table)/rows. Everything else is that of one replica. Hyperparameters that act on the
    parameter are each replica's own (learning rate, decoupled weight decay, ε, bias correction, seed). Those that act
    on gradient and states are replica 0's (betas, momentum, dampening, nesterov, amsgrad, maximize, clipping), so the
    states are those that replica 0 would have alone. Weight decay as an L2 penalty (sgd, adam, adagrad) differs by
    replica and cannot be shared through a state: the caller keeps it at 0 where there is a state. Without a state (sgd
    without momentum) it is each replica's own.

    Args:
        rule: A key of :data:`STATES`.
        param: The flat parameters, [n] or [rows, n].
        states: The state buffers [n] in the order of :data:`STATES`, laid out like one replica's parameters; ``None``
            for an optional one that is not in use.
        steps: float32 [slots], the step count of each slot. The step advances it, so a skipped slot or step does not
            advance the bias correction. For ``"sgd"`` it is negative until the first step with momentum, which is the
            one without dampening.
        table: The hyperparameters, [table rows, columns].
        chunks: The slots of one replica's parameters.
        master: float32 copy of bf16 or fp16 parameters, of their shape. The rule updates the master, and the parameter
            is its rounding. Where a parameter is no longer that rounding, other code has written it
            (``load_state_dict``, averaging), and the master takes its value. An int16 buffer is the lower halves of
            masters whose upper halves are the bf16 parameters (:mod:`hdet_kernels.split_master`): a parameter that
            other code has written then counts within half a step.
        stochastic_rounding: Round what is stored as bf16 up or down with the probability that makes the expectation
            exact. The random bits depend only on the table's ``seed``, the step count and the position, so a run can be
            repeated bit for bit.
        rows: The number of replicas in ``param``.
        scales: Of states that are uint8 codes, the scales of each: float32, ``BLOCKS_PER_CHUNK`` for every chunk. The
            codes are always rounded stochastically.
        backend: A backend by name; the fastest available by default.
    """

    rule: str
    param: Tensor
    states: Sequence[Tensor | None]
    steps: Tensor
    table: Tensor
    chunks: ChunkTable
    _: KW_ONLY
    master: Tensor | None = None
    stochastic_rounding: bool = False
    rows: int = 1
    scales: Sequence[Tensor | None] = ()
    backend: str | None = None

    def __post_init__(self) -> None:
        _check_arguments(self)
        self.backend = resolve(self.param.device, self.backend)
        bind_step = implementation(self.backend, "step").bind_step
        self._run: Callable[[MatchedGradients, Scalars], None] = bind_step(self)

    @property
    def flats(self) -> tuple[Any, ...]:
        """The first arguments of the compiled operator."""
        states, scales = [*self.states, None, None][:3], [*self.scales, None, None][:2]
        return list(STATES).index(self.rule), self.param, self.master, *states, *scales, self.steps, self.table

    def __call__(self, grads: MatchedGradients, scalars: Scalars = NO_SCALARS) -> None:
        """Run one step with ``grads``, one for each slot, made by ``chunks.match``."""
        if len(grads.table) != len(self.chunks.entries):
            raise ValueError(f"the chunk table has {len(self.chunks.entries)} slots, got {len(grads.table)} gradients")
        if scalars is not NO_SCALARS:
            _check_scalars(scalars, self.table, self.rows)
        self._run(grads, scalars)


def grad_norm(
    chunks: ChunkTable, grads: MatchedGradients, *, rows: int | None = None, backend: str | None = None
) -> Tensor:
    """Return √(Σ g²) over all gradients that ``chunks`` has matched, without waiting for the device.

    The sum is formed in float64 (float32 on devices without it), in the same order every time. The result is a scalar,
    or [rows] where ``chunks`` has the slots of that many replicas, one after the other and equally many for each.
    """
    slots, pieces = len(chunks.entries), len(chunks.chunks)
    if rows is not None and (rows < 1 or slots % rows or pieces % rows):
        raise ValueError(
            f"slots and chunks must be equally many for each of rows={rows} replicas, got {slots} slots and {pieces} "
            "chunks; pass the number of replicas that the chunk table was made for"
        )
    norms: Tensor = implementation(resolve(chunks.device, backend), "step").grad_norm(chunks, grads, rows or 1)
    return norms.squeeze(0) if rows is None else norms


def _check_arguments(given: Step) -> None:
    """Raise before a kernel reads or writes memory that is not there."""
    rule, param, chunks, rows = given.rule, given.param, given.chunks, given.rows
    if rule not in STATES:
        raise ValueError(f"unknown update rule {rule!r}; choose one of {', '.join(STATES)}")
    if param.dtype not in DTYPES:
        raise TypeError(f"parameters must be one of {DTYPES}, got {param.dtype}")
    if rows < 1 or (param.shape[:-1] != (rows,) and not (rows == 1 and param.dim() == 1)):
        raise ValueError(f"with rows={rows} the parameters must be [{rows}, n], got shape {tuple(param.shape)}")
    if given.stochastic_rounding and (given.master is not None or param.dtype == torch.float16):
        raise ValueError(
            "stochastic rounding is for bf16 parameters without master, got "
            f"{param.dtype} {'with' if given.master is not None else 'without'} master"
        )
    _check_states(given)
    if chunks.dtype != param.dtype:
        raise ValueError(f"the chunk table is for parameters of {chunks.dtype}, got {param.dtype}")
    if chunks.extent > param.shape[-1]:
        raise ValueError(f"the chunk table reaches to element {chunks.extent}, the parameters have {param.shape[-1]}")
    table, least = given.table, rows * chunks.table_row_count
    if table.dim() != 2 or table.shape[1] != len(COLUMNS) or len(table) < least or len(table) % rows:
        raise ValueError(
            f"the hyperparameter table must have {len(COLUMNS)} columns and at least {least} rows, as many rows for "
            f"each of {rows} replicas, got shape {tuple(table.shape)}"
        )
    for name, tensor in (("table", table), ("chunks", chunks.chunks)):
        _check_device(name, tensor, param.device)
    for name, buffer, dtypes, shape in _buffers(given):
        if buffer.shape != shape or buffer.dtype not in dtypes or not buffer.is_contiguous():
            raise ValueError(
                f"{name} must be a contiguous {' or '.join(map(str, dtypes))} buffer of shape {tuple(shape)}, got "
                f"{buffer.dtype} of shape {tuple(buffer.shape)}{'' if buffer.is_contiguous() else ', not contiguous'}"
            )
        _check_device(name, buffer, param.device)


def _check_states(given: Step) -> None:
    names = STATES[given.rule]
    if len(given.states) != len(names) or len(given.scales) > len(names):
        raise ValueError(
            f"{given.rule} has state buffers {names}, got {len(given.states)} of them (None for one not in use), and "
            f"got scales of {len(given.scales)} of them"
        )
    dtypes = {name: None if state is None else state.dtype for name, state in zip(names, given.states, strict=True)}
    for name, scales in zip(names, [*given.scales, None, None, None], strict=False):
        if dtypes[name] is None and name not in OPTIONAL_STATES:
            raise ValueError(f"{given.rule} needs its state buffer {name!r}, got None")
        if (scales is not None) != (dtypes[name] == torch.uint8):
            raise ValueError(
                f"{name} is {dtypes[name]} and its scales are {'missing' if scales is None else 'given'}; uint8 codes "
                "have scales, and nothing else has"
            )
    if len(set(dtypes.values()) - {None}) > 1:
        raise ValueError(f"the states must have one dtype, got {dtypes}")
    if dtypes.get("max_exp_avg_sq") == torch.uint8:
        raise ValueError(
            "amsgrad needs float32 or bfloat16 states, got uint8 codes: the maximum of a state in 8 bits grows by its "
            "rounding alone"
        )
    if given.master is not None and given.param.dtype not in MASTERED:
        raise ValueError(f"only bf16 and fp16 parameters have a master, these are {given.param.dtype}")


def _buffers(given: Step) -> Iterator[tuple[str, Tensor, tuple[torch.dtype, ...], Sequence[int]]]:
    """Yield each buffer that is given, with its name and the dtypes and the shape that it must have."""
    param, names = given.param, STATES[given.rule]
    float32, blocks = (torch.float32,), BLOCKS_PER_CHUNK * len(given.chunks.chunks)
    yield "param", param, (param.dtype,), param.shape
    yield "steps", given.steps, float32, (len(given.chunks.entries),)
    if given.master is not None:
        yield "master", given.master, MASTERED[param.dtype], param.shape
    for name, state in zip(names, given.states, strict=True):
        if state is not None:
            yield name, state, STATE_DTYPES[param.dtype], param.shape[-1:]
    for name, scales in zip(names, given.scales, strict=False):
        if scales is not None:
            yield f"scales of {name}", scales, float32, (blocks,)


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
        _check_device(name, scalar, table.device)


def _check_device(name: str, tensor: Tensor, device: torch.device) -> None:
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device} and the parameters on {device}; they must be together")
