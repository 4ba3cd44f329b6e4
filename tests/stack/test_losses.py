"""Losses and gradients of a stack against as many plain modules, each run by itself on its slice of the batch."""

from __future__ import annotations

import copy
import functools
import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

import hdet_kernels as hk
from hdet_kernels.ensemble import ProcessEnsemble
from tests.ranks import run_ranks

R = 3
WIDTH = 8

#: Sums in another order: some roundings of fp32, relative to the largest number of a gradient.
RTOL = 1e-5

Warned = Callable[[], list[str]]
Expected = tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]

pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")


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


class MultiHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0].square().mean()


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
        # Without biases, whose gradients are zero before a BatchNorm.
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
    """A BatchNorm before the checkpoint: its statistics must not be updated twice if vmap fails behind it."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.before, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(5)
        self.inner, self.outer, self.reentrant = nn.Linear(WIDTH, 16), nn.Linear(16, 1), reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.before(x))
        return checkpoint(lambda t: self.outer(self.inner(t).tanh()), x, use_reentrant=self.reentrant).square().mean()


class Undecided(nn.Module):
    """What vmap cannot do: a value decides on what is computed."""

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
    """Of the old kind, without setup_context."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 3 * ctx.saved_tensors[0] ** 2 * gradient


class Renewed(nn.Module):
    """Buffers that forward replaces by new tensors."""

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
    "multi-head": MultiHead,
    "convolutions": Convolutions,
    "batch-norm": BatchNorms,
    "renewed-buffers": Renewed,
    "weight-norm": weight_normed,
}

#: Those that are computed one by one.
LOOPED: dict[str, Callable[[], nn.Module]] = {
    "lstm": Recurrent,
    "spectral-norm": spectral,
    "checkpoint-reentrant": lambda: Checkpointed(True),
    "checkpoint": lambda: Checkpointed(False),
    **{f"vmap-refuses-{how}": functools.partial(Undecided, how) for how in ("branch", "item", "function", "in-place")},
}


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = model(x)
    return out if out.dim() == 0 else out.square().mean()


def batch(rows: int = 2 * R) -> Tensor:
    return torch.randn(rows, 5, WIDTH, generator=torch.Generator().manual_seed(1)).requires_grad_(False)


def spread(stack: hk.ReplicaStack) -> hk.ReplicaStack:
    """Make the replicas differ."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in stack.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator).to(parameter)
    return stack


def made(module: nn.Module, **options: Any) -> hk.ReplicaStack:
    return spread(hk.ReplicaStack(module, R, **options))


def separate(
    stack: hk.ReplicaStack, slices: list[Any], loss_fn: Callable[..., Tensor] = loss_of, calls: int = 1
) -> Expected:
    """Losses [R], gradients and buffers [R, *shape] of plain modules with the replicas' numbers."""
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


def close(found: Tensor, expected: Tensor, what: str, rtol: float = RTOL) -> None:
    scale = float(expected.abs().max()) if expected.is_floating_point() and expected.numel() else 0.0
    torch.testing.assert_close(found, expected, rtol=rtol, atol=rtol * scale, msg=lambda text: f"{what}: {text}")


def check(
    stack: hk.ReplicaStack, expected: tuple[Tensor, dict[str, Tensor], dict[str, Tensor]], losses: Tensor
) -> None:
    """The stack's losses, gradients and buffers are those."""
    close(losses, expected[0], "losses")
    assert not losses.requires_grad
    found = {name: parameter.grad for name, parameter in stack.named_parameters() if parameter.grad is not None}
    assert found.keys() == expected[1].keys()
    for name, gradient in found.items():
        assert gradient.shape == expected[1][name].shape
        if stack.gradients == "shared":
            assert gradient.stride(0) == 0, f"{name}: one gradient for all rows"
            close(gradient[0], expected[1][name].mean(0), name)
        else:
            close(gradient, expected[1][name], name)
    for name, buffer in stack.named_buffers():
        close(buffer, expected[2][name], name)


@pytest.fixture
def warned(caplog: pytest.LogCaptureFixture) -> Iterator[Warned]:
    """What the log of the package has said so far."""
    with caplog.at_level(logging.WARNING, logger="hdet_kernels"):
        yield lambda: caplog.messages


# Losses and gradients


@pytest.mark.parametrize("gradients", ["shared", "local"])
@pytest.mark.parametrize("chunk_size", [None, 2, 1], ids=lambda size: f"chunks-of-{size or 'all'}")
@pytest.mark.parametrize("name", MODULES)
def test_a_stack_is_as_many_modules(name: str, chunk_size: int | None, gradients: Any, warned: Warned) -> None:
    torch.manual_seed(0)
    stack = made(MODULES[name](), gradients=gradients)
    x = batch()
    expected = separate(stack, list(x.chunk(R)))
    check(stack, expected, stack.backward(loss_of, x, chunk_size=chunk_size))
    assert warned() == [], "computed together"


@pytest.mark.parametrize("gradients", ["shared", "local"])
@pytest.mark.parametrize("name", LOOPED)
def test_what_vmap_cannot_do_is_done_one_by_one(name: str, gradients: Any, warned: Warned) -> None:
    torch.manual_seed(0)
    stack = made(LOOPED[name](), gradients=gradients)
    x = batch().requires_grad_("reentrant" in name)
    expected = separate(stack, [part.detach().requires_grad_(x.requires_grad) for part in x.chunk(R)], calls=2)
    stack.backward(loss_of, x)
    check(stack, expected, stack.backward(loss_of, x))
    assert len(warned()) == 1, "it is said once"
    assert "loss_of are computed one after the other" in warned()[0]
    assert "3 forward passes" in warned()[0]


def test_all_replicas_see_the_same_batch_on_request() -> None:
    stack = made(Mlp())
    x = batch(4)
    expected = separate(stack, [x] * R)
    check(stack, expected, stack.backward(loss_of, x, same_batch=True))


@pytest.mark.parametrize("gradients", ["shared", "local"])
def test_gradients_add_up(gradients: Any) -> None:
    stack = made(Mlp(), gradients=gradients)
    first, second = batch(6), batch(9) + 1
    one, two = separate(stack, list(first.chunk(R))), separate(stack, list(second.chunk(R)))
    stack.backward(loss_of, first)
    losses = stack.backward(loss_of, second, chunk_size=2)
    check(stack, (two[0], {name: one[1][name] + two[1][name] for name in one[1]}, {}), losses)
    stack.zero_grad(set_to_none=False)
    assert all(p.grad is not None and not p.grad.any() for p in stack.parameters())
    check(stack, two, stack.backward(loss_of, second))
    stack.zero_grad()
    assert all(p.grad is None for p in stack.parameters())


def test_one_replica_is_the_module() -> None:
    stack = spread(hk.ReplicaStack(Mlp(), 1))
    x = batch(4)
    expected = separate(stack, [x])
    losses = stack.backward(loss_of, x)
    assert torch.equal(losses, expected[0]), "to the bit"
    assert all(torch.equal(p.grad, expected[1][n]) for n, p in stack.named_parameters() if p.grad is not None)


def test_half_precision_parameters_get_the_mean_rounded_once() -> None:
    stack = made(Mlp().to(torch.bfloat16))
    x = batch().bfloat16()
    expected = separate(stack, list(x.chunk(R)))[1]
    for chunk_size in (None, 1):
        stack.zero_grad()
        stack.backward(loss_of, x, chunk_size=chunk_size)
        for name, parameter in stack.named_parameters():
            assert parameter.grad is not None
            assert parameter.grad.dtype == torch.bfloat16
            close(parameter.grad[0].float(), expected[name].float().mean(0), name, rtol=2**-7)


def test_parameters_may_lie_anywhere() -> None:
    """As an optimizer leaves them: rows with gaps between them, channels_last inside of them."""
    module = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)
    stack = made(module, gradients="local")
    for parameter in stack.parameters():
        space = torch.zeros(R, parameter[0].numel() + 7)
        strides = (space.stride(0), *parameter.stride()[1:])
        parameter.data = torch.as_strided(space, parameter.shape, strides, 3).copy_(parameter.data)
    x = torch.randn(2 * R, 2, 5, 5)
    check(stack, separate(stack, list(x.chunk(R))), stack.backward(loss_of, x))
    weight = next(iter(stack.parameters()))
    assert weight.grad is not None
    assert weight.grad.stride()[1:] == weight.stride()[1:], "the gradient lies as its parameter does"


def test_an_unused_parameter_has_no_gradient() -> None:
    module = nn.ModuleDict({"used": nn.Linear(WIDTH, 1), "unused": nn.Linear(2, 2)})
    for gradients in ("shared", "local"):
        stack = hk.ReplicaStack(module, R, gradients=gradients)  # type: ignore[arg-type]
        stack.backward(lambda model, x: model["used"](x).mean(), batch())
        assert {n for n, p in stack.named_parameters() if p.grad is None} == {"unused.weight", "unused.bias"}


def test_a_frozen_row_parameter_gets_no_gradient() -> None:
    stack = made(Mlp())
    stack._parameters["inner.weight",].requires_grad_(False)
    stack.backward(loss_of, batch())
    assert [n for n, p in stack.named_parameters() if p.grad is None] == ["inner.weight"]


def test_sparse_gradients_become_dense() -> None:
    stack = made(nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Flatten()))
    tokens = torch.arange(2 * R).view(-1, 1) % 5
    stack.backward(loss_of, tokens)
    weight = next(iter(stack.parameters()))
    assert weight.grad is not None
    assert not weight.grad.is_sparse
    expected = (
        2
        / 6
        * torch.stack(
            [
                torch.zeros(5, 3).index_add(0, t.flatten(), weight[r].detach()[t.flatten()])
                for r, t in enumerate(tokens.chunk(R))
            ]
        )
    )
    close(weight.grad[0], expected.mean(0), "weight")


def test_an_embedding_called_by_hand_keeps_its_padding() -> None:
    def loss_fn(model: nn.Module, tokens: Tensor) -> Tensor:
        return torch.embedding(model.weight, tokens, 2).square().sum()

    stack = made(nn.Embedding(5, 3), gradients="local")
    tokens = torch.arange(2 * R).view(-1, 1) % 4
    expected = separate(stack, list(tokens.chunk(R)), loss_fn)
    assert not expected[1]["weight"][:, 2].any()
    check(stack, expected, stack.backward(loss_fn, tokens))


# Without gradients


@pytest.mark.parametrize("name", ["mlp", "batch-norm", "lstm"])
def test_losses_without_gradients(name: str) -> None:
    stack = made({**MODULES, **LOOPED}[name]())
    x = batch()
    expected = separate(stack, list(x.chunk(R)))
    for chunk_size in (None, 2):
        losses = copy_of(stack).losses(loss_of, x, chunk_size=chunk_size)
        close(losses, expected[0], "losses")
        assert losses.grad_fn is None
    assert all(p.grad is None for p in stack.parameters())


def copy_of(stack: hk.ReplicaStack) -> hk.ReplicaStack:
    copied = hk.ReplicaStack(copy.deepcopy(stack.replica(0)), stack.replicas)
    copied.load_state_dict(stack.state_dict())
    return copied


def test_backward_under_no_grad() -> None:
    stack = made(Mlp())
    expected = separate(stack, list(batch().chunk(R)))
    with torch.no_grad():
        check(stack, expected, stack.backward(loss_of, batch()))


def test_eval_mode_reaches_the_replicas() -> None:
    stack = made(nn.Sequential(nn.Dropout(0.5), nn.Linear(WIDTH, 1)))
    assert stack.eval() is stack
    assert not stack.training
    x = batch()
    check(stack, separate(stack, list(x.chunk(R))), stack.backward(loss_of, x))
    assert stack.train().training


# Random numbers


@pytest.mark.parametrize(
    "module", [nn.Sequential(nn.Dropout(0.5), nn.Linear(WIDTH, 4)), Attention(0.5)], ids=["dropout", "attention"]
)
def test_every_replica_drops_out_on_its_own(module: nn.Module) -> None:
    stack = hk.ReplicaStack(module, R, gradients="local")
    losses = stack.backward(loss_of, batch(), same_batch=True)
    assert len(set(losses.tolist())) == R
    gradients = [p.grad for p in stack.parameters()]
    assert all(g is not None and not torch.equal(g[0], g[1]) for g in gradients)
    stack.eval()
    assert len(set(stack.losses(loss_of, batch(), same_batch=True).tolist())) == 1


def test_random_numbers_are_drawn_once_when_vmap_fails() -> None:
    def noisy(model: nn.Module, x: Tensor) -> Tensor:
        y = model(x + torch.randn_like(x)).mean()
        return y * y.detach().item()

    stack = made(nn.Linear(WIDTH, 1))
    torch.manual_seed(5)
    first = stack.losses(noisy, batch())
    torch.manual_seed(5)
    assert torch.equal(first, stack.losses(noisy, batch(), chunk_size=1)), "as if vmap had not been tried"


# Autocast


@pytest.mark.parametrize("where", ["outside", "inside"])
@pytest.mark.parametrize("name", ["mlp", "attention", "language", "convolutions", "checkpoint"])
def test_autocast(name: str, where: str) -> None:
    torch.manual_seed(0)
    stack = made({**MODULES, **LOOPED}[name](), gradients="local")
    x = batch()
    exact = separate(stack, list(x.chunk(R)))

    def inside(model: nn.Module, part: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return loss_of(model, part)

    expected = separate(stack, list(x.chunk(R)), inside)
    for _ in range(2):
        stack.zero_grad()
        if where == "inside":
            losses = stack.backward(inside, x)
        else:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                losses = stack.backward(loss_of, x)
                assert torch.is_autocast_enabled("cpu")
    assert losses.dtype == expected[0].dtype
    off = (expected[0] - exact[0]).abs().max()
    assert (losses - exact[0]).abs().max() <= 2 * off + 2**-8 * exact[0].abs().max()
    for parameter_name, parameter in stack.named_parameters():
        assert parameter.grad is not None
        assert parameter.grad.dtype == torch.float32
        own, theirs = exact[1][parameter_name], expected[1][parameter_name]
        # Both are off by roundings to bf16, which fall differently.
        limit = 2 * (theirs - own).norm() + 2**-8 * own.norm()
        assert (parameter.grad - own).norm() <= limit, parameter_name


def test_autocast_does_not_remember_parameters_that_have_changed() -> None:
    stack = made(nn.Linear(WIDTH, 1, bias=False))
    x = batch()
    for loss_fn, chunk_size in ((loss_of, None), (loss_of, 1)):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            before = stack.backward(loss_fn, x, chunk_size=chunk_size)
            with torch.no_grad():
                for parameter in stack.parameters():
                    parameter.mul_(2)
            after = stack.backward(loss_fn, x, chunk_size=chunk_size)
        torch.testing.assert_close(after, 4 * before, rtol=2**-6, atol=0)


# Batches


@dataclass
class Pair:
    x: Tensor
    y: Tensor


def test_nested_batches() -> None:
    stack = made(nn.Linear(WIDTH, 1))
    x, y = batch(), batch()[:, :, :1]

    def loss_fn(
        model: nn.Module, inputs: dict[str, Any], pair: tuple[Tensor, float], scale: Tensor, name: str
    ) -> Tensor:
        assert (inputs["deep"][0]["x"].shape, pair[0].shape, scale.shape) == ((2, 5, WIDTH), (2, 5, 1), ())
        assert (pair[1], name) == (0.5, "name")
        return (F.mse_loss(model(inputs["deep"][0]["x"]), pair[0]) * scale * pair[1]).mean()

    found = stack.backward(loss_fn, {"deep": [{"x": x}]}, (y, 0.5), torch.tensor(2.0), "name")
    for r in range(R):
        close(found[r], F.mse_loss(stack.replica(r)(x.chunk(R)[r]), y.chunk(R)[r]).detach(), "loss")


def test_registered_classes_are_cut_and_others_refused() -> None:
    stack = hk.ReplicaStack(nn.Linear(WIDTH, 1), R)
    pair = Pair(batch(), batch())
    with pytest.raises(TypeError, match=r"a batch holds a Pair with tensors in it.*register the class"):
        stack.losses(lambda model, p: model(p.x).mean(), pair)
    assert stack.losses(lambda model, p: model(p.x).mean(), pair, same_batch=True).shape == (R,)
    pytree.register_dataclass(Pair)
    losses = stack.losses(lambda model, p: model(p.x).mean(), pair)
    close(losses, torch.stack([stack.replica(0)(part).mean() for part in pair.x.chunk(R)]).detach(), "losses")


def test_a_loss_may_make_its_own_data() -> None:
    stack = hk.ReplicaStack(nn.Linear(WIDTH, 1), R)
    assert len(set(stack.backward(lambda model: model(torch.randn(2, WIDTH)).mean()).tolist())) == R


def test_batches_that_cannot_be_cut() -> None:
    stack = hk.ReplicaStack(nn.Linear(WIDTH, 1), R)
    with pytest.raises(ValueError, match=r"7 is not divisible by 3 \(shapes \(7, 5, 8\)\).*drop_last=True"):
        stack.backward(loss_of, batch(7))
    with pytest.raises(ValueError, match=r"must agree in dimension 0.*\(6, 5, 8\), \(3, 5, 8\).*close over"):
        stack.backward(lambda model, x, y: model(x).mean(), batch(6), batch(3))
    with pytest.raises(TypeError, match=r"numpy array of shape \(6,\).*torch\.as_tensor"):
        stack.backward(loss_of, np.zeros(6))
    with pytest.raises(TypeError, match="nested"):
        stack.backward(loss_of, torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged))


# Losses and errors


def test_losses_that_are_none() -> None:
    stack = hk.ReplicaStack(nn.Linear(WIDTH, 1), R)
    with pytest.raises(ValueError, match=r"one real number for each replica, got shape \(2, 5, 1\).*\.mean\(\)"):
        stack.backward(lambda model, x: model(x), batch())
    with pytest.raises(TypeError, match="must return the loss, a tensor, got a tuple"):
        stack.backward(lambda model, x: (model(x).mean(), 1), batch())
    with pytest.raises(TypeError, match="loss_fn must be callable"):
        stack.backward(batch())  # type: ignore[arg-type]
    for wrong in (0, 1.5, True):
        with pytest.raises(ValueError, match="chunk_size must be a whole number"):
            stack.backward(loss_of, batch(), chunk_size=wrong)  # type: ignore[arg-type]
    assert all(p.grad is None for p in stack.parameters())


def test_errors_of_the_user_are_raised_as_they_are(warned: Warned) -> None:
    def wrong(model: nn.Module, x: Tensor) -> Tensor:
        model.norm(x)  # changes the buffers, before it fails
        return model.layer(x[..., 1:]).mean()

    stack = hk.ReplicaStack(Undecided("branch"), R)
    before = stack.state_dict()["norm.running_mean"].clone()
    with pytest.raises(RuntimeError, match=r"mat1 and mat2 shapes cannot be multiplied \(10x7 and 8x1\)"):
        stack.backward(wrong, batch())
    assert torch.equal(stack.state_dict()["norm.running_mean"], before)
    assert all(p.grad is None for p in stack.parameters())
    assert warned() == [], "vmap is not to blame"
    with pytest.raises(ZeroDivisionError):
        stack.backward(lambda model, x: model(x) / 0 * (1 // 0), batch())


def test_vmap_may_fail_later_too(warned: Warned) -> None:
    how = "together"

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        y = model(x)
        return y.square().mean() * (1 if how == "together" else float(y.detach().sum()))

    stack = made(nn.Sequential(nn.BatchNorm1d(5), nn.Linear(WIDTH, 1)))
    modules = [stack.replica(r) for r in range(R)]
    for how in ("together", "one by one"):
        expected = torch.stack([loss_fn(m, part) for m, part in zip(modules, batch().chunk(R), strict=True)])
        close(stack.losses(loss_fn, batch()), expected.detach(), how)
        assert len(warned()) == (how == "one by one")
    statistics = dict(stack.named_buffers())
    for name in ("0.running_mean", "0.running_var", "0.num_batches_tracked"):
        close(statistics[name], torch.stack([dict(m.named_buffers())[name] for m in modules]), name)


def test_too_little_memory_is_not_a_reason_for_the_loop() -> None:
    calls = []

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        calls.append(x.shape)
        raise torch.OutOfMemoryError("too much")

    with pytest.raises(torch.OutOfMemoryError, match="too much") as caught:
        hk.ReplicaStack(nn.Linear(WIDTH, 1), R).backward(loss_fn, batch())
    assert caught.value.__notes__ == ["chunk_size=k computes k of the 3 replicas at a time"]
    assert len(calls) == 1


class ListKeeper(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 1)
        self.kept = [self.layer.weight]

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.kept[0], self.layer.bias)


def test_a_loss_that_does_not_use_the_replicas_is_refused() -> None:
    module, keeper = nn.Linear(WIDTH, 1), ListKeeper()
    weight = module.weight
    with pytest.raises(RuntimeError, match=r"the module's own weight, not on the replicas'.*model that it is given"):
        hk.ReplicaStack(module, R).backward(lambda model, x: F.linear(x, weight, model.bias).mean(), batch())
    with pytest.raises(RuntimeError, match=r"the module's own layer\.weight, not"):
        hk.ReplicaStack(keeper, R).backward(lambda model, x: model(x).mean(), batch())
    assert all(p.grad is None for p in (*module.parameters(), *keeper.parameters()))


def test_a_loss_may_close_over_the_module() -> None:
    module = nn.Linear(WIDTH, 1)
    stack = made(module)
    expected = separate(stack, list(batch().chunk(R)))
    check(stack, expected, stack.backward(lambda _, x: loss_of(module, x), batch()))


# Loss functions of all kinds


class Trainer:
    def __init__(self) -> None:
        self.weight = 2.0

    def loss(self, model: nn.Module, x: Tensor) -> Tensor:
        return self.weight * loss_of(model, x)

    def __call__(self, model: nn.Module, x: Tensor) -> Tensor:
        return self.loss(model, x)


def halved(factor: float, model: nn.Module, x: Tensor) -> Tensor:
    return factor * loss_of(model, x)


@pytest.mark.parametrize(
    ("loss_fn", "factor"),
    [(lambda m, x: loss_of(m, x), 1), (Trainer().loss, 2), (Trainer(), 2), (functools.partial(halved, 0.5), 0.5)],
    ids=["lambda", "bound method", "object", "partial"],
)
def test_loss_functions_of_all_kinds(loss_fn: Any, factor: float) -> None:
    stack = made(Mlp())
    expected = separate(stack, list(batch().chunk(R)))[0]
    close(stack.backward(loss_fn, batch()), factor * expected, "losses")


def test_a_lambda_that_is_written_again_is_the_same_loss(warned: Warned) -> None:
    stack = made(nn.Linear(WIDTH, 1))
    for _ in range(3):
        stack.losses(lambda model, x: model(x).mean() * float(x.sum()), batch())
    assert len(warned()) == 1


# What forward leaves in the module


class Careless(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(WIDTH, 1), 0
        self.constant = torch.full((WIDTH,), 2.0)
        self.register_buffer("later", None)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen = self.layer(x * self.constant)
        self.later = self.seen.detach()
        return self.seen.square().mean()


@pytest.mark.parametrize("chunk_size", [None, 1])
def test_tensors_that_forward_sets_are_not_kept(chunk_size: int | None, warned: Warned) -> None:
    module = Careless()
    stack = made(module)
    expected = separate(stack, list(batch().chunk(R)))
    for _ in range(2):
        stack.zero_grad()
        check(stack, expected, stack.backward(loss_of, batch(), chunk_size=chunk_size))
    assert not hasattr(module, "seen")
    assert module.later is None
    assert module.calls > 0, "what is no tensor stays"
    assert len(warned()) == 1
    assert "forward sets later, seen" in warned()[0] or "forward sets seen, later" in warned()[0]
    stack.replica(0)


def test_a_buffer_that_changes_its_shape_is_refused() -> None:
    class Growing(Renewed):
        def forward(self, x: Tensor) -> Tensor:
            self.mean = torch.cat([self.mean, self.mean])
            return self.layer(x).mean()

    with pytest.raises(RuntimeError, match=r"forward has set buffer mean of shape \(4,\) to a tensor of shape \(8,\)"):
        hk.ReplicaStack(Growing(), R).backward(loss_of, batch())


# Several processes


def _on_two_ranks(rank: int) -> tuple[Tensor, dict[str, Tensor | None], list[str]]:
    torch.manual_seed(0)
    module = nn.ModuleDict({"a": Mlp(), "b": nn.Linear(WIDTH, 1), "c": nn.Linear(2, 2)})
    stack = spread(hk.ReplicaStack(module, 2, ensemble=ProcessEnsemble()))

    def loss_fn(model: Any, x: Tensor) -> Tensor:
        loss = model["a"](x)
        return loss + model["b"](x).mean() if rank else loss

    x = batch(8).chunk(2)[rank]
    losses = stack.backward(loss_fn, x)
    stack.backward(loss_fn, x, chunk_size=1)
    return losses, {name: p.grad for name, p in stack.named_parameters()}, [str(stack.ensemble.size), str(len(losses))]


def test_shared_gradients_are_shared_by_all_processes() -> None:
    results = run_ranks(2, _on_two_ranks)
    torch.manual_seed(0)
    module = nn.ModuleDict({"a": Mlp(), "b": nn.Linear(WIDTH, 1), "c": nn.Linear(2, 2)})
    stack = spread(hk.ReplicaStack(module, 2))
    total: dict[str, Tensor] = {}
    for rank, whole in enumerate(batch(8).chunk(2)):

        def loss_fn(model: Any, x: Tensor, rank: int = rank) -> Tensor:
            return model["a"](x) + (model["b"](x).mean() if rank else 0)

        losses, gradients, _ = separate(stack, list(whole.chunk(2)), loss_fn)
        close(results[rank][0], losses, "losses")
        for name, gradient in gradients.items():
            total[name] = total.get(name, torch.zeros(())) + gradient.sum(0) / 4
    for _, found, facts in results:
        assert facts == ["4", "2"]
        for name, gradient in found.items():
            if name.startswith("c."):
                assert gradient is None, "None everywhere stays None"
            else:
                assert gradient is not None, name
                close(gradient[0], 2 * total[name], name)
    assert all(torch.equal(results[0][1][n], results[1][1][n]) for n in total)  # type: ignore[arg-type]


def test_the_loss_gap_is_not_hidden_by_the_tolerance() -> None:
    """Replicas differ by more than what the comparisons above allow."""
    stack = made(Mlp())
    losses = stack.losses(loss_of, batch(4), same_batch=True)
    assert float(losses.std()) > 100 * RTOL * float(losses.mean())
    assert not math.isnan(float(losses.sum()))


def test_a_loss_that_raises_in_the_loop_leaves_buffers_as_they_were() -> None:
    stack = hk.ReplicaStack(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), 3)
    calls = []

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        calls.append(1)
        loss = model(x).square().mean()
        if loss.item() > -1 and len(calls) >= 6:  # of the last replica in the second call; the first fails under vmap
            raise KeyError("mine")
        return loss

    stack.backward(loss_fn, torch.randn(12, 3))
    before = [buffer.clone() for buffer in stack.buffers()]
    calls[:] = [1] * 3
    with pytest.raises(KeyError, match="mine"):
        stack.backward(loss_fn, torch.randn(12, 3))
    assert all(map(torch.equal, stack.buffers(), before))


def test_a_batch_that_the_loss_writes_to_is_written_once() -> None:
    stack = hk.ReplicaStack(nn.Linear(3, 1), 2)

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        x.mul_(2.0)
        loss = model(x).square().mean()
        return loss if loss.item() > -1 else 2 * loss  # which vmap cannot follow

    x = torch.randn(4, 3)
    expected = [model(2 * part).square().mean() for model, part in zip([stack.replica(0)] * 2, x.chunk(2), strict=True)]
    found = stack.losses(loss_fn, x.clone())
    torch.testing.assert_close(found, torch.stack(expected).detach())
