"""The hyperparameter table: one row for each parameter group, read by the kernels, written without waiting for them.

``csrc/table.h`` has the same columns in the same order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from hdet_kernels.buckets import wide_dtype

#: The columns of a row. A rule reads those that it knows; the others are zero. The last three are flags, 0 or 1.
COLUMNS = (
    "lr",
    "weight_decay",
    "beta1",
    "beta2",
    "eps",
    "momentum",
    "dampening",
    "lr_decay",
    "nesterov",
    "amsgrad",
    "maximize",
)


class Staged:
    """A small tensor on ``device`` with a mirror on the host; it is written only when the mirror changes.

    On CUDA a write goes through fresh pinned memory and does not wait. Fresh, because a buffer of our own could be
    overwritten while the copy out of it is still in flight; torch's pinned allocator hands a freed block out again
    only after the stream has passed the copies that read it.
    """

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
        self.tensor = torch.zeros(tuple(shape), dtype=dtype, device=device)
        self._mirror: list[float] | list[int] | None = [0] * self.tensor.numel()
        self._captured: list[Tensor] = []

    def write(self, values: list[float] | list[int]) -> bool:
        """Make the device tensor hold ``values`` (flattened); returns whether anything had to be copied."""
        if values == self._mirror:
            return False
        on_cuda = self.tensor.device.type == "cuda"
        staging = torch.tensor(values, dtype=self.tensor.dtype, pin_memory=on_cuda)
        self.tensor.copy_(staging.view(self.tensor.shape), non_blocking=on_cuda)
        self._mirror = values
        if on_cuda and torch.cuda.is_current_stream_capturing():
            # Every replay of the graph copies from this memory, and until the first one the device has old values.
            self._captured.append(staging)
            self._mirror = None
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
        changed. A tensor in host memory is read like a float.
        """
        values: list[float] = []
        on_device: list[tuple[int, int, Tensor]] = []
        for index, row in enumerate(rows):
            for column, name in enumerate(COLUMNS):
                value = row.get(name, 0.0)
                if isinstance(value, Tensor) and value.device.type != "cpu":
                    on_device.append((index, column, value))
                    value = 0.0
                values.append(float(value))
        self._staged.write(values)
        for index, column, tensor in on_device:
            self.tensor[index, column].copy_(tensor.detach().squeeze(), non_blocking=True)
