"""``optimizer.state`` as torch.optim shows it, made of views of flat buffers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from hdet_kernels.ops.chunks import MatchedGradients
from hdet_kernels.optim.flat_group import Home
from hdet_kernels.optim.options import Options
from hdet_kernels.optim.spot_check import Glance

#: The name in ``state[p]`` of the float32 master of a bf16 or fp16 parameter.
MASTER = "master"


class Owner(Protocol):
    """What of an optimizer is needed here."""

    shows_step: ClassVar[bool]
    eager_state: ClassVar[bool]
    options: Options
    param_groups: list[dict[str, Any]]
    state: Any

    def state_names(self, group: dict[str, Any]) -> tuple[str, ...]: ...

    def initial_state(self, name: str, group: dict[str, Any]) -> float: ...


class ShownState:
    """The entries of ``optimizer.state``, and how they come to be: loaded, or with a parameter's first step.

    An entry that is replaced as a whole (``state[p] = {…}``, ``state.clear()``) is taken over: all at once, a single
    one within ``len(state) / GLANCE`` steps, or when the state is saved. What is in an entry is to be changed in place.
    """

    def __init__(self, optimizer: Owner, homes: list[Home]) -> None:
        self.optimizer = optimizer
        self.homes = homes
        #: The entries as they were shown, and their parameters to be looked at.
        self._entries: dict[Tensor, dict[str, Any]] = {}
        self._glance: Glance[Tensor] = Glance([])
        self._names: list[tuple[str, ...]] = []

    @torch.no_grad()
    def adopt(self) -> None:
        """Copy what is in ``optimizer.state`` into the flat state, and make ``optimizer.state`` views of that."""
        optimizer = self.optimizer
        self._entries = {}
        sharing = [home for home in self.homes if home.shares_state]
        if any(self._has_rows(home, index) for home in sharing for index in range(len(home.residents))):
            # All or none: what parted the moments of some parameters holds for those that have none yet.
            for home in sharing:
                home.part_state()
        for home in self.homes:
            home.unpublished = set(range(len(home.residents)))
            for index, tied in enumerate(home.residents):
                group = optimizer.param_groups[home.groups[index]]
                found = self._found(tied)
                names = optimizer.state_names(group)
                kept = [name for name in home.states if found.get(name) is not None]
                for name in dict.fromkeys([*names, *kept]):
                    view = home.view(home.ensure(name), index)
                    if name in kept:
                        view.copy_(found[name])
                    else:
                        view.fill_(optimizer.initial_state(name, group))
                if home.master is not None:
                    home.view(home.master, index).copy_(found.get(MASTER, tied[0]))
                # A rule without a public step count needs to know only whether it has stepped before.
                home.count(index).copy_(torch.as_tensor(found.get("step", 1.0 if kept else 0.0)))
                if found or optimizer.eager_state:
                    self._show(home, index, (*names, *kept))
        self._remember()
        self._names = [optimizer.state_names(group) for group in optimizer.param_groups]

    def publish(self, home: Home, grads: MatchedGradients) -> None:
        """Show the state of parameters that step for the first time, as torch.optim does."""
        fresh = [index for index in home.unpublished if grads.tensors[index] is not None]
        if not fresh:  # parameters that never get a gradient
            return
        state = self.optimizer.state
        if any(state.get(param) and self._changed(param) for i in fresh for param in home.residents[i]):
            self.adopt()  # the user has given one a state
            fresh = [index for index in fresh if index in home.unpublished]
        for index in fresh:
            self._show(home, index, self._names[home.groups[index]])
        self._remember()

    def rename(self) -> None:
        """A hyperparameter changed, and may have brought a state along (a momentum that was zero)."""
        names = [self.optimizer.state_names(group) for group in self.optimizer.param_groups]
        if names != self._names:
            for home in self.homes:
                home.unpublished = set(range(len(home.residents)))
            self._names = names

    def disturbed(self) -> bool:
        """Whether the state, or one of the entries looked at this time, is not what was shown."""
        state = self.optimizer.state
        return state is not self._seen or len(state) != self._count or any(map(self._changed, self._glance.few()))

    def replaced(self) -> bool:
        """Whether any entry is not what was shown."""
        return any(map(self._changed, self._entries))

    def _found(self, tied: Iterable[Tensor]) -> dict[str, Any]:
        return next((self.optimizer.state[p] for p in tied if self.optimizer.state.get(p)), {})

    def _has_rows(self, home: Home, index: int) -> bool:
        """Whether there is a state for each replica of a slot."""
        found, own = self._found(home.residents[index]), home.slots[index].shape
        return any(isinstance(found.get(name), Tensor) and found[name].shape != own for name in home.states)

    def _changed(self, param: Tensor) -> bool:
        return self.optimizer.state.get(param) is not self._entries.get(param)

    def _remember(self) -> None:
        self._seen, self._count = self.optimizer.state, len(self.optimizer.state)
        self._glance = Glance(list(self._entries))

    def _show(self, home: Home, index: int, names: Iterable[str]) -> None:
        home.unpublished.discard(index)
        optimizer = self.optimizer
        # Stochastic rounding depends on the count, so it belongs to the checkpoint of every rule then.
        counted = optimizer.shows_step or optimizer.options.stochastic_rounding
        shown: dict[str, Tensor] = {"step": home.count(index)} if counted else {}
        shown |= {name: home.view(home.ensure(name), index) for name in names}
        if home.master is not None:
            shown[MASTER] = home.view(home.master, index)
        for param in home.residents[index] if shown else ():
            entry = optimizer.state[param]
            entry.update(shown)
            self._entries[param] = entry
