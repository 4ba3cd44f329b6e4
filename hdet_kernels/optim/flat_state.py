"""The optimizer state as whole flat buffers, for those who average, copy or restore all of it at once."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from hdet_kernels.buckets import Buckets
from hdet_kernels.optim.coded_state import scale_name
from hdet_kernels.optim.flat_group import FlatGroup
from hdet_kernels.optim.hyperparameters import HyperparameterWriter
from hdet_kernels.optim.options import Options
from hdet_kernels.optim.state_views import StateViews


class FlatState:
    """The methods of a fused optimizer that hand out its flat state, and that share it between replicas of a stack."""

    options: Options
    buckets: Buckets
    _flat_groups: list[FlatGroup]
    _state_views: StateViews
    _hyperparameters: HyperparameterWriter

    def state_flats(self) -> dict[str, Tensor]:
        """Return the flat buffers of all floating-point state (moments, no step counts), laid out like
        ``buckets.flats`` and named ``"number of the flat buffer/name of the state"``.

        State that all replicas of a stack share is left out: it follows from their common gradient and needs no
        averaging. State in 8 bits is decoded: these are copies, which :meth:`write_state_flats` writes back.
        """
        return {
            f"{number}/{name}": buffer
            for number, flat in enumerate(self._flat_groups)
            if flat.replicas == 1 or not flat.shares_state
            for name, buffer in flat.read_states().items()
        }

    def write_state_flats(self, flats: Mapping[str, Tensor]) -> None:
        """Write changed copies of :meth:`state_flats` back: state in 8 bits is encoded, rounding to nearest."""
        if self.options.state_dtype == torch.int8:
            for number, flat in enumerate(self._flat_groups):
                of_group = {name: flats[key] for name in flat.states if (key := f"{number}/{name}") in flats}
                flat.write_states(of_group)

    def all_state_flats(self) -> dict[str, Tensor]:
        """Return every flat buffer of the state: those of :meth:`state_flats`, those that all replicas of a stack
        share, the step counts as ``"number of the flat buffer/step"``, and of state in 8 bits codes and scales."""
        found: dict[str, Tensor] = {}
        for number, flat in enumerate(self._flat_groups):
            found |= {f"{number}/{name}": buffer for name, buffer in flat.states.items() if buffer is not None}
            found |= {f"{number}/{scale_name(name)}": part for name, part in flat.scales.items() if part is not None}
            found[f"{number}/step"] = flat.steps
        return found

    def step_flats(self) -> list[Tensor]:
        """Return the step counts of all parameters, one tensor for each flat buffer of parameters."""
        return [flat.steps for flat in self._flat_groups]

    @property
    def shares_state(self) -> bool:
        """Whether all replicas of a stack have one state."""
        return all(flat.replicas is not None and flat.shares_state for flat in self._flat_groups)

    def separate_state(self) -> None:
        """Give every replica of a stack a copy of the state that all of them share, for gradients that differ.

        The state gets other memory: a CUDA graph that captured the step before is no longer valid.
        """
        if self.shares_state:
            self._state_views.separate()
            self._hyperparameters.invalidate()

    def share_state(self) -> None:
        """Give all replicas of a stack one state again: that of the first. The other states are dropped.

        Where numbers that act on the moments differ between replicas, the next step separates them again.
        """
        if self.buckets.replicas is not None and not self.shares_state:
            self._state_views.share()
            self._hyperparameters.invalidate()
