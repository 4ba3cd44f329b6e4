"""Functions under vmap compute what they compute without it: attention by torch's fused kernels, autocast, embeddings.

``bench/stack_operations.py`` has the operations that are compared with separate modules.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

import hdet_kernels as hk
from bench.models import GPT2
from bench.stack_comparison import SeparateModulesFail, compare
from bench.stack_operations import OPERATIONS, PRECISIONS, RANDOM_OPERATIONS, outcome
from hdet_kernels.stack.vmap import StackMode
from tests.stack.cases import (
    MODULES,
    ONE_BY_ONE,
    WIDTH,
    Messages,
    R,
    batch,
    check_stack,
    diverged_stack,
    loss_of,
    separate_modules,
)

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no usable NVIDIA GPU")

# Of torch, where it computes the replicas in a loop. With attention that is an error: see check_attention.
pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")

Shapes = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
SHAPES: dict[str, Shapes] = {
    "2-d": ((5, 6), (7, 6), (7, 3)),
    "3-d": ((2, 5, 6), (2, 7, 6), (2, 7, 3)),
    "4-d": ((4, 2, 5, 6), (4, 2, 7, 6), (4, 2, 7, 6)),  # values as wide as keys: computed by flash attention
    "5-d": ((2, 4, 2, 5, 6), (2, 4, 2, 7, 6), (2, 4, 2, 7, 3)),
    "broadcast": ((4, 2, 5, 6), (1, 2, 7, 6), (7, 3)),
}


def tensors(shapes: Any, batched: tuple[bool, ...], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn((R, *shape) if has_rows else shape, generator=generator, dtype=dtype)
        for shape, has_rows in zip(shapes, batched, strict=True)
    ]


def stacked(function: Callable[..., Tensor], in_dims: Any = 0) -> Callable[..., Tensor]:
    """Return ``function`` as a stack computes it for R replicas, whose slices lie along ``in_dims``."""

    def one(replica: Tensor, *arguments: Tensor) -> Tensor:
        with StackMode(torch.device("cpu"), replica):
            return function(*arguments)

    def together(*arguments: Tensor) -> Tensor:
        dims = in_dims if isinstance(in_dims, tuple) else (in_dims,) * len(arguments)
        result: Tensor = vmap(one, (0, *dims), randomness="different")(torch.arange(R), *arguments)
        return result

    return together


def check_attention(given: list[Tensor], batched: tuple[bool, ...], **options: Any) -> None:
    """Compare outputs and gradients under vmap with those of a loop over the replicas."""
    leaves = [tensor for tensor in given if tensor.requires_grad]

    def one(*arguments: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(*arguments, **options)

    def loop() -> Tensor:
        rows = ([t[r] if b else t for t, b in zip(given, batched, strict=True)] for r in range(R))
        return torch.stack([one(*row) for row in rows])

    def together() -> Tensor:
        result: Tensor = stacked(one, tuple(0 if has_rows else None for has_rows in batched))(*given)
        return result

    results = []
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "There is a performance drop")
        for compute in (loop, together):
            output = compute()
            results.append((output.detach(), *torch.autograd.grad(output.sin().sum(), leaves)))
    for found, expected in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("shapes", SHAPES)
@pytest.mark.parametrize("batched", [b for b in itertools.product((True, False), repeat=3) if any(b)])
def test_any_subset_of_query_key_and_value_belongs_to_the_replicas(shapes: str, batched: tuple[bool, ...]) -> None:
    given = [tensor.requires_grad_() for tensor in tensors(SHAPES[shapes], batched)]
    check_attention(given, batched)
    check_attention(given, batched, is_causal=True, scale=0.3)


@pytest.mark.parametrize("kind", ["bool", pytest.param("float", marks=pytest.mark.full), "float with a gradient"])
@pytest.mark.parametrize("has_rows", [True, False], ids=["own masks", "one mask"])
@pytest.mark.parametrize(
    ("shapes", "mask"),
    [
        *(("4-d", mask) for mask in ((5, 7), (1, 7), (2, 5, 7), (4, 1, 1, 7), (4, 2, 5, 7), (1, 1, 5, 7))),
        *(("2-d", (5, 7)), ("3-d", (1, 5, 7)), ("5-d", (2, 1, 1, 5, 7)), ("5-d", (4, 2, 5, 7))),
    ],
)
def test_masks(shapes: str, mask: tuple[int, ...], has_rows: bool, kind: str) -> None:
    for rest in ((True, False, True), (False, False, False)):
        batched = (*rest, has_rows)
        if not any(batched):
            continue
        given = tensors((*SHAPES[shapes], mask), batched)
        given = [*(tensor.requires_grad_() for tensor in given[:3]), given[3]]
        if kind == "bool":
            given[3] = given[3] > -0.5
        elif kind != "float":
            given[3].requires_grad_()
        check_attention(given, batched)


@pytest.mark.parametrize("batched", [(True, True, True), (True, False, False)], ids=str)
def test_grouped_queries(batched: tuple[bool, ...]) -> None:
    for before in ((), (3,), (2, 3)):
        shapes = (*before, 4, 5, 6), (*before, 2, 7, 6), (*before, 2, 7, 3)
        check_attention([t.requires_grad_() for t in tensors(shapes, batched)], batched, enable_gqa=True)


def test_a_gradient_for_some_inputs_only() -> None:
    given = tensors(SHAPES["4-d"], (True, True, True))
    given[1].requires_grad_()
    check_attention(given, (True, True, True))


def test_a_vmap_of_the_loss_function_itself() -> None:
    given = tensors(((4, 2, 5, 6),) * 3, (True, True, True))
    found = stacked(vmap(F.scaled_dot_product_attention))(*given)
    torch.testing.assert_close(found, F.scaled_dot_product_attention(*given))


def penalty(model: nn.Module, x: Tensor) -> Tensor:
    """Return a loss with a gradient inside, by torch.func."""
    return grad(lambda inner: F.scaled_dot_product_attention(inner, inner, inner).sin().sum())(model(x)).square().mean()


def same_noise(model: nn.Module, x: Tensor) -> Tensor:
    """Return 0 if both halves of a batch have the same dropout mask."""
    y = model(x[:1]).expand(2, -1, -1)
    first, second = vmap(lambda q: F.scaled_dot_product_attention(q, q, q, dropout_p=0.5), randomness="same")(y)
    return (first - second).abs().max()


def lower_right(model: nn.Module, x: Tensor) -> Tensor:
    """Return a loss of attention with a mask of torch's own class."""
    y = model(x)
    return F.scaled_dot_product_attention(y[:, 2:], y, y, attn_mask=causal_lower_right(3, 5)).sin().mean()


@pytest.mark.parametrize("loss_fn", [penalty, same_noise, lower_right])
def test_attention_that_cannot_be_folded_is_computed_one_by_one(loss_fn: Any, warnings_logged: Messages) -> None:
    stack = diverged_stack(nn.Linear(WIDTH, WIDTH))
    expected = [loss_fn(stack.replica(r), part).detach() for r, part in enumerate(batch().chunk(R))]
    torch.testing.assert_close(stack.losses(loss_fn, batch()), torch.stack(expected))
    assert [f"{loss_fn.__name__} are computed one after the other" in text for text in warnings_logged()] == [True]


@pytest.mark.parametrize("batched", [True, False])
def test_every_replica_draws_its_own_dropout_mask(batched: bool) -> None:
    query = torch.randn(2, 2, 16, 8)
    given = query.expand(R, *query.shape) if batched else query
    dropped = stacked(lambda q: F.scaled_dot_product_attention(q, q, q, dropout_p=0.5), 0 if batched else None)
    found = dropped(given)
    assert not torch.equal(found[0], found[1])
    assert not torch.equal(found[1], found[2])


def test_chosen_kernels_are_respected() -> None:
    given = [tensor.requires_grad_() for tensor in tensors(SHAPES["4-d"], (True, True, True))]
    for backend in (SDPBackend.MATH, SDPBackend.FLASH_ATTENTION):
        with sdpa_kernel(backend):
            check_attention(given, (True, True, True))


class HeadsOfTorch(nn.Module):
    """Attention by torch's modules, with a mask of padded tokens."""

    def __init__(self, norm_first: bool) -> None:
        super().__init__()
        options: dict[str, Any] = {"dropout": 0.0, "batch_first": True, "norm_first": norm_first}
        self.encoder = nn.TransformerEncoderLayer(WIDTH, 2, 16, **options)
        self.decoder = nn.TransformerDecoderLayer(WIDTH, 2, 16, **options)
        self.last = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        memory = self.encoder(x, src_key_padding_mask=torch.arange(5, device=x.device).expand(len(x), 5) > 3)
        mixed = self.decoder(x, memory, tgt_mask=nn.Transformer.generate_square_subsequent_mask(5, device=x.device))
        return self.last(mixed, mixed, mixed, need_weights=False)[0].float().sin().mean()


def test_torch_heads_under_autocast_compute_in_its_precision() -> None:
    seen = []

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        found: Tensor = model(x, x, x, need_weights=False)[0]
        seen.append(found.dtype)
        return found.float().square().mean()

    stack = hk.ReplicaStack(nn.MultiheadAttention(WIDTH, 2, batch_first=True), R)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        stack.backward(loss_fn, batch())
    assert seen == [torch.bfloat16]


def gpt_batch() -> Tensor:
    return torch.randint(29, (4 * R, 13), generator=torch.Generator().manual_seed(3))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "gpt": (lambda: GPT2(2, 32, 4, 64, 29, 12), gpt_batch),
    "heads": (lambda: HeadsOfTorch(norm_first=True), batch),
    "heads in eval mode": (lambda: HeadsOfTorch(norm_first=False).eval(), batch),
}


def check_model(name: str, precision: str, device: str, **options: Any) -> None:
    torch.manual_seed(0)
    build, make_batch = MODELS[name]
    found = compare(build().to(device), loss_of, [make_batch().to(device)], precision, **options)
    assert found.excess <= 1, found
    assert (found.loops, found.one_by_one) == ([], "")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", MODELS)
def test_transformers_equal_separate_modules(name: str, precision: str) -> None:
    check_model(name, precision, "cpu")


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("passes", [1, 4], ids=["eager", "graph"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("name", MODELS)
def test_transformers_equal_separate_modules_on_a_gpu(name: str, precision: str, passes: int) -> None:
    check_model(name, precision, "cuda", passes=passes, cuda_graphs=passes > 1)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(
    "backend", [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION], ids=["flash", "memory"]
)
def test_fused_kernels_compute_all_replicas_on_a_gpu(backend: SDPBackend, warnings_logged: Messages) -> None:
    """With only one kernel allowed, torch raises if it cannot be used."""
    torch.manual_seed(0)
    stack = hk.ReplicaStack(MODELS["gpt"][0]().cuda(), R)
    with torch.autocast("cuda", dtype=torch.bfloat16), sdpa_kernel(backend):
        losses = stack.backward(loss_of, gpt_batch().cuda())
    assert losses.isfinite().all()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in stack.parameters())
    assert warnings_logged() == [], "computed together"


def inside(model: nn.Module, x: Tensor) -> Tensor:
    """Return the loss by autocast inside of the loss function."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return loss_of(model, x).float()


@pytest.mark.parametrize(
    "name",
    [
        *("mlp", "language", "convolutions", "checkpoint"),
        *(pytest.param(name, marks=pytest.mark.full) for name in ("attention", "batch-norm")),
    ],
)
@pytest.mark.parametrize("loss_fn", [loss_of, inside], ids=["outside", "inside"])
def test_autocast_is_as_precise_as_in_separate_modules(name: str, loss_fn: Any) -> None:
    torch.manual_seed(0)
    module = {**MODULES, **ONE_BY_ONE}[name]()
    found = compare(module, loss_fn, [batch()], "bf16" if loss_fn is loss_of else "fp32", passes=2)
    assert found.excess <= 1, found


def test_autocast_does_not_cache_parameters_that_change() -> None:
    stack = diverged_stack(nn.Linear(WIDTH, 1, bias=False))
    x = batch()
    for chunk_size in (None, 1):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            before = stack.backward(loss_of, x, chunk_size=chunk_size)
            with torch.no_grad():
                for parameter in stack.parameters():
                    parameter.mul_(2)
            after = stack.backward(loss_of, x, chunk_size=chunk_size)
        torch.testing.assert_close(after, 4 * before, rtol=2**-6, atol=0)


def test_torch_embedding_keeps_its_padding_index() -> None:
    def loss_fn(model: nn.Module, tokens: Tensor) -> Tensor:
        return torch.embedding(model.weight, tokens, 2).square().sum()

    stack = diverged_stack(nn.Embedding(5, 3), gradients="local")
    tokens = torch.arange(2 * R).view(-1, 1) % 4
    expected = separate_modules(stack, list(tokens.chunk(R)), loss_fn)
    assert not expected[1]["weight"][:, 2].any()
    check_stack(stack, expected, stack.backward(loss_fn, tokens))


# A few of each family in make test; all of them in make test-full.
CHOSEN = [
    *("batch_norm, training", "batch_norm, no statistics", "instance_norm", "embedding_bag, mean", "GRUCell"),
    *("attention, learned bias", "MultiheadAttention", "einsum", "max_pool2d", "interpolate, bilinear", "scatter_add"),
    *("cross_entropy, smoothed", "ctc_loss", "dropout", "attention, dropout"),
]
EVERY = [*OPERATIONS, *RANDOM_OPERATIONS]


@pytest.mark.parametrize("precision", PRECISIONS["cpu"])
@pytest.mark.parametrize(
    "name", [name if name in CHOSEN else pytest.param(name, marks=pytest.mark.full) for name in EVERY]
)
def test_operations_are_as_precise_as_in_separate_modules(name: str, precision: str) -> None:
    found = outcome(name, precision, "cpu")
    assert found["result"] in ("equal", "unknown"), found


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("precision", PRECISIONS["cuda"])
@pytest.mark.parametrize("name", EVERY)
def test_operations_on_a_gpu(name: str, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    found = outcome(name, precision, "cuda")
    assert found["result"] in ("equal", "unknown"), found


def test_operations_have_names_of_their_own() -> None:
    assert len(set(EVERY)) == len(EVERY)
    assert set(CHOSEN) <= set(EVERY)


@pytest.mark.parametrize("name", ["attention", "attention, causal", "attention, boolean mask", "batch_norm, training"])
def test_corrected_operations_are_computed_together(name: str) -> None:
    for precision in PRECISIONS["cpu"]:
        found = outcome(name, precision, "cpu")
        assert not found["loops"]
        assert not found["one by one"]


def test_a_wrong_result_is_noticed() -> None:
    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        wrong = torch._C._functorch.is_batchedtensor(model.weight)  # type: ignore[arg-type]
        return model(x).square().mean() * (1 + 1e-4 * wrong)

    x = torch.randn(6, 8)
    assert compare(nn.Linear(8, 2), loss_fn, [x], "fp32").excess > 10
    assert compare(nn.Linear(8, 2), lambda model, x: model(x).square().mean(), [x], "fp32").excess <= 1


def test_separate_modules_that_fail_are_told_apart() -> None:
    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        raise RuntimeError("not in this precision")

    with pytest.raises(SeparateModulesFail, match="not in this precision"):
        compare(nn.Linear(8, 2), loss_fn, [torch.randn(6, 8)], "fp32")
