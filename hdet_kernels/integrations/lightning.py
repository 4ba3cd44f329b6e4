"""HDET in Lightning: ``Trainer(callbacks=[HDET()])``.

The LightningModule returns an HDET scheduler from ``configure_optimizers``, with ``"interval": "step"``. The callback
does the rest, at these points of Lightning's loop:

- ``setup``, ``on_fit_start``: refuse what cannot work (``lightning_checks.py``).
- ``on_train_start``: take the batch of the probe, if one is asked for (``lightning_probe.py``).
- ``on_before_backward``: record the loss of this process. Lightning steps the scheduler before ``on_train_batch_end``.
- ``on_validation_start`` to the next training batch, and in ``trainer.save_checkpoint``: hold the averaged model.
- ``on_train_end``: average for good, wherever in the cycle training ended.
- at every sync: log.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from hdet_kernels.checks import check_flag
from hdet_kernels.integrations.lightning_checks import check_optimizer, check_strategy, checked_schedulers
from hdet_kernels.integrations.lightning_probe import ModuleProbe, ProbeChoice
from hdet_kernels.optim.base import FusedOptimizer
from hdet_kernels.schedule import SyncRecord
from hdet_kernels.schedule.with_cycle import WithCycle

log = logging.getLogger("hdet_kernels")


def find_lightning() -> Any:
    """Return Lightning's package: ``lightning.pytorch`` or ``pytorch_lightning``, first the one that is imported.

    Raises:
        ModuleNotFoundError: neither is installed.
    """
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
        if not (probe is None or probe in ("eval", "train") or callable(probe)):
            raise ValueError(f"probe must be 'eval', 'train', a function of the LightningModule or None, got {probe!r}")
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
            check_optimizer(optimizer)
            if trainer.gradient_clip_val and _scaler(trainer) is not None and isinstance(optimizer, FusedOptimizer):
                # Lightning clips gradients that it unscaled itself, and refuses optimizers that unscale in step().
                optimizer._step_supports_amp_scaling = False
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
                leave_start(scheduler, pl_module)
            elif not scheduler.in_sync:
                scheduler.converge()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Bring this replica's own parameters back. The other processes may be anywhere: nothing is averaged."""
        self._leave()
        apart = not all(scheduler.in_sync for scheduler in self._schedulers)
        self._end()
        if apart:
            log.warning(
                "training ended by %s between two syncs: the parameters in this process, and in a checkpoint that is "
                "saved now, are those of one replica and not the average. Resume from an earlier checkpoint",
                type(exception).__name__,
            )

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Let go of trainer and schedulers."""
        self._end()

    def _end(self) -> None:
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
        own, save = vars(trainer), trainer.save_checkpoint
        replaced = own.get("save_checkpoint")
        trainer.save_checkpoint = functools.partial(self._save, save)

        def restore() -> None:
            own.pop("save_checkpoint", None)
            if replaced is not None:
                own["save_checkpoint"] = replaced

        self._at_end.callback(restore)

    def _save(self, save: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        with contextlib.nullcontext() if self._holds else self._average():
            save(*args, **kwargs)


def write_metrics(trainer: Any, scheduler: WithCycle, name: str, record: SyncRecord) -> None:
    """Write the metrics of a sync to the trainer's loggers."""
    if not trainer.loggers:
        return
    metrics = {name + key.removeprefix("hdet"): value for key, value in scheduler.metrics().items()}
    for logger in trainer.loggers:
        # Lightning counts steps from 0. A logger may refuse to go back to the number of the step after this one.
        logger.log_metrics(metrics, step=max(record.step - 1, 0))


def leave_start(scheduler: WithCycle, module: torch.nn.Module) -> None:
    """Give all replicas the model that the run began with, when it ends before a learning rate was found."""
    with scheduler.consensus():
        start = {name: value.clone() for name, value in module.state_dict().items()}
    module.load_state_dict(start)
    log.warning("training ended before a learning rate was found: the model is the one that the run began with")


def _scaler(trainer: Any) -> Any:
    return getattr(trainer.precision_plugin, "scaler", None)
