"""Writers that pass every sync to a logger: TensorBoard, or anything that takes a dict (W&B, MLflow, Trackio).

``scheduler.on_sync(TensorBoardWriter("runs/1"))`` is the whole use. A writer is called in the first process only. A
logger that fails does not stop the training: the failure is logged.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

from hdet_kernels.checks import accepts, check_flag, spell
from hdet_kernels.schedule.history import SyncRecord

log = logging.getLogger("hdet_kernels")

LogFunction = Callable[[dict[str, float], int | None], object]


class Writer:
    """The base class of the writers: turns a record into metrics, and logs what goes wrong.

    Args:
        replicas: whether every replica has metrics of its own. With very many replicas that is a lot.
        every_process: whether every process writes, and not the first one alone. Each needs a place of its own then.
            ``scheduler.on_sync`` reads it.
    """

    def __init__(self, *, replicas: bool = True, every_process: bool = False) -> None:
        self.replicas = check_flag("replicas", replicas)
        self.every_process = check_flag("every_process", every_process)

    def __call__(self, record: SyncRecord) -> None:
        """Write the metrics of a sync at its step. Exceptions of the logger are logged, and training goes on."""
        try:
            self._write(record.metrics(replicas=self.replicas), record.step)
            if record.event is not None:
                self._write_event(record.event, record.step)
            self._flush()
        except Exception as error:  # whatever a logger raises: a full disk, a lost connection, a finished run
            log.error("step %d: %s could not write its metrics: %r", record.step, type(self).__name__, error)

    def _write(self, metrics: dict[str, float], step: int) -> None:
        raise NotImplementedError

    def _write_event(self, why: str, step: int) -> None:
        """Write what the controller did, and why, if the logger takes text. The metrics have it as numbers."""

    def _flush(self) -> None:
        """Have what was written in the file, if there is one."""


class TensorBoardWriter(Writer):
    """Writes every sync to TensorBoard. Needs ``pip install 'hdet_kernels[tensorboard]'``.

    Args:
        target: a folder for the event files, or a ``SummaryWriter`` that you have already, of torch or tensorboardX.
            The folder is made at the first sync.
        replicas, every_process: see :class:`Writer`.
    """

    def __init__(
        self, target: str | os.PathLike[str] | Any, *, replicas: bool = True, every_process: bool = False
    ) -> None:
        super().__init__(replicas=replicas, every_process=every_process)
        self._folder: str | None = None
        self._writer: Any = None
        if isinstance(target, str | os.PathLike):
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError as error:
                raise ImportError(
                    "TensorBoardWriter needs tensorboard, which is not installed: "
                    "pip install 'hdet_kernels[tensorboard]'"
                ) from error
            self._open: Any = SummaryWriter
            self._folder = os.fspath(target)
        elif callable(getattr(target, "add_scalar", None)):
            self._writer = target
        else:
            raise TypeError(
                f"target must be a folder or a SummaryWriter, which has add_scalar(), got {spell(target)}: pass "
                "TensorBoardWriter('runs/1')"
            )

    def _write(self, metrics: dict[str, float], step: int) -> None:
        if self._writer is None:
            self._writer = self._open(self._folder)
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def _write_event(self, why: str, step: int) -> None:
        write_text(self._writer, why, step)

    def _flush(self) -> None:
        if self._folder is not None:
            self._writer.flush()  # a run that dies leaves its syncs; there are few

    def close(self) -> None:
        """Close the event file that this writer opened; a ``SummaryWriter`` of yours stays open."""
        if self._folder is not None and self._writer is not None:
            self._writer.close()
            self._writer = None


def write_text(writer: Any, why: str, step: int) -> None:
    """Write the reason of an act to a ``SummaryWriter``, or anything else with ``add_text``, as ``hdet/why``."""
    if callable(add_text := getattr(writer, "add_text", None)):
        add_text("hdet/why", why, step)


class DictWriter(Writer):
    """Passes every sync, as a dict of numbers, to a logger.

    Args:
        target: an object with ``log(dict)`` or ``log_metrics(dict)`` (a W&B run, the module ``trackio`` or ``mlflow``,
            a logger of Lightning), or a function of a dict and a step.
        with_step: whether the step is passed too, as ``step=``, to a logger that takes it. False where the step of a
            logger must not be set, because you log without one: W&B drops what comes with a lower step than the last.
            The metric ``hdet/step`` has it in any case.
        replicas, every_process: see :class:`Writer`.
    """

    def __init__(
        self, target: object, *, with_step: bool = True, replicas: bool = True, every_process: bool = False
    ) -> None:
        super().__init__(replicas=replicas, every_process=every_process)
        self._log = _log_function(target)
        self._with_step = check_flag("with_step", with_step)

    def _write(self, metrics: dict[str, float], step: int) -> None:
        self._log(metrics, step if self._with_step else None)


def _log_function(target: object) -> LogFunction:
    """Return a function of a dict and a step that passes them to ``target``; raise TypeError if it takes no dict."""
    for call in (getattr(target, "log", None), getattr(target, "log_metrics", None), target):
        if callable(call) and (found := _called(call)) is not None:
            return found
    if callable(target) and accepts(target, {}, 0):
        return target
    raise TypeError(
        f"target must have log(dict) or log_metrics(dict), or be a function of a dict and a step, got {spell(target)}: "
        "pass for example the run that wandb.init() returns, or mlflow.log_metrics"
    )


def _called(function: Callable[..., object]) -> LogFunction | None:
    """Return ``function`` with the step as ``step=``, or without it; None if it does not take a dict alone."""
    if accepts(function, {}, step=0):
        return lambda metrics, step: function(metrics) if step is None else function(metrics, step=step)
    return (lambda metrics, _: function(metrics)) if accepts(function, {}) else None
