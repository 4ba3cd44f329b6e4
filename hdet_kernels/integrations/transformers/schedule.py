"""Build an HDET scheduler from ``TrainingArguments`` and the options of a trainer."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from torch import nn
from torch.optim import Optimizer
from transformers import TrainingArguments, get_scheduler
from transformers.trainer_utils import SchedulerType

from hdet_kernels.schedule import HDETOneCycleLR, HDETScheduler, release
from hdet_kernels.schedule.arguments import HDETOptions, Probe, with_defaults

log = logging.getLogger("hdet_kernels")

SaveAt = Literal["consensus", "sync"]
_SAVES = ("consensus", "sync")
_ONE_CYCLE = "one_cycle"


@dataclass
class TrainerOptions:
    """The entries of a trainer's ``hdet=``.

    Args:
        schedule: ``"one_cycle"``, or a ``lr_scheduler_type`` of transformers. None: that of ``TrainingArguments``, but
            one cycle where that is ``"linear"``, the default.
        max_lr: peak of the one cycle; None to look for it. Without an entry it is ``learning_rate``.
        finds_rate: whether ``max_lr=None`` was given.
        save: see :class:`.HDETCallback`.
        eval_probe: ``probe="eval"`` was given.
        scheduler: the keywords of the scheduler.
    """

    schedule: str | None = None
    max_lr: float | None = None
    finds_rate: bool = False
    save: SaveAt = "consensus"
    eval_probe: bool = False
    scheduler: dict[str, Any] = field(default_factory=dict)


def checked_save(save: str) -> SaveAt:
    """Return ``save`` if it is one of the two ways; raise ValueError if not."""
    if save not in _SAVES:
        raise ValueError(f"save must be one of {', '.join(map(repr, _SAVES))}, got {save!r}")
    return cast(SaveAt, save)


def trainer_options(hdet: Mapping[str, Any] | None) -> TrainerOptions:
    """Return the checked options of ``hdet=``.

    Raises:
        TypeError: for an entry that does not exist.
        ValueError: for a value that is not possible.
    """
    given = dict(hdet or {})
    schedule = given.pop("schedule", None)
    names = [_ONE_CYCLE, *(kind.value for kind in SchedulerType)]
    if schedule is not None and schedule not in names:
        raise ValueError(f"schedule must be one of {', '.join(names)}, got {schedule!r}")
    finds_rate = "max_lr" in given and given["max_lr"] is None
    max_lr = given.pop("max_lr", None)
    if (finds_rate or max_lr is not None) and schedule not in (None, _ONE_CYCLE):
        raise ValueError(f"max_lr is for the one cycle, got it with schedule={schedule!r}: leave one of the two out")
    save = checked_save(given.pop("save", "consensus"))
    eval_probe = given.get("probe") == "eval"
    if eval_probe:
        del given["probe"]
    with_defaults(cast(HDETOptions, given), "the hdet= of the trainer")
    return TrainerOptions(schedule, max_lr, finds_rate, save, eval_probe, given)


def build_scheduler(
    args: TrainingArguments,
    optimizer: Optimizer,
    steps: int,
    options: TrainerOptions,
    *,
    model: nn.Module,
    probe: Probe | None = None,
) -> HDETOneCycleLR | HDETScheduler:
    """Return the scheduler of a training of ``steps`` steps.

    Args:
        args: the arguments of the trainer: learning rate, warm-up, schedule and its keywords.
        optimizer: the optimizer, not wrapped.
        steps: number of optimizer steps.
        options: from :func:`trainer_options`.
        model: the model, wrapped in DDP if it is.
        probe: in the place of the one of ``options``.
    """
    given = {"model": model, **options.scheduler}
    if probe is not None:
        given["probe"] = probe
    warmup = args.get_warmup_steps(steps)
    name = schedule_name(args, options)
    release(optimizer)  # a schedule of transformers must not begin from the values of one replica
    if name != _ONE_CYCLE:
        base = get_scheduler(
            name,
            optimizer=optimizer,
            num_warmup_steps=warmup,
            num_training_steps=steps,
            scheduler_specific_kwargs=args.lr_scheduler_kwargs,
        )
        return HDETScheduler(base, total_steps=steps, **cast(HDETOptions, given))
    max_lr = options.max_lr if options.finds_rate or options.max_lr is not None else args.learning_rate
    # The betas are those of the arguments. A warm-up of one step has no length to climb in.
    own: dict[str, Any] = {"cycle_momentum": False}
    if warmup > 0:
        own["pct_start"] = min(max(warmup, 2) / steps, 1.0)
    keywords = {**own, **dict(args.lr_scheduler_kwargs or {}), **given}
    return HDETOneCycleLR(optimizer, max_lr, total_steps=steps, **keywords)


def schedule_name(args: TrainingArguments, options: TrainerOptions) -> str:
    """Return ``"one_cycle"`` or the name of a schedule of transformers."""
    if options.schedule is not None:
        return options.schedule
    named = SchedulerType(args.lr_scheduler_type)
    if named is not SchedulerType.LINEAR:
        if options.finds_rate or options.max_lr is not None:
            raise ValueError(
                f"max_lr is for the one cycle, got it with lr_scheduler_type={named.value!r}: leave one of the two out"
            )
        return named.value
    log.info("lr_scheduler_type is 'linear', the default: the schedule is one cycle; pass schedule='linear' for linear")
    return _ONE_CYCLE
