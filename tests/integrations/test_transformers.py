"""HDET in transformers' Trainer, on two ranks and alone: losses, evaluations, checkpoints, logs, ends, refusals."""

from __future__ import annotations

import importlib
import logging
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import hdet_kernels as hk
from tests.integrations import tiny
from tests.integrations.later import Later
from tests.ranks import FRAMEWORKS, Cases, run_ranks
from tests.schedule.undo_runs import Scripted

hf, hdet_hf = Later("transformers"), Later("hdet_kernels.integrations.transformers")
watches = Later("tests.integrations.watch")

STEPS, SYNC, SMOOTHING = 8, 3, 0.1


def trained(rank: int, optimizer_name: str, early: bool) -> dict[str, Any]:
    """Train with the callback: accumulation, clipping, evaluations and checkpoints between syncs."""
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
        watch = watches.Watch()
        stop = [hf.EarlyStoppingCallback(early_stopping_patience=1)] if early else []
        trainer = hf.Trainer(
            model,
            args,
            train_dataset=tiny.rows(64),
            eval_dataset=tiny.rows(8, seed=2),
            compute_metrics=lambda predictions: {"never_better": 1.0},
            optimizers=(optimizer, scheduler),
            callbacks=[watch, *stop, hdet_hf.HDETCallback()],
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


CALLBACK = Cases(2, trained, [("fused", False)], full=[("torch", False), ("fused", True)], imported=FRAMEWORKS)


@pytest.mark.parametrize(("optimizer", "early"), CALLBACK.params())
def test_evaluations_checkpoints_and_the_end_see_the_average(optimizer: str, early: bool) -> None:
    for rank, result in enumerate(CALLBACK[optimizer, early]):
        assert result["apart"][2] > 1e-5, "the replicas must differ, or nothing is tested"
        assert max(result["evaluated"].values()) < 1e-7
        assert result["evaluated"].keys() == ({2, 4} if early else {2, 4, 6, 8})
        if rank == 0:
            assert result["saved"].keys() == ({4} if early else {4, 8})
            assert max(result["saved"].values()) < 1e-7
        assert result["returned"] == dict.fromkeys((2,) if early else (2, 4, 6), True)
        assert result["steps"] == (4 if early else STEPS)
        assert result["equal"], "one model is left"
        assert result["history"][-1][:2] == ((4, "manual") if early else (STEPS, "last"))


@pytest.mark.parametrize(("optimizer", "early"), CALLBACK.params())
def test_losses_gradients_and_logged_learning_rates(optimizer: str, early: bool) -> None:
    plain = torch.optim.AdamW([nn.Parameter(torch.zeros(1))], lr=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(plain, 1e-2, STEPS, cycle_momentum=False)
    expected = []
    for _ in range(STEPS):
        expected.append(schedule.get_last_lr()[0])
        plain.step()
        schedule.step()
    results = CALLBACK[optimizer, early]
    for result in results:
        (step, _, loss), *_ = result["history"]
        assert step == SYNC
        assert loss == pytest.approx(np.mean(result["losses"][:SYNC]), rel=1e-5), "the mean of this process"
        assert all(logs["grad_norm"] > 0.2 for logs in result["logs"]), "nothing was clipped"
        assert max(result["norms"]) < 0.1001
        assert result["gradients"] == {"shared"}
        found = [logs["learning_rate"] for logs in result["logs"]]
        assert found == pytest.approx(expected[: len(found)]), "base values, not those of a replica"
    assert results[0]["history"][0][2] != results[1]["history"][0][2]


def asked_too_late(rank: int) -> tuple[list[str], bool]:
    """Let a callback after HDET's ask for an evaluation between two syncs."""

    class Late(hf.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_evaluate = state.global_step == 1

    told: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("hdet_kernels").addHandler(handler)
    with tiny.shared_folder(rank) as folder:
        model = tiny.model("llama")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        trainer = hf.Trainer(
            model,
            tiny.arguments(folder, max_steps=3),
            train_dataset=tiny.rows(32),
            eval_dataset=tiny.rows(8),
            optimizers=(optimizer, hk.HDETOneCycleLR(optimizer, 1e-2, 4, sync_every=2, auto_lr=False)),
            callbacks=[hdet_hf.HDETCallback(), Late()],
        )
        trainer.train()
        ended = tiny.of_all_ranks(tiny.flat(model))
    return told, torch.equal(ended[0], ended[1])


@pytest.mark.full
def test_an_evaluation_that_missed_the_average_is_told() -> None:
    for told, equal in run_ranks(2, asked_too_late, imported=FRAMEWORKS):
        assert any("built for 4 steps, and the trainer makes 3" in message for message in told)
        assert any("step 1: the trainer evaluated parameters of single replicas" in message for message in told)
        assert equal  # the schedule did not come to its last sync


def trainer_of(
    folder: Path,
    steps: int,
    *,
    name: str = "Trainer",
    scheduler_steps: int | None = None,
    in_backward: bool = False,
    **given: Any,
) -> Any:
    """Return a trainer in this process alone, with the callback or as HDET's trainer."""
    model = tiny.model()
    arguments = {key: given.pop(key) for key in ("hdet", "callbacks") if key in given}
    if scheduler_steps is not None:
        params = model.parameters()
        optimizer: Any = (
            hk.FusedAdamW(params, lr=1e-2, in_backward=True) if in_backward else torch.optim.AdamW(params, lr=1e-2)
        )
        arguments["optimizers"] = optimizer, hk.HDETOneCycleLR(optimizer, 1e-2, scheduler_steps, sync_every=2)
    make = hf.Trainer if name == "Trainer" else hdet_hf.HDETTrainer
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


def test_the_history_of_the_trainer_has_what_the_controller_did(tmp_path: Path) -> None:
    hdet = {"auto_lr": Scripted((8,)), "sync_every": 4}
    trainer = trainer_of(tmp_path, 12, name="HDETTrainer", hdet=hdet, logging_steps=1)
    trainer.train()
    events = [entry for entry in trainer.state.log_history if "hdet/why" in entry]
    why = trainer.lr_scheduler.history[1].why
    assert events == [{"hdet/why": why, "step": 8}]
    assert "all replicas return to the start, and the run begins anew over the 4 steps that remain" in why
    lines = [entry for entry in trainer.state.log_history if "loss" in entry]
    added = {"hdet/loss", "hdet/base/lr", "hdet/lr", "hdet/acts"}
    assert {name for name in lines[-1] if name.startswith("hdet/")} == added
    assert [line["hdet/acts"] for line in lines[6:9]] == [0, 1, 1]


def test_no_norm_is_logged_of_gradients_that_the_backward_pass_has_used(tmp_path: Path) -> None:
    options = {"name": "HDETTrainer", "scheduler_steps": 3, "logging_steps": 1, "max_grad_norm": 0}
    for in_backward in (False, True):
        trainer = trainer_of(tmp_path, 3, in_backward=in_backward, **options)
        trainer.train()
        lines = [entry for entry in trainer.state.log_history if "loss" in entry]
        assert ["grad_norm" in line for line in lines] == [not in_backward] * 3


def test_what_cannot_work_raises_before_the_first_step(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:

    callback = {"callbacks": [hdet_hf.HDETCallback()]}
    with pytest.raises(TypeError, match="needs an HDET scheduler, the trainer has LambdaLR"):
        trainer_of(tmp_path, 2, **callback).train()
    with pytest.raises(ValueError, match="built for 2 steps, and the trainer makes 4"):
        trainer_of(tmp_path, 4, scheduler_steps=2, **callback).train()
    with pytest.raises(ValueError, match=r"label_smoothing_factor=0\.1.*HDETTrainer"):
        trainer_of(tmp_path, 2, scheduler_steps=2, label_smoothing_factor=0.1, **callback).train()
    with pytest.raises(ValueError, match=r"norm of all gradients for its log.*HDETTrainer"):
        trainer_of(tmp_path, 2, scheduler_steps=2, in_backward=True, max_grad_norm=0, **callback).train()
    with pytest.raises(ValueError, match="save must be one of"):
        hdet_hf.HDETCallback(save="never")
    for name in ("record_losses", "log_metrics"):
        with pytest.raises(ValueError, match=f"{name} must be True or False, got 'no'"):
            hdet_hf.HDETCallback(**{name: "no"})
    with pytest.raises(ValueError, match="leave it out of callbacks="):
        trainer_of(tmp_path, 2, name="HDETTrainer", **callback)
    with pytest.raises(ValueError, match="hdet= is for the scheduler that the trainer builds"):
        trainer_of(tmp_path, 2, name="HDETTrainer", scheduler_steps=2, hdet={"spread": 0.1})
    trainer_of(tmp_path, 2, name="HDETTrainer", scheduler_steps=2, hdet={"save": "sync"})
    with caplog.at_level(logging.WARNING, logger="hdet_kernels"):
        trainer_of(tmp_path, 2, scheduler_steps=4, **callback).train()
    assert "built for 4 steps, and the trainer makes 2" in caplog.text


@pytest.mark.parametrize("name", ["transformers", "accelerate"])
def test_absent_libraries_are_named_with_the_extra(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    importlib.import_module("hdet_kernels.integrations.transformers")
    monkeypatch.delitem(sys.modules, "hdet_kernels.integrations.transformers")
    for module in [each for each in sys.modules if each.split(".")[0] == name]:
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=r"pip install 'hdet_kernels\[transformers\]'"):
        importlib.import_module("hdet_kernels.integrations.transformers")


def make_trainer(folder: str, watch: Any, *, kind: str = "gpt2", seed: int = 0, **given: Any) -> Any:
    """Return a trainer whose losses ``watch`` counts."""

    class Watched(hdet_hf.HDETTrainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
            labels = inputs["labels"]
            loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **kwargs)
            if model.training and (self.label_smoother is not None or self.compute_loss_func is not None):
                watch.count(outputs["logits"], labels)
            return (loss, outputs) if return_outputs else loss

    hdet, options = given.pop("hdet"), given.pop("options", {})
    return Watched(
        tiny.model(kind, seed),
        tiny.arguments(folder, **given),
        train_dataset=tiny.rows(64),
        eval_dataset=tiny.rows(8, seed=2),
        **{**options, "callbacks": [watch, *options.get("callbacks", [])]},
        hdet=hdet,
    )


def ended(trainer: Any) -> dict[str, Any]:
    """Return what two runs that are the same have in common."""
    moments = [state["exp_avg"].reshape(-1) for state in trainer.optimizer.state_dict()["state"].values()]
    return {
        "parameters": tiny.flat(trainer.model),
        "moments": torch.cat(moments),
        "base": trainer.lr_scheduler.get_base_lr(),
        "logged": [logs["loss"] for logs in trainer.state.log_history if "loss" in logs],
        "losses": [record.losses for record in trainer.lr_scheduler.history],
    }


def resumed(rank: int, kind: str, optimizer: str, bf16: bool, smoothing: float) -> dict[str, Any]:
    """Train, and train again from the checkpoint in the middle, at a sync."""

    options = {"optimizer_cls_and_kwargs": (hk.FusedAdamW, {"lr": 1e-2})} if optimizer == "fused" else {}
    settings: dict[str, Any] = {
        "kind": kind,
        "max_steps": STEPS,
        "warmup_steps": STEPS - 2,  # the controller acts until the peak, and replicas differ as long
        "gradient_accumulation_steps": 2,
        "bf16": bf16,
        "label_smoothing_factor": smoothing,
        "max_grad_norm": 0.1,
        "weight_decay": 0.1,
        "save_strategy": "steps",
        "save_steps": STEPS // 2,
        "options": options,
        "hdet": {"sync_every": 2, "trust": 10.0},
    }
    with tiny.shared_folder(rank) as folder:
        watch = watches.Watch(smoothing)
        first = make_trainer(folder, watch, **settings)
        first.train()
        second = make_trainer(folder, watches.Watch(smoothing), seed=5, **settings)
        second.train(resume_from_checkpoint=os.path.join(folder, f"checkpoint-{STEPS // 2}"))
        return {
            "first": ended(first),
            "second": ended(second),
            "watched": watch.losses,
            "norms": watch.norms,
            "apart": watch.apart,
            "saved": watch.saved,
            "logs": [logs for logs in watch.logs if "loss" in logs],
            "groups": len(first.optimizer.param_groups),
        }


def stopped(rank: int, save: str) -> dict[str, Any]:
    """Stop early between two syncs, load the best model, and resume from a checkpoint between two syncs."""
    settings: dict[str, Any] = {
        "max_steps": 10,
        "warmup_steps": 8,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_strategy": "steps",
        "save_steps": 2,
        "load_best_model_at_end": True,
        "metric_for_best_model": "never_better",
        "greater_is_better": True,
        "hdet": {"sync_every": 3, "save": save, "probe": "eval"},
    }
    with tiny.shared_folder(rank) as folder:
        watch = watches.Watch()
        settings["options"] = {"compute_metrics": lambda predictions: {"never_better": 1.0}}
        stop = {"callbacks": [hf.EarlyStoppingCallback(early_stopping_patience=1)]}
        trainer = make_trainer(folder, watch, **{**settings, "options": {**settings["options"], **stop}})
        trainer.train()
        watched = {name: dict(getattr(watch, name)) for name in ("apart", "evaluated", "saved", "returned")}
        best = os.path.join(folder, "checkpoint-2" if save == "consensus" else "checkpoint-3")
        loaded = type(trainer.model).from_pretrained(best)
        after = tiny.of_all_ranks(tiny.flat(trainer.model))
        evaluated = trainer.evaluate()["eval_loss"]
        again = make_trainer(folder, watches.Watch(), seed=5, **settings)
        again.train(resume_from_checkpoint=best)
        final = tiny.of_all_ranks(tiny.flat(again.model))  # the best of the resumed run
        return {
            **watched,
            "step": trainer.state.global_step,
            "best": torch.equal(after[0], after[1]) and torch.equal(after[0], tiny.flat(loaded)),
            "checkpoint": trainer.state.best_model_checkpoint == best,
            "eval_loss": evaluated,
            "probed": [record.probes is not None for record in again.lr_scheduler.history],
            "resumed": again.state.global_step,
            "one": torch.equal(final[0], final[1]) and bool(torch.isfinite(final[0]).all()),
        }


def either(rank: int, function: Any, *arguments: Any) -> dict[str, Any]:
    """Let one group of ranks run both."""
    return function(rank, *arguments)


DEFAULT = [("gpt2", "torch", True, SMOOTHING)]
FULL = [("gpt2", "fused", False, 0.0), ("llama", "fused", True, SMOOTHING), ("llama", "torch", False, 0.0)]
TRAINER = Cases(
    2,
    either,
    {**{case: (resumed, *case) for case in DEFAULT}, "consensus": (stopped, "consensus")},
    full={**{case: (resumed, *case) for case in FULL}, "sync": (stopped, "sync")},
    imported=FRAMEWORKS,
)
RESUMED = [pytest.param(*case) for case in DEFAULT] + [pytest.param(*case, marks=pytest.mark.full) for case in FULL]


@pytest.mark.parametrize(("kind", "optimizer", "bf16", "smoothing"), RESUMED)
def test_a_run_resumed_at_a_sync_is_the_uninterrupted_run(
    kind: str, optimizer: str, bf16: bool, smoothing: float
) -> None:
    for result in TRAINER[kind, optimizer, bf16, smoothing]:
        first, second = result["first"], result["second"]
        assert torch.equal(first["parameters"], second["parameters"])
        assert torch.equal(first["moments"], second["moments"])
        assert first["logged"] == second["logged"]
        assert first["base"] == second["base"]
        assert first["losses"] == second["losses"]
        assert result["apart"][STEPS // 2 + 1] > 0 == result["apart"][STEPS // 2]


@pytest.mark.parametrize(("kind", "optimizer", "bf16", "smoothing"), RESUMED)
def test_losses_are_those_of_this_process_with_smoothing_accumulation_and_autocast(
    kind: str, optimizer: str, bf16: bool, smoothing: float
) -> None:
    for rank, result in enumerate(TRAINER[kind, optimizer, bf16, smoothing]):
        found = [losses[rank] for losses in result["first"]["losses"]]
        steps = np.array(result["watched"]).reshape(-1, 2).mean(1)
        assert found == pytest.approx(steps.tolist(), rel=1e-5)
        assert max(result["norms"]) < 0.1001


@pytest.mark.parametrize(("kind", "optimizer", "bf16", "smoothing"), RESUMED)
def test_loggers_see_the_base_learning_rate_and_metrics(
    kind: str, optimizer: str, bf16: bool, smoothing: float
) -> None:
    results = TRAINER[kind, optimizer, bf16, smoothing]
    rates = [[logs["learning_rate"] for logs in result["logs"]] for result in results]
    assert rates[0] == rates[1]
    assert rates[0][0] == pytest.approx(1e-2 / 25)
    assert results[0]["groups"] == 2  # decayed and not decayed
    first = results[1]["logs"][1]
    assert {name for name in first if name.startswith("hdet/")} == {"hdet/loss", "hdet/base/lr", "hdet/lr", "hdet/acts"}
    assert first["hdet/lr"] != first["hdet/base/lr"]


def test_an_early_stop_loads_the_best_average_and_resumes() -> None:
    results = TRAINER["consensus"]
    for result in results:
        assert result["step"] == 4
        assert result["apart"][2] > 0
        assert result["evaluated"].keys() == {2, 4}
        assert max(result["evaluated"].values()) < 1e-7
        assert result["returned"] == {2: True}
        assert result["best"]
        assert result["checkpoint"]
        assert result["resumed"] == 10
        assert result["one"]
        assert result["probed"][0]
    assert results[0]["saved"].keys() == {2, 4}
    assert max(results[0]["saved"].values()) < 1e-7
    assert results[0]["eval_loss"] == results[1]["eval_loss"]


@pytest.mark.full
def test_checkpoints_and_the_evaluations_that_choose_among_them_wait_for_a_sync() -> None:
    results = TRAINER["sync"]
    for result in results:
        assert result["evaluated"].keys() == {3, 6}
        assert result["step"] == 6
        assert result["best"]
        assert result["checkpoint"]
    assert results[0]["saved"].keys() == {3, 6}


def compared(rank: int) -> dict[str, Any]:
    """Train with transformers' own trainer, and with HDET's without a spread."""
    found = {}
    with tiny.shared_folder(rank) as folder:
        for name, schedule in (("linear", {}), ("cosine", {"lr_scheduler_type": "cosine", "warmup_steps": 2})):
            given = {"max_steps": STEPS, "gradient_accumulation_steps": 2, **schedule}
            hdet = {"spread": 0.0, "sync_every": 3} | ({"schedule": "linear"} if name == "linear" else {})
            plain = hf.Trainer(tiny.model(), tiny.arguments(folder, **given), train_dataset=tiny.rows(64))
            plain.train()
            ours = hdet_hf.HDETTrainer(
                tiny.model(), tiny.arguments(folder, **given), train_dataset=tiny.rows(64), hdet=hdet
            )
            ours.train()
            logged = [
                [(logs["loss"], logs["learning_rate"]) for logs in trainer.state.log_history if "loss" in logs]
                for trainer in (plain, ours)
            ]
            found[name] = torch.equal(tiny.flat(plain.model), tiny.flat(ours.model)), logged[0] == logged[1]
    return found


@pytest.mark.full
def test_without_a_spread_it_is_the_plain_trainer() -> None:
    for found in run_ranks(2, compared, imported=FRAMEWORKS):
        assert found == {"linear": (True, True), "cosine": (True, True)}


def refused(rank: int) -> list[str]:
    """Return the messages of setups without replicas."""
    messages = []
    with tiny.shared_folder(rank) as folder:
        for build in (hdet_hf.HDETTrainer, hf.Trainer):
            callbacks = {} if build is hdet_hf.HDETTrainer else {"callbacks": [hdet_hf.HDETCallback()]}
            args = tiny.arguments(folder, max_steps=2, fsdp="full_shard")
            with pytest.raises(ValueError, match="whole replica of the model") as caught:
                build(tiny.model(), args, train_dataset=tiny.rows(8), **callbacks)
            messages.append(str(caught.value))
    return messages


@pytest.mark.full
def test_sharded_models_are_refused_before_they_are_sharded() -> None:
    for messages in run_ranks(2, refused, imported=FRAMEWORKS):
        assert all("FSDP" in message and "torchrun" in message for message in messages)
        assert len(messages) == 2


def total_over_items(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    """Return the loss of a language model as transformers asks for it, from a function of the user."""
    logits, chosen = outputs["logits"][:, :-1].flatten(0, 1), labels[:, 1:].reshape(-1)
    return torch.nn.functional.cross_entropy(logits, chosen, reduction="sum") / num_items_in_batch


def asked_otherwise(rank: int) -> dict[str, Any]:
    """Evaluate and save at the ends of epochs, from the user's own code, and without a learning rate."""

    class Asks(hf.TrainerCallback):
        trainer: Any = None

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 2:
                self.trainer.evaluate()
                self.trainer.predict(tiny.rows(4))
                self.trainer.save_model(os.path.join(args.output_dir, "own"))

    found: dict[str, Any] = {}
    with tiny.shared_folder(rank) as folder:
        epochs = {"num_train_epochs": 2, "eval_strategy": "epoch", "save_strategy": "epoch", "warmup_steps": 14}
        for save in ("consensus", "sync"):
            watch = watches.Watch()
            trainer = make_trainer(os.path.join(folder, save), watch, hdet={"sync_every": 5, "save": save}, **epochs)
            trainer.train()
            found[save] = watch.evaluated, watch.saved, watch.apart
        watch, asks = watches.Watch(), Asks()
        trainer = make_trainer(
            folder, watch, max_steps=8, hdet={"sync_every": 5, "auto_lr": False}, options={"callbacks": [asks]}
        )
        asks.trainer = trainer
        trainer.train()
        found["own"] = watch.evaluated, watch.returned, watch.apart
        watch = watches.Watch()
        options = {"compute_loss_func": total_over_items}
        trainer = make_trainer(
            folder,
            watch,
            max_steps=2,
            gradient_accumulation_steps=2,
            hdet={"sync_every": 2, "auto_lr": False},
            options=options,
        )
        trainer.train()
        found["own loss"] = trainer.lr_scheduler.history[0].losses[rank], list(watch.losses)
        trainer.train()
        every = tiny.of_all_ranks(tiny.flat(trainer.model))
        rates = [logs["learning_rate"] for logs in watch.logs if "loss" in logs]
        found["again"] = torch.equal(every[0], every[1]), rates, len(trainer.lr_scheduler.history)
        options = {"eval_strategy": "steps", "eval_steps": 4, "save_strategy": "steps", "save_steps": 4}
        watch = watches.Watch()
        trainer = make_trainer(
            os.path.join(folder, "none"), watch, max_steps=80, hdet={"max_lr": None, "sync_every": 8}, **options
        )
        trainer.train()
        scheduler = trainer.lr_scheduler
        every = tiny.of_all_ranks(tiny.flat(trainer.model))
        found["scouted"] = scheduler.scouted, scheduler.cycle.before, watch.saved, torch.equal(every[0], every[1])
    return found


@pytest.mark.full
def test_whatever_asks_for_an_evaluation_or_a_checkpoint_gets_the_average() -> None:
    for rank, found in enumerate(run_ranks(2, asked_otherwise, imported=FRAMEWORKS)):
        evaluated, saved, apart = found["consensus"]
        assert apart[8] > 0
        assert evaluated.keys() == {8, 16}
        assert max(evaluated.values()) < 1e-7
        if rank == 0:
            assert saved.keys() == {8, 16}
            assert max(saved.values()) < 1e-7
            assert found["sync"][1].keys() == {10, 16}
            assert max(found["sync"][1].values()) < 1e-7
        evaluated, returned, apart = found["own"]
        assert apart[2] > 0
        assert evaluated[2] < 1e-7
        assert returned[2]
        loss, steps = found["own loss"]
        assert loss == pytest.approx(np.mean(steps), rel=1e-5)
        equal, rates, syncs = found["again"]
        assert equal
        assert rates[2:] == rates[:2]
        assert syncs == 1
        rate, scouting, saved, equal = found["scouted"]
        assert rate is not None
        assert equal
        if rank == 0:
            assert min(saved) >= scouting > 4  # nothing is saved while a learning rate is looked for
            assert max(saved.values()) < 1e-6


def test_a_step_is_the_mean_over_all_items() -> None:
    losses = hdet_hf.StepLoss()
    assert losses.take() is None
    losses.add(torch.tensor(6.0), torch.tensor(2))
    losses.add(torch.tensor(2.0, dtype=torch.bfloat16), torch.tensor(6))
    assert losses.take() == torch.tensor(1.0)
    losses.add(torch.tensor(1.0))
    losses.add(torch.tensor(2.0))
    assert losses.take() == torch.tensor(1.5)
    losses.add(torch.tensor(0.0), torch.tensor(0))
    assert losses.take() == torch.tensor(0.0)
    assert losses.take() is None


def test_labels_that_enter_the_loss_are_counted() -> None:
    labels = torch.tensor([[1, 2, -100, -100], [1, 2, 3, -100]])
    causal, other = tiny.model(), nn.Linear(1, 1)
    assert hdet_hf.predicted_labels({"labels": labels}, other) == 5
    assert hdet_hf.predicted_labels({"labels": labels}, causal) == 3
    assert hdet_hf.predicted_labels({"labels": labels, "shift_labels": labels[:1]}, causal) == 2
    assert hdet_hf.predicted_labels({"labels": [{"boxes": 1}]}, other) is None
    assert hdet_hf.predicted_labels({}, causal) is None


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
@pytest.mark.parametrize("normalised", [False, True], ids=["mean", "items of all"])
def test_the_hook_takes_the_mean_of_a_model_in_training(kind: str, normalised: bool) -> None:
    model = tiny.model(kind).train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    losses = hdet_hf.StepLoss()
    hook = losses.hook(model)
    batches = [torch.utils.data.default_collate(tiny.rows(3, seed=seed)) for seed in (3, 4)]
    batches[1]["labels"][:, 4:] = -100
    means, counts = [], []
    for batch in batches:
        with torch.no_grad():
            means.append(float(model(**batch).loss))
        counts.append(int((batch["labels"][:, 1:] != -100).sum()))
        model(**batch, **({"num_items_in_batch": torch.tensor(1000)} if normalised else {}))
        model.eval()(**batch)
        model.train()
    weights = counts if normalised else [1, 1]
    expected = sum(mean * weight for mean, weight in zip(means, weights, strict=True)) / sum(weights)
    assert float(losses.take() or 0.0) == pytest.approx(expected, rel=1e-5)
    hook.remove()
    model(**batches[0])
    assert losses.take() is None


def test_a_model_without_a_loss_says_what_to_use() -> None:
    model = tiny.model().train()
    hdet_hf.StepLoss().hook(model)
    with pytest.raises(RuntimeError, match=r"GPT2LMHeadModel returned no loss.*HDETTrainer"):
        model(input_ids=torch.ones(1, 4, dtype=torch.long))


SCHEDULED = 20


def scheduler_of(folder: Path, hdet: dict[str, Any], **given: Any) -> Any:
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    args = tiny.arguments(str(folder), **given)
    return hdet_hf.build_scheduler(args, optimizer, SCHEDULED, hdet_hf.trainer_options(hdet), model=model)


def rates_of(scheduler: Any) -> list[float]:
    found = []
    for _ in range(SCHEDULED):
        found.append(scheduler.get_last_lr()[0])
        scheduler.optimizer.step()
        scheduler.step()
    return found


def test_the_default_is_one_cycle_that_peaks_after_the_warm_up(tmp_path: Path) -> None:
    scheduler = scheduler_of(tmp_path, {"auto_lr": False}, warmup_steps=5)
    assert isinstance(scheduler, hk.HDETOneCycleLR)
    rates = rates_of(scheduler)
    assert max(rates) == rates[4] == pytest.approx(1e-2)
    assert scheduler.optimizer.param_groups[0]["betas"] == (0.9, 0.999)
    assert rates_of(scheduler_of(tmp_path, {"auto_lr": False}))[5] == pytest.approx(1e-2)  # 30 %
    shares = scheduler_of(tmp_path, {"auto_lr": False}, warmup_steps=0.25)
    assert rates_of(shares) == rates


def test_keywords_and_the_peak_of_one_cycle_can_be_given(tmp_path: Path) -> None:
    keywords = {"div_factor": 10.0, "cycle_momentum": True}
    scheduler = scheduler_of(tmp_path, {"max_lr": 0.5, "auto_lr": False}, lr_scheduler_kwargs=keywords)
    assert rates_of(scheduler)[0] == pytest.approx(0.05)
    assert max(rates_of(scheduler_of(tmp_path, {"auto_lr": False}, warmup_steps=1))) == pytest.approx(1e-2)


@pytest.mark.parametrize(
    ("named", "hdet", "given"),
    [
        ("cosine", {}, {"lr_scheduler_type": "cosine", "warmup_steps": 4}),
        ("linear", {"schedule": "linear"}, {}),
        ("polynomial", {"schedule": "polynomial"}, {"lr_scheduler_kwargs": {"power": 2.0}}),
    ],
)
def test_schedules_of_transformers_are_wrapped(
    tmp_path: Path, named: str, hdet: dict[str, Any], given: dict[str, Any]
) -> None:
    scheduler = scheduler_of(tmp_path, {**hdet, "auto_lr": False}, **given)
    assert isinstance(scheduler, hk.HDETScheduler)
    plain = hf.get_scheduler(
        named,
        torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=1e-2),
        given.get("warmup_steps", 0),
        SCHEDULED,
        given.get("lr_scheduler_kwargs"),
    )
    assert rates_of(scheduler) == rates_of(plain)


@pytest.mark.parametrize("schedule", [None, "linear", "one_cycle"])
def test_one_cycle_in_the_place_of_a_linear_schedule_is_a_warning_unless_it_was_chosen(
    tmp_path: Path, schedule: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    chosen = {} if schedule is None else {"schedule": schedule}
    with caplog.at_level(logging.WARNING, logger="hdet_kernels"):
        scheduler = scheduler_of(tmp_path, {**chosen, "auto_lr": False}, lr_scheduler_type="linear")
    assert isinstance(scheduler, hk.HDETScheduler if schedule == "linear" else hk.HDETOneCycleLR)
    assert ("hdet={'schedule': 'linear'}" in caplog.text) is (schedule is None)


def test_a_second_training_begins_from_the_learning_rate_of_the_user(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    args = tiny.arguments(str(tmp_path))
    options = hdet_hf.trainer_options({"schedule": "constant", "auto_lr": False})
    for _ in range(2):
        assert rates_of(hdet_hf.build_scheduler(args, optimizer, SCHEDULED, options, model=model)) == [1e-2] * SCHEDULED


@pytest.mark.parametrize(
    ("hdet", "error", "message"),
    [
        ({"sync_evry": 3}, TypeError, "did you mean 'sync_every'"),
        ({"schedule": "triangle"}, ValueError, "schedule must be .*'triangle'"),
        ({"save": "often"}, ValueError, "save must be .*'often'"),
        ([("spread", 0.1)], TypeError, "hdet must be a dict of the scheduler's keywords"),
        ({"schedule": "cosine", "max_lr": None}, ValueError, "max_lr is for the one cycle"),
    ],
)
def test_bad_options_are_named(hdet: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        hdet_hf.trainer_options(hdet)


def test_a_peak_for_another_schedule_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"max_lr is for the one cycle.*'cosine'"):
        scheduler_of(tmp_path, {"max_lr": 1.0}, lr_scheduler_type="cosine")


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("deepspeed", "zero3.json", "DeepSpeed"),
        ("fsdp", "full_shard", "FSDP"),
        ("_n_gpu", 4, r"4 GPUs \(DataParallel\)"),
        ("parallelism_config", SimpleNamespace(tp_size=2, dp_replicate_size=2), "tp_size=2"),
    ],
)
def test_setups_without_replicas_are_refused(tmp_path: Path, name: str, value: Any, reason: str) -> None:
    args = tiny.arguments(str(tmp_path))
    hdet_hf.check_replicas(args)
    setattr(args, name, value)
    with pytest.raises(ValueError, match=f"whole replica of the model.*{reason}.*torchrun"):
        hdet_hf.check_replicas(args)


def test_a_model_that_was_loaded_sharded_is_refused(tmp_path: Path) -> None:
    model = torch.nn.Linear(1, 1)
    hdet_hf.check_replicas(tiny.arguments(str(tmp_path)), model)
    model.is_distributed_loading_by_transformers = True  # type: ignore[assignment]
    with pytest.raises(ValueError, match="loaded sharded"):
        hdet_hf.check_replicas(tiny.arguments(str(tmp_path)), model)
