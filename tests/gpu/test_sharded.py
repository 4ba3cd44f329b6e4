"""``fully_shard`` over one rank with NCCL: the fused optimizer beside torch's, in all precisions and offloaded."""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

import hdet_kernels as hk
from tests.ranks import run_ranks
from tests.training import batch, network

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "mixed precision": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)},
    "stays gathered": {"reshard_after_forward": False},
    "offloaded": {"offload_policy": CPUOffloadPolicy(pin_memory=True)},
}


def _train(mesh: Any, make: Any, clip: float | None, **options: Any) -> tuple[list[torch.Tensor], Any]:
    module = network().cuda()
    for part in (module.inner, module):
        fully_shard(part, mesh=mesh, **options)
    optimizer = make(module.parameters())
    for step in range(6):
        optimizer.zero_grad()
        inputs, targets = (each.cuda() for each in batch(0, step))
        F.mse_loss(module(inputs).float(), targets).backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(module.parameters(), clip)
        optimizer.step()
    state = [entry[name] for entry in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    return [tensor.detach().to_local().cpu() for tensor in (*module.parameters(), *state)], optimizer


def _beside_torch(_: int) -> dict[str, Any]:
    dist.destroy_process_group()
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        store = f"file://{folder}/store"
        dist.init_process_group("cpu:gloo,cuda:nccl", init_method=store, rank=0, world_size=1)
        mesh = init_device_mesh("cuda", (1, 1), mesh_dim_names=("replicate", "shard"))
        for name, options in CASES.items():
            theirs, _ = _train(mesh, lambda params: torch.optim.AdamW(params, lr=0.05, fused=True), 0.1, **options)
            ours, optimizer = _train(
                mesh, lambda params: hk.FusedAdamW(params, lr=0.05, max_grad_norm=0.1), None, **options
            )
            pinned = [flat.is_pinned() for flat in optimizer.buckets.flats]
            found[name] = theirs, ours, optimizer.buckets.moved(), pinned
    return found


def test_training_equals_torchs_fused_adamw_with_clipping() -> None:
    (results,) = run_ranks(1, _beside_torch)
    for name, (theirs, ours, moved, pinned) in results.items():
        assert moved == [], name
        assert set(pinned) == {name == "offloaded"}
        for a, b in zip(theirs, ours, strict=True):
            torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-6, msg=lambda found, case=name: f"{case}: {found}")
