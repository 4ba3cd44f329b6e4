"""Options of a fused optimizer: those that all share, such as precision and backend, and checks of the others."""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal, TypedDict, get_args

import numpy as np
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from hdet_kernels.checks import (
    check_choice,
    check_flag,
    check_iterable,
    check_kind,
    check_whole,
    is_real,
    spell,
    unexpected_keyword,
)
from hdet_kernels.ops import DTYPES, MASTERED, STATE_DTYPES
from hdet_kernels.optim.group_entries import IMPLEMENTATION_OPTIONS, SEVERAL
from hdet_kernels.sharded import part_of
from hdet_kernels.tensors import replicas_of

GradientStorage = Literal["autograd", "fixed"]
StateDtype = torch.dtype | Literal["int8"]
MasterWeights = bool | Literal["split"] | None
Clipping = Literal["previous", "tensor"]


#: Bytes of gradients that are stepped at once. Fewer cost launches, more keep gradients for longer.
CHUNK_BYTES = 64 * 10**6


@dataclass(frozen=True)
class InBackward:
    """How parameters are stepped in the backward pass: ``in_backward=True`` has the defaults.

    Args:
        clip: how ``max_grad_norm`` is meant, because the norm of all gradients is not known before the last of them.
            ``"previous"`` scales by the norm that the gradients had at the step before; so it clips neither the first
            step nor a jump, and a norm that is not finite is not remembered. ``"tensor"`` clips every gradient by its
            own norm.
        model: the ``DistributedDataParallel`` that the parameters are in. They are stepped after its all-reduce.
        chunk_bytes: bytes of gradients that are stepped at once.
    """

    clip: Clipping | None = None
    model: DistributedDataParallel | None = None
    chunk_bytes: int = CHUNK_BYTES

    def __post_init__(self) -> None:
        if self.clip is not None:
            check_choice("clip", self.clip, get_args(Clipping))
        if self.model is not None:
            remedy = "leave it out for a model that is not wrapped, or sharded by fully_shard"
            check_kind("model", self.model, DistributedDataParallel, "a DistributedDataParallel", remedy=remedy)
        check_whole("chunk_bytes", self.chunk_bytes, at_least=1, remedy=f"leave it out for {CHUNK_BYTES}")

    def check_max_grad_norm(self, value: float | None) -> None:
        """Raise ValueError if gradients are to be clipped by a norm that is not known in the backward pass yet."""
        if value is not None and self.clip is None:
            raise ValueError(
                f"max_grad_norm={value:g} needs all gradients, and in_backward uses the first while the last are "
                'computed: pass in_backward=InBackward(clip="previous") to clip by the norm of the step before, '
                'InBackward(clip="tensor") to clip every gradient by its own, or leave in_backward out for the exact '
                "norm"
            )

    def check_param(self, index: int, param: Tensor) -> None:
        """Raise ValueError if a parameter cannot be stepped in the backward pass with these settings."""
        if self.clip == "tensor" and (count := replicas_of(param)) is not None:
            raise ValueError(
                f'parameter {index} is a stack of {count} replicas, whose gradients InBackward(clip="tensor") would '
                'clip together: use clip="previous", which has a norm for each replica'
            )

    def __getstate__(self) -> dict[str, Any]:
        """Return the fields without the model: a copy of the optimizer has other parameters."""
        return {"clip": self.clip, "model": None, "chunk_bytes": self.chunk_bytes}


class SharedOptions(TypedDict, total=False):
    """Keywords that all fused optimizers take: the clipping norm, and the fields of :class:`Options`."""

    max_grad_norm: float | None
    gradients: GradientStorage
    master_weights: MasterWeights
    state_dtype: StateDtype
    stochastic_rounding: bool
    backend: str | None
    advance_versions: bool
    in_backward: bool | InBackward


@dataclass(frozen=True)
class Options:
    """Options that all fused optimizers share.

    Args:
        gradients: ``"autograd"`` reads gradients where autograd put them. ``"fixed"`` gives every parameter a permanent
            gradient in one flat buffer: no address is read again, and ``zero_grad`` is one fill. ``grad`` is then never
            ``None``, so a parameter that got no gradient takes a step with a zero one (momentum and weight decay go
            on). Useful for many small tensors, gradient accumulation and CUDA graphs. Clear gradients by the
            optimizer's ``zero_grad``, and call ``attach_gradients`` after freezing or unfreezing a part of the model.
        master_weights: keep a float32 copy of bf16 and fp16 parameters, so that small updates are not lost. Default:
            yes, unless they are rounded stochastically. ``"split"`` keeps the same numbers in 2 bytes instead of 4 for
            a bf16 parameter: the lower half of their bits, next to the parameter as the upper half, rounded. A
            parameter that other code writes then counts within half a bf16 step, not exactly.
        state_dtype: dtype of the moments. Those of float64 parameters are always float64.
        stochastic_rounding: round bf16 parameters (without master) and bf16 state up or down at random, so that small
            updates are kept on average. The random bits depend on the group's ``rounding_seed`` (0; the same on every
            rank, as plain data-parallel training needs it), the step and the position.
        backend: one of ``hdet_kernels.backends()``. Default: the fastest for the device.
        advance_versions: let autograd know that a step has written the parameters, so that a backward through a graph
            from before the step raises an error, as with torch.optim, instead of giving a wrong gradient. It takes the
            host about 0.1 µs for each parameter.
        in_backward: step parameters during the backward pass, as soon as their gradients are complete, and free the
            gradients. ``True`` stands for ``InBackward()``. Every ``backward()`` then changes the model: one that must
            not, as for saliency, goes into ``with optimizer.accumulate():``, and ``zero_grad()`` after it.
    """

    gradients: GradientStorage = "autograd"
    master_weights: MasterWeights = None
    state_dtype: StateDtype = torch.float32
    stochastic_rounding: bool = False
    backend: str | None = None
    advance_versions: bool = True
    in_backward: bool | InBackward = False

    def __post_init__(self) -> None:
        if not isinstance(self.in_backward, bool | InBackward):
            raise ValueError(f"in_backward must be True, False or an InBackward, got {spell(self.in_backward)}")
        check_choice("gradients", self.gradients, get_args(GradientStorage))
        if self.in_backward and self.gradients == "fixed":
            raise ValueError(
                'in_backward=True frees gradients in the backward pass, and gradients="fixed" keeps them for good: '
                "leave out one of them"
            )
        if not (self.master_weights is None or isinstance(self.master_weights, bool) or self.splits_masters):
            raise ValueError(
                f'master_weights must be True, False, "split" or None to choose, got {spell(self.master_weights)}'
            )
        if isinstance(self.state_dtype, str) and self.state_dtype == "int8":
            object.__setattr__(self, "state_dtype", torch.int8)
        if not any(self.state_dtype is dtype for dtype in (torch.float32, torch.bfloat16, torch.int8)):
            given = spell(self.state_dtype)
            raise ValueError(f'state_dtype must be torch.float32, torch.bfloat16 or "int8", got {given}')
        for name in ("stochastic_rounding", "advance_versions"):
            check_flag(name, getattr(self, name))
        if self.master_weights and self.stochastic_rounding:
            raise ValueError(
                f"master_weights={self.master_weights!r} and stochastic_rounding=True exclude each other: a master "
                "keeps small updates exactly, stochastic rounding keeps them on average without one; choose one of them"
            )

    @property
    def early(self) -> InBackward | None:
        """How parameters are stepped in the backward pass; None where ``step()`` steps all of them."""
        return InBackward() if self.in_backward is True else self.in_backward or None

    def check_param(self, index: int, param: Tensor) -> None:
        """Raise ValueError if a parameter cannot be trained with these options."""
        if self.early is not None:
            self.early.check_param(index, param)
        wanted = getattr(param, "grad_dtype", param.dtype)
        if self.gradients == "fixed" and wanted not in (None, param.dtype):
            raise ValueError(
                f"parameter {index} is {param.dtype} and asks for gradients of {wanted} (grad_dtype), but "
                'gradients="fixed" stores them in the dtype of the parameter: leave grad_dtype alone, or leave '
                "gradients= out"
            )
        if self.gradients == "fixed" and replicas_of(param) is not None:
            raise ValueError(
                f'parameter {index} is a stack of {replicas_of(param)} replicas, and gradients="fixed" is for plain '
                "parameters: leave gradients= out; stack.backward() makes new gradients at every step"
            )
        if self.stochastic_rounding and param.dtype == torch.float16:
            raise ValueError(
                f"parameter {index} is torch.float16, and stochastic rounding is for bfloat16; convert the model to "
                "bfloat16, or use master_weights=True"
            )
        if self.state_dtype != torch.float32 and self._stored_dtype not in STATE_DTYPES[param.dtype]:
            narrow = str(self.state_dtype).removeprefix("torch.")
            raise ValueError(
                f"parameter {index} is {param.dtype}, whose state cannot be {narrow}; leave state_dtype out, or "
                "convert the model to float32 or bfloat16"
            )

    def has_master(self, dtype: torch.dtype) -> bool:
        """Return whether parameters of ``dtype`` have float32 masters."""
        wanted = not self.stochastic_rounding if self.master_weights is None else bool(self.master_weights)
        return wanted and dtype in MASTERED

    @property
    def splits_masters(self) -> bool:
        """Whether masters of bf16 parameters are split. Those of fp16, which has another exponent, are copies."""
        return isinstance(self.master_weights, str) and self.master_weights == "split"

    def state_dtype_for(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of the moments of parameters of ``dtype``."""
        return torch.float64 if dtype == torch.float64 else self._stored_dtype

    def without_effect(self, dtypes: Collection[torch.dtype]) -> str | None:
        """Return a message if an option does nothing for parameters of ``dtypes``, or under its DDP."""
        if self.early is not None and self.early.model is not None and self.early.model.find_unused_parameters:
            return (
                "in_backward has no effect: the DistributedDataParallel has find_unused_parameters=True, so that it is "
                "known only at the end of the backward pass which parameters are to be stepped. Set it to False (in "
                "transformers ddp_find_unused_parameters=False), or leave in_backward out"
            )
        rounds = self.stochastic_rounding and self.state_dtype != torch.bfloat16
        if torch.bfloat16 in dtypes or not (self.splits_masters or rounds):
            return None
        option = 'master_weights="split"' if self.splits_masters else "stochastic_rounding=True"
        given = ", ".join(sorted(map(str, dtypes)))
        return (
            f"{option} is for bfloat16 and has no effect: the parameters are {given}. Autocast (bf16-mixed) leaves "
            "them as they are; convert the model (model.bfloat16(), bf16-true), or leave the option out"
        )

    @property
    def rounds_stochastically(self) -> bool:
        """Whether a step draws random bits: for numbers in bf16 if asked to, for state in 8 bits always."""
        return self.stochastic_rounding or self.state_dtype == torch.int8

    @property
    def _stored_dtype(self) -> torch.dtype:
        """The dtype of the state's buffers. 8-bit state is stored as codes without a sign."""
        assert isinstance(self.state_dtype, torch.dtype)
        return torch.uint8 if self.state_dtype == torch.int8 else self.state_dtype


def refuse_unknown(
    kind: type[object], given: Iterable[str], shared: Iterable[str] = SharedOptions.__annotations__
) -> None:
    """Raise TypeError for keywords that a class of optimizers does not have, and say which was probably meant.

    ``shared`` are those that it has beside the named ones of its constructor.
    """
    shared = list(shared)
    for name in given:
        if name not in shared:
            own = [each.name for each in inspect.signature(kind).parameters.values() if each.kind != each.VAR_KEYWORD]
            hint = f"{', '.join(IMPLEMENTATION_OPTIONS)} choose one of torch's implementations: leave them out here"
            known = [*own, *shared]
            raise unexpected_keyword(kind.__name__, name, known, hint if name in IMPLEMENTATION_OPTIONS else "")


def check_at_least_zero(options: Mapping[str, Any], *names: str, at_most: float = sys.float_info.max) -> None:
    """Raise ValueError unless each named option is a finite number of at least 0, and at most ``at_most``."""
    for name in names:
        number = _number(name, options[name])
        if number is not None and not 0 <= number <= at_most:
            raise ValueError(
                f"{name} must be a finite number of at least 0, got {spell(options[name])}; pass for example "
                f"{name}=0.001"
            )


def check_finite(options: Mapping[str, Any], name: str) -> None:
    """Raise ValueError unless the named option is a finite number."""
    number = _number(name, options[name])
    if number is not None and not math.isfinite(number):
        raise ValueError(f"{name} must be a finite number, got {spell(options[name])}; leave it out for 0")


def check_below_one(options: Mapping[str, Any], name: str) -> None:
    """Raise ValueError unless the named decay rate lies in [0, 1); ``betas`` is a pair of decay rates."""
    value, pair = options[name], name in SEVERAL
    if pair and not (isinstance(value, tuple) and len(value) == 2):
        raise ValueError(
            f"{name} must be a pair of numbers in [0, 1), got {spell(value)}; pass for example {name}=(0.9, 0.99)"
        )
    for part in value if pair else (value,):
        number = _number(name, part)
        if number is not None and not 0 <= number < 1:
            raise ValueError(f"{name} must be in [0, 1), got {spell(value)}; a usual value is 0.9")


def check_alike(options: Mapping[str, Any]) -> None:
    """Raise ValueError for a pair of decay rates of which one is a tensor and the other is none, as torch.optim does.

    Of the groups that is not asked: a schedule of momentum writes a number to the first of two.
    """
    for name in SEVERAL:
        if len({isinstance(each, Tensor) for each in options.get(name, ())}) > 1:
            raise ValueError(
                f"{name} must be two numbers or two tensors, got {spell(options[name])}: pass float(…) of the tensor, "
                "or torch.tensor(…) of the number"
            )


def check_flags(options: Mapping[str, Any], *names: str) -> None:
    """Raise ValueError unless each named option is True or False."""
    for name in names:
        if not isinstance(options[name], bool | np.bool_) and not (
            type(options[name]) is int and options[name] in (0, 1)
        ):
            raise ValueError(f"{name} must be True or False, got {spell(options[name])}")


def check_own_entries(group: Mapping[str, Any], shared: Mapping[str, Any] | None = None) -> None:
    """Raise ValueError if a parameter group has another option of its own than the optimizer has for all of its groups.

    ``shared``: those that the optimizer was built with. ``ZeroRedundancyOptimizer`` writes them to every group as well.
    """
    known = shared or {}
    others = [name for name in SharedOptions.__annotations__ if name in group]
    if wrong := [name for name in others if name not in known or not _are_same(group[name], known[name])]:
        given = f"{wrong[0]}={spell(group[wrong[0]])}"
        raise ValueError(
            f"a parameter group has {given}, which is one for all groups of an optimizer: pass it beside params, as in "
            f"FusedAdamW(params, {wrong[0]}=…), or build an optimizer for each group"
        )


def _are_same(given: object, known: object) -> bool:
    """Return whether two options are equal. A flag equals no number, and an array nothing else."""
    if isinstance(given, np.ndarray | Tensor) or isinstance(given, bool) != isinstance(known, bool):
        return given is known
    return bool(given == known)


def check_seed(value: object) -> None:
    """Raise ValueError unless ``value`` is a seed of stochastic rounding: 32 bits without a sign."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**32:
        raise ValueError(
            f"rounding_seed must be a whole number from 0 to 2**32 - 1, got {spell(value)}; the default is 0"
        )


def checked_max_grad_norm(value: object) -> float | None:
    """Return ``value`` as a float, or None; raise ValueError unless it is a positive number or None."""
    if value is None:
        return None
    number = _number("max_grad_norm", value)
    number = float(value) if number is None else number  # type: ignore[arg-type]  # a tensor on an accelerator
    if not number > 0 or (isinstance(value, int) and number == math.inf):
        raise ValueError(f"max_grad_norm must be a positive number, or None for no clipping, got {spell(value)}")
    return number


def check_params(params: object) -> None:
    """Raise TypeError unless ``params`` is a tensor or an iterable, as those of an optimizer or of a group must be."""
    remedy = "pass model.parameters()"
    if isinstance(params, torch.nn.Module | Set):  # torch refuses a set too: it has no order
        raise TypeError(f"parameters must be tensors, or dicts with tensors, got {spell(params)}: {remedy}")
    if not isinstance(params, Tensor):
        check_iterable("parameters", params, "tensors, or dicts with tensors", remedy=remedy)


def check_param(index: int, param: Tensor) -> None:
    """Raise ValueError unless the kernels support the dtype of a parameter."""
    if param.is_complex():
        raise ValueError(
            f"parameter {index} of shape {tuple(param.shape)} is {param.dtype}; fused optimizers need real numbers: "
            "store it as torch.view_as_real, or optimize it with torch.optim"
        )
    if param.dtype not in DTYPES:
        expected = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        raise ValueError(
            f"parameter {index} of shape {tuple(param.shape)} is {param.dtype}; expected one of {expected}"
        )


def check_ties(groups: Sequence[Mapping[str, Any]]) -> None:
    """Raise ValueError if parameters of different groups share their memory: their hyperparameters would conflict."""
    owner: dict[tuple[torch.device, int], int] = {}
    for number, group in enumerate(groups):
        for index, param in enumerate(group["params"]):
            part = part_of(param)
            if part.numel() and owner.setdefault((part.device, part.data_ptr()), number) != number:
                raise ValueError(
                    f"parameter {index} of group {number} shares its memory with one of group "
                    f"{owner[part.device, part.data_ptr()]}; tied parameters must be in one group"
                )


def _number(name: str, value: Any) -> float | None:
    """Return a number as a float, None if that would wait for an accelerator; raise ValueError for anything else."""
    if isinstance(value, Tensor):
        if not is_real(value) or value.numel() != 1:
            raise ValueError(f"{name} as a tensor must have one element, a real number, got {spell(value)}")
    elif isinstance(value, bool) or not isinstance(value, Real):
        raise ValueError(f"{name} must be a number or a tensor of one element, got {spell(value)}")
    if not on_host(value):
        return None
    try:
        return float(value)
    except OverflowError:  # a whole number beyond the range of floats
        return math.inf if value > 0 else -math.inf


def on_host(value: float | Tensor) -> bool:
    """Return whether a number can be read without waiting for an accelerator."""
    return not isinstance(value, torch.Tensor) or value.device.type == "cpu"
