"""Track the memory of torch's allocator by phases: the peak within each, and what is held after it."""

from __future__ import annotations

import contextlib
import gc
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile


class MemoryTracker:
    """Peak and held bytes by phase, counted from the state at construction.

    On a GPU the allocator's counters are used (``max_memory_allocated``). They round every tensor up to 512 bytes, and
    to its whole block where less than 1 MiB of it would be left. On a CPU the profiler's allocation events are summed,
    exact to the byte. Memory from other allocators is not counted. Memory that was allocated between two phases must
    not be freed within a phase.
    """

    def __init__(self, device: str) -> None:
        self.device = device
        # By phase, in bytes.
        self.peaks: dict[str, int] = {}
        self.held: dict[str, int] = {}
        self._now = 0
        self._before = torch.cuda.memory_allocated() if device == "cuda" else 0

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Record the peak of the block and the bytes held at its end."""
        gc.freeze()  # garbage from before must not be freed within the phase
        try:
            with self._on_the_gpu(name) if self.device == "cuda" else self._on_the_cpu(name):
                yield
                gc.collect()  # optimizers refer to themselves in cycles
        finally:
            gc.unfreeze()

    @contextlib.contextmanager
    def _on_the_gpu(self, name: str) -> Iterator[None]:
        torch.cuda.reset_peak_memory_stats()
        yield
        self.peaks[name] = torch.cuda.max_memory_allocated() - self._before
        self.held[name] = torch.cuda.memory_allocated() - self._before

    @contextlib.contextmanager
    def _on_the_cpu(self, name: str) -> Iterator[None]:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            yield
        sizes = [size for _, size in sorted(_allocations(profiled))]
        levels = list(itertools.accumulate(sizes, initial=self._now))
        self.peaks[name], self._now = max(levels), levels[-1]
        self.held[name] = self._now


def _allocations(profiled: Any) -> Iterator[tuple[int, int]]:
    """Yield time and bytes of every allocation; freed bytes are negative."""
    events = list(profiled.profiler.kineto_results.experimental_event_tree())
    while events:
        event = events.pop()
        events += event.children
        if event.tag == _EventType.Allocation and event.extra_fields.device.type == "cpu":
            yield event.start_time_ns, event.extra_fields.alloc_size


def warm_up_libraries(device: str) -> None:
    """Run a matrix product forwards and backwards, so that the libraries' permanent workspaces are not counted.

    They are allocated when a thread first uses them, and the backward pass has its own thread.
    """
    for dtype in (torch.float32, torch.bfloat16):
        matrix = torch.ones(64, 64, device=device, dtype=dtype, requires_grad=True)
        torch.nn.functional.linear(matrix, matrix, matrix[0]).sum().backward()
