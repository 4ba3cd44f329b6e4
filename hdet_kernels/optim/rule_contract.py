"""The part of a fused optimizer that its update rule decides: the options of a group, and the state of a parameter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor

from hdet_kernels import ops
from hdet_kernels.optim.group_entries import Group


class RuleContract:
    """The facts about an update rule that a subclass of :class:`hdet_kernels.optim.FusedOptimizer` states.

    It must set :attr:`rule` and define :meth:`check_group` and :meth:`row`. The rest has the values that most rules of
    torch.optim need.
    """

    rule: ClassVar[str]
    #: Whether torch.optim shows a ``step`` in ``state[p]``. Step counts exist for every rule.
    shows_step: ClassVar[bool] = True
    #: Whether ``state[p]`` exists before the first step.
    eager_state: ClassVar[bool] = False
    #: Whether ``state[p]`` may lack its buffers, as that of torch's SGD before the first step with momentum.
    optional_state: ClassVar[bool] = False

    def check_group(self, group: Mapping[str, Any]) -> None:
        """Raise ``ValueError`` if an option of ``group`` is out of range."""
        raise NotImplementedError

    def row(self, group: Group) -> dict[str, float | Tensor]:
        """Return the hyperparameters of ``group`` by the columns of the hyperparameter table."""
        raise NotImplementedError

    def state_names(self, group: Group) -> tuple[str, ...]:
        """Return the names of the state buffers that parameters of ``group`` have."""
        return ops.STATES[self.rule]

    def known_states(self, group: Group) -> tuple[str, ...]:
        """Return the names of the state buffers that a loaded state of ``group`` may have."""
        return ops.STATES[self.rule]

    def state_shape(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the state ``name`` of a parameter of ``shape``."""
        return shape

    def shows_step_of(self, group: Group) -> bool:
        """Return whether torch.optim shows a ``step`` in the state of parameters of ``group``."""
        return self.shows_step

    def initial_state(self, name: str, group: Group) -> float:
        """Return the value of the state ``name`` before the first step."""
        return 0.0
