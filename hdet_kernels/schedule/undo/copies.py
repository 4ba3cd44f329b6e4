"""A copy of many tensors that is kept over training steps, and the whole state of any optimizer for such a copy.

A copy is on the device of its tensors if there is room, else, or as the user wishes, in host memory. Room is a quarter
of the memory of the device that nobody has reserved. Host memory is pinned, so that a copy to it does not stop the
training. It is awaited only when the copy is read.

Optimizer state comes into being with the first step. To return to a time before it means that it is as before its first
step: the state of a fused optimizer becomes zeros in place, because captured CUDA graphs hold its addresses. The
entries of other optimizers are removed, unless the optimizer is made for such graphs (``capturable=True``).
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from hdet_kernels.optim.foreign import own_entries, with_inner
from hdet_kernels.tensors import local

log = logging.getLogger("hdet_kernels")

#: The share of a device's free memory that a copy may take.
SHARE = 0.25

Tree = Any
Place = Literal["auto", "cpu"]


def tensors_in(tree: Tree) -> Iterator[Tensor]:
    """Yield the tensors in nested dicts and lists, in order."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, dict | list | tuple):
        for entry in tree.values() if isinstance(tree, dict) else tree:
            yield from tensors_in(entry)


def with_tensors(tree: Tree, tensors: Iterator[Tensor]) -> Tree:
    """Return nested dicts and lists with other tensors in the places of theirs, in the order of :func:`tensors_in`."""
    if isinstance(tree, Tensor):
        return next(tensors)
    if isinstance(tree, dict):
        return {name: with_tensors(entry, tensors) for name, entry in tree.items()}
    return [with_tensors(entry, tensors) for entry in tree] if isinstance(tree, list | tuple) else tree


class KeptTensors:
    """A copy of the tensors in nested dicts and lists, which the next one of the same shapes overwrites.

    ``on``: ``"auto"``: on the device of the tensors if there is room; ``"cpu"``: in host memory.
    """

    def __init__(self, on: Place = "auto") -> None:
        self.on = on
        self._tree: Tree = None
        self._lent = False  # somebody else holds these tensors, so that they must not be overwritten
        self._copied: dict[torch.device, torch.cuda.Event] = {}

    @torch.no_grad()
    @torch.inference_mode(False)  # tensors made in inference mode could not be overwritten outside of it
    def copy(self, tree: Tree) -> None:
        """Keep a copy of ``tree`` in the place of the one before. Does not wait for a device."""
        sources = list(tensors_in(tree))
        held = list(tensors_in(self._tree))
        if self._lent or [_layout(tensor) for tensor in held] != [_layout(tensor) for tensor in sources]:
            held = []
            self.drop()  # before memory is asked for
            held = empty_copies(sources, self.on)
        self._wait()
        copy_all(held, sources)
        self._tree = with_tensors(tree, iter(held))
        self._note({source.device for source in sources if source.is_cuda})

    def read(self) -> Tree:
        """Return the copy, for work on the current streams that does not modify it. Call :meth:`was_read` after it."""
        self._wait()
        return self._tree

    def was_read(self) -> None:
        """Let later copies wait for the work that the current streams were given with what :meth:`read` returned."""
        self._note(list(self._copied))

    def lend(self) -> Tree:
        """Return the copy for somebody who keeps it. Waits for the devices."""
        for event in self._copied.values():
            event.synchronize()
        self._lent = True
        return self._tree

    def take(self, tree: Tree) -> None:
        """Keep ``tree`` itself, which is never modified."""
        self.drop()
        self._tree, self._lent = tree, True

    def drop(self) -> None:
        """Keep nothing."""
        self._wait()
        self._tree, self._lent, self._copied = None, False, {}

    def _wait(self) -> None:
        for device, event in self._copied.items():
            torch.cuda.current_stream(device).wait_event(event)

    def _note(self, devices: Iterable[torch.device]) -> None:
        for device in devices:
            self._copied[device] = torch.cuda.current_stream(device).record_event()


def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy tensors of equal shapes into others, without waiting where host memory is pinned."""
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source, non_blocking=not _waits(target, source))


def _waits(target: Tensor, source: Tensor) -> bool:
    """Return whether a copy is complete only after its device was waited for: one between unpinned memory and a GPU."""
    if target.device == source.device:
        return False
    return any(tensor.device.type == "cpu" and not tensor.is_pinned() for tensor in (target, source))


def empty_copies(sources: Sequence[Tensor], on: Place = "auto") -> list[Tensor]:
    """Return tensors for a copy of ``sources``: on their device if there is room, else in pinned host memory."""
    devices = {tensor.device for tensor in sources}
    to_host = {device for device in devices if device.type == "cuda" and (on == "cpu" or _crowded(device, sources))}
    try:
        return [_empty(tensor, host=tensor.device in to_host) for tensor in sources]
    except torch.OutOfMemoryError:
        return [_empty(tensor, host=tensor.device.type == "cuda") for tensor in sources]


def _crowded(device: torch.device, sources: Sequence[Tensor]) -> bool:
    # Memory that torch has reserved and does not use now is that of the next step's activations.
    free, _ = torch.cuda.mem_get_info(device)
    return sum(tensor.nbytes for tensor in sources if tensor.device == device) > SHARE * free


def _empty(like: Tensor, *, host: bool) -> Tensor:
    if type(like) not in (Tensor, torch.nn.Parameter):  # a quantised state, which only it knows how to copy
        return like.detach().clone()
    if not host:
        return torch.empty(like.shape, dtype=like.dtype, device=like.device)
    try:
        return torch.empty(like.shape, dtype=like.dtype, device="cpu", pin_memory=True)
    except RuntimeError as error:  # the system may limit it
        log.info("no pinned memory for a copy of %d bytes (%s): it is copied to ordinary memory", like.nbytes, error)
        return torch.empty(like.shape, dtype=like.dtype, device="cpu")


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    return type(tensor), tensor.shape, tensor.dtype


#: State of torch's capturable optimizers before the first step. Rprop's and ASGD's step sizes depend on the learning
#: rate of that step and are not among them.
_INITIAL = {
    **dict.fromkeys(("step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "square_avg", "acc_delta"), 0.0),
    **dict.fromkeys(("momentum_buffer", "grad_avg", "prev", "ax"), 0.0),
    "mu_product": 1.0,
}


def whole_state(optimizer: Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors of an optimizer's state by name, and its other values. The tensors are those in use.

    Numbers that it keeps in its groups are among the other values: a second set of weights depends on them.
    """
    if (flats := _flats(optimizer)) is not None:
        return flats(), {}
    tensors, others = {}, {}
    for name, _, _, value in _entries(optimizer):
        if isinstance(value, Tensor):
            tensors[name] = local(value)
        else:
            others[name] = copy.deepcopy(value)
    for number, group in enumerate(optimizer.param_groups):
        others |= {f"group {number}/{name}": copy.deepcopy(group.get(name)) for name in own_entries(optimizer)}
    return tensors, others


def state_pairs(optimizer: Optimizer, tensors: dict[str, Tensor]) -> list[tuple[str, Tensor, Tensor]]:
    """Return the name, the tensor in use and the copy of all state that has a copy."""
    if (flats := _flats(optimizer)) is not None:
        return [
            (name, _by_replica(flat, tensors[name]), tensors[name]) for name, flat in flats().items() if name in tensors
        ]
    now = {name: local(value) for name, _, _, value in _entries(optimizer) if isinstance(value, Tensor)}
    return [(name, tensor, tensors[name]) for name, tensor in now.items() if name in tensors]


def reset_others(optimizer: Optimizer, tensors: dict[str, Tensor], others: dict[str, Any]) -> None:
    """Bring back all state that :func:`state_pairs` leaves out.

    Args:
        optimizer: any optimizer.
        tensors, others: what :func:`whole_state` returned.
    """
    if (flats := _flats(optimizer)) is not None:
        for name, flat in flats().items():
            if name not in tensors:
                flat.zero_()
        return
    for number, group in enumerate(optimizer.param_groups):
        kept = {name: others.get(f"group {number}/{name}") for name in own_entries(optimizer)}
        group.update({name: copy.deepcopy(value) for name, value in kept.items() if value is not None})
    capturable = {id(p): bool(g.get("capturable")) for g in optimizer.param_groups for p in g["params"]}
    for name, param, state, value in list(_entries(optimizer)):
        key = name.partition("/")[2]
        if name in others:
            state[key] = copy.deepcopy(others[name])
        elif name in tensors and isinstance(value, Tensor):
            continue
        elif capturable[id(param)] and key in _INITIAL and isinstance(value, Tensor):
            local(value).fill_(_INITIAL[key])
        else:
            del state[key]


def _by_replica(counts: Tensor, saved: Tensor) -> Tensor:
    """Return the step counts as [replicas, …] if the replicas of a stack have got a state of their own since then."""
    several = counts.dim() == saved.dim() == 1 and saved.numel() and not counts.numel() % saved.numel()
    return counts.view(-1, saved.numel()) if several and counts.shape != saved.shape else counts


def _flats(optimizer: Optimizer) -> Callable[[], dict[str, Tensor]] | None:
    """Return the function of a fused optimizer that returns its flat state; None for any other optimizer."""
    found = getattr(optimizer, "all_state_flats", None)
    return found if callable(found) else None


def _entries(optimizer: Optimizer) -> Iterator[tuple[str, Tensor, dict[str, Any], Any]]:
    """Yield the name of every entry of the state, its parameter, the state of this, and the value of the entry."""
    params = {id(param): param for group in optimizer.param_groups for param in group["params"]}
    for depth, each in enumerate(with_inner(optimizer)):
        for index, param in enumerate(params.values()):
            state = each.state.get(param, {})
            for key, value in state.items():
                yield f"{f'inner {depth}:' if depth else ''}{index}/{key}", param, state, value
