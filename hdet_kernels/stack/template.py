"""The template of a stack: the module whose tensors get one row per replica.

Trainable parameters and all buffers get rows. Tied tensors get rows once, under all of their names.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from hdet_kernels.tensors import distinct, has_overlap


@dataclass(frozen=True)
class NamedTensor:
    """A tensor of a module, with all names that it has there (several if it is tied)."""

    names: tuple[str, ...]
    tensor: Tensor


def merge_tied(named: Iterable[tuple[str, Tensor]]) -> list[NamedTensor]:
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
    return [NamedTensor(tuple(names[key]), tensors[key]) for key in names]


def tensors_by_name(module: nn.Module) -> dict[str, Tensor]:
    """Return all parameters and buffers of ``module``; a tied tensor appears under each of its names."""
    return {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }


def trainable_parameters(module: nn.Module) -> list[NamedTensor]:
    """Return the parameters of ``module`` that get rows: those that require a gradient.

    Raises:
        TypeError: ``module`` is no plain module on one device (wrapped in DDP, scripted, sharded), or a parameter is
            not dense and real.
        ValueError: there is nothing to train, a tensor has no values yet, parameters are on several devices, or
            tensors share memory without being tied.
    """
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
    trained = [param for param in merge_tied(named) if param.tensor.requires_grad]
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


def _check_shared_memory(module: nn.Module, trained: list[NamedTensor]) -> None:
    """Raise if trained parameters share memory without being tied, or if a buffer is a view of one of them."""
    if len(distinct(param.tensor for param in trained)) < len(trained):
        raise ValueError(
            "two parameters share their memory but differ in shape or strides; tie parameters by registering one "
            "Parameter under both names"
        )
    owners = {(param.tensor.device, param.tensor.data_ptr()): param.names[0] for param in trained}
    for name, buffer in module.named_buffers():
        if buffer.numel() and (owner := owners.get((buffer.device, buffer.data_ptr()))) is not None:
            raise ValueError(
                f"buffer {name} shares its memory with parameter {owner}; in a stack each has rows of its own, and the "
                "buffer would not follow the parameter: read the parameter itself in forward, or clone the buffer"
            )
