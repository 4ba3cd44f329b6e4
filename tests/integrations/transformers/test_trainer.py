"""The trainer with HDET, on two ranks: from TrainingArguments to checkpoints that resume, and one model at the end."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch

import hdet_kernels as hk
from tests.integrations.transformers import tiny
from tests.ranks import Cases, run_ranks

STEPS, SMOOTHING = 8, 0.1


def make_trainer(folder: str, watch: Any, *, kind: str = "gpt2", seed: int = 0, **given: Any) -> Any:
    """Return a trainer whose losses ``watch`` counts."""
    from hdet_kernels.integrations.transformers import HDETTrainer

    class Watched(HDETTrainer):
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
    from tests.integrations.transformers.watch import Watch

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
        watch = Watch(smoothing)
        first = make_trainer(folder, watch, **settings)
        first.train()
        second = make_trainer(folder, Watch(smoothing), seed=5, **settings)
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
    from transformers import EarlyStoppingCallback

    from tests.integrations.transformers.watch import Watch

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
        watch = Watch()
        settings["options"] = {"compute_metrics": lambda predictions: {"never_better": 1.0}}
        stop = {"callbacks": [EarlyStoppingCallback(early_stopping_patience=1)]}
        trainer = make_trainer(folder, watch, **{**settings, "options": {**settings["options"], **stop}})
        trainer.train()
        watched = {name: dict(getattr(watch, name)) for name in ("apart", "evaluated", "saved", "returned")}
        best = os.path.join(folder, "checkpoint-2" if save == "consensus" else "checkpoint-3")
        loaded = type(trainer.model).from_pretrained(best)
        after = tiny.of_all_ranks(tiny.flat(trainer.model))
        evaluated = trainer.evaluate()["eval_loss"]
        again = make_trainer(folder, Watch(), seed=5, **settings)
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
CASES = Cases(
    2,
    either,
    {**{case: (resumed, *case) for case in DEFAULT}, "consensus": (stopped, "consensus")},
    full={**{case: (resumed, *case) for case in FULL}, "sync": (stopped, "sync")},
)
RESUMED = [pytest.param(*case) for case in DEFAULT] + [pytest.param(*case, marks=pytest.mark.full) for case in FULL]


@pytest.mark.parametrize(("kind", "optimizer", "bf16", "smoothing"), RESUMED)
def test_a_run_resumed_at_a_sync_is_the_uninterrupted_run(
    kind: str, optimizer: str, bf16: bool, smoothing: float
) -> None:
    for result in CASES[kind, optimizer, bf16, smoothing]:
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
    for rank, result in enumerate(CASES[kind, optimizer, bf16, smoothing]):
        found = [losses[rank] for losses in result["first"]["losses"]]
        steps = np.array(result["watched"]).reshape(-1, 2).mean(1)
        assert found == pytest.approx(steps.tolist(), rel=1e-5)
        assert max(result["norms"]) < 0.1001


@pytest.mark.parametrize(("kind", "optimizer", "bf16", "smoothing"), RESUMED)
def test_loggers_see_the_base_learning_rate_and_metrics(
    kind: str, optimizer: str, bf16: bool, smoothing: float
) -> None:
    results = CASES[kind, optimizer, bf16, smoothing]
    rates = [[logs["learning_rate"] for logs in result["logs"]] for result in results]
    assert rates[0] == rates[1]
    assert rates[0][0] == pytest.approx(1e-2 / 25)
    assert results[0]["groups"] == 2  # decayed and not decayed
    assert "hdet/base/lr" in results[0]["logs"][-1]


def test_an_early_stop_loads_the_best_average_and_resumes() -> None:
    results = CASES["consensus"]
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
    results = CASES["sync"]
    for result in results:
        assert result["evaluated"].keys() == {3, 6}
        assert result["step"] == 6
        assert result["best"]
        assert result["checkpoint"]
    assert results[0]["saved"].keys() == {3, 6}


def compared(rank: int) -> dict[str, Any]:
    """Train with transformers' own trainer, and with HDET's without a spread."""
    from transformers import Trainer

    from hdet_kernels.integrations.transformers import HDETTrainer

    found = {}
    with tiny.shared_folder(rank) as folder:
        for name, schedule in (("linear", {}), ("cosine", {"lr_scheduler_type": "cosine", "warmup_steps": 2})):
            given = {"max_steps": STEPS, "gradient_accumulation_steps": 2, **schedule}
            hdet = {"spread": 0.0, "sync_every": 3} | ({"schedule": "linear"} if name == "linear" else {})
            plain = Trainer(tiny.model(), tiny.arguments(folder, **given), train_dataset=tiny.rows(64))
            plain.train()
            ours = HDETTrainer(tiny.model(), tiny.arguments(folder, **given), train_dataset=tiny.rows(64), hdet=hdet)
            ours.train()
            logged = [
                [(logs["loss"], logs["learning_rate"]) for logs in trainer.state.log_history if "loss" in logs]
                for trainer in (plain, ours)
            ]
            found[name] = torch.equal(tiny.flat(plain.model), tiny.flat(ours.model)), logged[0] == logged[1]
    return found


@pytest.mark.full
def test_without_a_spread_it_is_the_plain_trainer() -> None:
    for found in run_ranks(2, compared):
        assert found == {"linear": (True, True), "cosine": (True, True)}


def refused(rank: int) -> list[str]:
    """Return the messages of setups without replicas."""
    from transformers import Trainer

    from hdet_kernels.integrations.transformers import HDETCallback, HDETTrainer

    messages = []
    with tiny.shared_folder(rank) as folder:
        for build in (HDETTrainer, Trainer):
            callbacks = {} if build is HDETTrainer else {"callbacks": [HDETCallback()]}
            args = tiny.arguments(folder, max_steps=2, fsdp="full_shard")
            with pytest.raises(ValueError, match="whole replica of the model") as caught:
                build(tiny.model(), args, train_dataset=tiny.rows(8), **callbacks)
            messages.append(str(caught.value))
    return messages


@pytest.mark.full
def test_sharded_models_are_refused_before_they_are_sharded() -> None:
    for messages in run_ranks(2, refused):
        assert all("FSDP" in message and "torchrun" in message for message in messages)
        assert len(messages) == 2


def total_over_items(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    """Return the loss of a language model as transformers asks for it, from a function of the user."""
    logits, chosen = outputs["logits"][:, :-1].flatten(0, 1), labels[:, 1:].reshape(-1)
    return torch.nn.functional.cross_entropy(logits, chosen, reduction="sum") / num_items_in_batch


def asked_otherwise(rank: int) -> dict[str, Any]:
    """Evaluate and save at the ends of epochs, from the user's own code, and without a learning rate."""
    from transformers import TrainerCallback

    from tests.integrations.transformers.watch import Watch

    class Asks(TrainerCallback):
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
            watch = Watch()
            trainer = make_trainer(os.path.join(folder, save), watch, hdet={"sync_every": 5, "save": save}, **epochs)
            trainer.train()
            found[save] = watch.evaluated, watch.saved, watch.apart
        watch, asks = Watch(), Asks()
        trainer = make_trainer(
            folder, watch, max_steps=8, hdet={"sync_every": 5, "auto_lr": False}, options={"callbacks": [asks]}
        )
        asks.trainer = trainer
        trainer.train()
        found["own"] = watch.evaluated, watch.returned, watch.apart
        watch = Watch()
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
        watch = Watch()
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
    for rank, found in enumerate(run_ranks(2, asked_otherwise)):
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
