"""HDET in Lightning: ``Trainer(callbacks=[HDET()])``.

The LightningModule returns an HDET scheduler from ``configure_optimizers``, with ``"interval": "step"``. The callback
does the rest, at these points of Lightning's loop:

- ``setup``, ``on_fit_start``: refuse what cannot work.
- ``on_train_start``: take the batch of the probe, if one is asked for (:class:`ModuleProbe`).
- ``on_before_backward``: record the loss of this process. Lightning steps the scheduler before ``on_train_batch_end``.
- ``on_validation_start`` to the next training batch, and in ``trainer.save_checkpoint``: hold the averaged model.
- ``on_train_end``: average for good, wherever in the cycle training ended.
- at every sync: log.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import logging
import sys
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn

from hdet_kernels.checks import check_callable, check_choice, check_flag
from hdet_kernels.integrations.loggers import write_text
from hdet_kernels.integrations.probe import BatchProbe, evaluating
from hdet_kernels.optim.base import FusedOptimizer
from hdet_kernels.schedule import SyncRecord
from hdet_kernels.schedule.schedulers import WithCycle

log = logging.getLogger("hdet_kernels")

#: The batch that a probe is made of, or the user's function of the LightningModule.
ProbeChoice = Literal["eval", "train"] | Callable[[Any], Any]

# Lightning's classes are told by their names: there are two packages of them.
#: Strategies whose processes do not hold one whole replica each, and the reason.
_REFUSED = {
    "FSDPStrategy": "shards one replica over the processes",
    "ModelParallelStrategy": "shards one replica over the processes",
    "DeepSpeedStrategy": "keeps parameters and optimizer state of its own",
    "XLAStrategy": "compiles whole steps, in which HDET cannot average the replicas",
    "SingleDeviceXLAStrategy": "compiles whole steps, in which HDET cannot average the replicas",
}
_ACCEPTED = ("DDPStrategy", "SingleDeviceStrategy")

_RETURN = '{"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}'


def find_lightning() -> Any:
    """Return Lightning's package: ``lightning.pytorch`` or ``pytorch_lightning``, first the one that is imported."""
    for name in sorted(("lightning.pytorch", "pytorch_lightning"), key=lambda name: name not in sys.modules):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if (error.name or "") not in (name, name.partition(".")[0]):
                raise  # it is installed, and something that it needs is not
    raise ModuleNotFoundError(
        "hdet_kernels.integrations.lightning needs Lightning: pip install 'hdet_kernels[lightning]'"
    )


_Callback: Any = find_lightning().Callback


class HDET(_Callback):
    """Callback that trains a LightningModule by HDET.

    ``configure_optimizers`` returns the scheduler, stepped at every step::

        scheduler = hk.HDETOneCycleLR(optimizer, max_lr=1e-3, total_steps=self.trainer.estimated_stepping_batches)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    With automatic optimization the losses that ``training_step`` returns are recorded, each process's own. With manual
    optimization call ``scheduler.step(loss)`` yourself. From the start of a validation to the next training batch, and
    in every checkpoint, the parameters are the average of all replicas.

    Args:
        probe: ``"eval"``: compare replicas on the first batch of the validation loader; ``"train"``: on the first of
            the training loader; a function of the LightningModule that returns a loss on a batch that is the same for
            all; or None: by the training losses. See ``docs/usage/lightning.md``.
        log: write :meth:`.metrics` of the scheduler to the trainer's loggers at every sync, under ``hdet/``.
    """

    def __init__(self, *, probe: ProbeChoice | None = None, log: bool = True) -> None:
        super().__init__()
        if callable(probe):
            check_callable("probe", probe, "probe(module), with the LightningModule", takes=1)
        else:
            check_choice("probe", probe, ("eval", "train", None), remedy="or a function of the LightningModule")
        check_flag("log", log)
        self._choice, self._log = probe, log
        self._schedulers: list[WithCycle] = []
        self._probe: ModuleProbe | None = None
        self._held = contextlib.ExitStack()
        self._holds = False
        self._at_end = contextlib.ExitStack()

    # Begin and end of a run

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Refuse strategies whose processes are no replicas."""
        if stage == "fit":
            check_strategy(trainer.strategy)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Find the schedulers, refuse what cannot work, and take part in saving and in the syncs."""
        found = checked_schedulers(trainer.lr_scheduler_configs, automatic=pl_module.automatic_optimization)
        for optimizer in trainer.optimizers:
            if trainer.gradient_clip_val and _scaler(trainer) is not None and isinstance(optimizer, FusedOptimizer):
                # Lightning clips gradients that it unscaled itself, and refuses optimizers that unscale in step().
                optimizer._step_supports_amp_scaling = False
            if isinstance(optimizer, FusedOptimizer):
                clips = f"gradient_clip_val={trainer.gradient_clip_val}" if trainer.gradient_clip_val else ""
                accumulates = functools.partial(_accumulates, trainer)
                optimizer.follow_trainer(model=trainer.strategy.model, accumulates=accumulates, clips=clips)
        if self._choice is not None:
            self._probe = ModuleProbe(self._choice, trainer, pl_module)
            for scheduler in found:
                scheduler.use_probe(self._probe)  # before a checkpoint is loaded, which tells whether there was one
        self._schedulers = found
        self._take_part_in_saving(trainer)
        if self._log:
            for number, scheduler in enumerate(self._schedulers):
                name = "hdet" if len(self._schedulers) == 1 else f"hdet{number}"
                write = functools.partial(write_metrics, trainer, scheduler, name)
                handle = scheduler.on_sync(write, every_process=False)
                self._at_end.callback(handle.remove)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Take the batch of the probe."""
        if self._probe is not None:
            self._probe.begin()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Leave one model, and not one for each replica, wherever in the cycle training ended."""
        self._leave()
        for scheduler in self._schedulers:
            if scheduler.scouting:
                with scheduler.consensus():
                    start = {name: value.clone() for name, value in pl_module.state_dict().items()}
                pl_module.load_state_dict(start)
                log.warning("training ended before a learning rate was found: the model is the one that it began with")
            elif not scheduler.in_sync:
                scheduler.converge()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Bring this replica's own parameters back. The other processes may be anywhere: nothing is averaged."""
        self._leave()
        apart = not all(scheduler.in_sync for scheduler in self._schedulers)
        self.teardown(trainer, pl_module, "fit")
        if apart:
            log.warning(
                "training ended by %s between two syncs: the parameters in this process, and in a checkpoint that is "
                "saved now, are those of one replica and not the average. Resume from an earlier checkpoint",
                type(exception).__name__,
            )

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Let go of trainer and schedulers."""
        self._leave()
        self._at_end.close()
        self._schedulers, self._probe = [], None

    # Losses

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        """Record the loss of this process before the scheduler is stepped, as ``training_step`` returned it."""
        if not pl_module.automatic_optimization:
            return
        loss = loss.detach()
        if (scaler := _scaler(trainer)) is not None:
            loss = loss / scaler.scale(torch.ones((), device=loss.device))  # without waiting for the device
        for scheduler in self._schedulers:
            scheduler.record_loss(loss, divided_by=trainer.accumulate_grad_batches)

    # The averaged model

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Hold the averaged model. Collective: Lightning validates on all processes."""
        if not self._holds:
            with torch.inference_mode(False):  # the copy of this replica is written back outside of Lightning's
                self._held.enter_context(self._average())
            self._holds = True

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Bring this replica's own parameters back. Until now, whoever saved after a validation saved the average."""
        if self._holds:
            self._leave()

    @contextlib.contextmanager
    def _average(self) -> Iterator[None]:
        """Hold the average of all replicas where they differ."""
        with contextlib.ExitStack() as stack:
            for scheduler in self._schedulers:
                if not scheduler.in_sync:
                    stack.enter_context(scheduler.consensus())
            yield

    def _leave(self) -> None:
        self._holds = False
        self._held.close()

    def _take_part_in_saving(self, trainer: Any) -> None:
        """Have ``trainer.save_checkpoint`` save the averaged model until the run ends.

        Callback hooks do not suffice: they are not called for weights alone, and the average must be held until the
        file is written.
        """
        save = trainer.save_checkpoint

        def save_the_average(*args: Any, **kwargs: Any) -> None:
            with contextlib.nullcontext() if self._holds else self._average():
                save(*args, **kwargs)

        own = "save_checkpoint" in vars(trainer)
        trainer.save_checkpoint = save_the_average
        self._at_end.callback(
            lambda: setattr(trainer, "save_checkpoint", save) if own else vars(trainer).pop("save_checkpoint", None)
        )


def write_metrics(trainer: Any, scheduler: WithCycle, name: str, record: SyncRecord) -> None:
    """Write the metrics of a sync to the trainer's loggers."""
    if not trainer.loggers:
        return
    metrics = {name + key.removeprefix("hdet"): value for key, value in scheduler.metrics().items()}
    for logger in trainer.loggers:
        # Lightning counts steps from 0. A logger may refuse to go back to the number of the step after this one.
        logger.log_metrics(metrics, step=max(record.step - 1, 0))
        if record.event is not None:
            write_text(getattr(logger, "experiment", None), record.event, max(record.step - 1, 0))


def _scaler(trainer: Any) -> Any:
    return getattr(trainer.precision_plugin, "scaler", None)


def checked_schedulers(configs: list[Any], *, automatic: bool) -> list[WithCycle]:
    """Return the HDET schedulers among the trainer's ``lr_scheduler_configs``; ``automatic``: Lightning steps them."""
    found = [config for config in configs if isinstance(config.scheduler, WithCycle)]
    if not found:
        names = ", ".join(type(config.scheduler).__name__ for config in configs) or "none"
        raise ValueError(
            f"HDET() found no HDET scheduler; configure_optimizers returned: {names}. Return hk.HDETOneCycleLR or "
            f"hk.HDETScheduler, as in {_RETURN}"
        )
    for config in found:
        if automatic and (config.interval, config.frequency) != ("step", 1):
            raise ValueError(
                f"{type(config.scheduler).__name__} must be stepped after every step of the optimizer, got "
                f"interval={config.interval!r} (Lightning's default is 'epoch') and frequency={config.frequency}: "
                f"return {_RETURN} from configure_optimizers"
            )
    return [config.scheduler for config in found]


def check_strategy(strategy: object) -> None:
    """Raise ValueError unless every process of a strategy holds one whole replica that may differ from the others."""
    name, kinds = type(strategy).__name__, [kind.__name__ for kind in type(strategy).__mro__]
    reason = next((reason for kind, reason in _REFUSED.items() if kind in kinds), None)
    if reason is None and not set(_ACCEPTED).intersection(kinds):
        reason = "is not known to give every process one whole replica"
    if reason is not None:
        raise ValueError(
            f"HDET needs one whole replica in every process, whose parameters may differ from the others', but {name} "
            f'{reason}. Pass strategy="ddp" (or a subclass of DDPStrategy), train on one device, or train sharded '
            "replicas in a loop of your own with ensemble=hk.ProcessEnsemble(mesh)"
        )
    if getattr(strategy, "_model_averaging_period", None) is not None:
        raise ValueError(
            f"{name}(model_averaging_period=...) averages the parameters itself, and HDET does too: leave it out"
        )


def _accumulates(trainer: Any) -> bool:
    """Return whether Lightning steps no optimizer after the batch of now, in automatic optimization."""
    if not trainer.lightning_module.automatic_optimization or trainer.is_last_batch:
        return False
    return bool((trainer.fit_loop.batch_idx + 1) % trainer.accumulate_grad_batches)


class ModuleProbe:
    """The probe of a run. The scheduler gets it before a checkpoint is loaded, the loaders are known only after that.

    The loss is what ``probe_step(batch)`` of the module returns, if it has one. Otherwise it is that of
    ``validation_step`` for a held-out batch, and of ``training_step`` for a training batch; nothing is logged, and
    metrics are as before. ``choice`` is ``probe=`` of :class:`HDET`.
    """

    def __init__(self, choice: ProbeChoice, trainer: Any, module: nn.Module) -> None:
        self.choice, self.trainer, self.module = choice, trainer, module
        self._of_batch: BatchProbe | None = None

    def begin(self) -> None:
        """Take the batch of the first process, and try it. Collective."""
        if callable(self.choice):
            return
        loader = _validation_loader(self.trainer) if self.choice == "eval" else _training_loader(self.trainer)
        autocast = self.trainer.precision_plugin.val_step_context
        self._of_batch = BatchProbe.of_loader(
            self.module, self._loss, loader, device=self.trainer.strategy.root_device, autocast=autocast
        )
        self()

    def __call__(self) -> Any:
        """Return the loss of this replica."""
        if callable(self.choice):
            with torch.no_grad(), evaluating(self.module), self.trainer.precision_plugin.val_step_context():
                return self.choice(self.module)
        if self._of_batch is None:
            raise RuntimeError("the probe has no batch before training starts")
        return self._of_batch()

    def _loss(self, module: Any, batch: Any) -> Any:
        """Return the loss on a batch that went the way of all batches of Lightning."""
        trainer = self.trainer
        batch = trainer.strategy.batch_to_device(trainer.precision_plugin.convert_input(batch), dataloader_idx=0)
        name = "validation_step" if self.choice == "eval" else "training_step"
        if own := hasattr(module, "probe_step"):
            name = "probe_step"
        elif name == "training_step" and not module.automatic_optimization:
            raise ValueError(
                "probe='train' cannot call a training_step that steps the optimizer itself: define "
                "probe_step(self, batch), which returns the loss"
            )
        with unnoticed(module):
            loss = loss_of(getattr(module, name)(batch) if own else call_step(getattr(module, name), batch))
        if loss is None:
            raise ValueError(
                f"probe={self.choice!r} needs a loss, but {name} of {type(module).__name__} returns none: return it "
                "there, or define probe_step(self, batch)"
            )
        return loss


def call_step(step: Callable[..., Any], batch: Any) -> Any:
    """Call a step of a LightningModule with the indices that it takes, by position as Lightning does."""
    taken = list(inspect.signature(step).parameters.values())
    several = any(each.kind is each.VAR_POSITIONAL for each in taken)
    named = [each for each in taken if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    # The index of the batch comes second under any name; that of the loader comes third, if it is one.
    loader = named[2:3] and (named[2].name == "dataloader_idx" or named[2].default is named[2].empty)
    return step(batch, *[0] * (2 if loader else 1 if several or len(named) > 1 else 0))


def loss_of(output: Any) -> Tensor | None:
    """Return the loss in what a step returned: itself, or its ``"loss"``."""
    loss = output.get("loss") if isinstance(output, dict) else output
    return loss if isinstance(loss, Tensor) else None


@contextlib.contextmanager
def unnoticed(module: nn.Module) -> Iterator[None]:
    """Log nothing inside the block, and have the metrics in the module as before after it."""
    own = vars(module)
    replaced: dict[str, Any] = {name: own[name] for name in ("log", "log_dict") if name in own}
    metrics = [part for part in module.modules() if _is_metric(part)]
    before = [{key: _copied(value) for key, value in vars(metric).items()} for metric in metrics]
    own["log"] = own["log_dict"] = lambda *_, **__: None
    try:
        yield
    finally:
        del own["log"], own["log_dict"]
        own.update(replaced)
        for metric, entries in zip(metrics, before, strict=True):
            vars(metric).clear()
            vars(metric).update(entries)


def _is_metric(part: nn.Module) -> bool:
    """Return whether a module is one of torchmetrics, which Lightning brings."""
    return any(f"{kind.__module__}.{kind.__name__}" == "torchmetrics.metric.Metric" for kind in type(part).__mro__)


def _copied(value: Any) -> Any:
    """Return a copy of a state of a metric: a tensor, or a list of tensors."""
    if isinstance(value, Tensor):
        return value.clone()
    return list(value) if isinstance(value, list) else value


def _validation_loader(trainer: Any) -> Any:
    if trainer.val_dataloaders is None and trainer.enable_validation:
        trainer.validating = True  # as Lightning itself does where an epoch without validation comes first
        trainer.fit_loop.epoch_loop.val_loop.setup_data()
        trainer.training = True
    loader = trainer.val_dataloaders
    while isinstance(loader, dict | list | tuple):  # the first in what val_dataloader returned
        loader = next(iter(loader.values() if isinstance(loader, dict) else loader), None)
    if loader is None:
        raise ValueError(
            "probe='eval' takes the first batch of the validation loader, and this run has none: pass a validation "
            "loader, probe='train', or a function of the LightningModule that returns a loss"
        )
    return loader


def _training_loader(trainer: Any) -> Any:
    loader = trainer.train_dataloader
    if isinstance(loader, dict | list | tuple):
        raise ValueError(
            "probe='train' takes the first batch of the training loader, and this run has several: pass a function of "
            "the LightningModule that returns a loss on a batch of your choice"
        )
    return loader
