"""Other people's AdamW, one small adapter each, and why one of them is not to be had here.

All are given the same hyperparameters and make the same update as ``torch.optim.AdamW``, but for the ``note``: what
they keep in other precision. The bytes that they have to move are counted from what they hold after a step.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import pytest
import torch
from torch import Tensor, nn

#: torch's own defaults; the others have others.
ADAMW: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2}

#: The works of ``test_optim_step.py`` that the peers can do.
ALL = ("adamw-fp32", "adamw-fp32-clip", "adamw-bf16")


@dataclass(frozen=True)
class Peer:
    """``make`` takes parameters of one dtype and returns what has ``step()`` and ``state``. ``module``, from the
    distribution ``package``, must be there. ``compiled``: for every model anew, and so only for models of a few
    tensors."""

    title: str
    package: str
    module: str
    make: Callable[[list[nn.Parameter]], Any]
    devices: tuple[str, ...] = ("cuda",)
    works: tuple[str, ...] = ALL
    compiled: bool = False
    note: str = ""


#: Tensors of the largest model that is compiled: on the CPU 52 of them took 40 seconds.
COMPILED = {"cuda": 200, "cpu": 16}


class CompiledAdamW:
    """As torch's recipe has it: ``step`` under ``torch.compile``, and the learning rate in a tensor, so that a
    scheduler can change it without another compilation."""

    def __init__(self, params: list[nn.Parameter]) -> None:
        torch.compiler.reset()  # those of earlier optimizers count towards a limit, beyond which nothing is compiled
        optimizer = torch.optim.AdamW(params, **ADAMW | {"lr": torch.tensor(ADAMW["lr"])})
        self.state = optimizer.state
        self.step = torch.compile(lambda: optimizer.step(), fullgraph=False)


def _apex(params: list[nn.Parameter]) -> Any:
    from apex.optimizers import FusedAdam

    return FusedAdam(params, **ADAMW, adam_w_mode=True)


def _deepspeed(params: list[nn.Parameter]) -> Any:
    from deepspeed.ops.adam import FusedAdam

    return FusedAdam(params, **ADAMW, adam_w_mode=True)


def _transformer_engine(params: list[nn.Parameter]) -> Any:
    from transformer_engine.pytorch.optimizers import FusedAdam

    return FusedAdam(params, **ADAMW, adam_w_mode=True)


def _torchao(params: list[nn.Parameter]) -> Any:
    from torchao.optim import AdamW8bit

    torch.compiler.reset()
    return AdamW8bit(params, **ADAMW)


def _bitsandbytes(params: list[nn.Parameter]) -> Any:
    from bitsandbytes.optim import AdamW

    return AdamW(params, **ADAMW)


def _bitsandbytes_8bit(params: list[nn.Parameter]) -> Any:
    from bitsandbytes.optim import AdamW8bit

    return AdamW8bit(params, **ADAMW)


def _optimi(params: list[nn.Parameter]) -> Any:
    from optimi import AdamW

    has_triton = "triton" in inspect.signature(AdamW).parameters  # since 0.3
    return AdamW(params, **ADAMW, kahan_sum=False, **({"triton": True} if has_triton and params[0].is_cuda else {}))


def _flashoptim(params: list[nn.Parameter]) -> Any:
    from flashoptim import FlashAdamW

    return FlashAdamW(params, **ADAMW, quantize=False, master_weight_bits=None)


def _flashoptim_8bit(params: list[nn.Parameter]) -> Any:
    from flashoptim import FlashAdamW

    return FlashAdamW(params, **ADAMW)


PEERS: dict[str, Peer] = {
    "torch-compiled": Peer("torch compiled", "torch", "torch", CompiledAdamW, ("cuda", "cpu"), compiled=True),
    "apex": Peer("apex", "apex", "apex.optimizers", _apex, note="moments of bf16 parameters in fp32"),
    "deepspeed": Peer("DeepSpeed", "deepspeed", "deepspeed", _deepspeed),
    "transformer-engine": Peer(
        "Transformer Engine",
        "transformer_engine",
        "transformer_engine.pytorch",
        _transformer_engine,
        note="moments of bf16 parameters in fp32",
    ),
    "torchao-8bit": Peer(
        "torchao 8-bit",
        "torchao",
        "torchao.optim",
        _torchao,
        ("cuda", "cpu"),
        compiled=True,
        note="moments in 8 bits with a scale for 256, where a tensor is a multiple of that",
    ),
    "bitsandbytes": Peer(
        "bitsandbytes",
        "bitsandbytes",
        "bitsandbytes.optim",
        _bitsandbytes,
        note="moments of bf16 parameters in fp32",
    ),
    "bitsandbytes-8bit": Peer(
        "bitsandbytes 8-bit",
        "bitsandbytes",
        "bitsandbytes.optim",
        _bitsandbytes_8bit,
        note="moments in 8 bits with a scale for 256, of tensors from 4096 elements on",
    ),
    "optimi": Peer("optimi", "torch-optimi", "optimi", _optimi, ("cuda", "cpu"), note="Triton where there is a GPU"),
    "flashoptim": Peer("flashoptim", "flashoptim", "flashoptim", _flashoptim, note="not quantised"),
    "flashoptim-8bit": Peer(
        "flashoptim 8-bit",
        "flashoptim",
        "flashoptim",
        _flashoptim_8bit,
        works=("adamw-bf16",),
        note="moments in 8 bits, and 8 bits more of each bf16 parameter",
    ),
}

#: What a peer that was measured raised, in this run.
failed: dict[str, str] = {}


def why_not(name: str, device: str, tensors: int = 1) -> str | None:
    """Why the peer cannot be measured on ``device`` with so many tensors, if so."""
    peer = PEERS[name]
    if (absent := _absent(peer)) is not None:
        return absent
    if device not in peer.devices:
        return f"{peer.title} needs a GPU"
    if peer.compiled and device == "cpu" and _compiler() is None:
        return f"{peer.title} needs a C++ compiler on the CPU: set CXX, or put c++, g++ or clang++ on PATH"
    if peer.compiled and tensors > COMPILED[device]:
        return f"{peer.title} is measured with up to {COMPILED[device]} tensors: it is compiled anew for every model"
    return None


def present() -> dict[str, str]:
    """``{name: version, or "absent: …", or "failed: …"}`` of every peer."""
    found = {}
    for name, peer in PEERS.items():
        absent = _absent(peer)
        found[name] = f"failed: {failed[name]}" if name in failed else absent or _version(peer.package)
    return found


@contextlib.contextmanager
def guarded(way: str) -> Iterator[None]:
    """A peer that raises is noted and its case skipped; whatever else raises is ours, and raises."""
    try:
        yield
    except Exception as error:
        if way not in PEERS:
            raise
        pytest.skip(fail(way, error))


def fail(name: str, error: Exception) -> str:
    """Notes what the peer raised, and says it in one line."""
    failed[name] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return f"{PEERS[name].title} failed: {failed[name]}"


def bytes_moved(params: Sequence[Tensor], optimizer: Any, clipped: bool) -> int:
    """What a step must move: parameters and state are read and written, gradients read, and once more for their norm.
    To be called after a step, when the state is there."""
    held = {id(tensor): tensor.nbytes for value in optimizer.state.values() for tensor in _tensors(value)}
    own = sum(param.nbytes for param in params)
    gradients = sum(param.grad.nbytes for param in params if param.grad is not None)
    return 2 * own + 2 * sum(held.values()) + (2 if clipped else 1) * gradients


def _tensors(value: Any) -> Iterator[Tensor]:
    """All plain tensors within: of subclasses and of objects what they hold."""
    if isinstance(value, Tensor):
        if hasattr(value, "__tensor_flatten__"):
            for name in value.__tensor_flatten__()[0]:
                yield from _tensors(getattr(value, name))
        else:
            yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _tensors(each)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors(each)
    elif hasattr(value, "__dict__"):
        yield from _tensors(vars(value))


def _absent(peer: Peer) -> str | None:
    try:
        found = importlib.util.find_spec(peer.module)
    except ModuleNotFoundError:  # of a parent
        found = None
    except Exception as error:  # a parent that is there and cannot be imported
        return f"absent: import {peer.module} raises {type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return None if found is not None else f"absent: there is no module {peer.module} here"


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "version unknown"


def _compiler() -> str | None:
    names = (os.environ.get("CXX", "").split()[:1] or []) + ["c++", "g++", "clang++"]
    return next((found for name in names if (found := shutil.which(name))), None)
