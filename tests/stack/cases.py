"""Modules for the tests of stacks, and the comparison of a stack with separate modules."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hdet_kernels as hk

R = 3
WIDTH = 8

# Sums in another order differ by a few roundings of fp32, relative to the largest entry of a gradient.
RTOL = 1e-5

Messages = Callable[[], list[str]]
Expected = tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm, self.outer = nn.Linear(WIDTH, 16), nn.LayerNorm(16), nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(torch.tanh(self.norm(self.inner(x)))).square().mean()


class Attention(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.qkv, self.out, self.dropout = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), dropout

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, 4)).transpose(-2, -3) for t in self.qkv(x).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.dropout if self.training else 0)
        return self.out(mixed.transpose(-2, -3).flatten(-2)).square().mean()


class Language(nn.Module):
    """Tied input and output embeddings, a padding token and labels that are ignored."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, WIDTH, padding_idx=0)
        self.block = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(WIDTH, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        tokens = (x[..., 0] * 4).long().clamp(0, 10)
        logits = self.head(self.block(self.embedding(tokens)))
        return F.cross_entropy(logits.flatten(0, 1), tokens.flatten(), ignore_index=0)


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.Sequential(
            nn.Conv1d(5, 6, 3, padding=1), nn.GroupNorm(2, 6), nn.GELU(), nn.ConvTranspose1d(6, 4, 2), nn.MaxPool1d(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.parts(x).square().mean()


class BatchNorms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        # Without biases: before a BatchNorm their gradients are zero.
        convolutions = nn.Conv1d(5, 6, 3, bias=False), nn.Conv1d(6, 2, 3, bias=False)
        self.parts = nn.Sequential(convolutions[0], nn.BatchNorm1d(6), nn.ReLU(), convolutions[1])
        self.last = nn.BatchNorm1d(2)

    def forward(self, x: Tensor) -> Tensor:
        return (self.last(self.parts(x)) * torch.linspace(-1, 2, 4)).sin().mean()


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, 6, num_layers=2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x)[0].square().mean()


class Checkpointed(nn.Module):
    """A BatchNorm before a checkpoint. Its statistics must not be updated twice when vmap fails at the checkpoint."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.before, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(5)
        self.inner, self.outer, self.reentrant = nn.Linear(WIDTH, 16), nn.Linear(16, 1), reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.before(x))
        return checkpoint(lambda t: self.outer(self.inner(t).tanh()), x, use_reentrant=self.reentrant).square().mean()


class DataDependent(nn.Module):
    """Several operations that vmap refuses, such as control flow that depends on values."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.norm, self.layer, self.how = nn.BatchNorm1d(5), nn.Linear(WIDTH, 1), how

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(self.norm(x))
        if self.how == "branch":
            return y.square().mean() if y.sum() > 0 else y.sin().mean()
        if self.how == "item":
            return y.square().mean() * y.detach().max().item()
        if self.how == "function":
            return _Cube.apply(y).mean()
        into = torch.zeros(y.shape)
        into += y
        return into.square().mean()


class _Cube(torch.autograd.Function):
    """A function without ``setup_context``, which vmap refuses."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 3 * ctx.saved_tensors[0] ** 2 * gradient


class ReassignedBuffers(nn.Module):
    """Buffers to which forward assigns new tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 4)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        self.mean = 0.9 * self.mean + 0.1 * y.mean((0, 1)).detach()
        self.calls = self.calls + 1
        return (y - self.mean).square().mean()


def spectral() -> nn.Module:
    return nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, 4)), nn.Tanh())


def weight_normed() -> nn.Module:
    return nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, 4)), nn.Tanh())


MODULES: dict[str, Callable[[], nn.Module]] = {
    "mlp": Mlp,
    "attention": Attention,
    "language": Language,
    "convolutions": Convolutions,
    "batch-norm": BatchNorms,
    "renewed-buffers": ReassignedBuffers,
    "weight-norm": weight_normed,
}


# Modules that vmap cannot compute.
ONE_BY_ONE: dict[str, Callable[[], nn.Module]] = {
    "lstm": Recurrent,
    "spectral-norm": spectral,
    "checkpoint-reentrant": lambda: Checkpointed(True),
    "checkpoint": lambda: Checkpointed(False),
    **{
        f"vmap-refuses-{how}": functools.partial(DataDependent, how)
        for how in ("branch", "item", "function", "in-place")
    },
}


class MixedModel(nn.Module):
    """A frozen layer, a tied one, BatchNorm, and several kinds of buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.frozen, self.outer = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
        self.outer.weight = self.inner.weight
        self.frozen.requires_grad_(False)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("mask", torch.full((4, 4), -torch.inf).triu(1))
        self.register_buffer("scratch", torch.arange(3), persistent=False)
        self.register_buffer("none", None)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.norm(self.frozen(self.inner(x)))).square().mean()


def mixed_model() -> MixedModel:
    torch.manual_seed(0)
    return MixedModel()


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = model(x)
    return out if out.dim() == 0 else out.square().mean()


def batch(rows: int = 2 * R) -> Tensor:
    return torch.randn(rows, 5, WIDTH, generator=torch.Generator().manual_seed(1)).requires_grad_(False)


def diverge(stack: hk.ReplicaStack) -> hk.ReplicaStack:
    """Add different noise to each replica."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in stack.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator).to(parameter)
    return stack


def diverged_stack(module: nn.Module, **options: Any) -> hk.ReplicaStack:
    return diverge(hk.ReplicaStack(module, R, **options))


def separate_modules(
    stack: hk.ReplicaStack, slices: list[Any], loss_fn: Callable[..., Tensor] = loss_of, calls: int = 1
) -> Expected:
    """Return losses [R], gradients and buffers [R, *shape] of plain modules with the replicas' values."""
    modules = [stack.replica(r) for r in range(stack.replicas)]
    for _ in range(calls):
        losses = []
        for module, part in zip(modules, slices, strict=True):
            loss = loss_fn(module, part)
            loss.backward()
            losses.append(loss.detach())
    gradients = {
        name: torch.stack([dict(module.named_parameters())[name].grad for module in modules])  # type: ignore[misc]
        for name, parameter in modules[0].named_parameters()
        if parameter.grad is not None
    }
    buffers = {
        name: torch.stack([dict(module.named_buffers())[name] for module in modules])
        for name, _ in modules[0].named_buffers()
    }
    return torch.stack(losses), gradients, buffers


def check_close(found: Tensor, expected: Tensor, what: str, rtol: float = RTOL) -> None:
    scale = float(expected.abs().max()) if expected.is_floating_point() and expected.numel() else 0.0
    torch.testing.assert_close(found, expected, rtol=rtol, atol=rtol * scale, msg=lambda text: f"{what}: {text}")


def check_stack(
    stack: hk.ReplicaStack, expected: tuple[Tensor, dict[str, Tensor], dict[str, Tensor]], losses: Tensor
) -> None:
    """Check that the losses, gradients and buffers of the stack are the expected ones."""
    check_close(losses, expected[0], "losses")
    assert not losses.requires_grad
    found = {name: parameter.grad for name, parameter in stack.named_parameters() if parameter.grad is not None}
    assert found.keys() == expected[1].keys()
    for name, gradient in found.items():
        assert gradient.shape == expected[1][name].shape
        if stack.gradients == "shared":
            assert gradient.stride(0) == 0, f"{name}: one gradient for all rows"
            check_close(gradient[0], expected[1][name].mean(0), name)
        else:
            check_close(gradient, expected[1][name], name)
    for name, buffer in stack.named_buffers():
        check_close(buffer, expected[2][name], name)


def number_rows(stack: hk.ReplicaStack) -> hk.ReplicaStack:
    """Add r to row r of every floating-point tensor."""
    with torch.no_grad():
        for tensor in (*stack.parameters(), *stack.buffers()):
            if tensor.is_floating_point():
                tensor += torch.arange(float(stack.replicas)).view(-1, *[1] * (tensor.dim() - 1))
    return stack
