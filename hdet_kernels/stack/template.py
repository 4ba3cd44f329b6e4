"""The module of a stack: its tensors that get one row per replica, and calls with the tensors of one replica.

Trainable parameters and all buffers get rows. Tied tensors get rows once, under all of their names. The module itself
is the template: it is called with the tensors of a replica in the place of its own, and never trained.
"""

from __future__ import annotations

import contextlib
import copy
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.utils.hooks import RemovableHandle

from hdet_kernels.checks import check_flag, check_kind, is_readable, spell
from hdet_kernels.tensors import compact, distinct, has_overlap
from hdet_kernels.torch_internals import times_written

log = logging.getLogger("hdet_kernels")

#: Tensors by the names that they have in a module, several if they are tied.
NamedTensors = Mapping[tuple[str, ...], Tensor]


class StackedParameter(nn.Parameter):
    """A parameter of R replicas, of shape [R, *shape].

    Row r belongs to replica r. The rows may lie at any distance from each other in memory.

    Attributes:
        shares_gradient: whether ``grad`` holds one gradient for all rows, as an expanded view of [*shape] with stride 0
            in dimension 0. Otherwise it holds one gradient for each row.
    """

    shares_gradient: bool
    _hooks: OrderedDict[int, Callable[[Tensor], None]]
    #: How often the gradient was written when ``stack.backward`` was done with it; None before.
    gradient_version: int | None = None

    def __new__(cls, data: Tensor, shares_gradient: bool = True, requires_grad: bool = True) -> StackedParameter:
        check_kind("data", data, Tensor, "a tensor [R, *shape]")
        shares_gradient = check_flag("shares_gradient", shares_gradient)
        requires_grad = check_flag("requires_grad", requires_grad)
        if (not is_readable(data) and not data.is_meta) or not data.dim():
            raise ValueError(f"data of a stacked parameter must be a dense tensor [R, *shape], got {spell(data)}")
        if requires_grad and not (data.is_floating_point() or data.is_complex()):
            raise ValueError(f"data must be floating-point to require a gradient, got {spell(data)}: pass float()")
        created: StackedParameter = super().__new__(cls, data, requires_grad)
        created.shares_gradient = shares_gradient
        created._hooks = OrderedDict()
        return created

    @property
    def replicas(self) -> int:
        """R, the number of rows."""
        return self.shape[0]

    def register_post_accumulate_grad_hook(self, hook: Callable[[Tensor], None]) -> RemovableHandle:
        """Call ``hook`` with the parameter as soon as ``stack.backward`` has completed its ``grad``."""
        handle = RemovableHandle(self._hooks)
        self._hooks[handle.id] = hook
        return handle

    @property
    def has_hooks(self) -> bool:
        """Whether somebody waits for ``grad``."""
        return bool(self._hooks)

    def gradient_complete(self) -> None:
        """Call the hooks, and note how often the gradient was written when they were done with it."""
        for hook in list(self._hooks.values()):
            hook(self)
        self.gradient_version = None if self.grad is None else times_written(self.grad)

    def __deepcopy__(self, memo: dict[int, Any]) -> StackedParameter:
        if id(self) not in memo:
            memo[id(self)] = type(self)(self.data.clone(), self.shares_gradient, self.requires_grad)
        copied: StackedParameter = memo[id(self)]
        return copied

    def __reduce_ex__(self, proto: Any) -> tuple[Any, ...]:
        # Rows that lie between those of other parameters would be pickled with all of them.
        return type(self), (compact(self.data), self.shares_gradient, self.requires_grad)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Stacked{super().__repr__()}"


def row_strides(row: Tensor) -> tuple[int, ...]:
    """Return the strides of ``row`` laid out without gaps, in its own order of dimensions."""
    return torch.empty_like(row, device="meta").stride()


def empty_rows(row: Tensor, count: int) -> Tensor:
    """Return an empty tensor [count, *shape] for rows like ``row``, each without gaps in its order of dimensions."""
    strides = (max(row.numel(), 1), *row_strides(row))
    return torch.empty_strided((count, *row.shape), strides, dtype=row.dtype, device=row.device)


def merge_tied(named: Iterable[tuple[str, Tensor]]) -> dict[tuple[str, ...], Tensor]:
    """Return each tensor once, with all of its names.

    Tensors are tied if they are the same object, or the same view of the same memory.
    """
    names: dict[object, list[str]] = {}
    tensors: dict[object, Tensor] = {}
    for name, tensor in named:
        view = (tensor.device, tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
        key = view if tensor.numel() else id(tensor)
        names.setdefault(key, []).append(name)
        # Of several objects keep the one that requires a gradient: the tensor is trained if one of them is.
        if key not in tensors or (tensor.requires_grad and not tensors[key].requires_grad):
            tensors[key] = tensor
    return {tuple(names[key]): tensors[key] for key in names}


def tensors_by_name(module: nn.Module) -> dict[str, Tensor]:
    """Return all parameters and buffers of ``module``; a tied tensor appears under each of its names."""
    return {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }


@torch.no_grad()
def copy_module(module: nn.Module, values: NamedTensors, without: Sequence[RemovableHandle] = ()) -> nn.Module:
    """Return a copy of ``module`` with ``values`` [*shape] in the places of the tensors of these names.

    The hooks of the module with the handles ``without`` are left out.
    """
    # deepcopy refuses tensors that are part of a graph; torch.nn.utils.weight_norm keeps some as attributes.
    attributes = (value for part in module.modules() for value in vars(part).values())
    computed = [value for value in attributes if isinstance(value, Tensor) and not value.is_leaf]
    memo = {id(value): value.detach().clone() for value in computed}
    copied, hooks = copy.deepcopy((module, list(without)), memo)  # together: these are the handles of the copy's hooks
    for handle in hooks:
        handle.remove()
    tensors = tensors_by_name(copied)
    for names, value in values.items():
        for name in names:
            tensors[name].copy_(value)
    return copied


def trainable_parameters(module: nn.Module) -> NamedTensors:
    """Return the parameters that get rows: those that require a gradient. Raise for what cannot be stacked."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"ReplicaStack needs a torch.nn.Module, got a {type(module).__name__}")
    for name, part in module.named_modules():
        if isinstance(part, DistributedDataParallel):
            raise TypeError(
                f"{name or 'the module'} is wrapped in DistributedDataParallel: pass ddp.module; with shared gradients "
                "the stack averages over processes by itself"
            )
        if isinstance(part, torch.jit.ScriptModule):
            raise TypeError(
                f"{name or 'the module'} is a ScriptModule, whose parameters cannot be replaced by rows: pass the "
                "module that was scripted"
            )
    for name, tensor in tensors_by_name(module).items():
        if is_lazy(tensor):
            raise ValueError(f"{name} is not initialised yet: run a forward pass of the module first")
        if tensor.is_meta:
            raise ValueError(f"{name} is on the meta device and has no values yet: materialise the module first")
    named = list(module.named_parameters(remove_duplicate=False))
    for name, param in named:
        _check_parameter(name, param)
    devices = sorted({str(param.device) for _, param in named})
    if len(devices) > 1:
        raise ValueError(f"a stack lives on one device, but the module has parameters on {', '.join(devices)}")
    trained = {names: param for names, param in merge_tied(named).items() if param.requires_grad}
    if not trained:
        raise ValueError(f"{type(module).__name__} has no parameters that require a gradient: nothing to train")
    _check_shared_memory(module, trained)
    return trained


def _check_parameter(name: str, param: Tensor) -> None:
    if hasattr(param, "device_mesh") or type(param).__name__ == "FlatParameter":
        raise TypeError(
            f"{name} is a sharded parameter ({type(param).__name__}, FSDP or tensor parallel); a stack holds whole "
            "replicas on one device: build it from the plain module"
        )
    if not param.requires_grad:
        return
    if type(param) is not nn.Parameter or param.layout is not torch.strided:
        raise TypeError(
            f"{name} is a {type(param).__name__} of layout {param.layout}; only dense torch parameters can be stacked"
        )
    if not param.is_floating_point():
        raise TypeError(f"{name} is of {param.dtype}; only real floating-point parameters can be stacked")
    if has_overlap(param):
        raise ValueError(
            f"{name} of shape {tuple(param.shape)} has strides {param.stride()}: elements share memory; make it "
            "contiguous first (param.data = param.data.contiguous())"
        )


def _check_shared_memory(module: nn.Module, trained: NamedTensors) -> None:
    """Raise if trained parameters share memory without being tied, or if a buffer is a view of one of them."""
    if len(distinct(trained.values())) < len(trained):
        raise ValueError(
            "two parameters share their memory but differ in shape or strides; tie parameters by registering one "
            "Parameter under both names"
        )
    owners = {(param.device, param.data_ptr()): names[0] for names, param in trained.items()}
    for name, buffer in module.named_buffers():
        if buffer.numel() and (owner := owners.get((buffer.device, buffer.data_ptr()))) is not None:
            raise ValueError(
                f"buffer {name} shares its memory with parameter {owner}; in a stack each has rows of its own, and the "
                "buffer would not follow the parameter: read the parameter itself in forward, or clone the buffer"
            )


class Template(nn.Module):
    """A module that can be called with the tensors of one replica in the place of its own.

    ``parameters`` and ``buffers`` are the names of those that have rows.
    """

    def __init__(
        self, module: nn.Module, parameters: Iterable[tuple[str, ...]], buffers: Iterable[tuple[str, ...]]
    ) -> None:
        super().__init__()
        self.module = module
        self._parameter_names, self._buffer_names = list(parameters), list(buffers)
        self._parts = [(f"{name}." if name else "", part) for name, part in module.named_modules()]
        self._warned = False

    def call(
        self, parameters: Sequence[Tensor], buffers: Sequence[Tensor], function: Callable[[nn.Module], Any]
    ) -> tuple[Any, dict[int, Tensor]]:
        """Call ``function`` with the module while it holds ``parameters`` and ``buffers``.

        Other tensors that it assigns to attributes of modules belong to one replica or, under vmap, to a transform that
        has ended. They are removed again, with one warning. The new tensors of buffers are returned beside the result,
        by the index of the buffer.
        """
        names = (*self._parameter_names, *self._buffer_names)
        tensors = {
            f"module.{name}": tensor
            for tied, tensor in zip(names, (*parameters, *buffers), strict=True)
            for name in tied
        }
        with self._without_new_attributes():
            result: tuple[Any, dict[int, Tensor]] = functional_call(
                self, tensors, (function, buffers), tie_weights=False
            )
        return result

    def forward(self, function: Callable[[nn.Module], Any], buffers: Sequence[Tensor]) -> tuple[Any, dict[int, Tensor]]:
        result, assigned = function(self.module), {}
        for index, (names, old) in enumerate(zip(self._buffer_names, buffers, strict=True)):
            owner, _, attribute = names[0].rpartition(".")
            new = getattr(self.module.get_submodule(owner), attribute, None)
            if new is old:
                continue
            if new is None or new.shape != old.shape:
                now = None if new is None else f"a tensor of shape {tuple(new.shape)}"
                raise RuntimeError(
                    f"forward has set buffer {names[0]} of shape {tuple(old.shape)} to {now}; buffers of a stack must "
                    "keep their shapes"
                )
            assigned[index] = new
        return result, assigned

    @contextlib.contextmanager
    def _without_new_attributes(self) -> Iterator[None]:
        """Undo assignments of tensors to attributes of modules inside the block, and warn about them once."""
        before = [(prefix, part, dict(vars(part))) for prefix, part in self._parts]
        buffers = {name for name, _ in self.module.named_buffers(remove_duplicate=False)}  # without those that are None
        dropped = []
        try:
            yield
        finally:
            for prefix, part, attributes in before:
                for name in _new_tensors(vars(part), attributes):
                    if name in attributes:
                        vars(part)[name] = attributes[name]
                    else:
                        del vars(part)[name]
                    dropped.append(prefix + name)
            for name in {name for name, _ in self.module.named_buffers(remove_duplicate=False)} - buffers:
                owner, _, attribute = name.rpartition(".")
                setattr(self.module.get_submodule(owner), attribute, None)
                dropped.append(name)
        # Private names are caches, as the _flat_weights of torch's RNNs.
        named = [name for name in dropped if not name.rpartition(".")[2].startswith("_")]
        if named and not self._warned:
            self._warned = True
            log.warning(
                "forward sets %s to a tensor, which is dropped when the losses are computed; if it is state of a "
                "replica, make it a buffer (register_buffer)",
                ", ".join(named),
            )

    @contextlib.contextmanager
    def refuse_gradients(self) -> Iterator[None]:
        """Raise RuntimeError if a loss inside the block gives gradients to the module's own parameters.

        No replica trains these. The gradients are removed.
        """
        before = [(name, param, param.grad) for name, param in self.module.named_parameters()]
        for _, param, _ in before:
            param.grad = None
        reached = []
        try:
            yield
        finally:
            for name, param, gradient in before:
                if param.grad is not None:
                    reached.append(name)
                param.grad = gradient
        if reached:
            raise RuntimeError(
                f"the loss depends on the module's own {', '.join(reached)}, not on the replicas': loss_fn must use "
                "the model that it is given; the module must read its parameters where they are registered, not from a "
                "list or another attribute; parameters that were frozen when the stack was built must stay frozen"
            )


def _new_tensors(now: Mapping[str, Any], before: Mapping[str, Any]) -> list[str]:
    """Return the names of attributes that have become tensors, or lists, tuples or dicts of tensors."""
    missing = object()
    changed = {name: value for name, value in now.items() if value is not before.get(name, missing)}
    return [name for name, value in changed.items() if any(isinstance(item, Tensor) for item in _items(value))]


def _items(value: Any) -> Iterable[Any]:
    """Return the items of a list, tuple or dict; for anything else the value itself."""
    if isinstance(value, list | tuple):
        return value
    return value.values() if isinstance(value, dict) else (value,)
