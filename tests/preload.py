"""Work that every rank would do again: the server of :mod:`tests.ranks` imports this module before it forks ranks."""

from __future__ import annotations

import torch
import torch._dynamo
import torch.distributed.checkpoint.state_dict
import torch.distributed.fsdp

import hdet_kernels as hk
import hdet_kernels.ops.compiled
import tests.training  # noqa: F401

# The first fused optimizer of a process loads the compiled extension and registers its operators. It takes no step:
# that would ask torch for GPUs, which forked processes could not use any more.
hk.FusedAdamW([torch.zeros(1, requires_grad=True)], lr=0.1)
