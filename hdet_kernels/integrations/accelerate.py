"""HDET in a loop of Hugging Face Accelerate: ``prepare(accelerator, model, optimizer, loader, scheduler)``.

Accelerate's own ``prepare`` steps a scheduler once for every process, and its savers know one model. Here an HDET
scheduler is stepped once for every optimizer step (:class:`PreparedScheduler`), and checkpoints hold the average of the
replicas (:func:`_save_the_average`).
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

from hdet_kernels.checks import spell
from hdet_kernels.ensemble import announced_size
from hdet_kernels.optim.base import FusedOptimizer
from hdet_kernels.schedule.losses import Loss
from hdet_kernels.schedule.schedulers import WithCycle

try:
    from accelerate import Accelerator
    from accelerate.scheduler import AcceleratedScheduler
    from accelerate.utils import DistributedType
except ImportError as error:
    raise ImportError(
        "hdet_kernels.integrations.accelerate needs Accelerate, which cannot be imported: "
        "pip install 'hdet_kernels[accelerate]'"
    ) from error

log = logging.getLogger("hdet_kernels")

#: Ways to distribute in which the processes are parts of one replica, or parameters are not torch's own.
_ONE_REPLICA = (DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM, DistributedType.XLA)


class PreparedScheduler(AcceleratedScheduler):
    """An HDET scheduler in a loop of Accelerate. All attributes but ``scheduler`` are the scheduler's own."""

    scheduler: Any

    def step(self, loss: Loss | None = None) -> None:
        """Record ``loss``, and step the scheduler if the optimizer made a step.

        Call it for every batch, inside ``accelerator.accumulate(model)`` too: between the optimizer's steps the loss is
        recorded and nothing else happens. A step that the gradient scaler of fp16 skipped counts, as in torch: a
        replica that skips one alone must not miss a sync.

        Args:
            loss: this process's loss of the batch, as it was passed to ``accelerator.backward``.
        """
        if self.gradient_state.sync_gradients or not self.step_with_optimizer:
            self.scheduler.step(loss)
        elif loss is not None:
            self.scheduler.record_loss(loss)

    def end(self) -> None:
        """Average the replicas if they differ: after a loop that ends before the schedule does. Collective."""
        if not self.scheduler.in_sync:
            self.scheduler.converge()

    def __getattr__(self, name: str) -> Any:
        if name == "scheduler":  # it is being built
            raise AttributeError(name)
        return getattr(self.scheduler, name)


def prepare(accelerator: Accelerator, *objects: Any, device_placement: list[bool] | None = None) -> Any:
    """Prepare objects for training as ``accelerator.prepare`` does, with HDET schedulers among them.

    From then on ``accelerator.save_state`` saves the average of the replicas, and must be called in every process, as
    Accelerate asks anyway. ``accelerator.save_model`` and ``get_state_dict`` raise where the replicas differ.

    Args:
        accelerator: trains replicas: one process, or DistributedDataParallel.
        objects: models, optimizers, data loaders and schedulers in any order; one is an HDET scheduler at least. The
            model and the optimizer of a scheduler may have been prepared before.
        device_placement: as in ``accelerator.prepare``: one for each object.

    Returns:
        The prepared objects in the same order; a single one by itself. HDET schedulers become a
        :class:`PreparedScheduler`.

    Raises:
        TypeError: if there is no HDET scheduler among the objects.
        ValueError: if the processes are not replicas: parts of one model (FSDP, DeepSpeed), or not the accelerator's.
    """
    if not isinstance(accelerator, Accelerator):
        raise TypeError(
            f"prepare() begins with an accelerate.Accelerator, got {spell(accelerator)}: call "
            "prepare(accelerator, model, optimizer, loader, scheduler)"
        )
    if not any(isinstance(thing, WithCycle | PreparedScheduler) for thing in objects):
        wrapped = [thing for thing in objects if isinstance(getattr(thing, "scheduler", None), WithCycle)]
        raise TypeError(
            "the scheduler was prepared by accelerator.prepare() before, which steps it once for every process: pass "
            "the HDET scheduler itself"
            if wrapped
            else f"prepare() got no HDET scheduler among {[type(thing).__name__ for thing in objects]}: pass an "
            "HDETOneCycleLR or HDETScheduler, or call accelerator.prepare()"
        )
    _check_replicas(accelerator)
    lengths = [_length(thing) for thing in objects]
    # Accelerate leaves objects that it does not know as they are, and appends what is marked as prepared to its lists.
    hidden = [_Hidden() if isinstance(thing, WithCycle | PreparedScheduler) else thing for thing in objects]
    prepared = accelerator.prepare(*hidden, device_placement=device_placement)
    results = [prepared] if len(objects) == 1 else list(prepared)
    for index, thing in enumerate(objects):
        if isinstance(thing, WithCycle):
            made = PreparedScheduler(
                thing,
                [thing.optimizer],
                step_with_optimizer=accelerator.step_scheduler_with_optimizer,
                split_batches=accelerator.split_batches,
            )
            made._is_accelerate_prepared = True
            results[index] = accelerator.prepare_scheduler(made)
            _check_length(accelerator, thing, lengths, [_length(result) for result in results])
        elif isinstance(thing, PreparedScheduler):
            results[index] = accelerator.prepare_scheduler(thing)
    models = [result for result in results if isinstance(result, nn.Module)]
    for optimizer in (thing.cycle.optimizer for thing in objects if isinstance(thing, WithCycle)):
        if isinstance(optimizer, FusedOptimizer):
            own = {param for group in optimizer.param_groups for param in group["params"]}
            model = next((each for each in models if not own.isdisjoint(each.parameters())), None)
            optimizer.follow_trainer(model=model, accumulates=lambda: not accelerator.sync_gradients)
    _save_the_average(accelerator)
    return results[0] if len(results) == 1 else tuple(results)


class _Hidden:
    """The place of a scheduler among objects that Accelerate prepares."""


def _check_replicas(accelerator: Accelerator) -> None:
    """Raise ValueError unless every process of the run has a model of its own."""
    started = dist.get_world_size() if dist.is_initialized() else announced_size()
    if started != accelerator.num_processes:
        raise ValueError(
            f"{started} processes were started, but the Accelerator has {accelerator.num_processes}: each would train "
            "alone. On CPUs, pass Accelerator(cpu=True) and start the processes with torchrun: accelerate launch --cpu "
            "starts one, whatever its --num_processes"
        )
    kind = accelerator.distributed_type
    parallel = getattr(accelerator, "parallelism_config", None)
    within = 1 if parallel is None else parallel.total_size // parallel.dp_replicate_size
    if kind not in _ONE_REPLICA and within == 1:
        return
    how = kind.value if kind in _ONE_REPLICA else f"{within} processes a model"
    raise ValueError(
        f"Accelerate is set up for {how}: the {accelerator.num_processes} processes hold parts of a model, and HDET "
        "needs a whole one in each, to train them apart. Launch it for DistributedDataParallel (accelerate launch "
        "--multi_gpu), or shard every replica over a mesh of your own with torch's fully_shard: examples/sharded.py"
    )


def _length(thing: Any) -> int | None:
    """Return the batches of a data loader; None for anything else, and where they are not known."""
    with contextlib.suppress(TypeError):
        return len(thing) if isinstance(thing, DataLoader) else None
    return None


def _check_length(
    accelerator: Accelerator, scheduler: WithCycle, before: list[int | None], after: list[int | None]
) -> None:
    """Warn if the length of a schedule was counted with a loader that was not yet divided among the processes."""
    cycle, micro = scheduler.cycle, accelerator.gradient_accumulation_steps
    if cycle.run.total_steps is None:
        return
    total = cycle.before + cycle.run.total_steps
    for whole, own in zip(before, after, strict=True):
        if not whole or not own or whole == own:
            continue
        meant, made = math.ceil(whole / micro), math.ceil(own / micro)
        if total % meant == 0:
            log.warning(
                "the schedule has %d steps, which is %d epochs of the loader before it was divided among %d processes. "
                "Each of them makes %d steps an epoch: for %d epochs build the scheduler with %d steps",
                *(total, total // meant, accelerator.num_processes, made, total // meant, total // meant * made),
            )


def _save_the_average(accelerator: Accelerator) -> None:
    """Let ``accelerator.save_state`` save the average, and ``get_state_dict`` refuse one replica of several."""
    if hasattr(accelerator.save_state, "saves_the_average"):
        return
    save_state, get_state_dict = accelerator.save_state, accelerator.get_state_dict

    def apart() -> list[PreparedScheduler]:
        """Return the schedulers whose replicas differ now: the same in every process."""
        return [one for one in accelerator._schedulers if isinstance(one, PreparedScheduler) and not one.in_sync]

    @functools.wraps(save_state)
    def save_state_of_average(*args: Any, **kwargs: Any) -> Any:
        # Around the whole of it: hooks of the user may save the model themselves, and an optimizer's state can have
        # parameters too (master weights).
        with contextlib.ExitStack() as averages:
            for scheduler in apart():
                averages.enter_context(scheduler.consensus())
            return save_state(*args, **kwargs)

    @functools.wraps(get_state_dict)
    def get_state_dict_of_average(model: nn.Module, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        # Not an average by itself: this is often called in the main process alone, which would wait for the others.
        groups = [group for scheduler in apart() for group in scheduler.optimizer.param_groups]
        differing = {id(param) for group in groups for param in group["params"]}
        if any(id(param) in differing for param in model.parameters()):
            raise RuntimeError(
                "the replicas differ between two syncs, and this would be the model of one of them: call it in every "
                "process inside `with scheduler.consensus():`, or after scheduler.end()"
            )
        state: dict[str, Tensor] = get_state_dict(model, *args, **kwargs)
        return state

    save_state_of_average.saves_the_average = True  # type: ignore[attr-defined]
    accelerator.save_state, accelerator.get_state_dict = save_state_of_average, get_state_dict_of_average
