"""HDET in loops of Accelerate, on two real gloo processes."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks import FRAMEWORKS, run_ranks
from tests.training import same

pytest.importorskip("accelerate", reason="accelerate is not installed")

# The two processes take as long as a hundred other tests. Accelerate's loop is in make test with steps in the backward
# pass, in test_in_backward.py.
pytestmark = pytest.mark.full


def _on_a_rank(rank: int, folder: Path) -> dict[str, Any]:
    from tests.integrations.accelerate_runs import run_all  # imports accelerate

    return run_all(rank, folder)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """Return the folder of the checkpoints, and the results of both ranks."""
    folder = tmp_path_factory.mktemp("accelerate")
    return folder, run_ranks(2, _on_a_rank, folder, imported=FRAMEWORKS)


Runs = tuple[Path, list[dict[str, Any]]]


def test_one_step_for_each_optimizer_step_as_in_a_loop_of_torch(runs: Runs) -> None:
    first, second = (results["as torch"] for results in runs[1])
    for run in (first, second):
        assert run["steps"] == (16, 16)
        assert same(run["loop"], run["plain"])
        assert same(run["history"], run["plain history"])
        assert run["accuracy"] > 0.6
        assert run["metrics"]
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
        assert run["logged"] == [], "nothing to warn of: it is the average"
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


@pytest.mark.parametrize("optimizer", ["torch", "fused"])
def test_a_step_that_the_gradient_scaler_skips_counts(runs: Runs, optimizer: str) -> None:
    first, second = (results[f"scaler, {optimizer}"] for results in runs[1])
    for run in (first, second):
        assert run["still"] == [step == 2 for step in range(8)]
        assert run["steps"] == 8
        assert run["syncs"] == 2
    assert same(first["weights"], second["weights"])


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
        assert "examples/sharded.py" in sharded


def test_without_accelerate_the_message_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "accelerate", None)
    monkeypatch.delitem(sys.modules, "hdet_kernels.integrations.accelerate", raising=False)
    with pytest.raises(ImportError, match=r"pip install 'hdet_kernels\[accelerate\]'"):
        importlib.import_module("hdet_kernels.integrations.accelerate")
