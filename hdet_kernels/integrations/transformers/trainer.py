"""A trainer of transformers that builds its HDET scheduler from ``TrainingArguments``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers import Trainer

from hdet_kernels.integrations.probe import BatchProbe
from hdet_kernels.integrations.transformers.callback import HDETCallback
from hdet_kernels.integrations.transformers.losses import predicted_labels, shifts_labels
from hdet_kernels.integrations.transformers.schedule import TrainerOptions, build_scheduler, trainer_options
from hdet_kernels.integrations.transformers.strategy import check_replicas

if TYPE_CHECKING:
    from transformers import Trainer as _Base
else:
    _Base = object


class HDETTrainerMixin(_Base):
    """Make a trainer train with HDET: ``class MyTrainer(HDETTrainerMixin, Trainer)``.

    The scheduler is built from ``TrainingArguments`` with the real number of steps. Evaluations, predictions and
    checkpoints during training see the averaged model, and so does every call of :meth:`evaluate` and
    :meth:`save_model`: during training all processes must make it.

    Args:
        args: those of the trainer.
        hdet: options by name: every keyword of :class:`hdet_kernels.HDETOneCycleLR` after ``last_epoch``, and

            - ``schedule``: ``"one_cycle"``, or an ``lr_scheduler_type`` such as ``"cosine"``. Default: the one of
              ``TrainingArguments``; where that is ``"linear"``, which is also its default, one cycle. Its keywords are
              ``lr_scheduler_kwargs``. Of the one cycle, ``learning_rate`` is the peak and ``warmup_steps`` the steps
              up to it (without any, 30 % of the run), and ``cycle_momentum`` is off.
            - ``max_lr=None``: no learning rate; the first 15 % of the steps find it.
            - ``save``: ``"consensus"`` or ``"sync"``, see :class:`HDETCallback`.
            - ``probe="eval"``: the probe is the loss on the first batch of the evaluation dataset.
        kwargs: those of the trainer.
    """

    lr_scheduler: LRScheduler | None
    _hdet_wrapped: nn.Module | None = None

    def __init__(self, *args: Any, hdet: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        self._hdet_options = trainer_options(hdet)
        super().__init__(*args, **kwargs)
        check_replicas(self.args, self.model)
        if self._hdet_options.eval_probe and self.eval_dataset is None:
            raise ValueError("probe='eval' takes a batch of the evaluation dataset, got none: pass eval_dataset=")
        if any(isinstance(one, HDETCallback) for one in self.callback_handler.callbacks):
            raise ValueError("the trainer has its HDETCallback already: leave it out of callbacks=")
        if self.lr_scheduler is not None and self._hdet_options != TrainerOptions(save=self._hdet_options.save):
            raise ValueError("hdet= is for the scheduler that the trainer builds, got optimizers=(…, scheduler) too")
        self._hdet = HDETCallback(save=self._hdet_options.save, record_losses=False)
        self.add_callback(self._hdet)

    def create_accelerator_and_postprocess(self) -> None:
        """Create the accelerator, and note what it wraps: the trainer keeps that only after it has a scheduler."""
        super().create_accelerator_and_postprocess()
        prepare = self.accelerator.prepare_model

        def noting(*args: Any, **kwargs: Any) -> nn.Module:
            self._hdet_wrapped = prepare(*args, **kwargs)
            return self._hdet_wrapped

        self.accelerator.prepare_model = noting

    def create_scheduler(self, num_training_steps: int, optimizer: Optimizer | None = None) -> LRScheduler:
        """Build the HDET scheduler, unless one was passed to the trainer."""
        if self.lr_scheduler is None:
            given = self.optimizer if optimizer is None else optimizer
            wrapped = self.model_wrapped if self.model_wrapped is not self.model else self._hdet_wrapped
            self.lr_scheduler = build_scheduler(
                self.args,
                getattr(given, "optimizer", given),  # accelerate's wrapper
                num_training_steps,
                self._hdet_options,
                model=self.model if wrapped is None else wrapped,
                probe=self._eval_probe() if self._hdet_options.eval_probe else None,
            )
            self._created_lr_scheduler = True
        return self.lr_scheduler

    def _eval_probe(self) -> BatchProbe:
        """Return a probe on the first batch of the evaluation dataset, of the first one if there are several."""
        several = isinstance(self.eval_dataset, dict)
        loader = self.get_eval_dataloader(next(iter(self.eval_dataset)) if several else None)
        return BatchProbe.of_loader(self.model, lambda model, batch: self.compute_loss(model, batch), loader)

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """Train on a micro-batch, and note the loss of this process."""
        labels = None if num_items_in_batch is None else predicted_labels(inputs, shifted=shifts_labels(self.model))
        loss = super().training_step(model, inputs, num_items_in_batch)
        if labels is not None and num_items_in_batch is not None and self._normalises_by_items:
            # The loss is this process's total over the items of all processes, times the processes.
            processes = self.accelerator.num_processes if self.args.average_tokens_across_devices else 1
            self._hdet.losses.add(loss * num_items_in_batch / processes, labels)
        else:
            self._hdet.losses.add(loss * self.current_gradient_accumulation_steps)
        return loss

    @property
    def _normalises_by_items(self) -> bool:
        """Whether losses are divided by the number of items of the whole step, as the trainer decides it."""
        said = getattr(self, "loss_is_scaled_for_ga", None)
        return bool(self.model_accepts_loss_kwargs or self.compute_loss_func is not None) if said is None else said

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log, and the scheduler's metrics with the losses of training."""
        if "loss" in logs:
            logs.update(self._hdet.metrics())
        super().log(logs, *args, **kwargs)

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Evaluate the averaged model."""
        with self._hdet.average(self.state.global_step):
            return super().evaluate(*args, **kwargs)

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """Predict with the averaged model."""
        with self._hdet.average(self.state.global_step):
            return super().predict(*args, **kwargs)

    def save_model(self, *args: Any, **kwargs: Any) -> None:
        """Save the averaged model."""
        with self._hdet.average(self.state.global_step):
            super().save_model(*args, **kwargs)

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        with self._hdet.average(self.state.global_step):
            super()._save_checkpoint(*args, **kwargs)


class HDETTrainer(HDETTrainerMixin, Trainer):
    """transformers' ``Trainer`` with HDET: ``HDETTrainer(model, args, train_dataset=…, hdet={"spread": 0.3})``."""
