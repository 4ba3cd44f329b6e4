"""A step of the compiled backends whose arguments were checked once, called without torch's dispatcher.

The operator takes twenty arguments, and handing them over takes longer than everything else in the step of a small
model. Only three scalars change from step to step, so all others are bound to a block of memory that
``csrc/bound_step.h`` describes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.autograd import profiler

from hdet_kernels.ops.native_calls import address_of, handle_of, is_plain, steps, why_not_callable
from hdet_kernels.ops.step import NO_SCALARS, Scalars

# What the functions return, as in csrc/bound_step.h.
_DONE, _FAILED = 0, 2

# Where the block has the tensors: after the addresses of the scalars, the number of norms and that of table rows.
_TENSORS_FROM = 5


class BoundStep:
    """A step with bound arguments.

    Args:
        device: The kind of device, ``"cpu"`` or ``"cuda"``.
        rule: The number of the rule.
        tensors: The tensors of the operator ``step_`` in its order, from ``param`` to ``scratch``. They are kept alive.
        stochastic_rounding: As for the operator.
        rows: As for the operator.
    """

    def __init__(
        self, device: str, rule: int, tensors: Sequence[Tensor | None], stochastic_rounding: bool, rows: int
    ) -> None:
        self._tensors = tuple(tensors)
        self._bound = False
        if why_not_callable() is not None or not all(tensor is None or is_plain(tensor) for tensor in self._tensors):
            return
        library = steps()
        self._block = np.zeros(library.hdet_bound_step_bytes() // 8 + 1, dtype=np.int64)
        handles = [0 if tensor is None else handle_of(tensor) for tensor in self._tensors]
        self._block[_TENSORS_FROM : _TENSORS_FROM + len(handles)] = handles
        self._at = address_of(self._block)
        self._step = getattr(library, f"hdet_step_{device}")
        self._scalars = NO_SCALARS
        self._bound = bool(library.hdet_bind_step(rule, stochastic_rounding, rows, self._at))

    def run(self, scalars: Scalars) -> bool:
        """Run one step with checked ``scalars``, on the device of the parameters.

        Returns:
            Whether the step was run. It was not if torch is to see the operator (profiler, dispatch mode), if a tensor
            has other memory than when it was bound, or if the arguments could not be bound.

        Raises:
            RuntimeError: If a launch failed.
        """
        if not self._bound or profiler._is_profiler_enabled or torch._C._len_torch_dispatch_stack():
            return False
        if scalars is not self._scalars:
            self._write(scalars)
        result = self._step(self._at)
        if result == _FAILED:
            raise RuntimeError(steps().hdet_step_error().decode())
        return bool(result == _DONE)

    def _write(self, scalars: Scalars) -> None:
        scale, norm, found_inf = (0 if scalar is None else scalar.data_ptr() for scalar in scalars)
        self._block[:4] = scale, norm, 0 if scalars.norm is None else scalars.norm.numel(), found_inf
        self._scalars = scalars  # kept: their memory is read on the device
