"""The memory from which FSDP gathers: where it is found, and that it moves with the parameter."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _composable_state
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import hdet_kernels as hk
from hdet_kernels.buckets import Buckets
from hdet_kernels.sharded.fsdp import drop_gathered, gathered_shards


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_fsdp_gathers_what_lies_in_the_buckets(mesh: DeviceMesh) -> None:
    module = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    for part in (module[0], module):
        fully_shard(part, mesh=mesh)
    params = list(module.parameters())
    shards = gathered_shards(params)
    assert sorted(shards) == sorted(map(id, params))
    assert [shards[id(param)].padded for param in params] == [6, 2, 2, 1]
    assert not any(shard.pinned for shard in shards.values())
    buckets = Buckets(params)
    for value in (0.25, 1.25):  # before and after FSDP's first forward pass, which looks at the memory
        buckets.flats[0].fill_(value)
        drop_gathered(params)  # the forward pass before leaves the parameters of the root gathered
        assert module(torch.ones(1, 3)).item() == pytest.approx(2 * value * (4 * value) + value)
    assert buckets.moved() == []


def test_other_distributed_parameters_have_no_record(mesh: DeviceMesh) -> None:
    param = nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Shard(0)]))
    assert gathered_shards([param, nn.Parameter(torch.ones(2))]) == {}


def test_another_version_of_torch_is_an_error_before_anything_is_moved(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = nn.Linear(2, 2)
    fully_shard(module, mesh=mesh)
    address = module.weight._local_tensor.data_ptr()
    monkeypatch.delattr(_composable_state, "_module_state_mapping")
    with pytest.raises(RuntimeError, match=r"torch .* does not keep sharded parameters .* use torch 2.11"):
        hk.FusedAdamW(module.parameters())
    assert module.weight._local_tensor.data_ptr() == address
