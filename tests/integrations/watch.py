"""A callback that watches a training from before HDET's: parameters at every event, losses of the model, logs."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch.nn import functional
from transformers import TrainerCallback

from tests.integrations import tiny


class Watch(TrainerCallback):
    """Puts down what a training with several replicas does, in numbers that a test compares.

    Attributes:
        apart: by step, the largest difference between two replicas after it.
        evaluated: by step, the largest difference between the evaluated model and the mean of the replicas.
        saved: by step, the same of the model in the checkpoint, as transformers loads it.
        returned: by step, whether this replica had its own parameters again after an evaluation or a checkpoint.
        losses: mean loss of this process in every step, from logits and labels.
        norms: norm of the gradients before every step of the optimizer.
        logs: logs as loggers before HDET's callback see them.
    """

    def __init__(self, smoothing: float = 0.0) -> None:
        self.smoothing = smoothing
        self.apart: dict[int, float] = {}
        self.evaluated: dict[int, float] = {}
        self.saved: dict[int, float] = {}
        self.returned: dict[int, bool] = {}
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.logs: list[dict[str, Any]] = []
        self._own = self._mean = torch.empty(0)
        self._looked: int | None = None
        self._total = self._labels = 0.0

    def count(self, logits: torch.Tensor, labels: torch.Tensor) -> None:
        """Add a micro-batch to the losses of the current step."""
        chosen, smoothing = labels[:, 1:].reshape(-1), self.smoothing
        found = functional.cross_entropy(
            logits[:, :-1].detach().float().flatten(0, 1), chosen, reduction="sum", label_smoothing=smoothing
        )
        self._total += float(found)
        self._labels += int((chosen != -100).sum())

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any, **kwargs: Any) -> None:
        def after(module: Any, args: Any, given: dict[str, Any], output: Any) -> None:
            if module.training and "labels" in given:
                self.count(output["logits"], given["labels"])

        self._hook = model.register_forward_hook(after, with_kwargs=True)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._hook.remove()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any, **kwargs: Any) -> None:
        self.losses.append(self._total / max(self._labels, 1))
        self._total = self._labels = 0
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        self.norms.append(float(torch.nn.utils.get_total_norm(gradients)))
        if self._looked is not None:
            self.returned[self._looked] = torch.equal(tiny.flat(model), self._own)
            self._looked = None

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any, **kwargs: Any) -> None:
        self._own = tiny.flat(model)
        every = tiny.of_all_ranks(self._own)
        self._mean = torch.stack(every).mean(0)
        self.apart[state.global_step] = float((every[0] - every[-1]).abs().max())

    def on_prediction_step(self, args: Any, state: Any, control: Any, model: Any, **kwargs: Any) -> None:
        self._looked = state.global_step
        self.evaluated[state.global_step] = float((tiny.flat(model) - self._mean).abs().max())

    def on_save(self, args: Any, state: Any, control: Any, model: Any, **kwargs: Any) -> None:
        self._looked = state.global_step
        if state.is_world_process_zero:
            folder = os.path.join(args.output_dir, f"checkpoint-{state.global_step}")
            loaded, told = type(model).from_pretrained(folder, output_loading_info=True)
            assert not told["missing_keys"], told
            self.saved[state.global_step] = float((tiny.flat(loaded) - self._mean).abs().max())

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **kwargs: Any) -> None:
        self.logs.append(dict(logs))
