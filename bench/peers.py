"""Adapters of other AdamW implementations, and the reasons why one of them cannot be measured.

All get the same hyperparameters and make the update of ``torch.optim.AdamW``; ``note`` names state that is kept in
another precision. The bytes that a peer has to move are counted from its tensors after a step.
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

from bench import measure

# torch's defaults, given to every peer.
ADAMW: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2}

# The cases of ``test_optim_step.py`` that most peers can run.
ALL = ("adamw-fp32", "adamw-fp32-clip", "adamw-bf16")

# Those of peers with state in 8 bits.
CODED = (*ALL, "adamw-bf16-int8-state")


@dataclass(frozen=True)
class Peer:
    """An optimizer of another package.

    Args:
        title: Name in tables.
        package: Distribution that has ``module``.
        module: Module that must be importable.
        make: Function of parameters of one dtype that returns an object with ``step()`` and ``state``.
        devices: Devices that it runs on.
        works: Cases of ``test_optim_step.py`` that it can run.
        compiled: Whether it is compiled for every model, and so measured only with few tensors.
        note: Differences from torch's AdamW.
        get: How to install it, if not by ``pip install package``.
    """

    title: str
    package: str
    module: str
    make: Callable[[list[nn.Parameter]], Any]
    devices: tuple[str, ...] = ("cuda",)
    works: tuple[str, ...] = ALL
    compiled: bool = False
    note: str = ""
    get: str = ""


# Tensors of the largest model that is compiled. On the CPU, 52 tensors took 40 seconds to compile.
COMPILED = {"cuda": 200, "cpu": 16}


class CompiledAdamW:
    """torch's AdamW with ``step`` under ``torch.compile``, by torch's recipe.

    The learning rate is a tensor, so that a scheduler can change it without recompilation.
    """

    def __init__(self, params: list[nn.Parameter]) -> None:
        torch.compiler.reset()  # compilations of earlier optimizers count towards a limit
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


WIDE = "moments of bf16 parameters in fp32"
PEERS: dict[str, Peer] = {
    "torch-compiled": Peer("torch compiled", "torch", "torch", CompiledAdamW, ("cuda", "cpu"), compiled=True),
    "apex": Peer("apex", "apex", "apex.optimizers", _apex, note=WIDE, get="build it from github.com/NVIDIA/apex"),
    "deepspeed": Peer("DeepSpeed", "deepspeed", "deepspeed", _deepspeed),
    "transformer-engine": Peer(
        "Transformer Engine",
        "transformer_engine",
        "transformer_engine.pytorch",
        _transformer_engine,
        get="pip install 'transformer_engine[pytorch]'",
        note=WIDE,
    ),
    "torchao-8bit": Peer(
        "torchao 8-bit",
        "torchao",
        "torchao.optim",
        _torchao,
        ("cuda", "cpu"),
        CODED,
        compiled=True,
        note="moments in 8 bits with a scale for 256, where a tensor is a multiple of that",
    ),
    "bitsandbytes": Peer(
        "bitsandbytes",
        "bitsandbytes",
        "bitsandbytes.optim",
        _bitsandbytes,
        note=WIDE,
    ),
    "bitsandbytes-8bit": Peer(
        "bitsandbytes 8-bit",
        "bitsandbytes",
        "bitsandbytes.optim",
        _bitsandbytes_8bit,
        works=CODED,
        note="moments in 8 bits with a scale for 256, of tensors from 4096 elements on",
    ),
    "optimi": Peer("optimi", "torch-optimi", "optimi", _optimi, ("cuda", "cpu"), note="Triton where there is a GPU"),
    "flashoptim": Peer("flashoptim", "flashoptim", "flashoptim", _flashoptim, note="not quantised"),
    "flashoptim-8bit": Peer(
        "flashoptim 8-bit",
        "flashoptim",
        "flashoptim",
        _flashoptim_8bit,
        works=("adamw-bf16", "adamw-bf16-int8-state"),
        note="moments in 8 bits, and 8 bits more of each bf16 parameter",
    ),
}

# Exceptions that peers raised in this process, by name.
failed: dict[str, str] = {}


def why_not(name: str, device: str, tensors: int = 1) -> str | None:
    """Return why the peer cannot be measured on ``device`` with so many tensors, or None if it can."""
    peer = PEERS[name]
    if (absent := _absent(peer)) is not None:
        return absent
    if device not in peer.devices:
        return f"{peer.title} needs a GPU"
    if peer.compiled and device == "cpu" and _compiler() is None:
        return f"{peer.title} needs a C++ compiler on the CPU: set CXX, or put c++, g++ or clang++ on PATH"
    if peer.compiled and measure.QUICK:
        return f"{peer.title} is left out of a quick run, since it compiles for a minute"
    if peer.compiled and tensors > COMPILED[device]:
        return f"{peer.title} is measured with up to {COMPILED[device]} tensors, since it is compiled for every model"
    return None


def present() -> dict[str, str]:
    """Return the version of every peer, or "absent: …" or "failed: …" with the reason."""
    found = {}
    for name, peer in PEERS.items():
        absent = _absent(peer)
        found[name] = f"failed: {failed[name]}" if name in failed else absent or _version(peer.package)
    return found


@contextlib.contextmanager
def guarded(way: str) -> Iterator[None]:
    """Skip the case of a peer that raises, and note the exception; exceptions of our own code propagate."""
    try:
        yield
    except Exception as error:
        if way not in PEERS:
            raise
        pytest.skip(fail(way, error))


def fail(name: str, error: Exception) -> str:
    """Note the exception of a peer, and return it in one line."""
    failed[name] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return f"{PEERS[name].title} failed: {failed[name]}"


def bytes_moved(params: Sequence[Tensor], optimizer: Any, clipped: bool) -> int:
    """Return the bytes that a step must move. Call it after a step, when the state exists.

    Parameters and state are read and written, gradients are read, and read once more for their norm if clipped.
    """
    held = {id(tensor): tensor.nbytes for value in optimizer.state.values() for tensor in _tensors(value)}
    own = sum(param.nbytes for param in params)
    gradients = sum(param.grad.nbytes for param in params if param.grad is not None)
    return 2 * own + 2 * sum(held.values()) + (2 if clipped else 1) * gradients


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield all plain tensors within a value, also those inside of tensor subclasses and objects."""
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
    except ModuleNotFoundError:  # a parent package is missing
        found = None
    except Exception as error:  # a parent package cannot be imported
        return f"absent: import {peer.module} raises {type(error).__name__}: {' '.join(str(error).split())[:200]}"
    if found is not None:
        return None
    return f"absent: no module {peer.module}; {peer.get or f'pip install {peer.package}'}"


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "version unknown"


def _compiler() -> str | None:
    names = (os.environ.get("CXX", "").split()[:1] or []) + ["c++", "g++", "clang++"]
    return next((found for name in names if (found := shutil.which(name))), None)
