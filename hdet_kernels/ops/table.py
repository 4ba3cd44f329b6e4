"""The hyperparameter table: one row for each parameter group, read by the kernels, written without waiting for them.

``csrc/table.h`` has the same columns in the same order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hdet_kernels.tensors import wide_dtype

#: The columns of a row. A rule reads those that it knows; the others are zero. ``max_grad_norm`` is 0 for no clipping,
#: ``seed`` (a whole number below 2³²) is that of stochastic rounding, and the last three are flags, 0 or 1.
COLUMNS = (
    "lr",
    "weight_decay",
    "beta1",
    "beta2",
    "eps",
    "momentum",
    "dampening",
    "lr_decay",
    "max_grad_norm",
    "seed",
    "nesterov",
    "amsgrad",
    "maximize",
)


_NUMBER = {name: number for number, name in enumerate(COLUMNS)}


class Staged:
    """A small tensor on ``device`` with a mirror on the host; it is written only when the mirror changes.

    On CUDA a write goes through fresh pinned memory and does not wait. Fresh, because a buffer of our own could be
    overwritten while the copy out of it is still in flight; torch's pinned allocator hands a freed block out again
    only after the stream has passed the copies that read it.
    """

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
        self.tensor = torch.zeros(tuple(shape), dtype=dtype, device=device)
        #: The bytes that the device has; None if that depends on which captured graph ran last.
        self._mirror: bytes | None = None
        self._captured: list[Tensor] = []

    def holds(self, values: NDArray[np.generic]) -> bool:
        return values.tobytes() == self._mirror

    @property
    def settled(self) -> bool:
        """Whether the device keeps what was written last, whatever is replayed."""
        return not self._captured

    @property
    def capturing(self) -> bool:
        """Whether what is written now becomes a part of a CUDA graph."""
        return self.tensor.is_cuda and torch.cuda.is_current_stream_capturing()

    def write(self, values: NDArray[np.generic]) -> bool:
        """Make the device tensor hold ``values``; returns whether anything had to be copied."""
        written = values.tobytes()
        if written == self._mirror and not self.capturing:
            return False
        if self.tensor.device.type == "cpu":
            self.tensor.numpy()[...] = values
            self._mirror = written
            return True
        on_cuda = self.tensor.device.type == "cuda"
        staging = torch.empty(self.tensor.shape, dtype=self.tensor.dtype, pin_memory=on_cuda)
        staging.numpy()[...] = values
        self.tensor.copy_(staging, non_blocking=on_cuda)
        if self.capturing:
            self._captured.append(staging)  # every replay of the graph copies from this memory
        # A graph that writes this table leaves it in its own state whenever it is replayed.
        self._mirror = written if self.settled else None
        return True


class HyperTable:
    """``tensor``: [rows, len(COLUMNS)], a row per parameter group.

    In float64, so that quantities like ``1 − β₂ᵗ`` are formed in full precision before they are rounded to the
    precision of the parameters (float32 on devices without float64).
    """

    def __init__(self, rows: int, device: torch.device) -> None:
        self._staged = Staged((rows, len(COLUMNS)), wide_dtype(device), device)

    @property
    def tensor(self) -> Tensor:
        return self._staged.tensor

    def write(self, rows: Sequence[Mapping[str, float | Tensor]]) -> None:
        """Write one mapping from column to value for each row; columns left out are zero.

        A tensor on an accelerator is copied from device to device at every call, since the host cannot know whether it
        changed. A tensor in host memory is read like a float. While a CUDA graph is captured no number may change: it
        would be written again by every replay.
        """
        lines = []
        on_device: list[tuple[int, int, Tensor]] = []
        for index, row in enumerate(rows):
            line = [0.0] * len(COLUMNS)
            for name, value in row.items():
                if type(value) is float:
                    line[_NUMBER[name]] = value
                elif isinstance(value, Tensor) and value.device.type != "cpu":
                    on_device.append((index, _NUMBER[name], value))
                else:
                    line[_NUMBER[name]] = float(value)
            lines.append(line)
        values = np.array(lines, dtype=np.float64).reshape(self.tensor.shape)
        if not self._staged.holds(values):
            if self._staged.capturing:
                raise RuntimeError(
                    "a hyperparameter changed since the last step, and this step is being captured in a CUDA graph, "
                    "whose replays would all write the captured value again; call optimizer.write_hyperparameters() "
                    "before the capture (and before a replay, for what changed since the last one)"
                )
            self._staged.write(values)
        for index, column, tensor in on_device:
            self.tensor[index, column].copy_(tensor.detach().squeeze(), non_blocking=True)
