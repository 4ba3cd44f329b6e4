"""The copy of the start: tensors, optimizers' states, and what is written back, in place."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import hdet_kernels as hk
from hdet_kernels.schedule.undo import copies
from hdet_kernels.schedule.undo.copies import (
    KeptTensors,
    reset_others,
    state_pairs,
    tensors_in,
    whole_state,
)
from hdet_kernels.schedule.undo.undoing import KeptStart, fits
from tests.ranks import run_ranks
from tests.schedule.cases import parameters
from tests.schedule.undo_runs import SYNC, TOTAL, Scripted, Trying, Undoable
from tests.training import batch, network, same, with_averaging


def tree(value: float = 1.0, size: int = 3, device: str = "cpu") -> dict[str, Any]:
    def full(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.full(shape, value, dtype=dtype, device=device)

    return {"a": [full(size), None, 7], "b": {"c": full(2, 2, dtype=torch.int64), "d": "text"}, "e": full(0)}


def memory(found: Any) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors_in(found) if tensor.numel()]


def test_the_next_copy_uses_the_memory_again_unless_somebody_holds_it_or_the_shapes_differ() -> None:
    kept = KeptTensors()
    kept.copy(tree(1.0))
    first = memory(kept.read())
    kept.copy(tree(2.0))
    assert memory(kept.read()) == first
    lent = kept.lend()
    kept.copy(tree(3.0))
    assert same(lent, tree(2.0))
    assert same(kept.read(), tree(3.0))
    kept.copy(tree(4.0, size=5))
    assert same(kept.read(), tree(4.0, size=5))


def test_what_is_taken_over_is_never_modified() -> None:
    kept, loaded = KeptTensors(), tree(1.0)
    kept.take(loaded)
    assert kept.read() is loaded
    kept.copy(tree(2.0))
    assert same(loaded, tree(1.0))


@pytest.mark.parametrize(
    "source", [torch.ones(2, 3).t(), torch.ones(3, 1).expand(3, 4)], ids=["transposed", "expanded"]
)
def test_strides_do_not_matter(source: torch.Tensor) -> None:
    kept = KeptTensors()
    kept.copy([source])
    assert torch.equal(kept.read()[0], source)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("share", "on", "here"),
    [(1.0, "auto", True), (0.0, "auto", False), (1.0, "cpu", False)],
    ids=["room", "no room", "as wished"],
)
def test_on_a_gpu_the_copy_lives_where_there_is_room_or_as_wished(
    share: float, on: Any, here: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copies, "SHARE", share)
    kept, source = KeptTensors(on), tree(device="cuda", size=1 << 22)
    kept.copy(source)
    for tensor in tensors_in(source):
        tensor.zero_()
    held = [tensor for tensor in tensors_in(kept.read()) if tensor.numel()]
    assert [tensor.is_cuda for tensor in held] == [here] * 2
    assert [tensor.is_pinned() for tensor in held if not tensor.is_cuda] == [True] * (0 if here else 2)
    back = tree(0.0, device="cuda", size=1 << 22)
    copies.copy_all(list(tensors_in(back)), list(tensors_in(kept.read())))
    kept.was_read()
    assert same(back, tree(device="cuda", size=1 << 22))
    assert same([tensor.cpu() for tensor in tensors_in(kept.lend())], list(tensors_in(tree(size=1 << 22))))


@pytest.mark.gpu
def test_a_copy_to_host_memory_does_not_wait_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device is busy when the copy is made; what is read later has the values of that moment."""
    monkeypatch.setattr(copies, "SHARE", 0.0)
    kept, source = KeptTensors(), [torch.zeros(1 << 22, device="cuda")]
    kept.copy(source)
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)
    source[0].fill_(1.0)
    torch.cuda.set_sync_debug_mode("error")
    try:
        kept.copy(source)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    source[0].fill_(2.0)
    other = torch.cuda.Stream()
    other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other):
        target = torch.zeros(1 << 22, device="cuda")
        torch.cuda._sleep(200_000_000)
        copies.copy_all([target], kept.read())
        kept.was_read()
    kept.copy([torch.full((1 << 22,), 3.0, device="cuda")])  # waits, on the device, until the other stream has read
    assert bool((kept.lend()[0] == 3).all())
    torch.cuda.synchronize()
    assert bool((target == 1).all())


CLIPPED: dict[str, Any] = {"max_grad_norm": 0.1, "in_backward": hk.InBackward(clip="previous")}

OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "FusedAdamW": lambda params: hk.FusedAdamW(params, lr=0.1, amsgrad=True),
    "FusedSGD": lambda params: hk.FusedSGD(params, lr=0.1, momentum=0.9, dampening=0.5),
    "FusedAdagrad": lambda params: hk.FusedAdagrad(params, lr=0.1, initial_accumulator_value=0.5),
    "FusedLion": lambda params: hk.FusedLion(params, lr=0.1),
    "FusedSGD, clipped by the norm before": lambda params: hk.FusedSGD(params, lr=0.1, **CLIPPED),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.1),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, dampening=0.5),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1, initial_accumulator_value=0.5),
    "NAdam": lambda params: torch.optim.NAdam(params, lr=0.1),
    "Rprop": lambda params: torch.optim.Rprop(params, lr=0.1),
    "RMSprop": lambda params: torch.optim.RMSprop(params, lr=0.1, momentum=0.9, centered=True),
}


def train_optimizer(optimizer: Any, params: list[nn.Parameter], steps: range) -> list[Tensor]:
    found = []
    for step in steps:
        for number, param in enumerate(params):
            param.grad = torch.linspace(-1, 1, param.numel()).reshape(param.shape) * (step + number + 0.5)
        optimizer.step()
        found += [param.detach().clone() for param in params]
    return found


def copied(optimizer: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
    tensors, others = whole_state(optimizer)
    return {name: tensor.clone() for name, tensor in tensors.items()}, others


def bring_back(optimizer: Any, kept: tuple[dict[str, Tensor], dict[str, Any]]) -> None:
    for _, now, saved in state_pairs(optimizer, kept[0]):
        now.copy_(saved)
    reset_others(optimizer, *kept)


@pytest.mark.parametrize("steps", [0, 2], ids=["start", "later"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_goes_on_from_the_copy_as_it_did(name: str, steps: int) -> None:
    params = parameters()
    optimizer = OPTIMIZERS[name](params)
    train_optimizer(optimizer, params, range(steps))
    kept, values = copied(optimizer), [param.detach().clone() for param in params]
    first = train_optimizer(optimizer, params, range(steps, steps + 3))
    bring_back(optimizer, kept)
    for param, value in zip(params, values, strict=True):
        param.data.copy_(value)
    assert same(train_optimizer(optimizer, params, range(steps, steps + 3)), first)


def test_a_state_that_is_no_tensor_is_copied_too() -> None:
    params = parameters()
    optimizer = torch.optim.SGD(params, lr=0.1)
    optimizer.state[params[0]] = {"count": 3, "past": [torch.ones(2)], "new": None}
    kept = copied(optimizer)
    optimizer.state[params[0]]["count"] = 4
    optimizer.state[params[0]]["past"][0].zero_()
    optimizer.state[params[0]]["later"] = 1
    bring_back(optimizer, kept)
    assert same(dict(optimizer.state[params[0]]), {"count": 3, "past": [torch.ones(2)], "new": None})


def test_state_for_captured_graphs_is_reset_in_place() -> None:
    params = parameters()
    optimizer = torch.optim.NAdam(params, lr=0.1)
    kept = copied(optimizer)
    train_optimizer(optimizer, params, range(2))
    optimizer.param_groups[0]["capturable"] = True
    before = {name: value.data_ptr() for name, value in optimizer.state[params[0]].items()}
    bring_back(optimizer, kept)
    state = optimizer.state[params[0]]
    assert {name: value.data_ptr() for name, value in state.items()} == before
    assert {name: float(value.abs().max()) for name, value in state.items()} == {
        "step": 0.0, "mu_product": 1.0, "exp_avg": 0.0, "exp_avg_sq": 0.0,
    }  # fmt: skip


def test_state_of_a_fused_optimizer_is_reset_in_place() -> None:
    params = parameters()
    optimizer = hk.FusedSGD(params, lr=0.1)
    kept = copied(optimizer)
    optimizer.param_groups[0]["momentum"] = 0.9  # as a schedule may do
    train_optimizer(optimizer, params, range(2))
    before = copy.copy(optimizer.all_state_flats())
    bring_back(optimizer, kept)
    after = optimizer.all_state_flats()
    assert before.keys() == after.keys() == {"0/momentum_buffer", "0/step"}
    assert all(after[name].data_ptr() == flat.data_ptr() for name, flat in before.items())
    assert not any(flat.any() for flat in after.values())


def test_a_shared_state_is_brought_back_to_replicas_that_have_their_own_now() -> None:
    stack = hk.ReplicaStack(nn.Linear(2, 1), 3)
    optimizer = hk.FusedAdamW(stack.parameters(), lr=0.1)
    x = torch.ones(6, 2)

    def step() -> None:
        optimizer.zero_grad()
        stack.backward(lambda model, x: model(x).square().mean(), x)
        optimizer.step()

    step()
    kept = copied(optimizer)
    assert kept[0]["0/exp_avg"].dim() == 1
    optimizer.param_groups[0]["per_replica"] = {"betas[1]": [0.9, 0.95, 0.99]}
    step()
    assert optimizer.all_state_flats()["0/exp_avg"].dim() == 2
    bring_back(optimizer, kept)
    found = optimizer.all_state_flats()
    for row in range(3):
        assert torch.equal(found["0/exp_avg"][row], kept[0]["0/exp_avg"])
        assert torch.equal(found["0/step"].view(3, -1)[row], kept[0]["0/step"])


#: Training breaks at the second sync.
BROKEN = Scripted((2 * SYNC,))


def single(make: Any = torch.optim.AdamW, model: nn.Module | None = None, **options: Any) -> Single:
    return Single(make, model or network(batch_norm=True), **options)


class Single:
    """One replica, whose controller judges by a script. ``warm``: the optimizer has a state at the start."""

    def __init__(self, make: Any, model: nn.Module, *, warm: bool = False, **options: Any) -> None:
        self.model = model
        self.optimizer = make(model.parameters(), lr=0.01)
        if warm:
            x, y = batch(1, 0)
            F.mse_loss(model(x), y).backward()
            self.optimizer.step()
        settings = {"auto_lr": BROKEN, "sync_every": SYNC, "cycle_momentum": False}
        self.scheduler = hk.HDETOneCycleLR(
            self.optimizer, 0.05, TOTAL, model=model, **with_averaging({**settings, **options})
        )
        self.start: list[Tensor] = []

    @property
    def kept(self) -> KeptStart:
        undoing = self.scheduler.cycle.undoing
        assert undoing is not None
        return undoing.start

    @property
    def returned(self) -> bool:
        """Whether all is as it was before the first forward pass. State that came later is gone, or zero."""
        now, count = self.values(), len(self.start)
        return same(now[:count], self.start) and not any(bool(tensor.any()) for tensor in now[count:])

    def train(self, steps: int) -> Single:
        self.start = self.start or self.values()
        device, dtype = next((p.device, p.dtype.to_real()) for p in self.model.parameters())
        for _ in range(steps):
            x, y = (each.to(device, dtype) for each in batch(0, self.scheduler.last_epoch))
            self.optimizer.zero_grad()
            loss = F.mse_loss(self.model(x), y)
            loss.backward()
            self.optimizer.step()
            self.scheduler.step(loss)
        return self

    def tensors(self) -> list[Tensor]:
        """Parameters, buffers and state, as they are in use; without master weights, which are never zero."""
        named = [item for entry in self.optimizer.state.values() for item in entry.items()]
        state = [value for name, value in named if isinstance(value, Tensor) and not name.startswith("master")]
        return [*self.model.parameters(), *self.model.buffers(), *state]

    def values(self) -> list[Tensor]:
        return [tensor.detach().clone() for tensor in self.tensors()]


@pytest.mark.parametrize("make", [torch.optim.AdamW, hk.FusedAdamW])
def test_a_return_writes_into_the_tensors_in_use(make: Any) -> None:
    run = single(make, warm=True).train(SYNC)
    places = [tensor.data_ptr() for tensor in run.tensors()]
    versions = [param._version for param in run.model.parameters()]
    assert run.train(SYNC).returned
    assert [tensor.data_ptr() for tensor in run.tensors()] == places
    assert all(param._version > before for param, before in zip(run.model.parameters(), versions, strict=True))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_return_of_any_optimizer_is_bit_for_bit(name: str) -> None:
    run = single(lambda params, lr: OPTIMIZERS[name](params)).train(2 * SYNC - 1)
    assert not run.returned
    assert run.train(1).returned
    again = single(lambda params, lr: OPTIMIZERS[name](params), auto_lr=Scripted())
    rates = run.scheduler.get_last_lr()
    for each in (run, again):
        each.optimizer.param_groups[0]["lr"] = rates[0]
        each.optimizer.zero_grad()
        x, y = batch(0, 99)
        F.mse_loss(each.model(x), y).backward()
        each.optimizer.step()
    assert same(*([p.detach() for p in each.model.parameters()] for each in (run, again)))


@pytest.mark.parametrize("warm", [False, True])
def test_the_norm_by_which_gradients_are_clipped_returns_and_goes_back(warm: bool) -> None:
    """At the start there is none, unless the optimizer has made steps before: zero, which clips nothing, returns."""

    def norm(run: Single) -> Any:
        return run.optimizer.state_dict()["param_groups"][0].get("previous_grad_norm")

    make, trial = (lambda params, lr: hk.FusedAdamW(params, lr=lr, **CLIPPED)), Trying(no_better=(2 * SYNC,))
    run = single(make, warm=warm, auto_lr=trial)
    start = norm(run)
    assert (start is not None) is warm
    tried = norm(run.train(SYNC))
    before = run.scheduler.cycle.undoing.aside.copy.read()["state"]["previous_grad_norm"]
    assert float(tried) == (0.0 if start is None else float(start))
    assert float(before) > 0
    assert norm(run.train(SYNC - 1)) not in (start, before)
    assert same(norm(run.train(1)), before)


def _loads_the_model(run: Single) -> None:
    run.model.load_state_dict({name: 2 * tensor for name, tensor in run.model.state_dict().items()})
    run.model.norm.load_state_dict({name: tensor + 1 for name, tensor in run.model.norm.state_dict().items()})


def _loads_a_part_without_buffers(run: Single) -> None:
    run.model.outer.load_state_dict({name: 2 * tensor for name, tensor in run.model.outer.state_dict().items()})


def _leaves_steps_out(run: Single) -> None:
    """As a GradScaler does. Gradients are accumulated too: a step follows several forward passes."""
    run.start = run.values()
    for number in range(3):
        F.mse_loss(run.model(batch(1, number)[0]), batch(1, number)[1]).backward()


BETWEEN: dict[str, Callable[[Single], object]] = {
    "nothing": lambda run: None,
    "weights are loaded": _loads_the_model,
    "a part is loaded": _loads_a_part_without_buffers,
    "steps are left out": _leaves_steps_out,
    "the model is converted": lambda run: run.model.double(),
    "the cycle is built again": lambda run: run.scheduler.use_probe(lambda: torch.zeros(())),
    "a checkpoint of the beginning is loaded": lambda run: run.scheduler.load_state_dict(run.scheduler.state_dict()),
}


@pytest.mark.parametrize("between", BETWEEN)
@pytest.mark.parametrize("make", [torch.optim.AdamW, hk.FusedAdamW])
def test_buffers_return_to_those_before_the_first_forward_pass(
    make: Any, between: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever comes between building the scheduler and the first step of the optimizer."""
    run = single(make)
    BETWEEN[between](run)
    assert run.train(2 * SYNC).returned
    assert "parameters were written" not in caplog.text


def test_a_checkpoint_of_the_beginning_that_is_loaded_in_the_middle_of_a_run_is_the_start() -> None:
    run = single()
    saved = copy.deepcopy([part.state_dict() for part in (run.model, run.optimizer, run.scheduler)])
    run.train(SYNC - 1)
    for part, state in zip((run.model, run.optimizer, run.scheduler), saved, strict=True):
        part.load_state_dict(state)
    assert run.train(2 * SYNC).returned


def test_buffers_of_parameters_that_were_written_by_hand_are_not_known_and_that_is_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    run = single()
    run.model.outer.weight.data.mul_(2)
    run.model.norm.running_mean.fill_(7)
    run.train(2 * SYNC)
    assert caplog.text.count("parameters were written after the scheduler was built, and not by load_state_dict()") == 1
    assert run.model.norm.num_batches_tracked == 1
    torch.testing.assert_close(run.model.norm.running_mean, torch.full((16,), 6.3), atol=0.1, rtol=0)


def test_buffers_that_are_not_averaged_return_too() -> None:
    run = single(average_buffers=False).train(2 * SYNC - 1)
    assert not run.returned
    assert run.train(1).returned


def test_a_buffer_of_another_shape_is_left_as_it_is() -> None:
    model = network()
    model.register_buffer("table", torch.ones(3))
    run = single(model=model).train(SYNC)
    model.table = torch.zeros(5)
    start = run.start[: len(list(model.parameters()))]
    run.scheduler.load_state_dict(run.scheduler.state_dict())  # a checkpoint knows that it was replaced
    run.train(SYNC)
    assert torch.equal(model.table, torch.zeros(5))
    assert same([param.detach() for param in model.parameters()], start)


def test_buffers_that_became_more_are_left_as_they_are_and_that_is_said(caplog: pytest.LogCaptureFixture) -> None:
    """The new one comes first, so that the others would get each other's values."""
    run = single().train(SYNC)
    run.model.register_buffer("table", torch.ones(16))
    run.train(SYNC - 1)
    kept = run.scheduler.state_dict()["hdet"][0]["undo"]["kept"]
    run.train(1)
    assert kept["buffers"] == [None] * 4
    assert torch.equal(run.model.table, torch.ones(16))
    assert run.model.norm.num_batches_tracked == 2 * SYNC
    assert caplog.text.count("the model has 4 buffers, and had 3 when the start was kept") == 1


def test_a_callback_brings_back_what_the_user_keeps_beside_the_run() -> None:
    """As ``docs/usage/failures.md`` has it: a moving average of the weights begins anew at what was returned to."""
    run = single()
    averages = [AveragedModel(run.model, multi_avg_fn=get_ema_multi_avg_fn(0.9)) for _ in range(2)]

    def begin_anew(record: hk.SyncRecord) -> None:
        if record.undone is not None:
            averages[0].n_averaged.zero_()
            averages[0].update_parameters(run.model)

    run.scheduler.on_sync(begin_anew)
    for step in range(2 * SYNC):
        run.train(1)
        if step + 1 < 2 * SYNC:
            if step >= SYNC:
                run.model.inner.weight.data.fill_(math.nan)
            for average in averages:
                average.update_parameters(run.model)
    kept, lost = (list(average.module.parameters()) for average in averages)
    assert [record.undone for record in run.scheduler.history] == [None, 0]
    assert not lost[0].isfinite().any(), "without a callback it stays as it was"
    assert same([param.detach() for param in kept], [param.detach() for param in run.model.parameters()])


def test_complex_parameters_return() -> None:
    class Waves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(6, 1, dtype=torch.complex64))

        def forward(self, x: Tensor) -> Tensor:
            return (x.to(torch.complex64) @ self.weight).real

    assert single(model=Waves()).train(2 * SYNC).returned


def test_parameters_of_another_shape_are_refused_with_nothing_changed() -> None:
    run = single(warm=True).train(SYNC)
    run.kept.copy.read()["state"]["0/exp_avg"] = torch.ones(3, 5)
    before = run.values()
    with pytest.raises(RuntimeError, match="state 0/exp_avg has shape"):
        run.kept.restore()
    assert same(run.values(), before)


@pytest.mark.parametrize(
    ("now", "saved", "expected"),
    [((3, 4), (3, 4), True), ((3, 4), (4,), True), ((3,), (), True), ((3, 4), (3,), False), ((6,), (3,), False)],
    ids=str,
)
def test_what_fits(now: tuple[int, ...], saved: tuple[int, ...], expected: bool) -> None:
    assert fits(torch.zeros(now), torch.zeros(saved)) is expected


def test_replicas_of_a_stack_that_begin_equal_are_copied_once_and_the_copy_stays() -> None:
    run = Undoable("stack local", "FusedAdamW", auto_lr=BROKEN).train(1)
    first = run.scheduler.state_dict()["hdet"][0]["undo"]["kept"]
    assert (first["step"], first["params"][0].dim()) == (0, 1)
    before = copy.deepcopy(first)
    for _ in range(2):  # over a sync, and over the return
        kept = run.train(SYNC).scheduler.state_dict()["hdet"][0]["undo"]["kept"]
        assert same(kept, before)
        assert same(first, before)
    apart = Undoable("stack local", "FusedAdamW", auto_lr=BROKEN, warm=True).train(1)
    assert apart.scheduler.state_dict()["hdet"][0]["undo"]["kept"]["params"][0].dim() == 2


@dataclass(frozen=True)
class ScriptedSlopes(Scripted):
    """The same by the hypergradient's slopes."""

    @property
    def reads(self) -> Literal["losses", "slopes"]:
        return "slopes"


def test_the_displacement_of_the_hypergradient_begins_anew() -> None:
    run = single(auto_lr=ScriptedSlopes((2 * SYNC,))).train(2 * SYNC)
    displacement = run.scheduler.cycle.displacement
    assert displacement is not None
    assert displacement.moved is None
    assert same(displacement.last[0], [param.detach() for param in run.optimizer.param_groups[0]["params"]])


def _trained_shards(rank: int, controller: Scripted) -> tuple[hk.HDETOneCycleLR, list[list[Tensor]]]:
    """Train a shard of one of two replicas for two cycles, and return what it holds at the start and after each."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = network()
    fully_shard(model, mesh=mesh["shard"])
    optimizer = hk.FusedAdamW(model.parameters(), lr=0.01)
    settings: dict[str, Any] = {"sync_every": SYNC, "auto_lr": controller, "spread": 0.5}
    ensemble = hk.ProcessEnsemble(mesh)
    F.mse_loss(*(each if number else model(each) for number, each in enumerate(batch(rank, 99)))).backward()
    optimizer.step()  # so that it has a state at the start
    scheduler = hk.HDETOneCycleLR(optimizer, 0.05, TOTAL, ensemble=ensemble, **settings)

    def shards() -> list[Tensor]:
        state = [value for entry in optimizer.state.values() for value in entry.values()]
        return [getattr(t.detach(), "to_local", lambda t=t: t)().clone() for t in (*model.parameters(), *state)]

    found = [shards()]
    for step in range(2 * SYNC):
        x, y = batch(rank, step)
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        scheduler.step(loss.detach())
        if (step + 1) % SYNC == 0:
            found.append(shards())
    return scheduler, found


def _sharded(rank: int) -> dict[str, Any]:
    """Ranks 0 and 1 hold the shards of replica 0, ranks 2 and 3 those of replica 1."""
    scheduler, found = _trained_shards(rank, BROKEN)
    _, tried = _trained_shards(rank, Trying(no_better=(2 * SYNC,)))
    kept = scheduler.state_dict()["hdet"][0]["undo"]["kept"]
    files: list[Any] = [scheduler.state_dict()]
    torch.distributed.broadcast_object_list(files, src=0)
    scheduler.load_state_dict(files[0])
    here = scheduler.cycle.undoing.start.step if scheduler.cycle.undoing else None
    moved = not same(*found[:2])
    return {
        "same": moved and same(found[0], found[2]),
        "back": same(tried, [found[0], found[0], found[1]]),
        "part": kept["part"],
        "of rank 0": here,
    }


@pytest.mark.full
def test_shards_return_and_go_back_and_those_of_another_part_are_left_out() -> None:
    results = run_ranks(4, _sharded)
    assert [found["same"] for found in results] == [True] * 4
    assert [found["back"] for found in results] == [True] * 4
    assert [found["part"] for found in results] == [[0, 2], [1, 2]] * 2
    assert [found["of rank 0"] for found in results] == [0, None] * 2


# On a GPU


def _graphed(share: float, monkeypatch: pytest.MonkeyPatch) -> tuple[Single, Any]:
    """Return a run whose step is a captured CUDA graph, after eager steps of warm-up, and a function that trains it."""
    monkeypatch.setattr(copies, "SHARE", share)
    run = single(hk.FusedAdamW, network().cuda())
    x, y = torch.zeros(8, 6, device="cuda"), torch.zeros(8, 1, device="cuda")

    def step() -> Tensor:
        run.optimizer.zero_grad(set_to_none=True)
        loss = F.mse_loss(run.model(x), y)
        loss.backward()
        run.optimizer.step()
        return loss.detach()

    def fill(number: int) -> None:
        for target, source in zip((x, y), batch(0, number), strict=True):
            target.copy_(source)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for number in range(2):
            fill(number)
            run.scheduler.step(step())
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()

    def train(steps: int) -> None:
        for _ in range(steps):
            fill(run.scheduler.last_epoch)
            graph.replay()
            run.scheduler.step(captured)

    return run, train


@pytest.mark.gpu
@pytest.mark.parametrize("share", [1.0, 0.0], ids=["device", "host"])
def test_a_captured_graph_goes_on_after_a_return(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    run, train = _graphed(share, monkeypatch)
    train(SYNC - 2)
    places = [tensor.data_ptr() for tensor in run.tensors()]
    assert run.kept.copy.read()["params"][0].is_cuda is bool(share)
    train(SYNC)
    assert run.returned
    assert [tensor.data_ptr() for tensor in run.tensors()] == places
    train(SYNC - 1)
    eager = single(hk.FusedAdamW, network().cuda()).train(3 * SYNC - 1)
    torch.testing.assert_close(run.values(), eager.values())


@pytest.mark.gpu
@pytest.mark.parametrize("share", [1.0, 0.0], ids=["device", "host"])
@pytest.mark.parametrize("make", [torch.optim.AdamW, hk.FusedAdamW])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_on_a_gpu_a_return_is_bit_for_bit(
    dtype: torch.dtype, make: Any, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copies, "SHARE", share)
    run = single(make, network(batch_norm=True).to("cuda", dtype)).train(SYNC)
    saved = copy.deepcopy([part.state_dict() for part in (run.model, run.optimizer, run.scheduler)])
    assert run.train(SYNC).returned
    other = single(make, network(batch_norm=True).to("cuda", dtype))
    for part, state in zip((other.model, other.optimizer, other.scheduler), saved, strict=True):
        part.load_state_dict(state)
    assert same(other.train(SYNC).values(), run.values())


@pytest.mark.gpu
def test_amp_with_a_scaler_returns() -> None:
    """A scaler that skipped steps keeps its scale; parameters, moments and counters return."""
    run = single(hk.FusedAdamW, network().cuda())
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**18, growth_interval=1)  # some steps overflow

    def train(steps: int) -> None:
        for _ in range(steps):
            x, y = (each.cuda() for each in batch(0, run.scheduler.last_epoch))
            run.optimizer.zero_grad()
            with torch.autocast("cuda", torch.float16):
                loss = F.mse_loss(run.model(x).float(), y)
            scaler.scale(loss).backward()
            scaler.step(run.optimizer)
            scaler.update()
            run.scheduler.step(loss.detach())

    train(2 * SYNC - 1)
    assert not run.returned
    train(1)
    assert run.returned


@pytest.mark.gpu
def test_while_a_graph_is_captured_no_start_is_kept(caplog: pytest.LogCaptureFixture) -> None:
    run = single(hk.FusedAdamW, network().cuda())
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        run.scheduler.cycle.before_optimizer_step()
    assert run.kept.step is None
    assert "the start cannot be kept" in caplog.text
