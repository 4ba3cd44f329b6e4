"""Lightning's Trainer with the callback: what is recorded, validated, saved, logged, refused, and how a run ends."""

from __future__ import annotations

import importlib
import math
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.ranks import FRAMEWORKS, Cases
from tests.training import same

T, CLIP = 4, 0.05


def in_rank(rank: int, name: str) -> Any:
    """Run a function of ``lightning_runs``, which imports Lightning, on a folder that all ranks share."""
    import torch.distributed as dist

    from tests.integrations import lightning_runs

    with tempfile.TemporaryDirectory() as own:
        folder = [own]
        dist.broadcast_object_list(folder)
        result = getattr(lightning_runs, name)(rank, Path(folder[0]))
        dist.barrier()
    return result


DEFAULT = ("everything", "scaled", "early_stop", "resume", "failures", "refusals", "probes", "one_replica")
FULL = ("manual", "scouting", "stack")
RUNS = Cases(
    2, in_rank, {name: (name,) for name in DEFAULT}, full={name: (name,) for name in FULL}, imported=FRAMEWORKS
)


def mean(zero: Tensor, one: Tensor) -> Tensor:
    return (zero + one) / 2


class TestOneRun:
    """Twelve steps of two micro-batches in bf16, clipped, validated after every third micro-batch, saved everywhere."""

    @pytest.fixture
    def ranks(self) -> list[dict[str, Any]]:
        return RUNS["everything"]

    def test_losses_of_this_process_are_recorded_before_the_scheduler_steps(self, ranks: list[dict[str, Any]]) -> None:
        for rank in ranks:
            # Two halves are recorded before each step, one of each micro-batch, and forgotten after a sync.
            assert rank["seen"] == [1, 2, 3, 4] * 3
            expected = np.reshape(rank["losses"], (3, 2 * T)).mean(1)
            np.testing.assert_allclose(rank["windows"], expected, rtol=1e-6)
        assert ranks[0]["windows"] != ranks[1]["windows"]

    def test_syncs_and_gradients(self, ranks: list[dict[str, Any]]) -> None:
        for rank in ranks:
            assert rank["steps"] == [4, 8, 12]
            assert rank["gradients"] == ["shared"] * 3

    def test_gradients_are_clipped(self, ranks: list[dict[str, Any]]) -> None:
        for rank in ranks:
            assert len(rank["norms"]) == 8  # a validation after a step clears the gradients before they are looked at
            assert max(rank["norms"]) == pytest.approx(CLIP, rel=1e-3)

    def test_validation_sees_the_average_and_the_replicas_come_back(self, ranks: list[dict[str, Any]]) -> None:
        zero, one = ranks
        assert len(zero["validated"]) == 1 + 24 // 3  # and the sanity check
        assert same(zero["validated"], one["validated"])
        differ = 0
        for number, average in enumerate(zero["validated"][:-1]):
            own = zero["trained"][3 * number], one["trained"][3 * number]  # of the micro-batch that comes next
            assert torch.equal(average, mean(*own))
            differ += not torch.equal(*own)
        assert differ >= 4

    @pytest.mark.parametrize(("name", "steps"), [("steps", range(1, 13)), ("weights", (3, 6, 9, 12))])
    def test_checkpoints_have_the_average(self, ranks: list[dict[str, Any]], name: str, steps: range) -> None:
        zero, one = ranks
        assert sorted(zero["saved"][name]) == list(steps)
        for step, saved in zero["saved"][name].items():
            if step < 12:
                assert torch.equal(saved, mean(zero["trained"][2 * step], one["trained"][2 * step]))
        assert torch.equal(zero["saved"][name][12], zero["parameters"])

    def test_what_is_saved_after_a_validation_was_validated(self, ranks: list[dict[str, Any]]) -> None:
        validated = ranks[0]["validated"][1:]
        found = list(ranks[0]["saved"]["best"].values())
        assert len(found) >= 6  # a validation between two micro-batches of a step saves under the same step again
        assert all(any(torch.equal(saved, average) for average in validated) for saved in found)

    def test_the_end_is_one_model(self, ranks: list[dict[str, Any]]) -> None:
        zero, one = ranks
        assert torch.equal(zero["parameters"], one["parameters"])
        assert zero["tested"] == one["tested"]
        assert not zero["save"]

    def test_logs(self, ranks: list[dict[str, Any]]) -> None:
        """Every sync is logged under Lightning's number of its step, beside Lightning's own metrics."""
        rows = ranks[0]["rows"]
        assert [int(row["step"]) for row in rows if row["hdet/base/lr"]] == [3, 7, 11]
        for other in ("train_loss", "val_loss", "lr-FusedAdamW"):
            assert [row for row in rows if row[other]]


@pytest.mark.parametrize("clip", ["clip", "plain"])
def test_fp16_with_a_scaler(clip: str) -> None:
    for rank in RUNS["scaled"]:
        found = rank[clip]
        np.testing.assert_allclose(found["windows"], np.reshape(found["losses"], (2, T)).mean(1), rtol=1e-6)
        assert found["scale"] > 1.0
        if clip == "clip":
            assert max(found["norms"]) == pytest.approx(CLIP, rel=1e-3)
        else:
            assert min(found["norms"]) > 100 * CLIP  # the step unscales them, and leaves them as they are


def test_one_device_is_one_replica_with_the_plain_schedule() -> None:
    for rank in RUNS["one_replica"]:
        assert rank["replicas"] == 1
        assert rank["rates"] == rank["expected"]


@pytest.mark.full
def test_without_a_learning_rate_one_is_found() -> None:
    zero, one = (rank["whole"] for rank in RUNS["scouting"])
    assert zero["found"] == one["found"] is not None
    assert torch.equal(zero["parameters"], one["parameters"])


@pytest.mark.full
def test_while_a_learning_rate_is_looked_for_the_model_is_that_of_the_start() -> None:
    for rank in (rank["short"] for rank in RUNS["scouting"]):
        assert rank["found"] is None
        for seen in (*rank["validated"], *rank["saved"].values(), rank["parameters"]):
            assert torch.equal(seen, rank["start"])


@pytest.mark.parametrize("reason", ["EarlyStopping", "max_steps", "should_stop"])
def test_a_run_that_ends_within_a_cycle_leaves_one_model(reason: str) -> None:
    zero, one = (rank[reason] for rank in RUNS["early_stop"])
    assert zero["steps"] == one["steps"] == 6
    assert zero["kind"] == "manual"
    assert torch.equal(zero["parameters"], one["parameters"])


def test_resume_at_a_sync_is_exact() -> None:
    for rank in RUNS["resume"]:
        whole, resumed = rank["at a sync"]
        assert resumed.pop("saved") is not None
        assert whole["steps"] == 16
        assert same(whole, resumed)


def test_resume_within_a_cycle_begins_with_the_average() -> None:
    zero, one = (rank["in a cycle"] for rank in RUNS["resume"])
    assert not torch.equal(zero[0]["trained"][0], one[0]["trained"][0])
    for _, resumed in (zero, one):
        assert torch.equal(resumed["trained"][0], resumed["saved"])
        assert torch.equal(resumed["saved"], mean(zero[0]["trained"][0], one[0]["trained"][0]))
        assert resumed["steps"] == 20
    assert torch.equal(zero[1]["parameters"], one[1]["parameters"])


@pytest.mark.parametrize("where", ["training_step", "validation_step", "interrupt"])
def test_an_exception_brings_the_replicas_back(where: str) -> None:
    """Nothing is averaged: the other processes may be anywhere."""
    zero, one = (rank[where] for rank in RUNS["failures"])
    assert not torch.equal(zero["parameters"], one["parameters"])
    assert not zero["held"]
    assert not zero["save"]
    assert [text for text in zero["told"] if "those of one replica and not the average" in text]


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("epoch", 'got interval=\'epoch\'.*"interval": "step"'),
        ("frequency", "frequency=2"),
        ("none", r"found no HDET scheduler.*StepLR"),
        ("zero", "ZeroRedundancyOptimizer"),
        ("model averaging", "averages the parameters itself"),
        ("probe", "got 'validation'"),
        ("no module", r"probe must be callable as probe\(module\)"),
        ("log", "log must be"),
        *((name, "one whole replica") for name in ("FSDPStrategy", "ModelParallelStrategy", "DeepSpeedStrategy")),
        *((name, "one whole replica") for name in ("XLAStrategy", "SingleDeviceXLAStrategy")),
    ],
)
def test_refusals(what: str, text: str) -> None:
    for rank in RUNS["refusals"]:
        assert re.search(text, rank[what])


@pytest.mark.full
def test_manual_optimization() -> None:
    zero, one = ranks = RUNS["manual"]
    for rank in ranks:
        np.testing.assert_allclose(rank["windows"][0], np.mean(rank["losses"][:T]), rtol=1e-6)
        assert math.isclose(rank["windows"][1], float(np.mean(rank["losses"][T:])), rel_tol=1e-6)
    assert same(zero["validated"], one["validated"])
    assert not torch.equal(zero["trained"][3], one["trained"][3])
    assert torch.equal(zero["parameters"], one["parameters"])


@pytest.mark.parametrize("choice", ["eval", "train", "function"])
def test_probes(choice: str) -> None:
    """Both ranks know both losses, which differ."""
    zero, one = (rank[choice] for rank in RUNS["probes"])
    assert zero["probes"] == one["probes"]
    compared = [probes for probes in zero["probes"] if probes is not None]
    assert compared
    assert all(first != second for first, second in compared)
    assert torch.equal(zero["parameters"], one["parameters"])


def test_a_probe_of_the_validation_loader_is_that_of_the_function_on_its_first_batch() -> None:
    """Nothing else changes: not even a metric of the validation."""
    for rank in RUNS["probes"]:
        eval_, function = rank["eval"], rank["function"]
        assert same(eval_["probes"], function["probes"])
        assert same(eval_["parameters"], function["parameters"])
        assert eval_["errors"] == function["errors"]


def test_resume_with_a_probe_is_exact() -> None:
    for rank in RUNS["probes"]:
        assert torch.equal(rank["train"]["parameters"], rank["train"]["resumed"])


@pytest.mark.parametrize(("what", "text"), [("no loader", "this run has none"), ("no loss", "returns none")])
def test_probes_that_cannot_be(what: str, text: str) -> None:
    for rank in RUNS["probes"]:
        assert text in rank["messages"][what]


def test_without_lightning_the_message_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    packages = ("lightning", "pytorch_lightning")
    for name in (*packages, *(each for each in sys.modules if each.split(".")[0] in packages)):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "hdet_kernels.integrations.lightning", raising=False)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'hdet_kernels\[lightning\]'"):
        importlib.import_module("hdet_kernels.integrations.lightning")


@pytest.mark.full
def test_a_stack_on_one_device() -> None:
    for rank in RUNS["stack"]:
        assert rank["replicas"] == 4
        assert rank["losses"] == rank["expected"]
        assert torch.equal(rank["rows"], rank["average"])


SCRIPT = """
import pickle
import torch
import {package} as pl
import hdet_kernels as hk
from hdet_kernels.integrations.lightning import HDET

class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(6, 1)

    def training_step(self, batch, batch_idx):
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self):
        optimizer = hk.FusedAdamW(self.parameters(), lr=0.01)
        scheduler = hk.HDETOneCycleLR(optimizer, 0.01, self.trainer.estimated_stepping_batches, sync_every=4)
        self.scheduler = scheduler
        return {{"optimizer": optimizer, "lr_scheduler": {{"scheduler": scheduler, "interval": "step"}}}}

    def on_train_end(self):
        found = {{
            "base": isinstance(HDET(), pl.Callback),
            "parameters": torch.nn.utils.parameters_to_vector(self.parameters()).detach(),
            "replicas": self.scheduler.cycle.ensemble.size,
            "steps": [record.step for record in self.scheduler.history],
        }}
        torch.save(found, f"rank{{self.global_rank}}.pt")

if __name__ == "__main__":
    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(96, 6))
    net = Net()
    quiet = dict(enable_progress_bar=False, enable_model_summary=False, logger=False, enable_checkpointing=False)
    callback = pickle.loads(pickle.dumps(HDET()))  # as ddp_spawn, which imports everything again, sends it
    trainer = pl.Trainer(
        callbacks=[callback], accelerator="cpu", strategy="{strategy}", devices=2, max_epochs=2, max_steps=10, **quiet
    )
    trainer.fit(net, torch.utils.data.DataLoader(data, batch_size=8))
"""


@pytest.mark.full
@pytest.mark.parametrize(("package", "strategy"), [("lightning.pytorch", "ddp"), ("pytorch_lightning", "ddp_fork")])
def test_lightning_starts_the_processes_itself(tmp_path: Path, package: str, strategy: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(package=package, strategy=strategy))
    done = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    zero, one = (torch.load(tmp_path / f"rank{rank}.pt") for rank in range(2))
    assert zero["base"]
    assert zero["replicas"] == 2
    assert zero["steps"] == [4, 8, 10]
    assert same(zero, one)


def test_checks_and_steps_of_other_shapes() -> None:
    from hdet_kernels.integrations.lightning import call_step, check_strategy, checked_schedulers, loss_of

    with pytest.raises(ValueError, match="object is not known to give every process one whole replica"):
        check_strategy(object())
    with pytest.raises(ValueError, match="configure_optimizers returned: none"):
        checked_schedulers([], automatic=True)
    assert call_step(lambda batch: [batch], "b") == ["b"]
    assert call_step(lambda x, batch_idx, dataloader_idx=7: [x, batch_idx, dataloader_idx], "b") == ["b", 0, 0]
    assert call_step(lambda b, i: [b, i], "b") == ["b", 0]
    assert call_step(lambda b, i, j: [b, i, j], "b") == ["b", 0, 0]
    assert call_step(lambda b, i, scale=7: [b, i, scale], "b") == ["b", 0, 7]
    assert call_step(lambda *args: list(args), "b") == ["b", 0]
    assert loss_of({"loss": torch.tensor(2.0), "n": 1}) == 2.0
    assert loss_of({"n": 1}) is None


def test_nothing_is_logged_inside_the_block() -> None:
    from hdet_kernels.integrations.lightning import unnoticed

    class Logging(nn.Linear):
        def __init__(self) -> None:
            super().__init__(1, 1)
            self.logged: list[str] = []

        def log(self, name: str) -> None:
            self.logged.append(name)

    module = Logging()
    with unnoticed(module):
        module.log("inside")
    module.log("outside")
    replaced: list[str] = []
    module.log = replaced.append  # type: ignore[method-assign]
    with pytest.raises(ZeroDivisionError), unnoticed(module):
        raise ZeroDivisionError
    module.log("own")
    assert module.logged == ["outside"]
    assert replaced == ["own"]
