"""The copy of the last sound average: what is in it, and what is written back, in place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import hdet_kernels as hk
from hdet_kernels.schedule.undo import copies
from hdet_kernels.schedule.undo.undoing import LastSound, fits
from tests.ranks import run_ranks
from tests.schedule.undo_runs import SOUND_THEN_BROKEN, SYNC, TOTAL, Scripted, Undoable, script
from tests.training import batch, network, same, with_averaging


def single(make: Any = torch.optim.AdamW, model: nn.Module | None = None, **options: Any) -> Single:
    return Single(make, model or network(batch_norm=True), **options)


class Single:
    """One replica, whose controller judges by a script."""

    def __init__(self, make: Any, model: nn.Module, **options: Any) -> None:
        self.model = model
        self.optimizer = make(model.parameters(), lr=0.01)
        settings = {"auto_lr": Scripted(SOUND_THEN_BROKEN), "sync_every": SYNC, "cycle_momentum": False}
        self.scheduler = hk.HDETOneCycleLR(
            self.optimizer, 0.05, TOTAL, model=model, **with_averaging({**settings, **options})
        )

    @property
    def last_sound(self) -> LastSound:
        undoing = self.scheduler.cycle.undoing
        assert undoing is not None
        return undoing.last_sound

    def train(self, steps: int) -> Single:
        device, dtype = next((p.device, p.dtype) for p in self.model.parameters())
        for _ in range(steps):
            x, y = (each.to(device, dtype) for each in batch(0, self.scheduler.last_epoch))
            self.optimizer.zero_grad()
            loss = F.mse_loss(self.model(x), y)
            loss.backward()
            self.optimizer.step()
            self.scheduler.step(loss)
        return self

    def tensors(self) -> list[Tensor]:
        """Parameters, buffers and state, as they are in use."""
        state = [v for entry in self.optimizer.state.values() for v in entry.values() if isinstance(v, Tensor)]
        return [*self.model.parameters(), *self.model.buffers(), *state]

    def values(self) -> list[Tensor]:
        return [tensor.detach().clone() for tensor in self.tensors()]


@pytest.mark.parametrize("make", [torch.optim.AdamW, hk.FusedAdamW])
def test_a_return_writes_into_the_tensors_in_use(make: Any) -> None:
    run = single(make).train(SYNC)
    sound, places = run.values(), [tensor.data_ptr() for tensor in run.tensors()]
    versions = [param._version for param in run.model.parameters()]
    run.train(SYNC)
    assert same(run.values(), sound)
    assert [tensor.data_ptr() for tensor in run.tensors()] == places
    assert all(param._version > before for param, before in zip(run.model.parameters(), versions, strict=True))


def test_buffers_that_are_not_averaged_return_too() -> None:
    run = single(average_buffers=False).train(SYNC)
    before = [buffer.clone() for buffer in run.model.buffers()]
    assert same(list(run.train(SYNC).model.buffers()), before)


def test_a_buffer_of_another_shape_is_left_as_it_is() -> None:
    model = network()
    model.register_buffer("table", torch.ones(3))
    run = single(model=model).train(SYNC)
    model.table = torch.zeros(5)
    sound = [param.detach().clone() for param in model.parameters()]
    run.train(SYNC)
    assert torch.equal(model.table, torch.zeros(5))
    assert same([param.detach() for param in model.parameters()], sound)


def test_complex_parameters_return() -> None:
    class Waves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(6, 1, dtype=torch.complex64))

        def forward(self, x: Tensor) -> Tensor:
            return (x.to(torch.complex64) @ self.weight).real

    run = Single(torch.optim.AdamW, Waves())
    for steps in (SYNC, SYNC):
        for _ in range(steps):
            x, y = batch(0, run.scheduler.last_epoch)
            run.optimizer.zero_grad()
            loss = F.mse_loss(run.model(x), y)
            loss.backward()
            run.optimizer.step()
            run.scheduler.step(loss)
        found = run.values()
        if run.scheduler.last_epoch == SYNC:
            sound = found
    assert same(found, sound)


def test_parameters_of_another_shape_are_refused_with_nothing_changed() -> None:
    run = single().train(SYNC)
    run.last_sound.copy.read()["state"]["0/exp_avg"] = torch.ones(3, 5)
    before = run.values()
    with pytest.raises(RuntimeError, match=r"state 0/exp_avg has shape \(16, 6\), and \(3, 5\) in the copy of step 4"):
        run.last_sound.restore()
    assert same(run.values(), before)


@pytest.mark.parametrize(
    ("now", "saved", "expected"),
    [((3, 4), (3, 4), True), ((3, 4), (4,), True), ((3,), (), True), ((3, 4), (3,), False), ((6,), (3,), False)],
    ids=str,
)
def test_what_fits(now: tuple[int, ...], saved: tuple[int, ...], expected: bool) -> None:
    assert fits(torch.zeros(now), torch.zeros(saved)) is expected


def test_the_copy_of_a_stack_after_an_average_is_of_one_replica() -> None:
    run = Undoable("stack local", "FusedAdamW", auto_lr=Scripted(SOUND_THEN_BROKEN))
    run.train(1)
    kept = run.scheduler.state_dict()["hdet"][0]["undo"]["kept"]
    assert (kept["step"], kept["params"][0].dim(), kept["state"]["0/exp_avg"].dim()) == (0, 1, 2)
    kept = run.train(SYNC - 1).scheduler.state_dict()["hdet"][0]["undo"]["kept"]
    assert (kept["step"], kept["params"][0].dim(), kept["state"]["0/exp_avg"].dim()) == (4, 1, 1)


def test_the_copy_in_a_checkpoint_does_not_change_with_the_next_one() -> None:
    run = Undoable("stack local", "FusedAdamW", auto_lr=Scripted(script(s4="sound", s8="sound"))).train(SYNC)
    kept = run.scheduler.state_dict()["hdet"][0]["undo"]["kept"]
    before = kept["params"][0].clone()
    run.train(SYNC)
    assert torch.equal(kept["params"][0], before)
    assert not torch.equal(run.scheduler.state_dict()["hdet"][0]["undo"]["kept"]["params"][0], before)


@dataclass(frozen=True)
class ScriptedSlopes(Scripted):
    """The same by the hypergradient's slopes."""

    @property
    def reads(self) -> Literal["losses", "slopes"]:
        return "slopes"


def test_the_displacement_of_the_hypergradient_begins_anew() -> None:
    run = single(auto_lr=ScriptedSlopes(SOUND_THEN_BROKEN)).train(2 * SYNC)
    displacement = run.scheduler.cycle.displacement
    assert displacement is not None
    assert displacement.moved is None
    assert same(displacement.last[0], [param.detach() for param in run.optimizer.param_groups[0]["params"]])


def _sharded(rank: int) -> dict[str, Any]:
    """Ranks 0 and 1 hold the shards of replica 0, ranks 2 and 3 those of replica 1."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = network()
    fully_shard(model, mesh=mesh["shard"])
    optimizer = hk.FusedAdamW(model.parameters(), lr=0.01)
    settings: dict[str, Any] = {"sync_every": SYNC, "auto_lr": Scripted(SOUND_THEN_BROKEN), "spread": 0.5}
    ensemble = hk.ProcessEnsemble(mesh)
    scheduler = hk.HDETOneCycleLR(optimizer, 0.05, TOTAL, ensemble=ensemble, **settings)

    def shards() -> list[Tensor]:
        state = [value for entry in optimizer.state.values() for value in entry.values()]
        return [getattr(t.detach(), "to_local", lambda t=t: t)().clone() for t in (*model.parameters(), *state)]

    found = []
    for step in range(2 * SYNC):
        x, y = batch(rank, step)
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        scheduler.step(loss.detach())
        if (step + 1) % SYNC == 0:
            found.append(shards())
    kept = scheduler.state_dict()["hdet"][0]["undo"]["kept"]
    files: list[Any] = [scheduler.state_dict()]
    torch.distributed.broadcast_object_list(files, src=0)
    scheduler.load_state_dict(files[0])
    here = scheduler.cycle.undoing.last_sound.step if scheduler.cycle.undoing else None
    return {"same": same(*found), "part": kept["part"], "of rank 0": here}


@pytest.mark.full
def test_shards_return_and_those_of_another_part_are_left_out() -> None:
    results = run_ranks(4, _sharded)
    assert [found["same"] for found in results] == [True] * 4
    assert [found["part"] for found in results] == [[0, 2], [1, 2]] * 2
    assert [found["of rank 0"] for found in results] == [4, None] * 2


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
    sound, places = run.values(), [tensor.data_ptr() for tensor in run.tensors()]
    kept = run.last_sound.copy.read()
    assert kept["params"][0].is_cuda is bool(share)
    train(SYNC)
    assert same(run.values(), sound)
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
    sound = run.values()
    saved = [part.state_dict() for part in (run.model, run.optimizer, run.scheduler)]
    assert same(run.train(SYNC).values(), sound)
    other = single(make, network(batch_norm=True).to("cuda", dtype))
    for part, state in zip((other.model, other.optimizer, other.scheduler), saved, strict=True):
        part.load_state_dict(state)
    assert same(other.train(SYNC).values(), sound)


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

    train(SYNC)
    sound = run.values()
    train(SYNC - 1)
    assert not same(run.values(), sound)
    train(1)
    assert same(run.values(), sound)


@pytest.mark.gpu
def test_while_a_graph_is_captured_no_start_is_kept(caplog: pytest.LogCaptureFixture) -> None:
    run = single(hk.FusedAdamW, network().cuda())
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        run.scheduler.cycle.before_optimizer_step()
    assert run.last_sound.step is None
    assert "the start cannot be kept" in caplog.text
