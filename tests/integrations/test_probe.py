"""Probes of one stored batch, alone and on two ranks."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import pickle
import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import hdet_kernels as hk
from hdet_kernels.integrations.probe import BatchProbe, bare, digest, first_batch, placed
from tests.ranks import run_ranks
from tests.training import batch, loss_of, network, same

Pair = collections.namedtuple("Pair", "x y")
CPU = torch.device("cpu")


@dataclasses.dataclass(frozen=True)
class Sample:
    x: Tensor
    name: str = "a"


class Movable:
    """An object of a library that has ``to()``."""

    def __init__(self) -> None:
        self.device: Any = None

    def to(self, device: torch.device) -> Movable:
        self.device = device
        return self


class Lossy:
    """A batch that pickle does not restore as it was."""

    def __init__(self, x: Tensor) -> None:
        self.x = x

    def __reduce__(self) -> Any:
        return list, ([self.x + 1],)


def loss_by_dict(model: nn.Module, data: dict[str, Any]) -> Tensor:
    """Take the labels out of the batch, as losses of transformers do, and change it in place."""
    labels = data.pop("y")
    found = F.mse_loss(model(data["x"]), labels)
    data["x"].zero_()
    return found


def generators() -> list[Any]:
    return [torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()]  # noqa: NPY002


class TestPlaced:
    def test_every_container_is_copied_with_its_tensors(self) -> None:
        x = torch.arange(3.0)
        nested = {"a": [x, (x, 5)], "b": Pair(x, "y"), "c": Sample(x), "d": None}
        made = placed(nested, CPU)
        assert same([made["a"][0], made["a"][1], made["c"].x, *made["b"]], [x, (x, 5), x, x, "y"])
        assert (type(made["b"]), type(made["c"]), made["c"].name, made["d"]) == (Pair, Sample, "a", None)
        made["c"].x.zero_()
        made["a"].clear()
        assert x.tolist() == [0.0, 1.0, 2.0]
        assert len(nested["a"]) == 2  # type: ignore[arg-type]

    def test_what_has_to_is_moved_by_it_as_a_copy(self) -> None:
        one = Movable()
        assert placed([one], CPU)[0].device == CPU
        assert one.device is None

    def test_batches_of_transformers(self) -> None:
        encoding = pytest.importorskip("transformers").BatchEncoding({"input_ids": torch.arange(4), "labels": [1]})
        made = placed(pickle.loads(pickle.dumps(encoding)), CPU)
        assert (type(made), digest(made)) == (type(encoding), digest(encoding))
        made.pop("labels")
        assert "labels" in encoding

    def test_digests_tell_batches_apart(self) -> None:
        x = torch.arange(4.0)
        others = [{"x": x + 1}, {"y": x}, {"x": x.double()}, {"x": x.reshape(2, 2)}, {"x": [x, 1]}, {"x": Sample(x)}]
        assert len({digest(each) for each in [{"x": x}, *others, {"x": "x"}, {"x": 1}, {"x": x.bfloat16()}]}) == 10
        assert digest({"x": x.clone()}) == digest({"x": x})


class TestFirstBatch:
    def test_the_loader_begins_anew_and_random_numbers_go_on(self) -> None:
        data = TensorDataset(torch.arange(40.0))
        for generator in (None, torch.Generator().manual_seed(3)):
            loader = DataLoader(data, batch_size=4, shuffle=True, generator=generator)
            before = generators()
            own = None if generator is None else generator.get_state()
            drawn = first_batch(loader)
            assert same(generators(), before)
            assert generator is None or torch.equal(generator.get_state(), own)  # type: ignore[arg-type]
            assert same(next(iter(loader)), drawn)

    def test_an_empty_loader(self) -> None:
        with pytest.raises(ValueError, match="has no batch to take a probe from"):
            first_batch([])

    def test_a_loader_of_accelerate_is_not_left_open(self) -> None:
        accelerate = pytest.importorskip("accelerate")
        accelerator = accelerate.Accelerator(cpu=True)
        loader = accelerator.prepare(DataLoader(TensorDataset(torch.arange(40.0)), batch_size=4))
        assert first_batch(loader)[0].tolist() == [0.0, 1.0, 2.0, 3.0]
        assert not accelerator.gradient_state.in_dataloader
        assert len(list(loader)) == 10


class TestBatchProbe:
    def test_a_call_leaves_no_trace(self) -> None:
        model = network(batch_norm=True)
        model.dropout.p = 0.5
        model.norm.eval()  # frozen by the user
        x, y = batch(0, 0)
        probe = BatchProbe(model, loss_by_dict, {"x": x, "y": y})
        modes, buffers = [m.training for m in model.modules()], [b.clone() for b in model.buffers()]
        before = generators()
        found = [probe(), probe()]
        assert same(found[0], found[1]), "the batch is as it was, without dropout"
        assert not found[0].requires_grad
        assert [m.training for m in model.modules()] == modes
        assert same(list(model.buffers()), buffers)
        assert same(generators(), before)
        model.eval()
        with torch.no_grad():
            assert same(found[0], loss_of(model, x, y))

    def test_random_numbers_of_the_loss_are_the_same_every_time(self) -> None:
        model = network()
        probe = BatchProbe(model, lambda m, x: m(x + torch.randn_like(x)).mean(), batch(0, 0)[0])
        first = probe()
        torch.randn(3)
        assert same(probe(), first)

    def test_modes_come_back_after_an_error(self) -> None:
        model = network()
        probe = BatchProbe(model, lambda m, x: m.nothing, torch.zeros(2))
        with pytest.raises(AttributeError):
            probe()
        assert model.training

    def test_autocast_is_that_of_the_caller(self) -> None:
        dtypes = []

        def loss(model: nn.Module, x: Tensor) -> Tensor:
            dtypes.append(model(x).dtype)
            return model(x).float().mean()

        for autocast in (None, lambda: torch.autocast("cpu", torch.bfloat16), contextlib.nullcontext):
            BatchProbe(network(), loss, batch(0, 0)[0], autocast=autocast)()
        assert dtypes == [torch.float32, torch.bfloat16, torch.float32]

    @pytest.mark.gpu
    @pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
    def test_the_batch_goes_to_the_device_of_the_model(self) -> None:
        model = network(batch_norm=True).cuda()
        probe = BatchProbe(model, lambda m, d: loss_of(m, *d) + 0 * torch.randn((), device="cuda"), batch(0, 0))
        before = torch.cuda.get_rng_state()
        assert probe().device.type == "cuda"
        assert torch.equal(torch.cuda.get_rng_state(), before)
        assert probe.batch[0].device.type == "cpu"

    def test_wrappers_are_left_out(self) -> None:
        model = network()
        assert bare(nn.DataParallel(model)) is model
        compiled = torch.compile(model, backend="eager")
        assert bare(compiled) is compiled

    @pytest.mark.parametrize(
        ("arguments", "options", "message"),
        [
            ((loss_of, loss_of, 1), {}, r"model must be a torch\.nn\.Module"),
            ((nn.Linear(1, 1), 3, 1), {}, r"loss_fn must be callable as loss_fn\(model, batch\)"),
            ((nn.Linear(1, 1), max, 1), {"autocast": True}, r"autocast must be callable as autocast\(\)"),
        ],
    )
    def test_bad_arguments(self, arguments: Any, options: Any, message: str) -> None:
        with pytest.raises(TypeError, match=message):
            BatchProbe(*arguments, **options)


def trained(rank: int, probe: bool, given: bool) -> tuple[Any, ...]:
    """Return the history of a run with a probe from the start, or one that it was given later."""
    model = DistributedDataParallel(network(batch_norm=True))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    data = [batch(rank, 1000 + step) for step in range(2)]
    made = BatchProbe.of_loader(model, lambda m, d: loss_of(m, *d), data) if probe else None
    options: dict[str, Any] = {"gradients": "local", "trust": 30.0, "model": model}
    scheduler = hk.HDETOneCycleLR(optimizer, 0.05, 80, probe=made if given else None, **options)
    before = scheduler.sync_every
    if made is not None and not given:
        scheduler.use_probe(made)
    for step in range(4):
        loss_of(model, *batch(rank, step)).backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step(0.1)
    with pytest.raises(RuntimeError, match=r"use_probe\(\) after the first step"):
        scheduler.use_probe(lambda: 0.0)
    records = [{**record.to_dict(), "seconds": 0} for record in scheduler.history]
    return before, scheduler.sync_every, records, [p.detach().clone() for p in model.parameters()]


def loss_on(model: nn.Module, data: Any) -> torch.Tensor:
    return loss_of(model, *data)


def on_two_ranks(rank: int) -> dict[str, Any]:
    model = DistributedDataParallel(network(batch_norm=True))
    kinds = {
        "dict": lambda x: {"x": x, "more": [x, (1, "text")]},
        "pair": lambda x: Pair(x, rank),
        "dataclass": lambda x: Sample(x, f"of {rank}"),
        "tensor": lambda x: x,
    }
    stored = {
        name: BatchProbe(model, loss_on, make(torch.full((2,), float(rank)))).batch for name, make in kinds.items()
    }
    probe = BatchProbe(model, loss_on, batch(rank, 0))
    # The forward pass of the wrapper would wait for the other rank: a collective that only one of them calls.
    alone = float(probe()) if rank == 0 else None
    dist.barrier()
    both = float(probe())
    errors = []
    for data in ([] if rank == 0 else [1], [lambda: 0] if rank == 0 else [1], [Lossy(torch.ones(1))]):
        with pytest.raises(RuntimeError) as error:
            BatchProbe.of_loader(model, loss_on, data)
        errors.append(str(error.value))
    own = dist.new_group([1])
    if rank == 1:
        assert BatchProbe(model, loss_on, torch.ones(1), group=own).batch.tolist() == [1.0]
    runs = {name: trained(rank, *how) for name, how in {"given": (True, True), "later": (True, False)}.items()}
    return {"stored": stored, "alone": alone, "both": both, "errors": errors, **runs}


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_ranks(2, on_two_ranks)


def test_all_ranks_have_the_batch_of_the_first(ranks: list[dict[str, Any]]) -> None:
    x = torch.zeros(2)
    for found in (rank["stored"] for rank in ranks):
        assert same(found["dict"], {"x": x, "more": [x, (1, "text")]})
        assert same(tuple(found["pair"]), (x, 0))
        assert same([found["tensor"], found["dataclass"].x, found["dataclass"].name], [x, x, "of 0"])
    assert ranks[0]["alone"] == ranks[0]["both"] == ranks[1]["both"]


def test_all_ranks_raise_where_the_first_has_no_batch(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["errors"] == ranks[1]["errors"]
    messages = (
        "first process has no batch for a probe: ValueError",
        "Can't pickle",
        "processes 1 .* another batch",
    )
    for error, message in zip(ranks[0]["errors"], messages, strict=True):
        with pytest.raises(RuntimeError, match=message):
            raise RuntimeError(error)


def test_a_probe_that_is_given_later_is_one_from_the_start(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        given, later = rank["given"], rank["later"]
        assert (given[:2], later[:2]) == ((1, 1), (2, 1)), "a probe halves T where gradients are local"
        assert same(given[2:], later[2:])
        assert all(record["probes"] for record in later[2])
    assert ranks[0]["later"][2][0]["probes"] == ranks[1]["later"][2][0]["probes"]
