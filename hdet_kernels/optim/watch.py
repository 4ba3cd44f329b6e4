"""Noticing what changed between two steps: regrouped and moved parameters, and replaced permanent gradients.

Checking every tensor in every step would cost as much as fixed gradients save, so some things are checked by turns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import is_
from typing import Generic, TypeVar

import torch
from torch import Tensor

from hdet_kernels.ops.chunks import MatchedGradients
from hdet_kernels.optim.flat_group import FlatGroup
from hdet_kernels.optim.group_entries import Group
from hdet_kernels.sharded import distributed_like, is_distributed, part_like, part_of, parts_of
from hdet_kernels.tensors import own_storage

T = TypeVar("T")

#: How many items one step checks.
ITEMS_PER_STEP = 4


class SpotCheck(Generic[T]):
    """Items to check in turn, ``ITEMS_PER_STEP`` at a time."""

    def __init__(self, items: Sequence[T]) -> None:
        self.items = items
        self._next = 0

    def next_items(self) -> Sequence[T]:
        """Return the next items; after the last one, start again with the first."""
        start = self._next
        self._next = start + ITEMS_PER_STEP if start + ITEMS_PER_STEP < len(self.items) else 0
        return self.items[start : start + ITEMS_PER_STEP]


class ParameterWatch:
    """The members of all parameter groups and the addresses of the parameters, as they were at the last look.

    Args:
        groups: the optimizer's ``param_groups``.
        params: all of their parameters, each once.
    """

    def __init__(self, groups: Sequence[Group], params: Sequence[Tensor]) -> None:
        self._lists = [(group["params"], list(group["params"])) for group in groups]
        self._params = list(params)
        self._parts = parts_of(self._params)  # of distributed tensors, whose data is in others
        self.remember_addresses()

    def regrouped(self, groups: Sequence[Group], *, lists_only: bool) -> bool:
        """Return whether parameters were added to, removed from or replaced in ``groups`` by hand.

        Args:
            groups: the optimizer's ``param_groups`` now.
            lists_only: notice only lists that were replaced or changed their length, at no cost for each parameter.
        """
        if len(groups) != len(self._lists):
            return True
        for group, (known, before) in zip(groups, self._lists, strict=True):
            members = group["params"]
            if members is not known or len(members) != len(before):
                return True
            if not lists_only and not all(map(is_, members, before)):
                return True
        return False

    def moved(self) -> bool:
        """Return whether a parameter has another address, at the cost of reading one pointer for each parameter."""
        return self._addresses_now() != self._addresses

    def remember_addresses(self) -> None:
        """Take the addresses that the parameters have now as the expected ones."""
        self._addresses = self._addresses_now()

    def _addresses_now(self) -> list[int]:
        return list(map(Tensor.data_ptr, self._parts(self._params)))


class FixedGradients:
    """Permanent gradients of the parameters of one :class:`FlatGroup`.

    Parameters keep the same ``grad`` tensor, and autograd adds into it. Checking every parameter in every step would
    cost as much as fixed gradients save, so each step checks the next few trained and the next few frozen parameters. A
    change of the whole model (moved, frozen, gradients replaced as by ``model.zero_grad()``) is noticed at once and
    repaired. A change of a part of the model can be noticed some steps late, when it can no longer be repaired; it
    raises an error.
    """

    def __init__(self, flat_group: FlatGroup) -> None:
        self.flat_group = flat_group
        self.flat = torch.zeros_like(flat_group.flat)
        self.attach()

    @torch.no_grad()
    def attach(self) -> bool:
        """Make views of the flat buffer the gradients of the parameters, keeping the values they have now.

        Returns:
            Whether a gradient had been replaced by another tensor.
        """
        replaced = False
        trained: list[_Snapshot] = []
        frozen: list[_Snapshot] = []
        stepped: list[Tensor | None] = []
        for index, tied in enumerate(self.flat_group.params):
            view = own_storage(self.flat_group.view(self.flat, index))
            # Compared by address: our view may have been given other memory, and another tensor may use our memory.
            grads = [param.grad for param in tied if param.grad is not None]
            others = [grad for grad in grads if grad.is_sparse or part_of(grad).data_ptr() != view.data_ptr()]
            if len(others) == len(grads):
                view.zero_()
            for other in others:
                view.add_(part_like(tied[0], other))
            replaced |= bool(others)
            for param in tied:
                param.grad = distributed_like(param, view) if param.requires_grad else None
                (trained if param.requires_grad else frozen).append(_Snapshot(param))
            stepped.append(view if any(param.requires_grad for param in tied) else None)
        self._trained, self._frozen = SpotCheck(trained), SpotCheck(frozen)
        self._gradients = replace(self.flat_group.parts[0].chunks.match(stepped), permanent=True)
        return replaced

    def gradients(self) -> MatchedGradients:
        """Return the gradients of the trained parameters."""
        return self._gradients

    def spot_check_fails(self) -> bool:
        """Return whether one of the parameters checked this time has changed."""
        return any(map(_Snapshot.changed, self._trained.next_items())) or any(
            map(_Snapshot.changed, self._frozen.next_items())
        )

    def check_not_partial(self) -> None:
        """Raise RuntimeError if some, but not all, of the trained parameters have changed.

        A spot check may have found such a change late: steps since then may have used wrong gradients.
        """
        snapshots = [*self._trained.items, *self._frozen.items]
        changed = [each for each in snapshots if each.changed()]
        if not changed or all(each.changed() for each in self._trained.items or snapshots):
            return
        shapes = ", ".join(str(tuple(each.param.shape)) for each in changed[:3])
        raise RuntimeError(
            f'gradients="fixed", but {len(changed)} of {len(snapshots)} parameters (of shape {shapes}'
            f"{', …' if len(changed) > 3 else ''}) were moved, frozen, unfrozen, or had their grad replaced since it "
            "was fixed, and steps may have missed it. Call optimizer.attach_gradients() right after such a change, "
            "clear gradients by optimizer.zero_grad(), or leave gradients= out"
        )


class _Snapshot:
    """A parameter with its gradient and addresses at the time when its gradient was attached."""

    def __init__(self, param: Tensor) -> None:
        self.param, self.grad, self.trains = param, param.grad, param.requires_grad
        self._address_now, self._grad_address_now = _reader(param), _reader(self.grad)
        self.address, self.grad_address = self._address_now(), self._grad_address_now()

    def changed(self) -> bool:
        param = self.param
        return (
            param.grad is not self.grad
            or param.requires_grad is not self.trains
            or self._address_now() != self.address
            or self._grad_address_now() != self.grad_address
        )


def _reader(tensor: Tensor | None) -> Callable[[], int]:
    """Return a function that reads the address of a tensor's memory, or of this process's part of it."""
    if tensor is None:
        return int
    return (lambda: part_of(tensor).data_ptr()) if is_distributed(tensor) else tensor.data_ptr
