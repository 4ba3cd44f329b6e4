"""What torch offers around an optimizer, with 8-bit state, split masters, stochastic rounding, Muon and tables.

Attention under autocast, compiled models, gradient scalers, averaged models, added groups, copies and conversions,
and other default devices and dtypes.
"""

from __future__ import annotations

import contextlib
import copy
import pickle
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel

import hdet_kernels as hk
from hdet_kernels.optim import FusedAdamW
from tests.ops.cases import QUICK
from tests.optim.cases import (
    assert_equal,
    choose,
    fused_optimizer,
    give_gradients,
    parameters,
    run,
    saved_and_loaded,
    with_backends,
)
from tests.training import same

# torch warns that processors without bf16 take another way.
pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")

BF16 = torch.bfloat16
WORDS, WIDTH, LENGTH, ROWS = 17, 16, 12, 6


class Attention(nn.Module):
    """One layer of causal attention by ``F.scaled_dot_product_attention``."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(WORDS, WIDTH), nn.LayerNorm(WIDTH)
        self.inward, self.outward, self.head = (
            nn.Linear(WIDTH, 3 * WIDTH),
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, WORDS),
        )

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        parts = self.inward(self.norm(hidden)).view(*tokens.shape, 3, 2, WIDTH // 2).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*parts, is_causal=True).transpose(1, 2).reshape(hidden.shape)
        return self.head(hidden + self.outward(mixed))  # type: ignore[no-any-return]


class Tables(nn.Module):
    """Embedding tables with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = (nn.Embedding(WORDS, WORDS, sparse=True) for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        # The sparse gradients of a plain sum would share their memory, and GradScaler.unscale_ would divide it twice.
        return self.one(tokens) + 0.5 * self.two(tokens.roll(1, -1))  # type: ignore[no-any-return]


#: By name: the model, its dtype, and the optimizer.
KINDS: dict[str, tuple[type[nn.Module], torch.dtype, Callable[..., Any]]] = {
    "int8": (Attention, torch.float32, partial(hk.FusedAdamW, state_dtype="int8")),
    "split": (Attention, BF16, partial(hk.FusedAdamW, master_weights="split")),
    "split, int8": (Attention, BF16, partial(hk.FusedAdamW, master_weights="split", state_dtype="int8")),
    "rounded, int8": (Attention, BF16, partial(hk.FusedAdamW, stochastic_rounding=True, state_dtype="int8")),
    "muon": (Attention, torch.float32, partial(hk.FusedMuon, adamw_lr=0.01)),
    "muon, split, int8": (
        Attention,
        BF16,
        partial(hk.FusedMuon, adamw_lr=0.01, normuon=True, master_weights="split", state_dtype="int8"),
    ),
    "tables": (Tables, torch.float32, partial(hk.FusedRowWiseAdagrad, eps=1e-4)),
    "tables, rounded": (Tables, BF16, partial(hk.FusedRowWiseAdagrad, eps=1e-4, stochastic_rounding=True)),
}
QUICK_KINDS = ("int8", "muon, split, int8", "tables, rounded")
LAYERS = [kind for kind, (model, _, _) in KINDS.items() if model is Attention]

Run = tuple[nn.Module, Any]


def begin(kind: str) -> Run:
    torch.manual_seed(0)
    model, dtype, make = KINDS[kind]
    module = model().to(dtype)
    return module, make(module.parameters(), lr=0.01)


def tokens(step: int) -> Tensor:
    return torch.randint(0, WORDS, (ROWS, LENGTH), generator=torch.Generator().manual_seed(step % 2))


def loss_of(module: Callable[[Tensor], Tensor], given: Tensor) -> Tensor:
    """Return the loss of predicting the next token, computed under autocast."""
    with torch.autocast("cpu", BF16):
        logits = module(given)
    return F.cross_entropy(logits.float()[:, :-1].flatten(0, 1), given[:, 1:].flatten())


def train(module: Callable[[Tensor], Tensor], optimizer: Any, steps: Iterable[int]) -> list[float]:
    losses = []
    for step in steps:
        optimizer.zero_grad()
        loss = loss_of(module, tokens(step))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def everything(pair: Run) -> Any:
    return pair[0].state_dict(), pair[1].state_dict()


@pytest.mark.parametrize("kind", KINDS)
def test_training_resuming_and_copies(kind: str) -> None:
    whole = begin(kind)
    losses = train(*whole, range(6))
    assert losses[4] < losses[0]
    assert losses[5] < losses[1]
    saved = saved_and_loaded(dict(zip("mo", everything(whole), strict=True)))
    runs = [whole, copy.deepcopy(whole), pickle.loads(pickle.dumps(whole)), begin(kind)]
    train(*runs[3], range(1))  # what it has is overwritten
    runs[3][0].load_state_dict(saved["m"])
    runs[3][1].load_state_dict(saved["o"])
    alone = copy.deepcopy(whole[1])
    for param in (param for group in alone.param_groups for param in group["params"]):
        param.grad = torch.ones_like(param)
    alone.step()  # of its own copies of the parameters
    for each in runs:
        train(*each, range(6, 8))
    assert [same(everything(each), everything(whole)) for each in runs[1:]] == [True] * 3


@pytest.mark.parametrize("kind", choose(LAYERS, *QUICK_KINDS))
@pytest.mark.parametrize("gradients", ["shared", pytest.param("local", marks=pytest.mark.full)])
def test_a_stack_of_attention_under_autocast(kind: str, gradients: Any) -> None:
    torch.manual_seed(0)
    model, dtype, make = KINDS[kind]
    stack = hk.ReplicaStack(model().to(dtype), 2, gradients=gradients)
    optimizer = make(stack.parameters(), lr=0.01)
    losses = []
    for step in range(6):
        optimizer.zero_grad()
        losses.append(stack.backward(loss_of, tokens(step)))
        optimizer.step()
    for late, early in ((4, 0), (5, 1)):
        assert losses[late].mean() < losses[early].mean()


@pytest.mark.full
@pytest.mark.parametrize("kind", LAYERS)
def test_a_compiled_model(kind: str) -> None:
    plain, compiled = begin(kind), begin(kind)
    train(*plain, range(3))
    train(torch.compile(compiled[0], backend="aot_eager"), compiled[1], range(3))
    assert same(everything(compiled), everything(plain))


@pytest.mark.parametrize("kind", choose(KINDS, *QUICK_KINDS))
def test_a_gradient_scaler_leaves_the_numbers_and_skips_steps(kind: str) -> None:
    plain, scaled, clipped = (begin(kind) for _ in range(3))
    train(*plain, range(2))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for each, unscale in ((scaled, False), (clipped, True)):
        module, optimizer = each
        for step in range(2):
            optimizer.zero_grad()
            scaler.scale(loss_of(module, tokens(step))).backward()
            if unscale:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        assert same(everything(each), everything(plain))
    before = copy.deepcopy(everything(scaled))
    scaler.scale(loss_of(scaled[0], tokens(2)) * torch.inf).backward()
    scaler.step(scaled[1])
    scaler.update()
    assert same(everything(scaled), before)
    assert scaler.get_scale() == 512


@pytest.mark.parametrize("kind", choose(KINDS, *QUICK_KINDS))
def test_an_averaged_model_and_an_added_group_change_nothing(kind: str) -> None:
    plain, (module, optimizer) = begin(kind), begin(kind)
    train(*plain, range(4))
    train(module, optimizer, range(2))
    average = AveragedModel(module, multi_avg_fn=lambda mean, now, _: torch._foreach_lerp_(mean, now, 0.5))
    first = copy.deepcopy(module.state_dict())
    average.update_parameters(module)
    added = nn.Embedding(5, 4).to(KINDS[kind][1])
    optimizer.add_param_group({"params": list(added.parameters())})
    train(module, optimizer, range(2, 4))
    assert same(module.state_dict(), plain[0].state_dict())
    assert same(average.module.state_dict(), first)
    average.update_parameters(module)
    for name, value in average.module.state_dict().items():
        torch.testing.assert_close(value, first[name].lerp(module.state_dict()[name], 0.5))
    start = added.weight.detach().clone()
    added.weight.grad = torch.ones_like(added.weight)
    optimizer.step()
    assert not torch.equal(added.weight, start)


@pytest.mark.parametrize("kind", choose(KINDS, *QUICK_KINDS))
def test_a_model_is_converted_before_the_first_step_and_not_later(kind: str) -> None:
    dtype = KINDS[kind][1]
    other = torch.float32 if dtype == BF16 else BF16
    early, late = begin(kind), begin(kind)
    early[0].to(other)
    losses = train(*early, range(5))
    assert losses[4] < losses[0]
    train(*late, range(1))
    saved = copy.deepcopy(late[1].state_dict())
    late[0].to(other)
    with pytest.raises(RuntimeError, match="build the optimizer and its scheduler again"):
        train(*late, range(1, 2))
    late[0].to(dtype)
    assert same(late[1].state_dict()["state"], saved["state"])
    train(*late, range(1, 2))


def trained(compiler: str | None, **options: Any) -> list[torch.Tensor]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
    call = net if compiler is None else torch.compile(net, backend=compiler)
    optimizer = FusedAdamW(net.parameters(), lr=0.1, **options)
    for step in range(4):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
        call(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [param.detach() for param in net.parameters()]


@pytest.mark.parametrize(
    ("compiler", "gradients"),
    [("aot_eager", "autograd"), ("aot_eager", "fixed"), pytest.param("inductor", "fixed", marks=pytest.mark.full)],
)
def test_a_compiled_model_trains_as_an_eager_one(compiler: str, gradients: str) -> None:
    for compiled, eager in zip(trained(compiler, gradients=gradients), trained(None), strict=True):
        torch.testing.assert_close(compiled, eager, rtol=1e-4, atol=1e-5)


def test_the_optimizer_may_be_inside_a_compiled_training_step() -> None:
    def weights(compiled: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        net = nn.Linear(6, 2)
        optimizer = FusedAdamW(net.parameters(), lr=0.1)

        def step(x: torch.Tensor) -> torch.Tensor:
            loss = net(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        call = torch.compile(step, backend="aot_eager") if compiled else step
        for seed in range(3):
            call(torch.randn(4, 6, generator=torch.Generator().manual_seed(seed)))
        return [param.detach() for param in net.parameters()]

    for compiled, eager in zip(weights(True), weights(False), strict=True):
        torch.testing.assert_close(compiled, eager)


@contextlib.contextmanager
def default_device(name: str) -> Iterator[None]:
    torch.set_default_device(name)
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


CONTEXTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "meta": lambda: torch.device("meta"),
    "default-meta": lambda: default_device("meta"),
    "float64": lambda: default_dtype(torch.float64),
    "inference": torch.inference_mode,
}


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize(
    ("backend", "name"),
    with_backends(QUICK, ["adamw", "sgd-momentum", "adagrad"], [("cpp-cpu", "adamw"), ("torch-cpu", "sgd-momentum")]),
)
@pytest.mark.parametrize(
    "dtype", [pytest.param(torch.float32, marks=pytest.mark.full, id="fp32"), pytest.param(torch.bfloat16, id="bf16")]
)
def test_the_context_makes_no_difference(context: str, backend: tuple[str, str], name: str, dtype: torch.dtype) -> None:
    where, device = backend
    plain, params = parameters(dtype, device), parameters(dtype, device)
    usual = fused_optimizer(name, plain, backend=where, max_grad_norm=1.0)
    run(usual, plain, range(4))
    give_gradients(params, seed=0)
    with CONTEXTS[context]():
        optimizer = fused_optimizer(name, params, backend=where, max_grad_norm=1.0)
        optimizer.step()
    run(optimizer, params, [1])
    copies = [param.detach().clone().requires_grad_() for param in params]
    again = fused_optimizer(name, copies, backend=where, max_grad_norm=1.0)
    with CONTEXTS[context]():
        again.load_state_dict(optimizer.state_dict())
    for target, own in ((optimizer, params), (again, copies)):
        run(target, own, range(2, 4))
        assert_equal(own, plain)
