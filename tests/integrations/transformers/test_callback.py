"""The callback in a real Trainer, on two ranks: losses, evaluations, checkpoints, logs, and the end of a training."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import hdet_kernels as hk
from tests.integrations.transformers import tiny
from tests.ranks import Cases, run_ranks

STEPS, SYNC = 8, 3


def trained(rank: int, optimizer_name: str, early: bool) -> dict[str, Any]:
    """Train with the callback: accumulation, clipping, evaluations and checkpoints between syncs."""
    from transformers import EarlyStoppingCallback, Trainer

    from hdet_kernels.integrations.transformers import HDETCallback
    from tests.integrations.transformers.watch import Watch

    with tiny.shared_folder(rank) as folder:
        args = tiny.arguments(
            folder,
            max_steps=STEPS,
            gradient_accumulation_steps=2,
            max_grad_norm=0.1,
            eval_strategy="steps",
            eval_steps=2,
            save_strategy="steps",
            save_steps=4,
            metric_for_best_model="never_better",
            greater_is_better=True,
        )
        model = tiny.model()
        make = hk.FusedAdamW if optimizer_name == "fused" else torch.optim.AdamW
        optimizer = make(model.parameters(), lr=1e-2)
        scheduler = hk.HDETOneCycleLR(optimizer, 1e-2, STEPS, sync_every=SYNC, cycle_momentum=False, auto_lr=False)
        watch = Watch()
        stop = [EarlyStoppingCallback(early_stopping_patience=1)] if early else []
        trainer = Trainer(
            model,
            args,
            train_dataset=tiny.rows(64),
            eval_dataset=tiny.rows(8, seed=2),
            compute_metrics=lambda predictions: {"never_better": 1.0},
            optimizers=(optimizer, scheduler),
            callbacks=[watch, *stop, HDETCallback()],
        )
        trainer.train()
        ended = tiny.of_all_ranks(tiny.flat(model))
        return {
            **{name: getattr(watch, name) for name in ("apart", "evaluated", "saved", "returned", "losses", "norms")},
            "logs": [logs for logs in watch.logs if "loss" in logs],
            "history": [(record.step, record.kind, record.losses[rank]) for record in scheduler.history],
            "gradients": {record.gradients for record in scheduler.history},
            "own": scheduler.get_last_lr(),
            "equal": torch.equal(ended[0], ended[-1]),
            "steps": trainer.state.global_step,
        }


CASES = Cases(2, trained, [("fused", False)], full=[("torch", False), ("fused", True)])


def resumed(rank: int) -> list[dict[str, Any]]:
    """Train in bf16, and train again from the checkpoint in the middle, at a sync, with everything built anew."""
    from transformers import Trainer

    from hdet_kernels.integrations.transformers import HDETCallback

    found = []
    with tiny.shared_folder(rank) as folder:
        for seed, checkpoint in ((0, None), (5, str(Path(folder) / f"checkpoint-{STEPS // 2}"))):
            args = tiny.arguments(folder, max_steps=STEPS, bf16=True, save_strategy="steps", save_steps=STEPS // 2)
            model = tiny.model(seed=seed)
            optimizer = hk.FusedAdamW(model.parameters(), lr=1e-2)
            scheduler = hk.HDETOneCycleLR(optimizer, 1e-2, STEPS, sync_every=2, auto_lr=False)
            trainer = Trainer(
                model,
                args,
                train_dataset=tiny.rows(64),
                optimizers=(optimizer, scheduler),
                callbacks=[HDETCallback()],
            )
            trainer.train(resume_from_checkpoint=checkpoint)
            found.append({"parameters": tiny.flat(model), "losses": [record.losses for record in scheduler.history]})
    return found


@pytest.mark.full
def test_a_run_resumed_at_a_sync_is_the_uninterrupted_run_in_bf16() -> None:
    for whole, again in run_ranks(2, resumed):
        assert torch.equal(whole["parameters"], again["parameters"])
        assert whole["losses"] == again["losses"]
        assert len(whole["losses"]) == STEPS // 2


@pytest.mark.parametrize(("optimizer", "early"), CASES.params())
def test_evaluations_and_checkpoints_see_the_average_between_syncs(optimizer: str, early: bool) -> None:
    for rank, result in enumerate(CASES[optimizer, early]):
        assert result["apart"][2] > 1e-5, "the replicas must differ, or nothing is tested"
        assert max(result["evaluated"].values()) < 1e-7
        assert result["evaluated"].keys() == ({2, 4} if early else {2, 4, 6, 8})
        if rank == 0:
            assert result["saved"].keys() == ({4} if early else {4, 8})
            assert max(result["saved"].values()) < 1e-7
        assert all(result["returned"].values())
        assert result["returned"].keys() == ({2} if early else {2, 4, 6})


@pytest.mark.parametrize(("optimizer", "early"), CASES.params())
def test_recorded_losses_are_the_means_of_this_process(optimizer: str, early: bool) -> None:
    results = CASES[optimizer, early]
    for result in results:
        (step, _, loss), *_ = result["history"]
        assert step == SYNC
        assert loss == pytest.approx(np.mean(result["losses"][:SYNC]), rel=1e-5)
    assert results[0]["history"][0][2] != results[1]["history"][0][2]


@pytest.mark.parametrize(("optimizer", "early"), CASES.params())
def test_clipping_and_accumulation_leave_gradients_shared(optimizer: str, early: bool) -> None:
    for result in CASES[optimizer, early]:
        assert all(logs["grad_norm"] > 0.2 for logs in result["logs"]), "nothing was clipped"
        assert max(result["norms"]) < 0.1001
        assert result["gradients"] == {"shared"}


@pytest.mark.parametrize(("optimizer", "early"), CASES.params())
def test_logged_learning_rates_are_base_values(optimizer: str, early: bool) -> None:
    parameter = torch.nn.Parameter(torch.zeros(1))
    plain = torch.optim.AdamW([parameter], lr=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(plain, 1e-2, STEPS, cycle_momentum=False)
    expected = []
    for _ in range(STEPS):
        expected.append(schedule.get_last_lr()[0])
        plain.step()
        schedule.step()
    for result in CASES[optimizer, early]:
        found = [logs["learning_rate"] for logs in result["logs"]]
        assert found == pytest.approx(expected[: len(found)])


@pytest.mark.parametrize(("optimizer", "early"), CASES.params())
def test_a_training_ends_with_one_model(optimizer: str, early: bool) -> None:
    for result in CASES[optimizer, early]:
        assert result["steps"] == (4 if early else STEPS)
        assert result["equal"]
        assert result["history"][-1][:2] == ((4, "manual") if early else (STEPS, "last"))


def asked_too_late(rank: int) -> tuple[list[str], bool]:
    """Let a callback after HDET's ask for an evaluation between two syncs."""
    from transformers import Trainer, TrainerCallback

    from hdet_kernels.integrations.transformers import HDETCallback

    class Late(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_evaluate = state.global_step == 1

    told: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("hdet_kernels").addHandler(handler)
    with tiny.shared_folder(rank) as folder:
        model = tiny.model("llama")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        trainer = Trainer(
            model,
            tiny.arguments(folder, max_steps=3),
            train_dataset=tiny.rows(32),
            eval_dataset=tiny.rows(8),
            optimizers=(optimizer, hk.HDETOneCycleLR(optimizer, 1e-2, 4, sync_every=2, auto_lr=False)),
            callbacks=[HDETCallback(), Late()],
        )
        trainer.train()
        ended = tiny.of_all_ranks(tiny.flat(model))
    return told, torch.equal(ended[0], ended[1])


@pytest.mark.full
def test_an_evaluation_that_missed_the_average_is_told() -> None:
    for told, equal in run_ranks(2, asked_too_late):
        assert any("built for 4 steps, and the trainer makes 3" in message for message in told)
        assert any("step 1: the trainer evaluated parameters of single replicas" in message for message in told)
        assert equal  # the schedule did not come to its last sync


def trainer_of(
    folder: Path, steps: int, *, name: str = "Trainer", scheduler_steps: int | None = None, **given: Any
) -> Any:
    """Return a trainer in this process alone, with the callback or as HDET's trainer."""
    import transformers

    from hdet_kernels.integrations import transformers as ours

    model = tiny.model()
    arguments = {key: given.pop(key) for key in ("hdet", "callbacks") if key in given}
    if scheduler_steps is not None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        arguments["optimizers"] = optimizer, hk.HDETOneCycleLR(optimizer, 1e-2, scheduler_steps, sync_every=2)
    make = transformers.Trainer if name == "Trainer" else ours.HDETTrainer
    args = tiny.arguments(str(folder), max_steps=steps, **given)
    return make(model, args, train_dataset=tiny.rows(16), eval_dataset=tiny.rows(4), **arguments)


def test_one_process_is_named_as_one_replica(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = trainer_of(tmp_path, 2, name="HDETTrainer", eval_strategy="steps", eval_steps=1, save_strategy="epoch")
    with caplog.at_level(logging.WARNING, logger="hdet_kernels"):
        trainer.train()
    assert "one process is one replica" in caplog.text
    assert trainer.state.global_step == 2
    trainer.save_model(str(tmp_path / "end"))
    loaded = type(trainer.model).from_pretrained(str(tmp_path / "end"))
    assert torch.equal(tiny.flat(loaded), tiny.flat(trainer.model))


def test_what_cannot_work_raises_before_the_first_step(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from hdet_kernels.integrations.transformers import HDETCallback

    callback = {"callbacks": [HDETCallback()]}
    with pytest.raises(TypeError, match="needs an HDET scheduler, the trainer has LambdaLR"):
        trainer_of(tmp_path, 2, **callback).train()
    with pytest.raises(ValueError, match="built for 2 steps, and the trainer makes 4"):
        trainer_of(tmp_path, 4, scheduler_steps=2, **callback).train()
    with pytest.raises(ValueError, match=r"label_smoothing_factor=0\.1.*HDETTrainer"):
        trainer_of(tmp_path, 2, scheduler_steps=2, label_smoothing_factor=0.1, **callback).train()
    with pytest.raises(ValueError, match="save must be one of"):
        HDETCallback(save="never")
    with pytest.raises(ValueError, match="leave it out of callbacks="):
        trainer_of(tmp_path, 2, name="HDETTrainer", **callback)
    with pytest.raises(ValueError, match="hdet= is for the scheduler that the trainer builds"):
        trainer_of(tmp_path, 2, name="HDETTrainer", scheduler_steps=2, hdet={"spread": 0.1})
    trainer_of(tmp_path, 2, name="HDETTrainer", scheduler_steps=2, hdet={"save": "sync"})
    with caplog.at_level(logging.WARNING, logger="hdet_kernels"):
        trainer_of(tmp_path, 2, scheduler_steps=4, **callback).train()
    assert "built for 4 steps, and the trainer makes 2" in caplog.text


def test_absent_libraries_are_named_with_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    from hdet_kernels.integrations import transformers

    for name in ("transformers", "accelerate"):
        with monkeypatch.context() as absent:
            absent.setitem(sys.modules, name, None)
            for wanted in transformers.__all__:
                with pytest.raises(ImportError, match=rf"{wanted} needs {name}.*hdet_kernels\[transformers\]"):
                    getattr(transformers, wanted)
    with pytest.raises(AttributeError, match="no attribute 'HDETTrainr'"):
        _ = transformers.HDETTrainr
