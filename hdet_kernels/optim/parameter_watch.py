"""Noticing parameters that were regrouped or moved between two steps."""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_

from torch import Tensor

from hdet_kernels.optim.group_entries import Group
from hdet_kernels.sharded import parts_of


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
