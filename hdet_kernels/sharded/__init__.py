"""Parameters that several processes hold together, each a part.

``dtensors.py`` has the part of a distributed tensor (DTensor) that this process holds, and norms over all parts.
``fsdp.py`` knows the memory from which FSDP2 gathers the parts.
"""

from hdet_kernels.sharded.dtensors import (
    Divided,
    distributed_like,
    divided_along,
    gradient_parts,
    is_distributed,
    norm_over_meshes,
    part_like,
    part_of,
    parts_of,
    why_unlike,
)
from hdet_kernels.sharded.fsdp import drop_gathered, gathered_shards

__all__ = [
    "Divided",
    "distributed_like",
    "divided_along",
    "drop_gathered",
    "gathered_shards",
    "gradient_parts",
    "is_distributed",
    "norm_over_meshes",
    "part_like",
    "part_of",
    "parts_of",
    "why_unlike",
]
