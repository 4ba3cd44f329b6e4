"""HDET in loops of Accelerate, on two real gloo processes."""

from __future__ import annotations

import copy
import importlib
import logging
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import hdet_kernels as hk
from tests.ranks import run_ranks
from tests.training import same

pytest.importorskip("accelerate", reason="accelerate is not installed")


def _as_torch(rank: int) -> dict[str, Any]:
    """Train by Accelerate and by a plain DDP loop on the same batches."""
    from tests.integrations.accelerated import BATCH, TASK, Loop, make_model

    loop = Loop(rank).train()
    model = make_model()
    replicated = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = hk.HDETOneCycleLR(optimizer, 0.01, 16, sync_every=4, model=model)
    rates = []
    for batch in range(16):
        rows = slice((2 * batch + rank) * BATCH, (2 * batch + rank + 1) * BATCH)
        loss = F.cross_entropy(replicated(TASK.train[0][rows]), TASK.train[1][rows])
        loss.backward()
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step(loss)
        optimizer.zero_grad()
    return {
        "steps": (loop.optimizer_steps, loop.scheduler.last_epoch),
        "loop": loop.weights(),
        "plain": dict(model.state_dict()),
        "history": [[record.losses, record.values] for record in loop.scheduler.history],
        "plain history": [[record.losses, record.values] for record in scheduler.history],
        "lr": loop.scheduler.get_last_lr(),
        "base": loop.scheduler.get_base_lr(),
        "accuracy": loop.accuracy(),
        "rates": rates,
    }


def _accumulated(rank: int) -> dict[str, Any]:
    """Accumulate two batches a step, in bf16, with clipping and a fused optimizer; the last step has one batch."""
    from tests.integrations.accelerated import Loop

    options = {"gradient_accumulation_steps": 2, "mixed_precision": "bf16"}
    loop = Loop(rank, steps=8, batches=15, make_optimizer=hk.FusedAdamW, accelerator=options)
    dtypes = set()
    loop.model.module[0].register_forward_hook(lambda *call: dtypes.add(call[-1].dtype))
    loop.train(clip=0.5)
    return {
        "steps": (loop.optimizer_steps, loop.scheduler.last_epoch),
        "losses": loop.losses,
        "history": [record.losses[rank] for record in loop.scheduler.history],
        "gradients": [record.gradients for record in loop.scheduler.history],
        "norms": loop.norms,
        "dtypes": dtypes,
        "weights": loop.weights(),
    }


def _at_a_sync(rank: int, folder: Path) -> dict[str, Any]:
    """Save at a sync, and resume in new objects."""
    from tests.integrations.accelerated import Loop

    optimizers: dict[str, Any] = {"torch": torch.optim.AdamW, "fused": hk.FusedAdamW}
    outcome: dict[str, Any] = {}
    for name, make in optimizers.items():
        whole = Loop(rank, make_optimizer=make, auto_lr=False).train(8)
        whole.accelerator.save_state(str(folder / name))
        whole.train(8, skip=8)
        resumed = Loop(rank, make_optimizer=make, auto_lr=False)
        resumed.accelerator.load_state(str(folder / name))
        resumed.train(8, skip=8)
        outcome[name] = whole.weights(), resumed.weights(), resumed.scheduler.last_epoch
    return outcome


def _between_syncs(rank: int, folder: Path) -> dict[str, Any]:
    """Save and evaluate two steps after a sync, resume, and stop early."""
    from tests.integrations.accelerated import Loop

    loop = Loop(rank, make_optimizer=hk.FusedAdamW, auto_lr=False).train(6)
    own = loop.weights()
    seen_by_hook: list[dict[str, Tensor]] = []
    loop.accelerator.register_save_state_pre_hook(lambda *_: seen_by_hook.append(loop.weights()))
    loop.accelerator.save_state(str(folder / "mid"))
    after = loop.weights()
    refused = ""
    try:
        loop.accelerator.save_model(loop.model, folder / "refused")
    except RuntimeError as error:
        refused = str(error)
    other = torch.nn.Linear(2, 2)  # not trained by the scheduler
    loop.accelerator.save_model(other, folder / "other")
    with loop.scheduler.consensus():
        average, accuracy = loop.weights(), loop.accuracy()
        loop.accelerator.save_model(loop.model, folder / "model")
    loop.scheduler.end()
    ended, records = loop.weights(), len(loop.scheduler.history)
    loop.scheduler.end()
    loop.accelerator.save_model(loop.model, folder / "ended")
    resumed = Loop(rank, make_optimizer=hk.FusedAdamW, auto_lr=False)
    resumed.accelerator.load_state(str(folder / "mid"))
    loaded = resumed.weights()
    resumed.train(10, skip=6)
    return {
        "own": own,
        "after": after,
        "hook": seen_by_hook[0],
        "refused": refused,
        "average": average,
        "accuracy": accuracy,
        "ended": ended,
        "ended twice": len(loop.scheduler.history) - records,
        "loaded": loaded,
        "resumed steps": resumed.scheduler.last_epoch,
        "resumed": resumed.weights(),
    }


def _refused(rank: int) -> list[str]:
    """Return the messages of calls that cannot work."""
    from accelerate import DistributedType
    from accelerate.parallelism_config import ParallelismConfig

    from hdet_kernels.integrations.accelerate import prepare
    from tests.integrations.accelerated import make_accelerator, make_model

    def message(*objects: Any) -> str:
        try:
            prepare(*objects)
        except (TypeError, ValueError) as error:
            return f"{type(error).__name__}: {error}"
        return "accepted"

    accelerator = make_accelerator(rank)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = hk.HDETOneCycleLR(optimizer, 0.01, 16, auto_lr=False)
    messages = [
        message(model, optimizer, scheduler),
        message(accelerator, model, optimizer),
        message(accelerator, accelerator.prepare_scheduler(scheduler)),
    ]
    accelerator.state.num_processes = 1  # as after Accelerator() on CPUs, without cpu=True
    messages.append(message(accelerator, model, optimizer, scheduler))
    accelerator.state.num_processes = 2
    # Accelerate takes these on GPUs only. Here its state is given what it would note of them.
    accelerator.state.parallelism_config = ParallelismConfig(tp_size=2)
    messages.append(message(accelerator, model, optimizer, scheduler))
    accelerator.state.distributed_type = DistributedType.FSDP
    return [*messages, message(accelerator, model, optimizer, scheduler)]


def _prepared_before(rank: int) -> dict[str, Any]:
    """Build a scheduler on what Accelerate prepared, without a learning rate, and one that Accelerate prepares."""
    from hdet_kernels.integrations.accelerate import prepare
    from tests.integrations.accelerated import BATCH, TASK, make_accelerator, make_model

    accelerator = make_accelerator(rank)
    inputs, targets = TASK.train[0][:BATCH], TASK.train[1][:BATCH]

    def train(scheduler: Any, steps: int) -> int:
        for step in range(steps):
            loss = F.cross_entropy(model(inputs.roll(step + rank, 0)), targets.roll(step + rank, 0))
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step(loss)
            optimizer.zero_grad()
        return int(scheduler.last_epoch)

    model = make_model()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    scheduler = prepare(accelerator, hk.HDETOneCycleLR(optimizer, None, 68, sync_every=4, model=model))
    train(scheduler, 68)
    found = scheduler.scouted, copy.deepcopy(accelerator.unwrap_model(model).state_dict())
    plain = accelerator.prepare(hk.HDETOneCycleLR(optimizer, 0.01, 60, sync_every=4, model=model))
    try:
        train(plain, 5)
        refused = ""
    except RuntimeError as error:
        refused = str(error)
    return {"found": found, "refused": refused}


def _counted_with_the_whole_loader(rank: int) -> list[str]:
    """Return the warnings of a schedule whose steps were counted before the loader was divided."""
    from tests.integrations.accelerated import Loop

    seen: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: seen.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("hdet_kernels").addHandler(handler)
    Loop(rank, steps=2 * 10, batches=5, accelerator={"gradient_accumulation_steps": 1})
    found = [text for text in seen if "epochs" in text]
    Loop(rank, steps=15, batches=5)
    assert len([text for text in seen if "epochs" in text]) == len(found)
    return found


def _all(rank: int, folder: Path) -> dict[str, Any]:
    """Run everything in one group of ranks: a start costs seconds."""
    return {
        "as torch": _as_torch(rank),
        "accumulated": _accumulated(rank),
        "at a sync": _at_a_sync(rank, folder),
        "between syncs": _between_syncs(rank, folder),
        "prepared before": _prepared_before(rank),
        "counted": _counted_with_the_whole_loader(rank),
        "refused": _refused(rank),
    }


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """Return the folder of the checkpoints, and the results of both ranks."""
    folder = tmp_path_factory.mktemp("accelerate")
    return folder, run_ranks(2, _all, folder)


Runs = tuple[Path, list[dict[str, Any]]]


def test_one_step_for_each_optimizer_step_as_in_a_loop_of_torch(runs: Runs) -> None:
    first, second = (results["as torch"] for results in runs[1])
    for run in (first, second):
        assert run["steps"] == (16, 16)
        assert same(run["loop"], run["plain"])
        assert same(run["history"], run["plain history"])
        assert run["accuracy"] > 0.6
    assert first["rates"] != second["rates"], "replicas that train alike show nothing"
    assert same(first["loop"], second["loop"])
    assert first["base"] == second["base"]
    assert first["accuracy"] == second["accuracy"]


def test_accumulation_in_bf16_with_clipping(runs: Runs) -> None:
    first, second = (results["accumulated"] for results in runs[1])
    for run in (first, second):
        assert run["steps"] == (8, 8)  # 15 batches in pairs, and the last one alone
        means = [sum(part) / len(part) for part in (run["losses"][:8], run["losses"][8:])]
        assert run["history"] == pytest.approx(means, rel=1e-6)
        assert set(run["gradients"]) == {"shared"}
        assert run["dtypes"] == {torch.bfloat16}
        assert max(before for before, _ in run["norms"]) > 0.5 >= max(left for _, left in run["norms"]) * (1 - 1e-3)
    assert same(first["weights"], second["weights"])


@pytest.mark.parametrize("optimizer", ["torch", "fused"])
def test_resumes_bit_for_bit_at_a_sync(runs: Runs, optimizer: str) -> None:
    for results in runs[1]:
        whole, resumed, steps = results["at a sync"][optimizer]
        assert steps == 16
        assert same(whole, resumed)


def test_save_state_between_syncs_saves_the_average(runs: Runs) -> None:
    from safetensors.torch import load_file

    folder, results = runs
    first, second = (result["between syncs"] for result in results)
    assert not same(first["own"], second["own"]), "replicas that are equal show nothing"
    saved = {
        name.removeprefix("module."): tensor for name, tensor in load_file(folder / "mid/model.safetensors").items()
    }
    for run in (first, second):
        assert same(run["own"], run["after"]), "each replica has its own parameters again"
        assert same(run["hook"], saved), "a hook of the user sees the average"
        assert same(run["average"], saved)
        assert same(run["loaded"], saved)
        assert run["resumed steps"] == 16
    for name, tensor in saved.items():
        if tensor.is_floating_point():
            torch.testing.assert_close(tensor, (first["own"][name] + second["own"][name]) / 2)
    assert same(first["resumed"], second["resumed"])


def test_save_model_keeps_every_tensor_and_refuses_one_replica_of_several(runs: Runs) -> None:
    from safetensors.torch import load_file

    folder, results = runs
    first, second = (result["between syncs"] for result in results)
    assert same(load_file(folder / "model/model.safetensors"), first["average"])
    assert same(load_file(folder / "ended/model.safetensors"), first["ended"])
    assert set(load_file(folder / "other/model.safetensors")) == {"weight", "bias"}
    for run in (first, second):
        assert "with scheduler.consensus():" in run["refused"]


def test_evaluation_of_the_average_is_the_same_in_every_process(runs: Runs) -> None:
    first, second = (results["between syncs"] for results in runs[1])
    assert first["accuracy"] == second["accuracy"]
    assert first["accuracy"] > 0.2


def test_an_early_end_leaves_one_model(runs: Runs) -> None:
    first, second = (results["between syncs"] for results in runs[1])
    assert same(first["ended"], second["ended"])
    assert first["ended twice"] == 0, "there was nothing left to average"


def test_a_scheduler_on_a_prepared_optimizer_finds_a_learning_rate(runs: Runs) -> None:
    (first, first_weights), (second, second_weights) = (results["prepared before"]["found"] for results in runs[1])
    assert first is not None
    assert first == second
    assert same(first_weights, second_weights)


def test_the_prepare_of_accelerate_is_told_from_ours(runs: Runs) -> None:
    for results in runs[1]:
        assert "hdet_kernels.integrations.accelerate.prepare()" in results["prepared before"]["refused"]


def test_a_schedule_that_was_counted_with_the_whole_loader_is_named(runs: Runs) -> None:
    for results in runs[1]:
        (text,) = results["counted"]
        assert "20 steps, which is 2 epochs of the loader before it was divided among 2 processes" in text
        assert "makes 5 steps an epoch: for 2 epochs build the scheduler with 10 steps" in text


def test_refusals_say_what_to_do(runs: Runs) -> None:
    for results in runs[1]:
        no_accelerator, no_scheduler, prepared, alone, divided, sharded = results["refused"]
        assert no_accelerator.startswith("TypeError: prepare() begins with an accelerate.Accelerator, got a Sequential")
        assert "no HDET scheduler among ['Sequential', 'AdamW']" in no_scheduler
        assert "pass the HDET scheduler itself" in prepared
        assert alone.startswith("ValueError: 2 processes were started, but the Accelerator has 1")
        assert divided.startswith(
            "ValueError: Accelerate is set up for 2 processes a model: the 2 processes hold parts"
        )
        assert sharded.startswith("ValueError: Accelerate is set up for FSDP: the 2 processes hold parts of a model")
        assert "examples/hsdp.py" in sharded


def test_without_accelerate_the_message_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "accelerate", None)
    monkeypatch.delitem(sys.modules, "hdet_kernels.integrations.accelerate", raising=False)
    with pytest.raises(ImportError, match=r"pip install 'hdet_kernels\[accelerate\]'"):
        importlib.import_module("hdet_kernels.integrations.accelerate")
