"""The mean training loss of this process over one optimizer step.

transformers normalises a loss over all tokens of all processes and micro-batches of a step, where the model takes
``num_items_in_batch``. The result depends on how many tokens the other processes had, and cannot be compared between
replicas. So losses are summed here as totals and numbers of items, on the device.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle


class StepLoss:
    """Total loss and number of items of the micro-batches since the last :meth:`take`. Never waits for the device."""

    def __init__(self) -> None:
        self._total: Tensor | None = None
        self._count: Tensor | int = 0

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


def predicted_labels(inputs: Mapping[str, Any], *, shifted: bool) -> Tensor | None:
    """Return the number of labels that enter the loss of a batch; None if the batch has no tensor of labels.

    Args:
        inputs: the batch.
        shifted: the loss compares position i with label i + 1, and so leaves out the first label of each row.
    """
    labels = inputs.get("shift_labels")
    if labels is None:
        labels = inputs.get("labels")
        if isinstance(labels, Tensor) and shifted:
            labels = labels[..., 1:]
    return labels.ne(-100).sum() if isinstance(labels, Tensor) else None


def shifts_labels(model: nn.Module) -> bool:
    """Return whether the loss of a model of transformers is that of a causal language model."""
    from transformers.loss.loss_utils import ForCausalLMLoss

    encoder_decoder = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    return getattr(model, "loss_function", None) is ForCausalLMLoss and not encoder_decoder


class LossHook:
    """Adds the loss that a model returns to a :class:`StepLoss`, in every forward pass of training."""

    def __init__(self, model: nn.Module, losses: StepLoss) -> None:
        self._losses = losses
        self._shifted: bool | None = None
        self._handle: RemovableHandle = model.register_forward_hook(self._after_forward, with_kwargs=True)

    def remove(self) -> None:
        """Take the hook off the model."""
        self._handle.remove()

    def _after_forward(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if not (model.training and torch.is_grad_enabled()):
            return
        loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
        if not isinstance(loss, Tensor):
            raise RuntimeError(
                f"{type(model).__name__} returned no loss (output: {type(output).__name__}), so HDETCallback cannot "
                "record it: use HDETTrainer or HDETTrainerMixin, or call scheduler.record_loss(loss) in compute_loss "
                "and pass HDETCallback(record_losses=False)"
            )
        items = kwargs.get("num_items_in_batch")
        if self._shifted is None:
            self._shifted = shifts_labels(model)
        labels = None if items is None else predicted_labels(kwargs, shifted=self._shifted)
        if items is None or labels is None:
            self._losses.add(loss)
        else:
            self._losses.add(loss.detach() * items, labels)
