"""The probe that the Lightning callback gives its schedulers: the loss of a LightningModule on one stored batch."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn

from hdet_kernels.integrations.probe import BatchProbe, evaluating

#: The batch that a probe is made of, or the user's function of the LightningModule.
ProbeChoice = Literal["eval", "train"] | Callable[[Any], Any]


class ModuleProbe:
    """The probe of a run. The scheduler gets it before a checkpoint is loaded, the loaders are known only after that.

    The loss is what ``probe_step(batch)`` of the module returns, if it has one. Otherwise it is that of
    ``validation_step`` for a held-out batch, and of ``training_step`` for a training batch; nothing is logged, and
    metrics are as before.

    Args:
        choice: ``"eval"``: the first batch of the first validation loader. ``"train"``: the first batch of the
            training loader, which is trained on too. Or a function of the module.
        trainer: Lightning's trainer.
        module: the LightningModule.
    """

    def __init__(self, choice: ProbeChoice, trainer: Any, module: nn.Module) -> None:
        self.choice, self.trainer, self.module = choice, trainer, module
        self._of_batch: BatchProbe | None = None

    def begin(self) -> None:
        """Take the batch of the first process, and try it. Collective.

        Raises:
            ValueError: there is no loader, or the step returns no loss.
        """
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
    """Call a step of a LightningModule with the indices that it takes."""
    names = list(inspect.signature(step).parameters)[1:]
    return step(batch, **{name: 0 for name in names if name in ("batch_idx", "dataloader_idx")})


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
    own["log"] = own["log_dict"] = _nothing
    try:
        yield
    finally:
        del own["log"], own["log_dict"]
        own.update(replaced)
        for metric, entries in zip(metrics, before, strict=True):
            vars(metric).clear()
            vars(metric).update(entries)


def _nothing(*_: Any, **__: Any) -> None:
    pass


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
    loader = _first(trainer.val_dataloaders)
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


def _first(loaders: Any) -> Any:
    """Return the first loader in what ``val_dataloader`` returned."""
    while isinstance(loaders, dict | list | tuple):
        loaders = next(iter(loaders.values() if isinstance(loaders, dict) else loaders), None)
    return loaders
