"""What torch offers around an optimizer, with 8-bit state, split masters, stochastic rounding, Muon and tables.

Attention under autocast, compiled models, gradient scalers, averaged models, added groups, copies and conversions.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel

import hdet_kernels as hk
from tests.optim.cases import choose, saved_and_loaded
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
QUICK = ("int8", "muon, split, int8", "tables, rounded")
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


def everything(run: Run) -> Any:
    return run[0].state_dict(), run[1].state_dict()


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
    for run in runs:
        train(*run, range(6, 8))
    assert [same(everything(run), everything(whole)) for run in runs[1:]] == [True] * 3


def test_float32_state_has_the_losses_of_torch() -> None:
    losses = []
    for make in (hk.FusedAdamW, torch.optim.AdamW):
        torch.manual_seed(0)
        module = Attention()
        losses.append(train(module, make(module.parameters(), lr=0.01), range(6)))
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.parametrize("kind", choose(LAYERS, *QUICK))
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


@pytest.mark.parametrize("kind", choose(KINDS, *QUICK))
def test_a_gradient_scaler_leaves_the_numbers_and_skips_steps(kind: str) -> None:
    plain, scaled, clipped = (begin(kind) for _ in range(3))
    train(*plain, range(2))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for run, unscale in ((scaled, False), (clipped, True)):
        module, optimizer = run
        for step in range(2):
            optimizer.zero_grad()
            scaler.scale(loss_of(module, tokens(step))).backward()
            if unscale:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        assert same(everything(run), everything(plain))
    before = copy.deepcopy(everything(scaled))
    scaler.scale(loss_of(scaled[0], tokens(2)) * torch.inf).backward()
    scaler.step(scaled[1])
    scaler.update()
    assert same(everything(scaled), before)
    assert scaler.get_scale() == 512


@pytest.mark.parametrize("kind", choose(KINDS, *QUICK))
def test_an_averaged_model_and_an_added_group_change_nothing(kind: str) -> None:
    plain, run = begin(kind), begin(kind)
    train(*plain, range(4))
    train(*run, range(2))
    module, optimizer = run
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


@pytest.mark.parametrize("kind", choose(KINDS, *QUICK))
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
