"""The hyperparameter table on the device: kernels read it, and the host writes it without waiting for them.

It has one row for each parameter group, or for each replica and parameter group. ``csrc/table.h`` has the same columns
in the same order.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from hdet_kernels.ops.operators import has_cuda
from hdet_kernels.tensors import wide_dtype

#: The columns of the table. A rule ignores those that it does not use. ``max_grad_norm`` is 0 for no clipping, ``seed``
#: (a whole number below 2³²) seeds stochastic rounding, and the last three are flags, 0 or 1.
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

_PLAIN_TYPES = (float, bool, int)

#: The most bytes that are written to a CUDA device as arguments of launches, of which each takes up to 3968.
MOST_ARGUMENT_BYTES = 4 * 3968


class Staged:
    """A small tensor on a device with a copy of its bytes on the host; it is written only when they change.

    Nothing waits for the device. On CUDA a few kilobytes travel as arguments of a launch, which copies them
    (``csrc/write_cuda.cu``). More, and without the extension, go through newly allocated pinned memory: a buffer that
    is kept could be overwritten while the copy out of it is still in flight. torch's pinned allocator reuses a freed
    block only after the stream has passed the copies that read it.
    """

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
        self.tensor = torch.zeros(tuple(shape), dtype=dtype, device=device)
        # The bytes that the device holds; None if they depend on which captured graph ran last.
        self._mirror: bytes | None = None
        # Whether a captured CUDA graph writes this tensor, and the memory from which its replays copy.
        self._captured = False
        self._captured_memory: list[Tensor] = []
        self._on_cuda = self.tensor.is_cuda
        small = self.tensor.nbytes <= MOST_ARGUMENT_BYTES and self.tensor.element_size() == 8
        self._as_arguments = self._on_cuda and small and has_cuda()
        # Where the host writes: the tensor itself on a CPU, and else a copy, unless a new one is made for every write.
        in_host_memory = self.tensor.device.type == "cpu"
        self._host = self.tensor if in_host_memory else self._staging() if self._as_arguments else None
        self._host_bytes = None if self._host is None else _bytes_of(self._host)

    def _staging(self) -> Tensor:
        pinned = self._on_cuda and not self._as_arguments
        return torch.empty(self.tensor.shape, dtype=self.tensor.dtype, device="cpu", pin_memory=pinned)

    def holds(self, values: bytes) -> bool:
        """Return whether the device is known to hold ``values``."""
        return values == self._mirror

    @property
    def settled(self) -> bool:
        """Whether the device keeps the last written values: no captured CUDA graph writes this tensor."""
        return not self._captured

    @property
    def capturing(self) -> bool:
        """Whether a write now would be captured in a CUDA graph."""
        return self._on_cuda and torch.cuda.is_current_stream_capturing()

    def write(self, values: bytes) -> bool:
        """Copy the bytes of a whole tensor to the device if it does not hold them.

        Returns:
            Whether anything was copied.
        """
        if values == self._mirror and not self.capturing:
            return False
        staging = self._staging() if self._host is None else self._host
        (self._host_bytes or _bytes_of(staging))[:] = values
        if self._as_arguments:
            try:
                torch.ops.hdet_kernels.write_(self.tensor, staging)
            except RuntimeError:  # the extension was built for other GPUs
                self._as_arguments, self._host, self._host_bytes = False, None, None
                return self.write(values)
        elif self._host is None:
            self.tensor.copy_(staging, non_blocking=self._on_cuda)
        if self.capturing:
            self._captured = True
            if not self._as_arguments:
                self._captured_memory.append(staging)  # every replay of the graph copies from this memory
        # A graph that writes this tensor sets it to the captured values whenever it is replayed.
        self._mirror = None if self._captured else values
        return True


def _bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the host, to be written."""
    return tensor.view(-1).numpy().view("u1").data


class HyperTable:
    """The hyperparameters of all parameter groups, on the device.

    The table is float64, so that quantities like ``1 − β₂ᵗ`` are formed in full precision before they are rounded to
    the precision of the parameters. Devices without float64 have float32.
    """

    def __init__(self, table_rows: int, device: torch.device) -> None:
        dtype = wide_dtype(device)
        self._staged = Staged((table_rows, len(COLUMNS)), dtype, device)
        self._rows = table_rows
        self._pack = struct.Struct(f"{table_rows * len(COLUMNS)}{'d' if dtype == torch.float64 else 'f'}").pack

    @property
    def tensor(self) -> Tensor:
        """The table, [table rows, len(COLUMNS)]."""
        return self._staged.tensor

    def write(self, table_rows: Sequence[Mapping[str, float | Tensor]]) -> None:
        """Write every row of the table.

        A tensor on an accelerator is copied from device to device at every call, because the host cannot know whether
        it has changed. A tensor in host memory is read like a float.

        Args:
            table_rows: For each row, a mapping from column to value. Columns that are left out become zero.

        Raises:
            ValueError: If there are more or fewer rows than the table has.
            RuntimeError: If a number changes while a CUDA graph is captured: every replay would write it again.
        """
        if len(table_rows) != self._rows:
            raise ValueError(f"the hyperparameter table has {self._rows} rows, got {len(table_rows)}")
        numbers: list[float] = [0.0] * (self._rows * len(COLUMNS))
        on_device: list[tuple[int, int, Tensor]] = []
        for index, values_by_column in enumerate(table_rows):
            first = index * len(COLUMNS)
            for name, value in values_by_column.items():
                # The types are asked first: whether something is a tensor takes longer.
                if type(value) not in _PLAIN_TYPES and isinstance(value, Tensor) and value.device.type != "cpu":
                    on_device.append((index, _NUMBER[name], value))
                else:
                    numbers[first + _NUMBER[name]] = float(value)
        values = self._pack(*numbers)
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
