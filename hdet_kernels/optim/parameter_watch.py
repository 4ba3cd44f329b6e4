"""Noticing parameters that were regrouped or moved between two steps."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from operator import is_

from torch import Tensor

from hdet_kernels.ops.live_tensors import LiveTensors
from hdet_kernels.optim.group_entries import Group


class ParameterWatch:
    """The members of all parameter groups and the addresses of the parameters, as they were at the last look.

    Args:
        groups: the optimizer's ``param_groups``.
        params: all of their parameters, each once.
        backend: the backend that steps them, by name.
    """

    def __init__(self, groups: Sequence[Group], params: Sequence[Tensor], backend: str | None = None) -> None:
        self._lists = [(group["params"], len(group["params"])) for group in groups]
        self._members = [param for members, _ in self._lists for param in members]
        self._params = LiveTensors(params, backend)

    def regrouped(self, groups: Sequence[Group], *, lists_only: bool) -> bool:
        """Return whether parameters were added to, removed from or replaced in ``groups`` by hand.

        Args:
            groups: the optimizer's ``param_groups`` now.
            lists_only: notice only lists that were replaced or changed their length, at no cost for each parameter.
        """
        lists = [group["params"] for group in groups]
        if len(lists) != len(self._lists):
            return True
        for members, (known, count) in zip(lists, self._lists, strict=True):
            if members is not known or len(members) != count:
                return True
        return not lists_only and not all(map(is_, chain.from_iterable(lists), self._members))

    def moved(self) -> bool:
        """Return whether a parameter has another address, at the cost of reading one pointer for each parameter."""
        return self._params.moved()

    def remember_addresses(self) -> None:
        """Take the addresses that the parameters have now as the expected ones."""
        self._params.remember_addresses()
