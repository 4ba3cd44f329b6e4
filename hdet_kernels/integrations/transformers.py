"""HDET in transformers' ``Trainer``: a callback for your own scheduler, or a trainer that builds the scheduler itself.

:class:`HDETCallback` follows the events of a training: it records losses, holds the averaged model while the trainer
evaluates or saves, and averages the replicas at the end. :class:`HDETTrainerMixin` adds this callback to a trainer,
builds its scheduler from ``TrainingArguments`` (:func:`build_scheduler`), and does what no event announces.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.hooks import RemovableHandle

from hdet_kernels.checks import check_choice, check_flag, check_kind
from hdet_kernels.integrations.probe import BatchProbe
from hdet_kernels.optim.base import FusedOptimizer
from hdet_kernels.schedule import HDETOneCycleLR, HDETScheduler
from hdet_kernels.schedule.arguments import Probe, refuse_unknown
from hdet_kernels.schedule.attachment import release
from hdet_kernels.torch_internals import last_lr, set_last_lr

try:
    from accelerate.state import AcceleratorState, GradientState, is_initialized
    from transformers import Trainer, TrainerCallback, TrainingArguments, get_scheduler
    from transformers.loss.loss_utils import ForCausalLMLoss
    from transformers.trainer_utils import SaveStrategy, SchedulerType
except ImportError as error:
    raise ImportError(
        f"hdet_kernels.integrations.transformers needs transformers and accelerate, and cannot import them ({error}): "
        "pip install 'hdet_kernels[transformers]'"
    ) from error

if TYPE_CHECKING:
    from transformers import Trainer as _Base
else:
    _Base = object

log = logging.getLogger("hdet_kernels")

_ONE_CYCLE = "one_cycle"


def check_replicas(args: TrainingArguments, model: nn.Module | None = None) -> None:
    """Raise ValueError if the processes of this training cannot hold parameters of their own, and say the way out."""
    # accelerate launch chooses by its own configuration, which is not in the arguments.
    kind = AcceleratorState().distributed_type.value if is_initialized() else ""
    sizes = getattr(args, "parallelism_config", None)
    parts = [f"{name}={getattr(sizes, name, 1)}" for name in ("dp_shard_size", "tp_size", "cp_size", "sp_size")]
    reasons = {
        "DeepSpeed steps one optimizer for all processes": args.deepspeed or kind == "DEEPSPEED",
        "FSDP or Megatron shards one model over the processes": args.fsdp or kind in ("FSDP", "MEGATRON_LM"),
        f"one process drives {args.n_gpu} GPUs (DataParallel)": args.n_gpu > 1,
        f"parallelism_config shards the model ({', '.join(parts)})": not all(part.endswith("=1") for part in parts),
        "the model was loaded sharded (distributed_config=)": getattr(
            model, "is_distributed_loading_by_transformers", False
        ),
    }
    if reason := next((reason for reason, holds in reasons.items() if holds), None):
        raise ValueError(
            f"HDET needs a whole replica of the model in every process, but {reason}: start one process for each GPU "
            "with torchrun, without it (plain data parallel), or write a loop of your own"
        )


class StepLoss:
    """The mean training loss of this process over one optimizer step, summed on the device.

    transformers normalises a loss over all tokens of all processes and micro-batches of a step, where the model takes
    ``num_items_in_batch``. The result depends on how many tokens the other processes had, and cannot be compared
    between replicas. So losses are summed here as totals and numbers of items.
    """

    _total: Tensor | None = None
    _count: Tensor | int = 0

    def add(self, total: Tensor, count: Tensor | int = 1) -> None:
        """Add the loss of a micro-batch: the total over ``count`` items."""
        total = total.detach().float()
        self._total = total if self._total is None else self._total + total
        self._count = self._count + count

    def take(self) -> Tensor | None:
        """Return the mean loss of an item, and begin anew; None if nothing was added."""
        total, count = self._total, self._count
        self._total, self._count = None, 0
        if total is None:
            return None
        # A step without a single label has a loss of 0, as in the trainer, not 0/0.
        return total / (count.clamp(min=1) if isinstance(count, Tensor) else count)

    def hook(self, model: nn.Module) -> RemovableHandle:
        """Add the loss that a model returns in every forward pass of training, until the handle is removed."""

        def after_forward(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            if not (model.training and torch.is_grad_enabled()):
                return
            loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
            if not isinstance(loss, Tensor):
                raise RuntimeError(
                    f"{type(model).__name__} returned no loss (output: {type(output).__name__}), which HDETCallback "
                    "records: use HDETTrainer or HDETTrainerMixin, or call scheduler.record_loss(loss) in "
                    "compute_loss and pass HDETCallback(record_losses=False)"
                )
            items = kwargs.get("num_items_in_batch")
            labels = None if items is None else predicted_labels(kwargs, model)
            if items is None or labels is None:
                self.add(loss)
            else:
                self.add(loss.detach() * items, labels)

        return model.register_forward_hook(after_forward, with_kwargs=True)


def predicted_labels(inputs: Mapping[str, Any], model: nn.Module) -> Tensor | None:
    """Return the number of labels that enter the loss of a batch; None if the batch has no tensor of labels.

    The loss of a causal language model compares position i with label i + 1: the first label of each row is left out.
    """
    labels = inputs.get("shift_labels")
    if labels is None:
        labels = inputs.get("labels")
        encoder_decoder = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
        causal = getattr(model, "loss_function", None) is ForCausalLMLoss and not encoder_decoder
        if isinstance(labels, Tensor) and causal:
            labels = labels[..., 1:]
    return labels.ne(-100).sum() if isinstance(labels, Tensor) else None


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
        log_metrics: add :meth:`metrics` to the training logs. Loggers of transformers come before a callback and do not
            see them; those of :class:`.HDETTrainer` do.
    """

    #: Whether the trainer logs no norm of the gradients where there are none.
    logs_no_norm = False

    def __init__(self, *, save: str = "consensus", record_losses: bool = True, log_metrics: bool = True) -> None:
        check_choice("save", save, ("consensus", "sync"))
        self.save = save
        self.record_losses = check_flag("record_losses", record_losses)
        self.log_metrics = check_flag("log_metrics", log_metrics)
        self.losses = StepLoss()
        self._scheduler: HDETOneCycleLR | HDETScheduler | None = None
        self._hook: RemovableHandle | None = None
        self._average: contextlib.ExitStack | None = None  # the average is in place until the next step
        self._averaged_at: int | None = None  # the last step at which it was
        self._stepped = False  # a step was made in this training
        self._due = {"save": False, "evaluate": False}  # what waits for a sync
        self._events: list[str] = []  # what the controller did and the history of the trainer does not have yet
        self._on_sync: RemovableHandle | None = None
        self._rates: tuple[list[Any], list[Any]] | None = None  # base values and this replica's own

    # The beginning

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Refuse setups without replicas, before the model is moved or wrapped."""
        check_replicas(args, kwargs.get("model"))

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: nn.Module, lr_scheduler: Any = None, **kwargs: Any
    ) -> None:
        """Check the scheduler, and hook the model."""
        self._leave()  # of a training that an exception ended
        check_replicas(args, model)
        self._scheduler = _checked_scheduler(lr_scheduler, state.max_steps)
        if isinstance(optimizer := self._scheduler.cycle.optimizer, FusedOptimizer):
            if optimizer.steps_in_backward and not self.logs_no_norm:
                raise ValueError(
                    "transformers' Trainer takes the norm of all gradients for its log after the backward pass, when "
                    "in_backward has used them: train with HDETTrainer, or HDETTrainerMixin and a trainer of your own, "
                    "which leave it out of the log; or leave out in_backward"
                )
            clips = f"max_grad_norm={args.max_grad_norm}" if args.max_grad_norm else ""
            optimizer.follow_trainer(accumulates=lambda: not GradientState().sync_gradients, clips=clips)
        self._stepped, self._averaged_at, self._rates = False, None, None
        self._due = {"save": False, "evaluate": False}
        self.losses = StepLoss()
        self._unhook()
        self._events.clear()
        self._on_sync = self._scheduler.on_sync(lambda record: self._events.extend(filter(None, (record.event,))))
        if self.record_losses:
            if args.label_smoothing_factor:
                raise ValueError(
                    f"label_smoothing_factor={args.label_smoothing_factor}: the trainer computes the loss itself, and "
                    "HDETCallback does not see it; use HDETTrainer or HDETTrainerMixin"
                )
            self._hook = self.losses.hook(model)
        if self._scheduler.cycle.ensemble.size == 1:
            log.warning(
                "one process is one replica: nothing is spread or averaged; start several processes with torchrun"
            )

    # A step

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Give this replica its own parameters back."""
        self._leave()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Record the loss of the step, which the trainer does not pass to the scheduler."""
        loss = self.losses.take()
        if loss is not None:
            self.scheduler.record_loss(loss)
        # The trainer logs what get_last_lr() says between this event and scheduler.step(), which renews it.
        base = self.scheduler.get_base_lr()
        self._rates = base, last_lr(self.scheduler)
        set_last_lr(self.scheduler, base)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Note what the controller did, and put the average in place if an evaluation or a checkpoint follows."""
        self._stepped = True
        if self._rates is not None and last_lr(self.scheduler) is self._rates[0]:  # AMP left the step out
            set_last_lr(self.scheduler, self._rates[1])
        state.log_history += [{"hdet/why": why, "step": state.global_step} for why in self._events]
        self._events.clear()
        return self.on_epoch_end(args, state, control)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Put the average in place if an evaluation or a checkpoint follows."""
        if control.should_training_stop:
            self._finish()
        self._wait_for_sync(args, control)
        if (control.should_evaluate or control.should_save) and self._average is None and self._apart:
            self._average, self._averaged_at = contextlib.ExitStack(), state.global_step
            self._average.enter_context(self.scheduler.consensus())
        return control

    # Evaluations, checkpoints and logs

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Warn of an evaluation that did not see the average."""
        self._check_averaged("evaluated", state.global_step)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Warn of a checkpoint that is not of the average."""
        self._check_averaged("saved", state.global_step)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
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
        """Return what a line of the log says of HDET: losses, base and own learning rates, and the acts so far.

        Loss and probe are of the last sync, the learning rates are those of now. There are none before training.
        """
        if self._scheduler is None:
            return {}
        own = f"hdet/replica{self._scheduler.cycle.ensemble.replica}/lr"
        chosen = {
            name.replace(own, "hdet/lr"): value
            for name, value in self._scheduler.metrics().items()
            if name in ("hdet/loss", "hdet/probe") or name.startswith(("hdet/base/lr", own))
        }
        summary = self._scheduler.history_summary
        return {**chosen, "hdet/acts": float(summary.undone)}

    @contextlib.contextmanager
    def average(self, step: int) -> Iterator[None]:
        """Have the averaged model inside the block, if replicas differ at this global step. Collective in training."""
        if self._average is None and self._apart:
            self._averaged_at = step
            with self.scheduler.consensus():
                yield
        else:
            yield

    # The end

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
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
        """Whether the replicas differ, apart from an average that is in place."""
        if self._scheduler is None or not self._stepped:
            return False
        return self._average is not None or not self._scheduler.in_sync

    def _wait_for_sync(self, args: Any, control: Any) -> None:
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
        if self._average is not None:
            average, self._average = self._average, None
            average.close()

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

    def _check_averaged(self, done: str, step: int) -> None:
        if self._average is None and self._apart and self._averaged_at != step:
            log.warning(
                "step %d: the trainer %s parameters of single replicas, not the average: a callback after "
                "HDETCallback, or your own code, asked for it; put HDETCallback last, or use HDETTrainer",
                step,
                done,
            )

    def _unhook(self) -> None:
        for handle in (self._hook, self._on_sync):
            if handle is not None:
                handle.remove()
        self._hook = self._on_sync = None


def _checked_scheduler(scheduler: Any, steps: int) -> HDETOneCycleLR | HDETScheduler:
    """Return the trainer's scheduler if it is one of HDET for the trainer's number of steps."""
    if not isinstance(scheduler, HDETOneCycleLR | HDETScheduler):
        raise TypeError(
            f"HDETCallback needs an HDET scheduler, the trainer has {type(scheduler).__name__}: pass "
            "optimizers=(optimizer, hdet_kernels.HDETOneCycleLR(optimizer, …)), or use HDETTrainer, which builds one"
        )
    run = scheduler.cycle.run.total_steps
    planned = steps if run is None else scheduler.cycle.before + run
    if planned < steps:
        raise ValueError(
            f"the scheduler was built for {planned} steps, and the trainer makes {steps}: build it with {steps}, or "
            "use HDETTrainer, which knows the number"
        )
    if planned > steps:
        log.warning("the scheduler was built for %d steps, and the trainer makes %d: it ends early", planned, steps)
    return scheduler


@dataclass
class TrainerOptions:
    """The entries of a trainer's ``hdet=``, which :class:`HDETTrainerMixin` explains."""

    schedule: str | None = None
    peak: dict[str, float | None] = field(default_factory=dict)  # {"max_lr": …} if it was given
    save: str = "consensus"
    eval_probe: bool = False  # probe="eval" was given
    scheduler: dict[str, Any] = field(default_factory=dict)  # the keywords of the scheduler

    def schedule_of(self, args: TrainingArguments) -> str:
        """Return ``"one_cycle"`` or the name of a schedule of transformers."""
        named = SchedulerType(args.lr_scheduler_type)
        if self.schedule is None and named is SchedulerType.LINEAR:
            if args.process_index == 0:
                log.warning(
                    "lr_scheduler_type='linear', which is also its default, trains one cycle. Pass "
                    "hdet={'schedule': 'linear'} for a linear schedule, or 'one_cycle' to say that you mean it"
                )
            return _ONE_CYCLE
        schedule = named.value if self.schedule is None else self.schedule
        if self.peak:
            _check_one_cycle(schedule)
        return schedule


def _check_one_cycle(schedule: str) -> None:
    if schedule != _ONE_CYCLE:
        raise ValueError(f"max_lr is for the one cycle, got it with schedule={schedule!r}: leave one of the two out")


def trainer_options(hdet: Mapping[str, Any] | None) -> TrainerOptions:
    """Return the checked options of ``hdet=``."""
    if hdet is not None:
        check_kind(
            "hdet", hdet, Mapping, "a dict of the scheduler's keywords", remedy="pass for example {'spread': 0.2}"
        )
    given = dict(hdet or {})
    schedule, save = given.pop("schedule", None), given.pop("save", "consensus")
    if schedule is not None:
        check_choice("schedule", schedule, (_ONE_CYCLE, *(kind.value for kind in SchedulerType)))
    check_choice("save", save, ("consensus", "sync"))
    peak = {"max_lr": given.pop("max_lr")} if "max_lr" in given else {}
    if peak and schedule is not None:
        _check_one_cycle(schedule)
    eval_probe = isinstance(probe := given.get("probe"), str) and probe == "eval"
    if eval_probe:
        del given["probe"]
    refuse_unknown(given, "the hdet= of the trainer")
    return TrainerOptions(schedule, peak, save, eval_probe, given)


def build_scheduler(
    args: TrainingArguments,
    optimizer: Optimizer,
    steps: int,
    options: TrainerOptions,
    *,
    model: nn.Module,
    probe: Probe | None = None,
) -> HDETOneCycleLR | HDETScheduler:
    """Return the scheduler of a training of ``steps`` steps of the optimizer, which is not wrapped.

    The model is wrapped in DDP if it is. ``probe`` comes in the place of the one of ``options``.
    """
    given = {"model": model, **options.scheduler} | ({} if probe is None else {"probe": probe})
    warmup, name = args.get_warmup_steps(steps), options.schedule_of(args)
    release(optimizer)  # a schedule of transformers must not begin from the values of one replica
    if name != _ONE_CYCLE:
        base = get_scheduler(
            name,
            optimizer=optimizer,
            num_warmup_steps=warmup,
            num_training_steps=steps,
            scheduler_specific_kwargs=args.lr_scheduler_kwargs,
        )
        return HDETScheduler(base, total_steps=steps, **given)
    # The betas are those of the arguments. A warm-up of one step has no length to climb in.
    own: dict[str, Any] = {"max_lr": args.learning_rate, "cycle_momentum": False, **options.peak}
    if warmup > 0:
        own["pct_start"] = min(max(warmup, 2) / steps, 1.0)
    return HDETOneCycleLR(optimizer, total_steps=steps, **{**own, **dict(args.lr_scheduler_kwargs or {}), **given})


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
            - ``max_lr=None``: no learning rate; the first 23 % of the steps find it.
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
        self._hdet.logs_no_norm = True
        self.add_callback(self._hdet)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        """Return the norm of the gradients for the log: none where ``in_backward`` has used them by then."""
        own = getattr(self.optimizer, "optimizer", self.optimizer)
        if isinstance(own, FusedOptimizer) and own.steps_in_backward:
            return None
        return super()._get_grad_norm(model, grad_norm=grad_norm)

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
            own = getattr(given, "optimizer", given)  # in accelerate's wrapper
            wrapped = self.model_wrapped if self.model_wrapped is not self.model else self._hdet_wrapped
            if isinstance(own, FusedOptimizer):
                own.follow_trainer(model=wrapped)
            self.lr_scheduler = build_scheduler(
                self.args,
                own,
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
        labels = None if num_items_in_batch is None else predicted_labels(inputs, self.model)
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
