"""Restarts: torchrun restarts a run in which a rank died, and a run resumes with another number of replicas."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import hdet_kernels as hk
from hdet_kernels.optim import FusedAdamW
from tests.ranks import run_ranks
from tests.schedule import restart_script
from tests.training import Trainer

OPTIMIZERS: dict[str, Any] = {"torch": torch.optim.AdamW, "ours": FusedAdamW}


@pytest.mark.full
def test_a_run_that_torchrun_restarts_ends_as_the_undisturbed_one(tmp_path: Path) -> None:
    undisturbed, disturbed = tmp_path / "undisturbed", tmp_path / "disturbed"
    undisturbed.mkdir()
    disturbed.mkdir()
    expected = run_ranks(2, restart_script.run, undisturbed, None)

    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    package = str(Path(hk.__file__).parents[1])
    paths = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
    # Otherwise the second attempt may read the addresses of the first from a store that outlives it.
    settings = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*launch, restart_script.__file__, str(disturbed)],
        env={**os.environ, **settings, "PYTHONPATH": paths, "PYTHONSAFEPATH": ""},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (disturbed / "died").exists()
    for rank in range(2):
        found = torch.load(disturbed / f"result{rank}.pt", weights_only=True)
        assert (found["attempt"], found["resumed at"]) == (1, restart_script.SAVE_EVERY)
        for name in ("parameters", "moments"):
            assert torch.equal(found[name], expected[rank][name]), name
        for name in ("base", "rates", "history"):
            assert found[name] == expected[rank][name], name
        assert len(found["history"]) == 4
    plain = Trainer(0, ddp=False, **{**restart_script.SETTINGS, "auto_lr": False}).train(restart_script.TOTAL)
    assert expected[0]["base"] != plain.scheduler.get_base_lr(), "the controller has moved the base"


# Another number of replicas

TOTAL, SYNC = 20, 5
SETTINGS: dict[str, Any] = {
    "ddp": False,
    "total_steps": TOTAL,
    "sync_every": SYNC,
    "spread": 0.5,
    "groups": True,
    "tie_groups": False,
    "auto_lr": hk.RegressionController(start_at=0.0, stop_at=1.0),
}


def _saved(rank: int, kind: str, at: int, folder: Path) -> list[Any]:
    trainer = Trainer(rank, make_optimizer=OPTIMIZERS[kind], **SETTINGS).train(at)
    if rank == 0:
        parts = (trainer.module, trainer.optimizer, trainer.scheduler)
        torch.save([part.state_dict() for part in parts], folder / "rank0.pt")
    return [trainer.parameters(), trainer.scheduler.get_base_lr(), len(trainer.scheduler.history)]


def _of_another_size(rank: int, kind: str, folder: Path) -> Any:
    trainer = Trainer(rank, make_optimizer=OPTIMIZERS[kind], **SETTINGS)
    model, optimizer, scheduler = torch.load(folder / "rank0.pt", weights_only=True)
    before = (trainer.step, trainer.scheduler.get_last_lr(), trainer.scheduler.state_dict()["hdet"][0]["size"])
    try:
        trainer.scheduler.load_state_dict(scheduler)
    except ValueError as error:
        after = (trainer.step, trainer.scheduler.get_last_lr(), trainer.scheduler.state_dict()["hdet"][0]["size"])
        return str(error), before == after
    trainer.module.load_state_dict(model)
    trainer.optimizer.load_state_dict(optimizer)
    start = [trainer.parameters(), trainer.scheduler.get_base_lr(), len(trainer.scheduler.history)]
    trainer.train(TOTAL - trainer.step)
    history = [record.to_dict() for record in trainer.scheduler.history]
    return {"start": start, "rates": trainer.rates, "history": history, "end": trainer.parameters()}


@pytest.mark.parametrize(
    ("before", "after", "kind"),
    [
        (2, 3, "ours"),
        pytest.param(3, 2, "torch", marks=pytest.mark.full),
    ],
)
def test_a_run_resumes_with_another_number_of_replicas(before: int, after: int, kind: str, tmp_path: Path) -> None:
    parameters, base, syncs = run_ranks(before, _saved, kind, 10, tmp_path)[0]
    results = run_ranks(after, _of_another_size, kind, tmp_path)
    for rank, result in enumerate(results):
        assert torch.equal(result["start"][0], parameters)
        assert result["start"][1:] == [base, syncs]
        old, new = result["history"][:syncs], result["history"][syncs:]
        assert [len(record["losses"]) for record in old] == [before] * 2
        assert [record["step"] for record in new] == [15, 20]
        for record, last in zip(new, (4, 9), strict=True):
            assert len(record["losses"]) == after
            for group in range(2):
                values, middle = record["values"][f"lr/{group}"], record["base"][f"lr/{group}"]
                np.testing.assert_allclose(np.sort(values) / middle, hk.multipliers(after, 0.5), rtol=1e-12)
                np.testing.assert_allclose(result["rates"][last][group], values[rank], rtol=1e-12)
        assert torch.equal(result["end"], results[0]["end"])
    first = np.array([result["rates"][0] for result in results])  # [rank, group]
    for group in range(2):
        expected = np.multiply(base[group], hk.multipliers(after, 0.5))
        np.testing.assert_allclose(np.sort(first[:, group]), expected, rtol=1e-12)


def test_another_number_of_replicas_is_refused_within_a_cycle(tmp_path: Path) -> None:
    run_ranks(2, _saved, "ours", 12, tmp_path)
    for message, untouched in run_ranks(3, _of_another_size, "ours", tmp_path):
        assert "has 2 replicas and was saved 2 steps into a cycle, this run has 3" in message
        assert "another number of replicas can resume only where all are equal" in message
        assert f"at a multiple of sync_every={SYNC}; save there" in message
        assert untouched
