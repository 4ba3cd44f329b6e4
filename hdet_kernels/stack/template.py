"""The module that a stack is made of: which of its tensors get rows, and how it is kept as it was."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from hdet_kernels.tensors import distinct, has_overlap

log = logging.getLogger("hdet_kernels")


@dataclass(frozen=True)
class Member:
    """A tensor of a module, and all names that it has there."""

    names: tuple[str, ...]
    tensor: Tensor


def members(named: Iterable[tuple[str, Tensor]]) -> list[Member]:
    """Each tensor once: tied are one object under several names, and objects that are the same view of one memory."""
    names: dict[object, list[str]] = {}
    tensors: dict[object, Tensor] = {}
    for name, tensor in named:
        view = (tensor.device, tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
        key = view if tensor.numel() else id(tensor)
        names.setdefault(key, []).append(name)
        # A tensor that is trained under one of its names is trained.
        if key not in tensors or (tensor.requires_grad and not tensors[key].requires_grad):
            tensors[key] = tensor
    return [Member(tuple(names[key]), tensors[key]) for key in names]


def named_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers under all of their names."""
    return {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }


def trained_members(module: nn.Module) -> list[Member]:
    """The parameters of ``module`` that get rows: those that require a gradient. Raises if they cannot."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"ReplicaStack needs a torch.nn.Module, got a {type(module).__name__}")
    for name, part in module.named_modules():
        if isinstance(part, DistributedDataParallel):
            raise TypeError(
                f"{name or 'the module'} is wrapped in DistributedDataParallel: pass ddp.module; with shared gradients "
                "the stack averages over processes by itself"
            )
        if isinstance(part, torch.jit.ScriptModule):
            raise TypeError(f"{name or 'the module'} is a ScriptModule, whose parameters cannot be swapped for rows")
    named = list(module.named_parameters(remove_duplicate=False))
    for name, tensor in named_tensors(module).items():
        if is_lazy(tensor):
            raise ValueError(f"{name} is not initialised yet: run a forward pass of the module first")
        if tensor.is_meta:
            raise ValueError(f"{name} is on the meta device and has no values yet: materialise the module first")
    for name, param in named:
        _check_parameter(name, param)
    devices = sorted({str(param.device) for _, param in named})
    if len(devices) > 1:
        raise ValueError(f"a stack lives on one device, and the module has parameters on {', '.join(devices)}")
    trained = [member for member in members(named) if member.tensor.requires_grad]
    if not trained:
        raise ValueError(f"{type(module).__name__} has no parameters that require a gradient: nothing to train")
    if len(distinct(member.tensor for member in trained)) < len(trained):
        raise ValueError(
            "two parameters share their memory and differ in shape or strides; only parameters that are tied as they "
            "are can be stacked: tie them by using one Parameter twice"
        )
    memory = {(member.tensor.device, member.tensor.data_ptr()): member.names[0] for member in trained}
    for name, buffer in module.named_buffers():
        if buffer.numel() and (owner := memory.get((buffer.device, buffer.data_ptr()))) is not None:
            raise ValueError(
                f"buffer {name} shares its memory with parameter {owner}; in a stack each has rows of its own, and the "
                "buffer would not follow: read the parameter itself in forward, or clone the buffer"
            )
    return trained


def _check_parameter(name: str, param: Tensor) -> None:
    if hasattr(param, "device_mesh") or type(param).__name__ == "FlatParameter":
        raise TypeError(
            f"{name} is a sharded parameter ({type(param).__name__}, FSDP or tensor parallel); a stack holds whole "
            "replicas on one device: build it from the plain module"
        )
    if param.requires_grad and (type(param) is not nn.Parameter or param.layout is not torch.strided):
        raise TypeError(
            f"{name} is a {type(param).__name__} of layout {param.layout}; only dense torch parameters can be stacked"
        )
    if param.requires_grad and not param.is_floating_point():
        raise TypeError(f"{name} is of {param.dtype}; only real floating-point parameters can be stacked")
    if param.requires_grad and has_overlap(param):
        raise ValueError(
            f"{name} of shape {tuple(param.shape)} has strides {param.stride()}: elements share memory; make it "
            "contiguous first (param.data = param.data.contiguous())"
        )


class Places:
    """Where named buffers hang, to see what a forward pass has put there."""

    def __init__(self, module: nn.Module, names: Iterable[str]) -> None:
        split = [(name, *name.rpartition(".")[::2]) for name in names]
        self._places = [(name, module.get_submodule(owner), attribute) for name, owner, attribute in split]

    def reassigned(self, given: Sequence[Tensor]) -> dict[int, Tensor]:
        """The tensors that are now in the places of those that were ``given``, by number."""
        found = {}
        for index, ((name, owner, attribute), was) in enumerate(zip(self._places, given, strict=True)):
            now = owner._buffers.get(attribute)
            if now is was:
                continue
            if now is None or now.shape != was.shape:
                raise RuntimeError(
                    f"forward has set buffer {name} of shape {tuple(was.shape)} to "
                    f"{None if now is None else f'a tensor of shape {tuple(now.shape)}'}; buffers of a stack keep "
                    "their shapes"
                )
            found[index] = now
        return found


class Untouched:
    """Keeps tensors that a forward pass sets as plain attributes of modules from staying there: they belong to one
    replica or, under vmap, to no world that still exists."""

    def __init__(self, module: nn.Module) -> None:
        self._module, self._warned = module, False

    @contextlib.contextmanager
    def __call__(self, escaped: Callable[[Tensor], bool]) -> Iterator[None]:
        before = [(name, m, dict(m.__dict__), dict(m._buffers)) for name, m in self._module.named_modules()]
        try:
            yield
        finally:
            dropped = [
                f"{name}.{attribute}" if name else attribute
                for name, module, attributes, buffers in before
                for now, was in ((module.__dict__, attributes), (module._buffers, buffers))
                for attribute in _restore(now, was, escaped)
                if not attribute.startswith("_")  # a cache, like the _flat_weights of torch's RNNs
            ]
            if dropped and not self._warned:
                self._warned = True
                log.warning(
                    "forward sets %s to a tensor, which is dropped when the losses are computed; if it is state of a "
                    "replica, make it a buffer (register_buffer)",
                    ", ".join(dropped),
                )


def _restore(now: dict[str, Any], was: dict[str, Any], escaped: Callable[[Tensor], bool]) -> list[str]:
    missing = object()
    changed = [
        name
        for name, value in now.items()
        if value is not was.get(name, missing) and any(isinstance(v, Tensor) and escaped(v) for v in _shallow(value))
    ]
    for name in changed:
        if name in was:
            now[name] = was[name]
        else:
            del now[name]
    return changed


def _shallow(value: Any) -> Iterable[Any]:
    if isinstance(value, list | tuple):
        return value
    return value.values() if isinstance(value, dict) else (value,)


@contextlib.contextmanager
def own_gradients(module: nn.Module) -> Iterator[None]:
    """Raise if a loss reaches the parameters of the module itself, which no replica trains."""

    def mark(param: Tensor) -> tuple[int, int] | None:
        return None if param.grad is None else (id(param.grad), param.grad._version)

    named = [(name, param, mark(param)) for name, param in module.named_parameters()]
    reached: list[str] = []
    try:
        yield
    finally:
        for name, param, before in named:
            if mark(param) != before:
                param.grad = None
                reached.append(name)
    if reached:
        raise RuntimeError(
            f"the loss depends on the module's own {', '.join(reached)}, not on the replicas': loss_fn must use the "
            "model that it is given; the module must find its parameters where they are registered, not in a list or "
            "an attribute of its own; and what was frozen when the stack was built must stay frozen"
        )
