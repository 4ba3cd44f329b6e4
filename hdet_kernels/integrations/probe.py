"""A probe of one stored batch: the loss of the bare model on it, the same on all processes.

The batch of the first process is sent to the others, so that all replicas are compared on the same examples. Where the
loss draws random numbers (masks, noise, time steps), it draws the same ones every time.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import hashlib
import pickle
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hdet_kernels.checks import check_callable, check_iterable, check_kind, spell
from hdet_kernels.schedule.attachment import bare
from hdet_kernels.schedule.build import same_generators

#: Seed of the random numbers that the loss draws.
SEED = 0


class BatchProbe:
    """The loss on one batch, as ``probe=`` of the schedulers or for ``scheduler.use_probe()``.

    A call puts the model into evaluation mode and every module back afterwards, computes no gradients, goes past the
    wrapper of ``DistributedDataParallel``, and leaves the random generators as they were.

    Building one is collective: every process of the group must do it. All get the batch of the first.

    Args:
        model: the model, bare or wrapped in ``DistributedDataParallel``.
        loss_fn: ``loss_fn(model, batch)`` returns the loss. It gets the bare model, and a copy of the batch that it may
            change.
        batch: tensors in dicts, lists, tuples, dataclasses or other objects that can be pickled; or a function that
            returns such a batch. Where it raises in the first process, all raise.
        device: where the batch goes. Default: the device of the model's first parameter.
        autocast: returns the context in which the loss is computed, for example
            ``lambda: torch.autocast("cuda", torch.bfloat16)``. Default: none.
        group: the processes that share the batch. Default: all.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[[Any, Any], Any],
        batch: Any,
        *,
        device: torch.device | str | None = None,
        autocast: Callable[[], contextlib.AbstractContextManager[Any]] | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        check_kind(
            "model", model, nn.Module, "a torch.nn.Module", remedy="a stack has stack.losses(…, same_batch=True)"
        )
        check_callable("loss_fn", loss_fn, "loss_fn(model, batch)", takes=2)
        if autocast is not None:
            check_callable("autocast", autocast, "autocast()", takes=0, remedy="it returns a context manager")
        self.model, self.loss_fn, self.autocast = bare(model), loss_fn, autocast
        if group is not None:
            remedy = "pass what torch.distributed.new_group() returned, or leave it out for all processes"
            check_kind("group", group, dist.ProcessGroup, "a torch.distributed process group", remedy=remedy)
        try:
            self.device = None if device is None else torch.device(device)
        except (RuntimeError, TypeError, ValueError) as error:
            raise ValueError(f"device must be a torch.device or its name, got {spell(device)}: {error}") from error
        # On the CPU, and copied for every call: it takes no memory of the device between two syncs.
        made = batch if callable(batch) else lambda: batch
        self.batch = from_first(lambda: placed(made(), torch.device("cpu")), group)

    @classmethod
    def of_loader(
        cls, model: nn.Module, loss_fn: Callable[[Any, Any], Any], loader: Iterable[Any], **options: Any
    ) -> BatchProbe:
        """Return a probe of the first batch of a loader, see :func:`first_batch`. Collective.

        Every process iterates its own loader, because some talk to those of the others. ``options`` are the keywords of
        the class.
        """
        return cls(model, loss_fn, partial(first_batch, loader), **options)

    def __call__(self) -> Any:
        """Return the loss of the model on the batch."""
        device = self.device or next((param.device for param in self.model.parameters()), torch.device("cpu"))
        autocast = contextlib.nullcontext() if self.autocast is None else self.autocast()
        with torch.no_grad(), evaluating(self.model), same_generators(device, SEED), autocast:
            return self.loss_fn(self.model, placed(self.batch, device))


def first_batch(loader: Iterable[Any]) -> Any:
    """Return the first batch of a loader, and leave the random generators as they were.

    The loader begins anew afterwards. One whose data cannot be read twice (a stream) has lost this batch.
    """
    check_iterable("loader", loader, "a loader of batches")
    device = torch.device("cuda" if torch.cuda.is_initialized() else "cpu")
    holders = (loader, getattr(loader, "sampler", None))
    own = [held for holder in holders if isinstance(held := getattr(holder, "generator", None), torch.Generator)]
    states = [(generator, generator.get_state()) for generator in own]
    nothing = object()
    with same_generators(device):
        batch = next(iter(loader), nothing)
        for generator, state in states:
            generator.set_state(state)
    if callable(end := getattr(loader, "end", None)):
        end()  # Accelerate's loaders tell the gradient accumulation that they are being iterated
    if batch is nothing:
        raise ValueError("the loader has no batch to take a probe from: pass one with at least one batch")
    return batch


def from_first(make: Callable[[], Any], group: dist.ProcessGroup | None = None) -> Any:
    """Return what ``make()`` returns in the first process of the group. Collective; without a group a plain call.

    Every process calls ``make``. Where it raises in the first, all raise, and where the processes do not have the same
    tensors, numbers and texts in the end.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return make()
    first, failure = dist.get_rank(group) == 0, None
    sent: list[Any] = [None, None]
    try:
        made = make()
        sent[0] = pickle.dumps(made) if first else None
    except Exception as error:  # the others wait for the batch, and must learn of it
        failure = error
        sent[1] = repr(error) if first else None
    dist.broadcast_object_list(sent, src=0 if group is None else dist.get_global_rank(group, 0), group=group)
    if sent[1] is not None:
        raise RuntimeError(f"the first process has no batch for a probe: {sent[1]}") from failure
    try:
        made = made if first else pickle.loads(sent[0])
        own = digest(made)
    except Exception as error:
        own = repr(error)
    digests: list[str] = [own] * dist.get_world_size(group)
    dist.all_gather_object(digests, own, group=group)
    if differing := [f"{rank} ({found})" for rank, found in enumerate(digests) if found != digests[0]]:
        raise RuntimeError(
            f"processes {', '.join(differing)} have another batch than process 0 ({digests[0]}) after it was sent to "
            "them: pass a batch that pickle restores as it was, such as tensors in dicts, lists or tuples"
        )
    return made


def placed(batch: Any, device: torch.device) -> Any:
    """Return a copy of a batch with its tensors on ``device``. What has neither tensors nor ``to()`` stays as it is."""
    if isinstance(batch, Tensor):
        return batch.detach().to(device, copy=True)
    made: Any
    if isinstance(batch, MutableMapping):
        made = copy.copy(batch)
        for key, value in batch.items():
            made[key] = placed(value, device)
        return made
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(placed(value, device) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(placed(value, device) for value in batch)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        made = copy.copy(batch)
        for field in dataclasses.fields(batch):
            object.__setattr__(made, field.name, placed(getattr(batch, field.name), device))
        return made
    return copy.copy(batch).to(device) if callable(getattr(batch, "to", None)) else batch


def digest(batch: Any) -> str:
    """Return a hash of the tensors, numbers and texts in a batch on the CPU."""
    found = hashlib.blake2b(digest_size=16)
    for part in _leaves(batch):
        if isinstance(part, Tensor):
            found.update(f"{part.dtype}{tuple(part.shape)}".encode())
            found.update(part.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        else:
            found.update(repr(part).encode())
    return found.hexdigest()


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Hold a model in evaluation mode inside the block; every module has its own mode again after it."""
    modes, training = [(module, module.training) for module in model.modules()], model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)  # a module may do more in train() and eval() than note it
        for module, own in modes:
            module.training = own


def _leaves(batch: Any) -> Iterator[Any]:
    """Yield the tensors, numbers and texts in a batch, in order."""
    if isinstance(batch, MutableMapping):
        for key, value in batch.items():
            yield key
            yield from _leaves(value)
    elif isinstance(batch, list | tuple):
        for value in batch:
            yield from _leaves(value)
    elif dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        yield from _leaves([getattr(batch, field.name) for field in dataclasses.fields(batch)])
    elif batch is None or isinstance(batch, Tensor | str | bytes | int | float):
        yield batch
