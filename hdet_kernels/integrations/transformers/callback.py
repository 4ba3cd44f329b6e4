"""The callback: what HDET does at the events of a training by transformers' ``Trainer``."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import SaveStrategy

from hdet_kernels.integrations.transformers.losses import LossHook, StepLoss
from hdet_kernels.integrations.transformers.schedule import checked_save
from hdet_kernels.integrations.transformers.strategy import check_replicas
from hdet_kernels.schedule import HDETOneCycleLR, HDETScheduler

log = logging.getLogger("hdet_kernels")


class HDETCallback(TrainerCallback):
    """Train with an HDET scheduler: ``Trainer(…, optimizers=(optimizer, scheduler), callbacks=[HDETCallback()])``.

    It records the losses of this process, lets evaluations and checkpoints see the averaged model, logs the base
    learning rate in the place of replica 0's, and averages the replicas when training ends, early too. It acts on what
    the callbacks before it asked for: put it last in the list.

    Args:
        save: ``"consensus"``: a checkpoint has the average of the moment, at any step. A run that resumes from one
            between two syncs begins there from the average on all replicas; at a sync it is the uninterrupted run.
            ``"sync"``: a checkpoint that is due between two syncs is written at the next sync, and the evaluation that
            belongs to it too.
        record_losses: take the loss that the model returns in training. False if your own code calls
            ``scheduler.record_loss``.
        log_metrics: add the scheduler's metrics to the training logs. Loggers of transformers come before a callback
            and do not see them; those of :class:`.HDETTrainer` do.
    """

    def __init__(self, *, save: str = "consensus", record_losses: bool = True, log_metrics: bool = True) -> None:
        self.save = checked_save(save)
        self.record_losses = record_losses
        self.log_metrics = log_metrics
        self.losses = StepLoss()
        self._scheduler: HDETOneCycleLR | HDETScheduler | None = None
        self._hook: LossHook | None = None
        self._held: contextlib.ExitStack | None = None  # the average is held until the next step
        self._averaged_at: int | None = None  # the last step at which it was held
        self._stepped = False  # a step was made in this training
        self._due = {"save": False, "evaluate": False}  # what waits for a sync
        self._rates: tuple[list[Any], list[Any]] | None = None  # base values and this replica's own

    # The beginning

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Refuse setups without replicas, before the model is moved or wrapped."""
        check_replicas(args, kwargs.get("model"))

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module,
        lr_scheduler: Any = None,
        **kwargs: Any,
    ) -> None:
        """Check the scheduler, and hook the model."""
        self._leave()  # of a training that an exception ended
        check_replicas(args, model)
        self._scheduler = _checked_scheduler(lr_scheduler, state.max_steps)
        self._stepped, self._averaged_at, self._rates = False, None, None
        self._due = {"save": False, "evaluate": False}
        self.losses = StepLoss()
        self._unhook()
        if self.record_losses:
            if args.label_smoothing_factor:
                raise ValueError(
                    f"label_smoothing_factor={args.label_smoothing_factor}: the trainer computes the loss itself, and "
                    "HDETCallback does not see it; use HDETTrainer or HDETTrainerMixin"
                )
            self._hook = LossHook(model, self.losses)
        if self._scheduler.cycle.ensemble.size == 1:
            log.warning(
                "one process is one replica: nothing is spread or averaged; start several processes with torchrun"
            )

    # A step

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Give this replica its own parameters back."""
        self._leave()

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Record the loss of the step, which the trainer does not pass to the scheduler."""
        loss = self.losses.take()
        if loss is not None:
            self.scheduler.record_loss(loss)
        # The trainer logs what get_last_lr() says between this event and scheduler.step(), which renews it.
        base = self.scheduler.get_base_lr()
        self._rates = base, self.scheduler._last_lr
        self.scheduler._last_lr = base

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        """Hold the average if an evaluation or a checkpoint follows."""
        self._stepped = True
        if self._rates is not None and self.scheduler._last_lr is self._rates[0]:  # AMP left the step out
            self.scheduler._last_lr = self._rates[1]
        return self._before_evaluation(args, state, control)

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        """Hold the average if an evaluation or a checkpoint follows."""
        return self._before_evaluation(args, state, control)

    # Evaluations, checkpoints and logs

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Tell of an evaluation that did not see the average."""
        self._check_averaged("evaluated", state)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Tell of a checkpoint that is not of the average."""
        self._check_averaged("saved", state)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Add metrics to the logs of training. The last ones, of the whole training, come before the best model."""
        if self._scheduler is None or logs is None:
            return
        if "train_loss" in logs:
            self._finish()
        elif self.log_metrics and "loss" in logs:
            metrics = self.metrics()
            logs.update(metrics)
            if state.log_history:
                state.log_history[-1].update(metrics)

    def metrics(self) -> dict[str, float]:
        """Return the scheduler's metrics; none before training."""
        return {} if self._scheduler is None else self._scheduler.metrics()

    @contextlib.contextmanager
    def average(self, step: int) -> Iterator[None]:
        """Hold the averaged model inside the block, if replicas differ now. Collective during training.

        Args:
            step: the trainer's global step.
        """
        if self._held is None and self._apart:
            self._averaged_at = step
            with self.scheduler.consensus():
                yield
        else:
            yield

    # The end

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Leave one model on all processes."""
        self._finish()
        self._unhook()
        self._scheduler = None

    @property
    def scheduler(self) -> HDETOneCycleLR | HDETScheduler:
        """The scheduler of the training that is under way."""
        if self._scheduler is None:
            raise RuntimeError("HDETCallback has no scheduler outside of Trainer.train()")
        return self._scheduler

    @property
    def _apart(self) -> bool:
        """Whether the replicas differ, apart from an average that is held."""
        if self._scheduler is None or not self._stepped:
            return False
        return self._held is not None or not self._scheduler.in_sync

    def _before_evaluation(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl
    ) -> TrainerControl:
        if control.should_training_stop:
            self._finish()
        self._wait_for_sync(args, control)
        if (control.should_evaluate or control.should_save) and self._held is None and self._apart:
            self._held, self._averaged_at = contextlib.ExitStack(), state.global_step
            self._held.enter_context(self.scheduler.consensus())
        return control

    def _wait_for_sync(self, args: TrainingArguments, control: TrainerControl) -> None:
        """Move checkpoints that are due between two syncs, and evaluations that choose among them, to the next sync."""
        if not self._apart:
            control.should_save = control.should_save or self._due["save"]
            control.should_evaluate = control.should_evaluate or self._due["evaluate"]
            self._due = {"save": False, "evaluate": False}
        elif self.save == "sync" or self.scheduler.scouting:  # while scouting there is no model of the run to save
            self._due["save"] |= control.should_save
            control.should_save = False
            if args.load_best_model_at_end or args.save_strategy == SaveStrategy.BEST:
                self._due["evaluate"] |= control.should_evaluate
                control.should_evaluate = False

    def _leave(self) -> None:
        if self._held is not None:
            held, self._held = self._held, None
            held.close()

    def _finish(self) -> None:
        """Average the replicas for good, if they differ."""
        self._leave()
        if not self._apart:
            return
        if self.scheduler.scouting:
            log.warning(
                "training ended while a learning rate was looked for: the replicas are not averaged, and differ"
            )
        else:
            self.scheduler.converge()

    def _check_averaged(self, done: str, state: TrainerState) -> None:
        if self._held is None and self._apart and self._averaged_at != state.global_step:
            log.warning(
                "step %d: the trainer %s parameters of single replicas, not the average: a callback after "
                "HDETCallback, or your own code, asked for it; put HDETCallback last, or use HDETTrainer",
                state.global_step,
                done,
            )

    def _unhook(self) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None


def _checked_scheduler(scheduler: Any, steps: int) -> HDETOneCycleLR | HDETScheduler:
    """Return the trainer's scheduler if it is one of HDET for the trainer's number of steps."""
    if not isinstance(scheduler, HDETOneCycleLR | HDETScheduler):
        raise TypeError(
            f"HDETCallback needs an HDET scheduler, the trainer has {type(scheduler).__name__}: pass "
            "optimizers=(optimizer, hdet_kernels.HDETOneCycleLR(optimizer, …)), or use HDETTrainer, which builds one"
        )
    run = scheduler.cycle.run.total_steps
    planned = None if run is None else scheduler.cycle.before + run
    if planned is not None and planned < steps:
        raise ValueError(
            f"the scheduler was built for {planned} steps, and the trainer makes {steps}: build it with {steps}, or "
            "use HDETTrainer, which knows the number"
        )
    if planned is not None and planned > steps:
        log.warning("the scheduler was built for %d steps, and the trainer makes %d: it ends early", planned, steps)
    return scheduler
