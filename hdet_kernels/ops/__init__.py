"""One operation, several backends: the fused optimizer step over a chunk table, validated and dispatched here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from hdet_kernels.ops import reference
from hdet_kernels.ops.backends import resolve
from hdet_kernels.ops.chunks import ChunkTable, Gradients
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

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class _Step(Protocol):
    def __call__(
        self,
        rule: str,
        param: Tensor,
        states: Sequence[Tensor | None],
        steps: Tensor,
        table: Tensor,
        chunks: ChunkTable,
        grads: Gradients,
        multiplier: Tensor | None,
        found_inf: Tensor | None,
    ) -> None: ...


def step(
    rule: str,
    param: Tensor,
    states: Sequence[Tensor | None],
    steps: Tensor,
    table: Tensor,
    chunks: ChunkTable,
    grads: Gradients,
    *,
    multiplier: Tensor | None = None,
    found_inf: Tensor | None = None,
    backend: str | None = None,
) -> None:
    """One step of ``rule``, in place, for every slot of ``chunks`` that has a gradient.

    ``param`` [n] and each of ``states`` [n] (``None`` for an optional one that is not in use) are flat buffers of one
    dtype, laid out alike. ``steps`` [slots] float32 counts the steps of each slot and is advanced here, so that a
    skipped slot or step does not advance its bias correction. ``table`` [rows, columns] has the hyperparameters.
    Gradients are multiplied by ``multiplier`` (one element, the dtype of the table), and if ``found_inf`` (one
    element, float32) is above zero nothing changes at all. Both are read on the device.
    """
    _check(rule, param, states, steps, table, chunks, grads, multiplier, found_inf)
    _implementation(resolve(param.device, backend))(
        rule, param, states, steps, table, chunks, grads, multiplier, found_inf
    )


def all_finite(tensors: Iterable[Tensor]) -> Tensor:
    """A bool scalar on the device of the first tensor: whether every element of every tensor is finite."""
    given = list(tensors)
    largest = [
        norm.to(given[0].device, torch.float64 if norm.dtype == torch.float64 else torch.float32, non_blocking=True)
        for norm in _norms(given, torch.inf)
    ]
    if not largest:
        return torch.ones((), dtype=torch.bool, device=given[0].device if given else "cpu")
    return torch.stack([norm.isfinite() for norm in largest]).all()


def grad_norm(tensors: Iterable[Tensor]) -> Tensor:
    """√(Σ x²) over all elements of all tensors, a scalar on the device of the first: float64 if one of them is,
    else float32 (half-precision values are summed as float32)."""
    given = list(tensors)
    dtype = torch.float64 if any(tensor.dtype == torch.float64 for tensor in given) else torch.float32
    norms = [norm.to(given[0].device, dtype, non_blocking=True) for norm in _norms(given, 2)]
    if not norms:
        return torch.zeros((), dtype=dtype, device=given[0].device if given else "cpu")
    return torch.linalg.vector_norm(torch.stack(norms))


def _norms(tensors: Sequence[Tensor], order: float) -> list[Tensor]:
    """A norm for each non-empty floating tensor, by one fused call for each device and dtype."""
    kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        real = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
        if real.is_floating_point() and real.numel():
            kinds.setdefault((real.device, real.dtype), []).append(real)
    return [norm for members in kinds.values() for norm in _foreach_norm(members, order)]


def _foreach_norm(tensors: list[Tensor], order: float) -> tuple[Tensor, ...]:
    # A norm of half-precision values overflows or loses digits if it is accumulated or returned in their precision.
    wide = torch.float32 if tensors[0].dtype in (torch.float16, torch.bfloat16) else None
    return torch._foreach_norm(tensors, order, wide)


def _implementation(backend: str) -> _Step:
    if backend == "torch":
        return reference.step
    from hdet_kernels.ops import native

    return native.step


def _check(
    rule: str,
    param: Tensor,
    states: Sequence[Tensor | None],
    steps: Tensor,
    table: Tensor,
    chunks: ChunkTable,
    grads: Gradients,
    multiplier: Tensor | None,
    found_inf: Tensor | None,
) -> None:
    if rule not in STATES:
        raise ValueError(f"unknown update rule {rule!r}; choose one of {', '.join(STATES)}")
    if param.dtype not in DTYPES:
        raise TypeError(f"parameters must be one of {DTYPES}, got {param.dtype}")
    names = STATES[rule]
    if len(states) != len(names):
        raise ValueError(f"{rule} has state buffers {names}, got {len(states)} of them (None for one not in use)")
    flat = {"param": param} | {name: state for name, state in zip(names, states, strict=True) if state is not None}
    for name in names:
        if name not in flat and name not in OPTIONAL_STATES:
            raise ValueError(f"{rule} needs its state buffer {name!r}, got None")
    for name, tensor in flat.items():
        if tensor.shape != (param.numel(),) or tensor.dtype != param.dtype or not tensor.is_contiguous():
            raise ValueError(
                f"{name} must be a contiguous {param.dtype} buffer of {param.numel()} elements like the parameters, "
                f"got {tensor.dtype} of shape {tuple(tensor.shape)}"
            )
    if chunks.dtype != param.dtype or len(grads.tensors) != len(chunks.entries):
        raise ValueError(
            f"the chunk table is for {len(chunks.entries)} slots of {chunks.dtype}, "
            f"got {len(grads.tensors)} gradients and parameters of {param.dtype}"
        )
    if chunks.extent > param.numel():
        raise ValueError(f"the chunk table reaches to element {chunks.extent}, the parameters have {param.numel()}")
    if steps.shape != (len(chunks.entries),) or steps.dtype != torch.float32:
        raise ValueError(
            f"steps must be {len(chunks.entries)} float32 counts, got {steps.dtype} of shape {tuple(steps.shape)}"
        )
    if table.dim() != 2 or table.shape[1] != len(COLUMNS) or table.shape[0] < chunks.row_count:
        raise ValueError(
            f"the hyperparameter table must have {len(COLUMNS)} columns and at least {chunks.row_count} rows, "
            f"got shape {tuple(table.shape)}"
        )
    scalars = {"multiplier": (multiplier, table.dtype), "found_inf": (found_inf, torch.float32)}
    for name, (scalar, dtype) in scalars.items():
        if scalar is not None and (scalar.numel() != 1 or scalar.dtype != dtype):
            raise ValueError(
                f"{name} must be one element of {dtype}, got {scalar.dtype} of shape {tuple(scalar.shape)}"
            )
    everything = [*flat.items(), ("steps", steps), ("table", table), ("chunks", chunks.chunks)]
    everything += [(name, scalar) for name, (scalar, _) in scalars.items() if scalar is not None]
    for name, tensor in everything:
        if tensor.device != param.device:
            raise ValueError(
                f"{name} is on {tensor.device} and the parameters on {param.device}; they must be together"
            )
