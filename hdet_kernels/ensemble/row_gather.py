"""Gather a row of numbers from every process in a number of hops that grows with the logarithm of the processes.

The all-gather of gloo and of NCCL is a ring of N−1 hops: at thousands of processes it takes longer than the average
of the parameters, although a row has a few hundred bytes. Here the known rows double with every hop.

Between CPUs the processes exchange what they know in pairs (:func:`gather_by_doubling`). N = m·2ᵏ processes, m odd, are
a grid of m × 2 × … × 2. The rows travel along the first dimension, whose neighbours are the farthest apart, and along
the last one at the end. So the last messages, which have most of the bytes, go to the next neighbours: where nodes hold
2ʲ processes with consecutive numbers, the last j hops stay within a node, and every process brings in the rows of 1/2ʲ
of the other nodes' processes. This is the gather in two levels, between the nodes and within them, and nobody has to be
told where a node ends.

Between GPUs one all-reduce does it (:func:`gather_by_sum`), since that is a tree for small messages, in two levels
as well, over connections that exist anyway.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

#: ``exchange(sent, to, received, source)`` sends a tensor to the process of that number and fills another one.
Exchange = Callable[[Tensor, int, Tensor, int], None]


def gather_by_doubling(row: Tensor, process: int, processes: int, exchange: Exchange) -> Tensor:
    """Return the rows of all processes, [processes, columns], after ⌈log₂ N⌉ messages to and from others.

    All rows but the own one are received once. Their bits stay as they are.

    Args:
        row: the own row, [columns], of equal length and dtype everywhere.
        process: number of this process.
        processes: N.
        exchange: sends one message and receives one. It may start before the other side does.
    """
    known = row.reshape(1, -1)
    stride, dimensions = processes, grid(processes)
    for size in dimensions:
        stride //= size
        own = process // stride % size
        # The block of number i belongs to the coordinate own + i along this dimension.
        blocks = known.new_empty(size, *known.shape)
        blocks[0] = known
        have = 1
        while have < size:
            more = min(have, size - have)
            to, source = (process + ((own + step) % size - own) * stride for step in (-have, have))
            exchange(blocks[:more], to, blocks[have : have + more], source)
            have += more
        known = blocks.roll(own, 0).flatten(0, 1)
    # The dimension that came last is the outermost now, and must be the innermost.
    reordered = known.view(*reversed(dimensions), -1).permute(*reversed(range(len(dimensions))), -1)
    return reordered.reshape(processes, -1)


def gather_by_sum(row: Tensor, process: int, processes: int, all_reduce: Callable[[Tensor], object]) -> Tensor:
    """Return the rows of all processes, [processes, columns], by a sum of tables that are zero but for the own row.

    The bytes are added as integers, so that all bits stay as they are: those of −0.0 and of a NaN too.

    Args:
        row: the own row, [columns], of equal length and dtype everywhere.
        process: number of this process.
        processes: their number.
        all_reduce: replaces a tensor by its sum over the processes.
    """
    table = torch.zeros(processes, row.nbytes, dtype=torch.uint8, device=row.device)
    table[process] = row.contiguous().view(torch.uint8)
    all_reduce(table)
    return table.view(row.dtype)


def grid(processes: int) -> list[int]:
    """Return the dimensions of the grid: the odd factor of ``processes``, then as many twos as it takes."""
    twos = (processes & -processes).bit_length() - 1
    return [processes >> twos, *[2] * twos]
