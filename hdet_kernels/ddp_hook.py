"""The communication hook of a ``DistributedDataParallel``: over whom it averages gradients, and who hears of them.

DDP takes one hook, for good. So a model has one of these, whoever asks for it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from hdet_kernels.lent import freed_before_exit
from hdet_kernels.torch_internals import after_backward, has_comm_hook

#: Called with the parameters of a bucket and their averaged gradients, before ``grad`` has them.
Listener = Callable[[Sequence[Tensor], Sequence[Tensor]], None]


class DDPHook:
    """Averages gradients over a team, or over all processes as DDP does.

    Attributes:
        group: the processes of the team; None for all of DDP's.
    """

    def __init__(self, wrapper: DistributedDataParallel) -> None:
        self.group: dist.ProcessGroup | None = None
        self._all = wrapper.process_group
        self._listeners: OrderedDict[int, Listener] = OrderedDict()
        self._at_end: OrderedDict[int, Callable[[], None]] = OrderedDict()

    def __getstate__(self) -> dict[str, Any]:
        """Return nothing: a copy of the model has process groups of its own, and no hook."""
        return {}

    def listen(self, listener: Listener, at_end: Callable[[], None]) -> list[RemovableHandle]:
        """Call ``listener`` when the gradients of a bucket are averaged, and ``at_end`` when ``grad`` has them all."""
        handles = [RemovableHandle(self._listeners), RemovableHandle(self._at_end)]
        self._listeners[handles[0].id], self._at_end[handles[1].id] = listener, at_end
        return handles

    def _end_after_ddp(self) -> None:
        # DDP writes ``grad`` at the end too, and has asked for it later than this: what is asked for now comes after.
        after_backward(self._end)

    def _end(self) -> None:
        for at_end in list(self._at_end.values()):
            at_end()

    def __call__(self, bucket: Any) -> Any:
        """Start the average of a bucket of gradients, and return the future of it."""
        if bucket.index() == 0 and self._at_end:
            after_backward(self._end_after_ddp)
        group = self._all if self.group is None else self.group
        gradients: Tensor = bucket.buffer().mul_(1 / dist.get_world_size(group))  # as DDP does without a hook
        params, parts = bucket.parameters(), bucket.gradients()

        def averaged(done: Any) -> Tensor:
            done.value()  # raises if the collective failed
            for listener in list(self._listeners.values()):
                listener(params, parts)
            return gradients

        work = dist.all_reduce(freed_before_exit(gradients.detach()), group=group, async_op=True)
        return work.get_future().then(freed_before_exit(averaged))


def _averaged(hook, bucket):  # type: ignore[no-untyped-def]  # DDP takes its own annotations only, and no strings
    return hook(bucket)


_HOOKS: WeakKeyDictionary[DistributedDataParallel, DDPHook] = WeakKeyDictionary()


def hook_of(wrapper: DistributedDataParallel) -> DDPHook:
    """Return the hook of a DDP model; the first call registers it.

    Raises:
        ValueError: the user has given the model another one.
    """
    if wrapper not in _HOOKS:
        if has_comm_hook(wrapper):
            raise ValueError(
                "the DistributedDataParallel has a communication hook already, and takes one only: leave out "
                "register_comm_hook, or in_backward"
            )
        _HOOKS[wrapper] = hook = DDPHook(wrapper)
        wrapper.register_comm_hook(hook, _averaged)
    return _HOOKS[wrapper]


def may_have_hook(wrapper: DistributedDataParallel) -> bool:
    """Return whether :func:`hook_of` has a hook for a model, or can give it one."""
    return wrapper in _HOOKS or not has_comm_hook(wrapper)
