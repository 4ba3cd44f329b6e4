"""Noticing parameters that were regrouped or moved between two steps."""

from __future__ import annotations

from collections.abc import Sequence

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
        self._lists = [(group["params"], LiveTensors(group["params"], backend)) for group in groups]
        self._params = LiveTensors(params, backend)

    def regrouped(self, groups: Sequence[Group], *, lists_only: bool) -> bool:
        """Return whether parameters were added to, removed from or replaced in ``groups`` by hand.

        Args:
            groups: the optimizer's ``param_groups`` now.
            lists_only: notice only lists that were replaced or changed their length, at no cost for each parameter.
        """
        if len(groups) != len(self._lists):
            return True
        for group, (known, tensors) in zip(groups, self._lists, strict=True):
            members = group["params"]
            if members is not known or len(members) != len(tensors.tensors):
                return True
            if not lists_only and not tensors.are(members):
                return True
        return False

    def moved(self) -> bool:
        """Return whether a parameter has another address, at the cost of reading one pointer for each parameter."""
        return self._params.moved()

    def remember_addresses(self) -> None:
        """Take the addresses that the parameters have now as the expected ones."""
        self._params.remember_addresses()
