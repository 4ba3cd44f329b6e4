"""Steps in the backward pass: the bits of ``step()``, gradients that are gone, and what is refused."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hdet_kernels as hk
from hdet_kernels.optim import (
    FusedAdam,
    FusedAdamW,
    FusedMuon,
    FusedOptimizer,
    FusedRowWiseAdagrad,
    FusedSGD,
    InBackward,
)
from tests.ops.cases import BACKENDS
from tests.optim.cases import FUSED, assert_equal, saved_and_loaded, with_backends

#: Bytes of a part: every net here has several.
SMALL = 20_000
EARLY = InBackward(chunk_bytes=SMALL)
OF_STACKS = InBackward(chunk_bytes=5000)

MUON: tuple[type[FusedOptimizer], dict[str, Any]] = (FusedMuon, {"lr": 0.02, "normuon": True})
OPTIMIZERS = FUSED | {"muon": MUON}

#: By name: the dtype of the parameters, and options.
PRECISIONS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "fp32": (torch.float32, {}),
    "fp64": (torch.float64, {}),
    "fp32-int8": (torch.float32, {"state_dtype": "int8"}),
    "bf16-master": (torch.bfloat16, {}),
    "bf16-split": (torch.bfloat16, {"master_weights": "split"}),
    "bf16-stochastic": (torch.bfloat16, {"stochastic_rounding": True}),
    "bf16-state": (torch.bfloat16, {"stochastic_rounding": True, "state_dtype": torch.bfloat16}),
    "bf16-int8": (torch.bfloat16, {"stochastic_rounding": True, "state_dtype": "int8"}),
}


class Net(nn.Module):
    """Layers of several sizes, a head that is tied to the embedding, and a layer that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 32)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(6))
        self.wide = nn.Sequential(nn.Linear(32, 160), nn.GELU(), nn.Linear(160, 32))
        self.norm = nn.LayerNorm(32)
        self.head = nn.Linear(32, 50, bias=False)
        self.head.weight = self.embedding.weight
        self.unused = nn.Linear(7, 7)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        logits: Tensor = self.head(self.norm(x + self.wide(x)))
        return logits


def make_net(dtype: torch.dtype = torch.float32, device: str = "cpu") -> Net:
    torch.manual_seed(0)
    return Net().to(device, dtype)


def loss_of(model: nn.Module, seed: int, device: str = "cpu") -> Tensor:
    tokens = torch.randint(0, 50, (4, 9), generator=torch.Generator().manual_seed(seed)).to(device)
    return nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())


def train(model: nn.Module, optimizer: torch.optim.Optimizer, seeds: Any, device: str = "cpu") -> list[int]:
    """Take a step for each seed; return how many gradients were gone after each backward pass."""
    gone = []
    for seed in seeds:
        loss_of(model, seed, device).backward()
        gone.append(sum(param.grad is None for param in model.parameters()) - 2)  # two are never used
        optimizer.step()
        optimizer.zero_grad()
    return gone


def pair(make: Callable[..., FusedOptimizer], **options: Any) -> tuple[Net, Net, FusedOptimizer, FusedOptimizer]:
    """Return two equal nets, and optimizers that step in ``step()`` and in the backward pass."""
    plain, early = make_net(), make_net()
    return (
        plain,
        early,
        make(plain.parameters(), **options),
        make(early.parameters(), in_backward=EARLY, **options),
    )


def assert_same(plain: nn.Module, early: nn.Module, one: FusedOptimizer, other: FusedOptimizer) -> None:
    """Assert equal parameters and equal state, bit for bit."""
    assert_equal(plain.parameters(), early.parameters())
    states = one.state_dict()["state"], other.state_dict()["state"]
    assert states[0].keys() == states[1].keys()
    for key, entries in states[0].items():
        assert entries.keys() == states[1][key].keys()
        assert_equal(entries.values(), [states[1][key][name] for name in entries])  # loaded in another order


COMBINATIONS = [f"{name}/{precision}" for name in OPTIMIZERS for precision in PRECISIONS]
QUICK = (
    *(("torch-cpu", f"adamw/{precision}") for precision in PRECISIONS),
    *(("cpp-cpu", f"{name}/bf16-stochastic") for name in OPTIMIZERS),
    ("cpp-cpu", "adamw/bf16-int8"),
    ("torch-cpu", "muon/fp32"),
)

#: In Triton's interpreter a case takes many seconds: one with codes and scales, and one with halves of masters.
INTERPRETED = ("adamw/bf16-int8", "lion/bf16-split")
CASES = [
    case
    for case in with_backends(BACKENDS, COMBINATIONS, QUICK)
    if case.values[0] != ("triton", "cpu") or case.values[-1] in INTERPRETED
]


@pytest.mark.parametrize(("backend", "case"), CASES)
def test_the_bits_are_those_of_step(backend: tuple[str, str], case: str) -> None:
    where, device = backend
    name, precision = case.split("/")
    make, given = OPTIMIZERS[name]
    dtype, options = PRECISIONS[precision]
    if given.get("amsgrad") and options.get("state_dtype") == "int8":
        with pytest.raises(ValueError, match="amsgrad"):
            make(make_net(dtype).parameters(), **given, **options)
        return
    plain, early = make_net(dtype, device), make_net(dtype, device)
    one = make(plain.parameters(), backend=where, **given, **options)
    other = make(early.parameters(), backend=where, in_backward=EARLY, **given, **options)
    steps = range(2 if where == "triton" else 4)
    train(plain, one, steps, device)
    gone = train(early, other, steps, device)
    assert_same(plain, early, one, other)
    assert gone[-1] > 3, "parts are stepped in the backward pass"


def test_the_first_step_waits_where_gradients_may_be_changed_after_the_backward_pass() -> None:
    wide, narrow = make_net(), make_net(torch.bfloat16)
    assert train(wide, FusedAdamW(wide.parameters(), in_backward=EARLY), range(2))[0] == 0
    assert train(narrow, FusedAdamW(narrow.parameters(), in_backward=EARLY), range(2))[0] > 3


def test_a_part_has_at_most_as_many_bytes_as_asked_for_and_true_is_the_default() -> None:
    net = make_net()
    parts = FusedAdamW(net.parameters(), in_backward=EARLY)._flat_groups[0].parts
    sizes = [sum(param.nbytes for param in part.params) for part in parts]
    assert len(parts) > 3
    assert all(size <= SMALL or len(part.params) == 1 for size, part in zip(sizes, parts, strict=True))
    assert sum(sizes) == sum(param.nbytes for param in net.parameters())
    assert hk.InBackward is InBackward
    assert FusedAdamW(net.parameters(), in_backward=True).options.early == InBackward()
    assert not FusedAdamW(net.parameters(), in_backward=False).steps_in_backward


def test_row_wise_adagrad_steps_sparse_gradients() -> None:
    def make(early: bool) -> tuple[nn.ModuleList, FusedRowWiseAdagrad]:
        torch.manual_seed(0)
        tables = nn.ModuleList(nn.Embedding(200, 16, sparse=index % 2 == 0) for index in range(4))
        return tables, FusedRowWiseAdagrad(tables.parameters(), in_backward=EARLY if early else False)

    (plain, one), (early, other) = make(False), make(True)
    for tables, optimizer in ((plain, one), (early, other)):
        for seed in range(3):
            rows = torch.randint(0, 200, (30,), generator=torch.Generator().manual_seed(seed))
            torch.stack([table(rows).square().mean() for table in tables]).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_same(plain, early, one, other)


def test_groups_schedules_and_weights_that_are_tied_by_their_memory() -> None:
    """Tied parameters that are two objects are stepped once, when both gradients are there."""

    def make(early: bool) -> tuple[Net, FusedOptimizer, Any]:
        net = make_net()
        net.head.weight = nn.Parameter(net.embedding.weight.detach())
        named = dict(net.named_parameters())
        decayed = [param for name, param in named.items() if "weight" in name and "norm" not in name]
        others = [param for name, param in named.items() if not ("weight" in name and "norm" not in name)]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "lr": 0.003}]
        optimizer = FusedAdamW(groups, lr=0.01, in_backward=EARLY if early else False)
        return net, optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, [0.01, 0.003], 6)

    runs = [make(False), make(True)]
    for net, optimizer, schedule in runs:
        for seed in range(5):
            train(net, optimizer, [seed])
            schedule.step()
    (plain, one, _), (early, other, _) = runs
    assert early.head.weight.data_ptr() == early.embedding.weight.data_ptr()
    assert_same(plain, early, one, other)


def test_parameters_that_get_gradients_at_some_steps_only() -> None:
    """A part waits for as many gradients as came before; what comes later is stepped by ``step()``."""
    plain, early, one, other = pair(FusedSGD, lr=0.1, momentum=0.9)
    for seed in range(8):
        for net, optimizer in ((plain, one), (early, other)):
            layers = net.layers
            net.layers = nn.ModuleList(layer for index, layer in enumerate(layers) if (seed + index) % 3)
            for index, layer in enumerate(layers):
                layer.requires_grad_(not (seed == 5 and index < 3))
            train(net, optimizer, [seed])
            net.layers = layers
    assert_same(plain, early, one, other)


@pytest.mark.parametrize("accumulated", [None, 0, 5], ids=["never", "always", "later"])
def test_gradients_that_come_in_another_order(accumulated: int | None) -> None:
    """While the order stays, few parameters have hooks; after it changed all have them again, and step as early.

    Where gradients are accumulated, as from step ``accumulated`` on, one that is there may not be complete.
    """
    plain, early, one, other = pair(FusedAdamW, lr=0.01)
    orders, gone = [[0, 1, 2, 3, 4, 5]] * 5 + [[3, 5, 1, 0, 4, 2]] * 5 + [[5, 0, 4], [1, 2, 3], [0, 5, 2]] * 2, []
    for seed, order in enumerate(orders):
        for net, optimizer in ((plain, one), (early, other)):
            layers = net.layers
            net.layers = nn.ModuleList(layers[index] for index in order)
            if accumulated is not None and seed >= accumulated:
                with optimizer.accumulate():
                    loss_of(net, 100 + seed).backward()
            found = train(net, optimizer, [seed])
            net.layers = layers
        gone += found
    assert_same(plain, early, one, other)
    assert min(gone[1:5]) == min(gone[7:10]) == max(gone[:10]) > 10


def test_a_user_s_hooks_see_every_gradient() -> None:
    """Also those that were registered after the optimizer was built, on the parameter that completes a part."""
    plain, early, one, other = pair(FusedAdamW, lr=0.01)
    seen: list[int] = []

    def halve(param: Tensor) -> None:
        assert param.grad is not None
        param.grad.mul_(0.5)
        seen.append(id(param))

    for net in (plain, early):
        for param in net.parameters():
            param.register_post_accumulate_grad_hook(halve)
    for net, optimizer in ((plain, one), (early, other)):
        train(net, optimizer, range(4))
    assert_same(plain, early, one, other)
    assert len(seen) == 2 * 4 * (len(list(early.parameters())) - 2)


@pytest.mark.parametrize("wrapper", ["checkpoint", pytest.param("compile", marks=pytest.mark.full), "closure"])
def test_checkpointing_compilation_and_closures(wrapper: str) -> None:
    plain, early, one, other = pair(FusedAdamW, lr=0.01)
    for net, optimizer in ((plain, one), (early, other)):
        model: Any = net
        if wrapper == "compile":
            model = torch.compile(net, backend="aot_eager")
        if wrapper == "checkpoint":
            net.wide.forward = _checkpointed(net.wide.forward)  # type: ignore[method-assign]
        for seed in range(3):
            if wrapper == "closure":
                optimizer.step(lambda seed=seed, net=net: _backward(net, seed))
            else:
                _backward(model, seed)
                optimizer.step()
            optimizer.zero_grad()
    assert_same(plain, early, one, other)


def _checkpointed(forward: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x: checkpoint(forward, x, use_reentrant=False)


def _backward(model: nn.Module, seed: int) -> float:
    loss = loss_of(model, seed)
    loss.backward()
    return float(loss.detach())


def test_micro_batches_accumulate_and_the_last_one_steps() -> None:
    plain, early, one, other = pair(FusedAdamW, lr=0.01)
    for step in range(3):
        for net, optimizer in ((plain, one), (early, other)):
            for micro in range(3):
                if micro < 2:
                    with optimizer.accumulate():
                        loss_of(net, 3 * step + micro).backward()
                    assert net.norm.weight.grad is not None
                else:
                    loss_of(net, 3 * step + micro).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_same(plain, early, one, other)


@pytest.mark.parametrize("steps", [0, 1, 2, 3])
@pytest.mark.parametrize("settings", [EARLY, True], ids=["parts", "one part"])
def test_a_second_backward_pass_raises_and_says_what_to_write(settings: InBackward | bool, steps: int) -> None:
    net = make_net()
    optimizer = FusedAdamW(net.parameters(), in_backward=settings)
    train(net, optimizer, range(steps))
    loss_of(net, 2).backward()
    before = [param.detach().clone() for param in net.parameters()]
    with pytest.raises(RuntimeError, match=r"with optimizer\.accumulate\(\)"):
        loss_of(net, 3).backward()
    assert_equal(before, net.parameters())


@pytest.mark.parametrize("steps", [1, 4])
def test_a_second_pass_that_reaches_one_stepped_parameter_raises_at_the_latest_in_step(steps: int) -> None:
    """Whether that parameter has a hook or not, once the order is known."""
    stepped = 0
    for name, _ in make_net().named_parameters():
        net = make_net()
        optimizer = FusedAdamW(net.parameters(), in_backward=EARLY)
        train(net, optimizer, range(steps))
        loss_of(net, steps).backward()
        param = net.get_parameter(name)
        if param.grad is None and not name.startswith("unused"):
            with pytest.raises(RuntimeError, match="a second backward pass"):
                optimizer.step(lambda param=param: param.square().sum().backward())
            stepped += 1
    assert stepped > 10


def by_torch(model: nn.Module, other: nn.Module, file: Path) -> None:
    other.load_state_dict(saved_and_loaded(model.state_dict()))


def by_save_model(model: nn.Module, other: nn.Module, file: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    safetensors.save_model(model, str(file))
    assert safetensors.load_model(other, str(file)) == (set(), [])


def by_save_file(model: nn.Module, other: nn.Module, file: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    safetensors.save_file({name: tensor for name, tensor in model.state_dict().items() if name != "head.weight"}, file)
    missing, unknown = other.load_state_dict(safetensors.load_file(file), strict=False)
    assert (missing, unknown) == (["head.weight"], []), "which is tied to the embedding"


@pytest.mark.parametrize("precision", ["fp32", "bf16-master", "bf16-split", "bf16-int8"])
@pytest.mark.parametrize("move", [by_torch, by_save_model, by_save_file])
def test_training_goes_on_exactly_from_a_checkpoint_in_mid_run(
    move: Callable[[nn.Module, nn.Module, Path], None], precision: str, tmp_path: Path
) -> None:
    """The optimizer's state is saved by ``torch.save``, and its model by ``torch.save`` or safetensors."""
    dtype, given = PRECISIONS[precision]
    options: dict[str, Any] = {"max_grad_norm": 0.5, "in_backward": InBackward("previous", None, SMALL), **given}
    whole, first, second = make_net(dtype), make_net(dtype), make_net(dtype)
    optimizer, part, resumed = (FusedAdamW(net.parameters(), lr=0.01, **options) for net in (whole, first, second))
    train(whole, optimizer, range(7))
    train(first, part, range(4))
    move(first, second, tmp_path / "model")
    resumed.load_state_dict(saved_and_loaded(part.state_dict()))
    assert train(second, resumed, range(4, 7))[-1] > 3
    assert_same(whole, second, optimizer, resumed)


def test_a_checkpoint_from_before_the_first_step_has_no_norm_to_clip_with() -> None:
    net = make_net()
    settings = InBackward("previous", None, SMALL)
    optimizer = FusedSGD(net.parameters(), lr=0.1, max_grad_norm=0.1, in_backward=settings)
    start = copy.deepcopy([net.state_dict(), optimizer.state_dict()])
    train(net, optimizer, range(3))
    found = [param.detach().clone() for param in net.parameters()]
    net.load_state_dict(start[0])
    optimizer.load_state_dict(start[1])
    train(net, optimizer, range(3))
    assert_equal(found, net.parameters())


@pytest.mark.parametrize("early", [False, True])
def test_an_optimizer_that_is_built_later_takes_the_parameters_over(early: bool) -> None:
    """The one before may be alive, and would step in the backward pass of its successor. Its own steps still work."""
    plain, net, _, before = pair(FusedAdamW, lr=0.01)
    train(net, before, range(2))
    plain.load_state_dict(net.state_dict())
    one, other = FusedSGD(plain.parameters(), lr=0.1), FusedSGD(net.parameters(), lr=0.1, in_backward=early and EARLY)
    train(plain, one, range(2, 5))
    assert (train(net, other, range(2, 5))[-1] > 3) is early
    assert_same(plain, net, one, other)
    if not early:
        kept = [param.detach().clone() for param in net.parameters()]
        assert train(net, before, [5]) == [0]
        assert not any(map(torch.equal, kept[:3], list(net.parameters())[:3]))


def test_checkpoints_are_those_of_other_optimizers() -> None:
    """Of torch's, and of one that steps in ``step()``, in both directions."""
    plain, early, one, other = pair(FusedAdamW, lr=0.01)
    theirs = make_net()
    torch_own = torch.optim.AdamW(theirs.parameters(), lr=0.01)
    train(early, other, range(3))
    plain.load_state_dict(early.state_dict())
    one.load_state_dict(saved_and_loaded(other.state_dict()))
    theirs.load_state_dict(early.state_dict())
    torch_own.load_state_dict(saved_and_loaded(other.state_dict()))
    train(plain, one, [3])
    train(early, other, [3])
    train(theirs, torch_own, [3])
    assert_same(plain, early, one, other)
    for mine, reference in zip(early.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, reference, rtol=1e-5, atol=1e-6)
    other.load_state_dict(saved_and_loaded(one.state_dict()))
    train(plain, one, [4])
    train(early, other, [4])
    assert_same(plain, early, one, other)


# Clipping


def test_the_norm_of_the_step_before_clips() -> None:
    """Beside torch, with gradients scaled by hand."""
    most = 0.5
    early, theirs = make_net(), make_net()
    settings = InBackward(clip="previous", chunk_bytes=SMALL)
    optimizer = FusedSGD(early.parameters(), lr=0.1, max_grad_norm=most, in_backward=settings)
    reference = torch.optim.SGD(theirs.parameters(), lr=0.1)
    norm: Tensor | None = None
    for seed in range(5):
        train(early, optimizer, [seed])
        loss_of(theirs, seed).backward()
        grads = [param.grad for param in theirs.parameters() if param.grad is not None]
        own = torch.nn.utils.get_total_norm(grads)
        if norm is not None:
            torch.nn.utils.clip_grads_with_norm_(theirs.parameters(), most, norm)
        norm = own
        reference.step()
        reference.zero_grad()
    for mine, other in zip(early.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)


def test_a_norm_that_is_not_finite_is_not_remembered() -> None:
    net = make_net()
    settings = InBackward(clip="previous", chunk_bytes=SMALL)
    optimizer = FusedSGD(net.parameters(), lr=0.0, max_grad_norm=0.5, in_backward=settings)
    train(net, optimizer, range(2))
    assert optimizer._previous_norm is not None
    before = float(optimizer._previous_norm)
    (loss_of(net, 2) * float("inf")).backward()
    optimizer.step()
    optimizer.zero_grad()
    assert float(optimizer._previous_norm) == before > 0


def test_every_tensor_is_clipped_by_its_own_norm() -> None:
    early, theirs = make_net(), make_net()
    settings = InBackward(clip="tensor", chunk_bytes=SMALL)
    optimizer = FusedSGD(early.parameters(), lr=0.1, max_grad_norm=0.05, in_backward=settings)
    reference = torch.optim.SGD(theirs.parameters(), lr=0.1)
    for seed in range(4):
        train(early, optimizer, [seed])
        loss_of(theirs, seed).backward()
        for param in theirs.parameters():
            if param.grad is not None:
                torch.nn.utils.clip_grad_norm_([param], 0.05)
        reference.step()
        reference.zero_grad()
    for mine, other in zip(early.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)


def test_what_cannot_be_combined_is_refused_with_the_remedy() -> None:
    params = list(make_net().parameters())
    with pytest.raises(ValueError, match=r'clip="previous".*clip="tensor"'):
        FusedAdamW(params, max_grad_norm=1.0, in_backward=True)
    optimizer = FusedAdamW(params, in_backward=True)
    with pytest.raises(ValueError, match=r'max_grad_norm=2.*clip="previous"'):
        optimizer.max_grad_norm = 2.0
    with pytest.raises(ValueError, match="fixed"):
        FusedAdamW(params, gradients="fixed", in_backward=True)
    with pytest.raises(ValueError, match="got 3"):
        FusedAdamW(params, in_backward=3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="clip"):
        InBackward(clip="exact")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="chunk_bytes"):
        InBackward(chunk_bytes=0)
    with pytest.raises(TypeError, match="DistributedDataParallel"):
        InBackward(model=make_net())  # type: ignore[arg-type]
    stack = hk.ReplicaStack(nn.Linear(3, 3), 2)
    with pytest.raises(ValueError, match="stack of 2 replicas"):
        FusedAdamW(stack.parameters(), max_grad_norm=1.0, in_backward=InBackward(clip="tensor"))


def test_a_scaler_of_bf16_parameters_is_refused_at_the_first_step_of_all() -> None:
    net = make_net(torch.bfloat16)
    optimizer = FusedAdamW(net.parameters(), in_backward=EARLY)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(loss_of(net, 0)).backward()
    with pytest.raises(RuntimeError, match="bfloat16"):
        scaler.step(optimizer)


def test_the_start_is_kept_before_anything_is_written_in_the_first_backward_pass() -> None:
    """A run in bf16 begins anew from the very start, though its first backward pass has stepped."""
    torch.manual_seed(0)
    layers = [*(nn.Linear(24, 24) for _ in range(6)), nn.BatchNorm1d(24)]
    stack = hk.ReplicaStack(nn.Sequential(*layers).bfloat16(), 3)
    before = [tensor.detach().clone() for tensor in (*stack.parameters(), *stack.buffers())]
    optimizer = FusedSGD(stack.parameters(), lr=1e-3, in_backward=OF_STACKS)
    scheduler = hk.HDETOneCycleLR(optimizer, 1e-3, 40, sync_every=1, ensemble=stack.ensemble)
    for step in range(3):
        inputs = torch.randn(12, 24, dtype=torch.bfloat16)
        losses = stack.backward(lambda model, x: (model(x) - x).float().square().mean(), inputs)
        assert any(param.grad is None for param in stack.parameters()), step
        optimizer.step()
        scheduler.step(losses)
        optimizer.zero_grad()
    assert scheduler.cycle.undoing is not None
    scheduler.cycle.undoing.start.restore()
    assert_equal(before, [*stack.parameters(), *stack.buffers()])


@pytest.mark.parametrize("change", ["clip", "scaler", "unscale"])
def test_what_changes_gradients_after_the_backward_pass_raises_before_anything_is_modified(change: str) -> None:
    net = make_net()
    before = [param.detach().clone() for param in net.parameters()]
    optimizer = FusedAdamW(net.parameters(), in_backward=EARLY)
    scaler = torch.amp.GradScaler("cpu", enabled=change != "clip")
    scaler.scale(loss_of(net, 0)).backward()
    if change == "clip":
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
    if change == "unscale":
        scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match=r"bfloat16|max_grad_norm="):
        scaler.step(optimizer)
    assert_equal(before, net.parameters())


def test_a_copy_has_hooks_of_its_own_and_a_deleted_optimizer_none() -> None:
    net = make_net()
    optimizer = FusedAdamW(net.parameters(), lr=0.01, in_backward=EARLY)
    train(net, optimizer, range(2))
    twin, copied = copy.deepcopy((net, optimizer))
    thawed_net, thawed = pickle.loads(pickle.dumps((net, optimizer)))
    for each, own in ((net, optimizer), (twin, copied), (thawed_net, thawed)):
        train(each, own, range(2, 5))
    assert_same(net, twin, optimizer, copied)
    assert_same(net, thawed_net, optimizer, thawed)
    gone = weakref.ref(copied)
    del copied, own
    gc.collect()
    assert gone() is None
    before = [param.detach().clone() for param in twin.parameters()]
    loss_of(twin, 0).backward()
    assert_equal(before, twin.parameters())
    assert twin.norm.weight.grad is not None


def test_parameters_that_were_moved_or_added_between_steps() -> None:
    plain, early, one, other = pair(FusedAdam, lr=0.01)
    for net, optimizer in ((plain, one), (early, other)):
        train(net, optimizer, range(2))
        net.wide[0].weight.data = net.wide[0].weight.data.clone()
        more = nn.Linear(32, 32)
        torch.nn.init.eye_(more.weight)
        torch.nn.init.zeros_(more.bias)
        net.layers.append(more)
        optimizer.add_param_group({"params": more.parameters(), "lr": 0.02})
        train(net, optimizer, range(2, 6))
    assert_same(plain, early, one, other)


# Between the backward pass and the step


def test_the_norm_is_the_same_bit_for_bit_in_whichever_order_gradients_come() -> None:
    """As on the ranks of DDP, where the order of arrival differs."""

    def run(order: int) -> tuple[list[Tensor], list[float]]:
        torch.manual_seed(0)
        layers = nn.ModuleList(nn.Linear(7 + index, 5) for index in range(12))
        settings = InBackward("previous", None, 100)
        optimizer = FusedSGD(layers.parameters(), lr=0.1, max_grad_norm=0.01, in_backward=settings)
        norms = []
        for step in range(12):
            generator = torch.Generator().manual_seed(step)
            inputs = [torch.randn(3, 7 + index, generator=generator) for index in range(12)]
            losses = [layers[index](inputs[index]).square().sum() for index in range(12)[::order]]
            torch.stack(losses).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            assert optimizer._previous_norm is not None
            norms.append(float(optimizer._previous_norm))
        return [param.detach().clone() for param in layers.parameters()], norms

    (params, norms), (others, same) = run(1), run(-1)
    assert norms == same
    assert_equal(params, others)


def _set_rate(net: nn.Module, optimizer: FusedOptimizer) -> None:
    optimizer.param_groups[0]["lr"] = 0.5


def _fill_rate(net: nn.Module, optimizer: FusedOptimizer) -> None:
    optimizer.param_groups[0]["lr"].fill_(0.5)


def _set_betas(net: nn.Module, optimizer: FusedOptimizer) -> None:
    optimizer.param_groups[0]["betas"] = (0.5, 0.999)


def _set_norm(net: nn.Module, optimizer: FusedOptimizer) -> None:
    optimizer.max_grad_norm = 7.0


def _schedule(net: nn.Module, optimizer: FusedOptimizer) -> None:
    """Step a scheduler that was built before, as a loop does in the wrong order."""
    optimizer.schedule.step()  # type: ignore[attr-defined]


def _clip(net: nn.Module, optimizer: FusedOptimizer) -> None:
    torch.nn.utils.clip_grad_norm_(net.parameters(), 1e9)  # writes, though it changes no number


def _replace_gradient(net: nn.Module, optimizer: FusedOptimizer) -> None:
    for param in net.parameters():
        if param.grad is not None:
            param.grad = param.grad * 0.5


def _write_data(net: nn.Module, optimizer: FusedOptimizer) -> None:
    """Write as old code does, which torch does not count."""
    for param in net.parameters():
        if param.grad is not None:
            param.grad.data.mul_(0.5)


def _drop_gradients(net: nn.Module, optimizer: FusedOptimizer) -> None:
    net.zero_grad()


CHANGES: dict[str, tuple[Callable[[nn.Module, FusedOptimizer], None], str]] = {
    "lr": (_set_rate, r"lr of parameter group 0 was changed from 0\.01 to 0\.5 .* before backward\(\)"),
    "lr in place": (_fill_rate, "lr of parameter group 0"),
    "betas": (_set_betas, "betas of parameter group 0"),
    "max_grad_norm": (_set_norm, r"max_grad_norm was changed from 1\.0 to 7\.0"),
    "scheduler": (_schedule, "lr of parameter group 0"),
    "clip": (_clip, "max_grad_norm="),
    "other gradients": (_replace_gradient, "max_grad_norm="),
    "data of gradients": (_write_data, "max_grad_norm="),
    "no gradients": (_drop_gradients, "max_grad_norm="),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("steps", [0, 1, 4])
@pytest.mark.parametrize("change", CHANGES)
def test_what_is_changed_between_the_passes_and_the_step_raises_at_that_step(
    change: str, steps: int, dtype: torch.dtype
) -> None:
    act, message = CHANGES[change]
    net = make_net(dtype)
    rate: Any = torch.tensor(0.01) if change == "lr in place" else 0.01
    optimizer: Any = FusedAdamW(
        net.parameters(), lr=rate, max_grad_norm=1.0, in_backward=InBackward("previous", None, SMALL)
    )
    optimizer.schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    for seed in range(steps):
        train(net, optimizer, [seed])
    before = [param.detach().clone() for param in net.parameters()]
    loss_of(net, steps).backward()
    held = steps == 0 and dtype == torch.float32
    assert all(map(torch.equal, before, net.parameters())) is held
    act(net, optimizer)
    middle = [param.detach().clone() for param in net.parameters()]
    with pytest.raises(RuntimeError, match=message) as error:
        optimizer.step()
    assert_equal(middle, net.parameters())
    assert ("have taken this step" in str(error.value)) is not held


def test_schedulers_and_trainers_may_set_values_before_the_backward_pass_and_after_the_step() -> None:
    plain, early, one, other = pair(FusedAdamW, lr=0.01)
    for net, optimizer in ((plain, one), (early, other)):
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        for seed in range(4):
            optimizer.param_groups[0]["weight_decay"] = 0.1 * seed
            train(net, optimizer, [seed])
            schedule.step()
    assert_same(plain, early, one, other)


class _Broken(torch.autograd.Function):
    """Raises in its backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise ArithmeticError


def _fail(net: Net, seed: int) -> None:
    """Make a backward pass that raises when half of it is done."""
    layer = net.layers[1]
    forward = layer.forward
    layer.forward = lambda x: _Broken.apply(forward(x))  # type: ignore[method-assign]
    with pytest.raises(ArithmeticError):
        loss_of(net, seed).backward()
    layer.forward = forward  # type: ignore[method-assign]


@pytest.mark.parametrize("steps", [0, 2, 5])
def test_a_run_goes_on_from_a_checkpoint_after_a_backward_pass_that_raised(steps: int) -> None:
    plain, early, one, other = pair(FusedAdamW, lr=0.01)
    train(plain, one, range(steps + 3))
    train(early, other, range(steps))
    saved = saved_and_loaded(early.state_dict()), saved_and_loaded(other.state_dict())
    _fail(early, steps)
    early.zero_grad()
    early.load_state_dict(saved[0])
    other.load_state_dict(saved[1])
    train(early, other, range(steps, steps + 3))
    assert_same(plain, early, one, other)


def test_zero_grad_ends_a_backward_pass_that_raised_and_says_what_was_stepped(caplog: pytest.LogCaptureFixture) -> None:
    net = make_net()
    optimizer = FusedAdamW(net.parameters(), lr=0.01, in_backward=EARLY)
    train(net, optimizer, range(3))
    assert "zero_grad" not in caplog.text, "after a step it forgets nothing"
    _fail(net, 3)
    optimizer.zero_grad()
    assert "parameters have taken this step" in caplog.text
    assert train(net, optimizer, range(4, 7))[-1] > 3


def test_what_would_save_half_a_step_is_refused() -> None:
    net = make_net()
    optimizer = FusedAdamW(net.parameters(), lr=0.01, in_backward=EARLY)
    loss_of(net, 0).backward()
    optimizer.state_dict()  # the first step is step()'s, so nothing has moved
    optimizer.step()
    optimizer.zero_grad()
    loss_of(net, 1).backward()
    for name, call in {
        "state_dict": optimizer.state_dict,
        "copy": lambda: copy.deepcopy(optimizer),
        "add_param_group": lambda: optimizer.add_param_group({"params": nn.Linear(2, 2).parameters()}),
    }.items():
        with pytest.raises(RuntimeError, match=rf"{name}.* between backward\(\) and step\(\)"):
            call()
    optimizer.step()
    optimizer.state_dict()


@pytest.mark.parametrize("steps", [0, 1, 4])
def test_a_parameter_that_is_moved_between_the_backward_pass_and_the_step_loses_no_step(steps: int) -> None:
    plain, early, one, other = pair(FusedAdamW, lr=0.01)
    train(plain, one, range(steps))
    train(early, other, range(steps))
    loss_of(plain, steps).backward()
    loss_of(early, steps).backward()
    left = [name for name, param in early.named_parameters() if param.grad is not None]
    for net, optimizer in ((plain, one), (early, other)):
        for name in left:
            param = net.get_parameter(name)
            param.data = param.data * 0.5
        optimizer.step()
        optimizer.zero_grad()
    assert left
    train(plain, one, [steps + 1])
    train(early, other, [steps + 1])
    assert_same(plain, early, one, other)


def test_a_layer_that_several_reentrant_checkpoints_share_is_refused_with_the_remedy() -> None:
    plain, early, one, other = pair(FusedSGD, lr=0.1)

    def shared(net: Net, reentrant: bool) -> None:
        x = net.embedding(torch.arange(12).view(2, 6))
        for _ in range(2):
            x = checkpoint(net.wide, x, use_reentrant=reentrant)
        x.square().mean().backward()

    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        shared(early, True)
    other.zero_grad()
    for net, optimizer in ((plain, one), (early, other)):
        for _ in range(3):
            shared(net, False)
            optimizer.step()
            optimizer.zero_grad()
    assert_same(plain, early, one, other)


def test_a_backward_pass_that_is_not_to_step() -> None:
    """As for saliency: it accumulates, and is cleared."""
    plain, early, one, other = pair(FusedAdamW, lr=0.01)
    for net, optimizer in ((plain, one), (early, other)):
        for seed in range(4):
            before = [param.detach().clone() for param in net.parameters()]
            with optimizer.accumulate():
                loss_of(net, 50 + seed).backward()
            optimizer.zero_grad()
            assert_equal(before, net.parameters())
            train(net, optimizer, [seed])
    assert_same(plain, early, one, other)


# Schedulers and stacks


def history(scheduler: Any) -> list[tuple[Any, ...]]:
    return [(record.step, record.losses, record.values, record.base) for record in scheduler.history]


@pytest.mark.parametrize(
    ("gradients", "controller"),
    [("shared", "regression"), ("shared", "hypergradient"), ("local", "regression")],
)
def test_stacks_under_a_scheduler_train_alike(gradients: Any, controller: str) -> None:
    """Slopes are measured on gradients that are gone at the sync; the start is kept before the first step."""

    def run(early: bool) -> tuple[hk.ReplicaStack, FusedOptimizer, Any, list[int]]:
        torch.manual_seed(0)
        stack = hk.ReplicaStack(nn.Sequential(*(nn.Linear(24, 24) for _ in range(6))), 3, gradients=gradients)
        optimizer = FusedAdamW(
            stack.parameters(), lr=0.01, in_backward=InBackward(chunk_bytes=5000) if early else False
        )
        auto = hk.HypergradientController() if controller == "hypergradient" else True
        scheduler = hk.HDETOneCycleLR(optimizer, 0.01, 40, sync_every=2, auto_lr=auto, ensemble=stack.ensemble)
        gone = []
        for seed in range(40):
            inputs = torch.randn(12, 24, generator=torch.Generator().manual_seed(seed))
            losses = stack.backward(lambda model, x: (model(x) - x).square().mean(), inputs)
            gone.append(sum(param.grad is None for param in stack.parameters()))
            optimizer.step()
            scheduler.step(losses)
            optimizer.zero_grad()
        return stack, optimizer, scheduler, gone

    (plain, one, schedule, _), (early, other, same, gone) = run(False), run(True)
    assert_equal(plain.parameters(), early.parameters())
    assert one.state_dict()["state"].keys() == other.state_dict()["state"].keys()
    torch.testing.assert_close(history(schedule), history(same), rtol=0, atol=0, equal_nan=True)
    assert gone[0] == 0, "parameters are in float32"
    assert min(gone[2:]) > 3


def test_a_stack_without_sync_accumulates() -> None:
    def run(early: bool) -> hk.ReplicaStack:
        torch.manual_seed(0)
        stack = hk.ReplicaStack(nn.Sequential(*(nn.Linear(24, 24) for _ in range(4))), 2)
        optimizer = FusedAdamW(
            stack.parameters(), lr=0.01, in_backward=InBackward(chunk_bytes=5000) if early else False
        )
        for seed in range(8):
            inputs = torch.randn(8, 24, generator=torch.Generator().manual_seed(seed))
            if seed % 2 == 0:
                with stack.no_sync():
                    stack.backward(lambda model, x: (model(x) - x).square().mean(), inputs)
                continue
            stack.backward(lambda model, x: (model(x) - x).square().mean(), inputs)
            optimizer.step()
            optimizer.zero_grad()
        return stack

    assert_equal(run(False).parameters(), run(True).parameters())


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """The same order of sums in every pass, whatever else runs on the machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
